"""StepPlan: what the scheduler's side tells the workers with each step. Plain values; it is pickled."""

from dataclasses import dataclass

from kvstore.keys import Namespace
from kvstore_engine_adapter.block_transfers import Move


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Loads to begin and blocks to save after this step.

    ``namespaces`` has those of all groups whenever there is something to do. ``is_idle``: the step computes
    nothing, so that waiting a moment holds nobody up.
    """

    loads: tuple[Move, ...] = ()
    saves: tuple[Move, ...] = ()
    namespaces: tuple[Namespace, ...] = ()
    is_idle: bool = False
