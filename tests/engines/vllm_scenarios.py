"""Scenarios of vLLM with the connector. Each takes a Workshop and returns an Outcome."""

import time
from collections.abc import Callable
from typing import Any

from kvstore import KVStore
from tests.engines.replica_process import ReplicaProcess, transfer_config
from tests.engines.scenario import Outcome, Workshop, batches, tokens
from tests.store_damage import damage_memory
from tests.store_process import StoreProcess

ENGINE = "vllm"
_SHARED = 288
_LATE_S = 10.0
"""Far beyond every deadline; shorter delays are reported, not judged: the machine may be busy."""


def _address(store: StoreProcess) -> str:
    return f"unix:{store.socket_path}"


def reuse(shop: Workshop) -> Outcome:
    """A producer, then a fresh consumer."""
    return _reuse(shop, "reuse", "llama", {})


def reuse_in_processes(shop: Workshop) -> Outcome:
    """The same with the scheduler and the worker in processes of their own."""
    return _reuse(shop, "reuse_in_processes", "llama", {"in_process": False})


def reuse_by_two_ranks(shop: Workshop) -> Outcome:
    """The same with two tensor-parallel ranks."""
    # On one NUMA node vLLM does not find processors for two ranks by itself.
    environ = {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    more = {"in_process": False, "tensor_parallel_size": 2, "environ": environ}
    return _reuse(shop, "reuse_by_two_ranks", "llama", more)


def reuse_hybrid(shop: Workshop) -> Outcome:
    """The same with a model of which most layers have a sliding window."""
    return _reuse(shop, "reuse_hybrid", "hybrid", {})


def _reuse(shop: Workshop, scenario: str, kind: str, more: dict[str, Any]) -> Outcome:
    outcome = Outcome(ENGINE, scenario)
    model = shop.model(kind)
    wanted = shop.reference(f"{scenario}-{kind}" if more else kind, lambda: batches(1), model=model, **more)
    with shop.store(scenario) as store:
        transfer = transfer_config(_address(store))
        for who in ("producer", "consumer"):
            with shop.replica(f"{scenario}-{who}", model=model, transfer=transfer, **more) as replica:
                got = [replica.ask(batch) for batch in batches(1)]
            for one, other in zip(got, wanted, strict=True):
                outcome.compare(one, other, what=who)
            outcome.notes[who] = [one.cached for one in got]
    outcome.external_tokens = got[0].cached[0]
    outcome.demand(got[0].cached[0] >= 0.95 * _SHARED, f"reused {got[0].cached[0]} of {_SHARED} tokens")
    return outcome


def store_never_there(shop: Workshop) -> Outcome:
    """No store at all."""
    outcome = Outcome(ENGINE, "store_never_there")
    wanted = shop.reference("llama", lambda: batches(1))
    transfer = transfer_config(f"unix:{shop.folder}/nobody.sock")
    with shop.replica("nobody", transfer=transfer) as replica:
        for batch, other in zip(batches(1), wanted, strict=True):
            outcome.compare(replica.ask(batch), other)
    outcome.notes["seconds_without"] = round(sum(one.seconds for one in wanted), 3)
    return outcome


def store_in_trouble(shop: Workshop) -> Outcome:
    """One engine while its store freezes, goes on, is killed, comes back empty, is full of damage."""
    outcome = Outcome(ENGINE, "store_in_trouble")
    seeds = range(10, 18)
    wanted = shop.reference("trouble", lambda: [batch for seed in seeds for batch in batches(seed)])
    with (
        shop.store("trouble") as store,
        shop.replica("trouble", transfer=transfer_config(_address(store))) as replica,
    ):
        _ask_in_trouble(outcome, replica, store, {s: wanted[2 * i] for i, s in enumerate(seeds)})
    outcome.notes["seconds_without"] = round(max(one.seconds for one in wanted), 3)
    return outcome


def _ask_in_trouble(
    outcome: Outcome, replica: ReplicaProcess, store: StoreProcess, wanted: dict[int, object]
) -> None:
    def ask(seed: int, what: str, *, reset: bool = True) -> int:
        answer = replica.ask(batches(seed)[0], reset=reset)
        outcome.compare(answer, wanted[seed], what=what)  # type: ignore[arg-type]
        outcome.notes[what] = {"cached": answer.cached[0], "seconds": round(answer.seconds, 3)}
        outcome.demand(answer.seconds < _LATE_S, f"{what}: {answer.seconds:.1f} s")
        return answer.cached[0]

    ask(10, "cold")
    _await_blocks(store, 9)
    outcome.demand(ask(10, "warm") >= _SHARED - 32, "warm: nothing was reused")
    store.pause()
    ask(11, "frozen, new prompt")
    ask(10, "frozen, stored prompt")
    store.resume()
    time.sleep(3)
    outcome.demand(ask(10, "goes on") >= _SHARED - 32, "goes on: nothing was reused")
    store.kill()
    ask(10, "killed, stored prompt")
    ask(12, "killed, new prompt")
    store.start()
    time.sleep(3)
    ask(10, "back and empty")
    _await_blocks(store, 9)
    outcome.external_tokens = ask(10, "stored again")
    outcome.demand(outcome.external_tokens >= _SHARED - 32, "stored again: nothing was reused")
    damage_memory(store)
    ask(10, "damaged")
    outcome.notes["corrupt_blocks"] = corrupt = _corrupt_blocks(store)
    outcome.demand(corrupt > 0, "damaged: the store has noticed nothing")
    ask(13, "after the damage, new prompt")
    _await_blocks(store, 9)
    outcome.demand(
        ask(13, "after the damage, stored") >= _SHARED - 32, "after the damage: nothing was reused"
    )


def killed_in_the_middle(shop: Workshop) -> Outcome:
    """The store freezes, is killed and restarts while batches are computed."""
    outcome = Outcome(ENGINE, "killed_in_the_middle")
    prompts = [tokens(100 + at, 200) for at in range(24)]
    wanted = shop.reference("middle", lambda: [prompts])[0]
    with (
        shop.store("middle") as store,
        shop.replica("middle", transfer=transfer_config(_address(store))) as replica,
    ):
        outcome.compare(replica.ask(prompts), wanted, what="first")
        for what, hurt, heal in (
            ("frozen", store.pause, store.resume),
            ("killed", store.kill, store.start),
        ):
            for delay_s in (0.0, 0.01, 0.03):
                replica.begin(prompts, reset=True)
                time.sleep(delay_s)
                hurt()
                answer = replica.finish()
                heal()
                outcome.compare(answer, wanted, what=what)
                note = {"cached": sum(answer.cached), "seconds": round(answer.seconds, 3)}
                outcome.notes[f"{what} after {delay_s} s"] = note
                outcome.demand(answer.seconds < wanted.seconds + _LATE_S, f"{what}: {answer.seconds:.1f} s")
                time.sleep(2)
                replica.ask(prompts, reset=True)
    outcome.notes["seconds_without"] = round(wanted.seconds, 3)
    return outcome


def preempted(shop: Workshop) -> Outcome:
    """Too few blocks for all requests, so that some are preempted, and reload what they had."""
    outcome = Outcome(ENGINE, "preempted")
    prompts = [tokens(200 + at, 150) for at in range(8)]
    wanted = shop.reference("preempted", lambda: [prompts])[0]
    with shop.store("preempted") as store:
        transfer = transfer_config(_address(store))
        with shop.replica(
            "preempted", transfer=transfer, max_model_len=512, num_gpu_blocks_override=30
        ) as replica:
            for turn in range(2):
                answer = replica.ask(prompts, max_tokens=40, reset=turn > 0)
                outcome.compare(answer, wanted, what=f"turn {turn}")
            outcome.notes["preemptions"] = answer.preemptions
            outcome.external_tokens = sum(answer.cached)
            outcome.demand(bool(answer.preemptions), "no request was preempted")
    return outcome


def two_at_once(shop: Workshop) -> Outcome:
    """Two replicas answer the same prompts at the same time through one store."""
    outcome = Outcome(ENGINE, "two_at_once")
    prompts = [tokens(300, 200) + tokens(301 + at, 50) for at in range(16)]
    wanted = shop.reference("two", lambda: [prompts])[0]
    with shop.store("two") as store:
        transfer = transfer_config(_address(store))
        pair = [shop.replica(f"two-{at}", transfer=transfer) for at in range(2)]
        with pair[0], pair[1]:
            for turn in range(3):
                for replica in pair:
                    replica.begin(prompts, reset=True)
                for replica in pair:
                    answer = replica.finish()
                    outcome.compare(answer, wanted, what=f"turn {turn}")
            outcome.external_tokens = sum(answer.cached)
    return outcome


def others_on_one_store(shop: Workshop) -> Outcome:
    """Another model, dtype, block size and salt find nothing of each other's."""
    outcome = Outcome(ENGINE, "others_on_one_store")
    prompts = batches(1)
    kinds: dict[str, dict[str, object]] = {
        "model": {"model": shop.model(seed=2)},
        "dtype": {"dtype": "bfloat16"},
        "block_size": {"block_size": 64},
        "salt": {},
    }
    with shop.store("others") as store:
        with shop.replica("others-first", transfer=transfer_config(_address(store))) as replica:
            replica.ask(prompts[0])
        for name, more in kinds.items():
            reference = "llama" if name == "salt" else f"other-{name}"
            wanted = shop.reference(reference, lambda: prompts, **more)
            options = {"salt": "of another team"} if name == "salt" else {}
            transfer = transfer_config(_address(store), **options)
            with shop.replica(f"others-{name}", transfer=transfer, **more) as replica:
                got = replica.ask(prompts[0])
            outcome.compare(got, wanted[0], what=name)
            outcome.notes[name] = got.cached[0]
            outcome.demand(got.cached[0] == 0, f"{name}: {got.cached[0]} tokens of another's")
    return outcome


def full_store(shop: Workshop) -> Outcome:
    """A store that holds less than one prompt."""
    outcome = Outcome(ENGINE, "full_store")
    prompts = [batch for seed in range(10, 18) for batch in batches(seed)]
    wanted = shop.reference("trouble", lambda: prompts)
    with (
        shop.store("full", dram_bytes=2 << 20) as store,
        shop.replica("full", transfer=transfer_config(_address(store))) as replica,
    ):
        for turn in range(2):
            for batch, other in zip(prompts, wanted, strict=True):
                got = replica.ask(batch, reset=True)
                outcome.compare(got, other, what=f"turn {turn}")
                outcome.external_tokens += sum(got.cached)
    return outcome


def _await_blocks(store: StoreProcess, count: int) -> None:
    """Wait until a store has so many blocks: saves are made in the background."""
    until_s = time.monotonic() + 30
    with KVStore.connect(store.socket_path) as client:
        while time.monotonic() < until_s:
            if client.stats()["tiers"]["dram"]["blocks"] >= count:
                return
            time.sleep(0.02)


def _corrupt_blocks(store: StoreProcess) -> int:
    with KVStore.connect(store.socket_path) as client:
        return sum(client.stats()["corrupt_blocks"].values())


SCENARIOS: tuple[Callable[[Workshop], Outcome], ...] = (
    reuse,
    store_never_there,
    store_in_trouble,
    killed_in_the_middle,
    preempted,
    two_at_once,
    others_on_one_store,
    full_store,
    reuse_hybrid,
    reuse_in_processes,
    reuse_by_two_ranks,
)
