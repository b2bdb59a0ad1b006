"""The scenarios of a user who sets no deadline: how many fresh consumers reuse all of a shared prefix."""

import os
from collections.abc import Callable, Mapping

from tests.engines.replica_process import transfer_config
from tests.engines.scenario import Outcome, Workshop, batches
from tests.engines.stored import address, await_blocks
from tests.engines.vllm_tier_scenarios import tier_config
from tests.store_process import StoreProcess

_SHARED = 288
_CONSUMERS = int(os.environ.get("KVSTORE_CONSUMERS", "3"))
"""Fresh engines; each is asked twice, the second time with its own cache emptied."""

Through = Callable[[StoreProcess], Mapping[str, object]]


def reuse_by_default(shop: Workshop) -> Outcome:
    """vLLM with the connector."""
    return reuse_without_options(shop, "vllm", "reuse_by_default", _connector)


def tier_reuse_by_default(shop: Workshop) -> Outcome:
    """vLLM with the store behind its CPU cache."""
    return reuse_without_options(
        shop, "vllm", "tier_reuse_by_default", lambda store: {"transfer": tier_config(address(store))}
    )


def _connector(store: StoreProcess) -> Mapping[str, object]:
    made = transfer_config(address(store))
    return {"transfer": made | {"kv_connector_extra_config": {"store": address(store)}}}


def reuse_without_options(shop: Workshop, engine: str, name: str, through: Through) -> Outcome:
    """Judge what fresh consumers reuse, unless the machine is too busy for deadlines to be kept."""
    outcome = Outcome(engine, name)
    asked = batches(1)[0]
    wanted = shop.reference("default", lambda: [asked])[0]
    first: list[int] = []
    again: list[int] = []
    idle: list[bool] = []
    with shop.store(name) as store:
        with shop.replica(f"{name}-producer", **through(store)) as replica:
            outcome.compare(replica.ask(asked), wanted, what="producer")
            await_blocks(store, _SHARED // 32)
        for at in range(_CONSUMERS):
            with shop.replica(f"{name}-{at}", **through(store)) as replica:
                for found, is_again in ((first, False), (again, True)):
                    got = replica.ask(asked, reset=is_again)
                    outcome.compare(got, wanted, what=f"consumer {at}")
                    found.append(got.cached[0])
            idle.append(os.getloadavg()[0] <= (os.cpu_count() or 1))
    outcome.external_tokens = first[-1]
    outcome.notes |= {"first": first, "again": again, "machine_is_idle": idle}
    for found in (first, again):
        missed = [count for count, is_idle in zip(found, idle, strict=True) if is_idle and count < _enough()]
        outcome.demand(not missed, f"reused {missed} of {_SHARED} tokens on an idle machine")
    return outcome


def _enough() -> float:
    return 0.95 * _SHARED
