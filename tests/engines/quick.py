"""The scenario that is short enough for every change: reuse, and a store that is killed in mid-run."""

import time
from collections.abc import Callable, Mapping

from tests.engines.scenario import Outcome, Workshop, batches, tokens
from tests.engines.stored import await_blocks
from tests.store_process import StoreProcess

_SHARED = 288
_TURNS = 3


def reuse_and_kill(
    shop: Workshop, *, engine: str, through: Callable[[StoreProcess], Mapping[str, object]]
) -> Outcome:
    """A producer, then a fresh consumer, whose store is killed while it computes.

    ``through`` returns the arguments of an engine that has the connector to a store.
    """
    outcome = Outcome(engine, "reuse_and_kill")
    many = [tokens(100 + at, 200) for at in range(8)]
    wanted = shop.reference("quick", lambda: [*batches(1), many])
    with shop.store("quick") as store:
        with shop.replica("quick-producer", **through(store)) as replica:
            # A busy store may not take a save in time; the engine drops it, and saves what it computes anew.
            for turn in range(_TURNS):
                for batch, other in zip([*batches(1), many], wanted, strict=True):
                    outcome.compare(replica.ask(batch, reset=turn > 0), other, what="producer")
                if await_blocks(store, 9 + 6 * len(many), patience_s=20 * (turn + 1)):
                    break
            outcome.notes["turns of the producer"] = turn + 1
        with shop.replica("quick-consumer", **through(store)) as replica:
            got = [replica.ask(batch) for batch in batches(1)]
            for one, other in zip(got, wanted, strict=False):
                outcome.compare(one, other, what="consumer")
            replica.begin(many)
            time.sleep(0.02)
            store.kill()
            outcome.compare(replica.finish(), wanted[-1], what="store killed")
            outcome.compare(replica.ask(many, reset=True), wanted[-1], what="no store")
    outcome.external_tokens = got[0].cached[0]
    outcome.demand(got[0].cached[0] == _SHARED, f"reused {got[0].cached[0]} of {_SHARED} tokens")
    return outcome
