"""Scenarios of vLLM's OffloadingConnector with the store behind its CPU cache."""

import time
from typing import Any

from tests.engines.replica_process import PATIENT
from tests.engines.scenario import Outcome, Workshop, batches, tokens
from tests.engines.stored import address, await_blocks
from tests.store_process import StoreProcess

ENGINE = "vllm"
_SHARED = 288
_LATE_S = 10.0


def tier_config(store: str, **options: object) -> dict[str, object]:
    """Return vLLM's ``kv_transfer_config`` with the tier; ``vllm`` in options has keys of vLLM's own."""
    own = options.pop("vllm", {})
    return {
        "kv_connector": "KVStoreOffloadingConnector",
        "kv_connector_module_path": "kvstore_engine_adapter.vllm",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "cpu_bytes_to_use": 32 << 20,
            "spec_name": "CpuTieringSpec",
            "spec_module_path": "tests.engines.cpu_offload_spec",
            **own,  # type: ignore[dict-item]  # a mapping of vLLM's options
            "kvstore": {"store": store, **options},
        },
    }


def tier_reuse(shop: Workshop) -> Outcome:
    """A producer, then a fresh consumer."""
    return _reuse(shop, "tier_reuse", "llama", {})


def tier_reuse_hybrid(shop: Workshop) -> Outcome:
    """The same with a model of which most layers have a sliding window."""
    return _reuse(shop, "tier_reuse_hybrid", "hybrid", {})


def tier_reuse_by_two_ranks(shop: Workshop) -> Outcome:
    """The same with two tensor-parallel ranks, whose parts of a chunk are one block of the store."""
    environ = {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    more = {"in_process": False, "tensor_parallel_size": 2, "environ": environ}
    return _reuse(shop, "tier_reuse_by_two_ranks", "llama", more)


def tier_of_large_chunks(shop: Workshop) -> Outcome:
    """Chunks of two blocks."""
    return _reuse(shop, "tier_of_large_chunks", "llama", {}, shared=256, blocks_per_chunk=2)


def _reuse(
    shop: Workshop,
    scenario: str,
    kind: str,
    more: dict[str, Any],
    *,
    shared: int = _SHARED,
    **own: object,
) -> Outcome:
    outcome = Outcome(ENGINE, scenario)
    model = shop.model(kind)
    key = kind if not more else f"tier-{scenario}"
    wanted = shop.reference(key, lambda: batches(1), model=model, **more)
    with shop.store(scenario) as store:
        transfer = tier_config(address(store), vllm=own, **PATIENT)
        for who in ("producer", "consumer"):
            with shop.replica(f"{scenario}-{who}", model=model, transfer=transfer, **more) as replica:
                got = [replica.ask(batch) for batch in batches(1)]
            for one, other in zip(got, wanted, strict=True):
                outcome.compare(one, other, what=who)
            outcome.notes[who] = [one.cached for one in got]
            outcome.notes[f"{who}_external"] = got[-1].external
    outcome.external_tokens = got[0].cached[0]
    outcome.demand(got[0].cached[0] >= 0.95 * shared, f"reused {got[0].cached[0]} of {shared} tokens")
    return outcome


def tier_in_trouble(shop: Workshop) -> Outcome:
    """A store that freezes, is killed and comes back empty while a fresh consumer asks."""
    outcome = Outcome(ENGINE, "tier_in_trouble")
    prompts = [tokens(400 + at, 200) for at in range(12)]
    wanted = shop.reference("tier-trouble", lambda: [prompts])[0]
    with shop.store("tier-trouble") as store:
        transfer = tier_config(address(store))
        with shop.replica("tier-trouble-first", transfer=transfer) as first:
            outcome.compare(first.ask(prompts), wanted, what="first")
            await_blocks(store, 72)
        for what, hurt, heal in (
            ("frozen", store.pause, store.resume),
            ("killed", store.kill, store.start),
        ):
            for delay_s in (0.0, 0.02):
                _ask_while(outcome, shop, store, f"{what} after {delay_s} s", (hurt, heal, delay_s))
                if what == "killed":
                    _fill(shop, store, transfer, prompts)
    outcome.external_tokens = outcome.notes.pop("last", 0)  # type: ignore[assignment]  # a number
    return outcome


def _fill(shop: Workshop, store: StoreProcess, transfer: dict[str, object], prompts: list[list[int]]) -> None:
    with shop.replica("tier-trouble-fill", transfer=transfer) as replica:
        replica.ask(prompts)
        await_blocks(store, 72)


def _ask_while(
    outcome: Outcome, shop: Workshop, store: StoreProcess, what: str, trouble: tuple[Any, Any, float]
) -> None:
    """Ask a fresh replica while the store gets into trouble; then again when it is well."""
    hurt, heal, delay_s = trouble
    prompts = [tokens(400 + at, 200) for at in range(12)]
    wanted = shop.reference("tier-trouble", lambda: [prompts])[0]
    with shop.replica(f"tier-{what.replace(' ', '-')}", transfer=tier_config(address(store))) as replica:
        replica.begin(prompts)
        time.sleep(delay_s)
        hurt()
        answer = replica.finish()
        heal()
        time.sleep(3)
        outcome.compare(answer, wanted, what=what)
        outcome.notes[what] = {"cached": sum(answer.cached), "seconds": round(answer.seconds, 3)}
        outcome.demand(answer.seconds < wanted.seconds + _LATE_S, f"{what}: {answer.seconds:.1f} s")
        again = replica.ask(prompts, reset=True)
        outcome.compare(again, wanted, what=f"{what}, then")
        outcome.notes[f"{what}, then"] = sum(again.cached)
        outcome.notes["last"] = sum(again.cached)


SCENARIOS = (
    tier_reuse,
    tier_of_large_chunks,
    tier_reuse_hybrid,
    tier_in_trouble,
    tier_reuse_by_two_ranks,
)
