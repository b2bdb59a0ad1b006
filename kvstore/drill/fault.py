"""Fault: one kind of fault, and how a try of it goes."""

import abc
from typing import ClassVar

from kvstore.drill.stage import Stage
from kvstore.drill.store_process import MIB


class Fault(abc.ABC):
    """One kind of fault.

    ``setup`` runs once per visit; then each try is ``inject``, which ends with the fault over, and
    ``verify``. Every random choice comes from ``stage.rng``, which is seeded anew for each try.
    """

    name: ClassVar[str]
    description: ClassVar[str]
    effect: ClassVar[str] = ""
    """Name of the count that shows that the fault did something; zero after all tries is a violation."""
    weight: ClassVar[float] = 1.0
    """Its share of the time, relative to other kinds: kinds whose tries are cheap get more."""
    try_s: ClassVar[float] = 1.0
    """About how long one try takes, with what it needs before: that much of the time is kept for it."""
    shares_stage: ClassVar[bool] = True
    """Whether the next kind that asks for the same parts may go on with those that this one leaves."""
    needs_redis: ClassVar[bool] = False
    is_troubled: ClassVar[bool] = False
    """Whether its store runs where its disk operations can be made to fail, see ``Trouble``."""
    is_encrypted: ClassVar[bool] = False
    """Whether its store encrypts the blocks that it writes below memory."""
    dram_bytes: ClassVar[int] = 2 * MIB
    ssd_bytes: ClassVar[int] = 16 * MIB
    lease_s: ClassVar[float] = 30.0

    def obstacle(self) -> str:
        """Return why the fault cannot be tried on this machine; empty if it can."""
        return ""

    @property
    def is_unfinished(self) -> bool:
        """Whether more tries are wanted than its share of the time allows, up to 10 % of all of it."""
        return False

    def setup(self, stage: Stage) -> None:
        """Start what a try works on, unless it runs."""
        stage.ensure_running()
        stage.fill_durable()
        stage.verify()

    @abc.abstractmethod
    def inject(self, stage: Stage) -> None:
        """Let the fault happen, use the store meanwhile, and end the fault."""

    def verify(self, stage: Stage) -> None:
        """Check every promise."""
        stage.verify()

    def teardown(self, stage: Stage) -> None:  # noqa: B027 (most kinds need none)
        """End what ``setup`` started beside the store. Called also when ``setup`` failed."""
