"""Scenarios of vLLM with the connector. Each takes a Workshop and returns an Outcome."""

import statistics
import time
from collections.abc import Callable
from typing import Any

from tests.engines.real_model import document_tokens, find_model, write_folder
from tests.engines.replica_process import PATIENT, ReplicaProcess, transfer_config
from tests.engines.scenario import Outcome, Workshop, batches, tokens
from tests.engines.stored import address, await_blocks, corrupt_blocks
from tests.engines.vllm_event_scenario import events
from tests.engines.vllm_server import ServerProcess
from tests.store_damage import damage_memory
from tests.store_process import StoreProcess

ENGINE = "vllm"
_SHARED = 288
_TRIES = 8
_LATE_S = 10.0
"""Far beyond every deadline; shorter delays are reported, not judged: the machine may be busy."""


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
        transfer = transfer_config(address(store), **PATIENT)
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
        shop.replica("trouble", transfer=transfer_config(address(store))) as replica,
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

    def warm(seed: int, what: str) -> int:
        """Ask for what is stored; some times, for on a busy machine the deadlines may be too short."""
        tokens_reused = 0
        for _ in range(_TRIES):
            tokens_reused = max(tokens_reused, ask(seed, what))
            if tokens_reused >= _SHARED - 32:
                return tokens_reused
        outcome.demand(False, f"{what}: nothing was reused")
        return tokens_reused

    ask(10, "cold")
    await_blocks(store, 9)
    warm(10, "warm")
    store.pause()
    ask(11, "frozen, new prompt")
    ask(10, "frozen, stored prompt")
    store.resume()
    time.sleep(3)
    warm(10, "goes on")
    store.kill()
    ask(10, "killed, stored prompt")
    ask(12, "killed, new prompt")
    store.start()
    time.sleep(3)
    ask(10, "back and empty")
    await_blocks(store, 9)
    outcome.external_tokens = warm(10, "stored again")
    damage_memory(store)
    ask(10, "damaged")
    outcome.notes["corrupt_blocks"] = corrupt = corrupt_blocks(store)
    outcome.demand(corrupt > 0, "damaged: the store has noticed nothing")
    ask(13, "after the damage, new prompt")
    await_blocks(store, 9)
    warm(13, "after the damage, stored")


def killed_in_the_middle(shop: Workshop) -> Outcome:
    """The store freezes, is killed and restarts while batches are computed."""
    outcome = Outcome(ENGINE, "killed_in_the_middle")
    prompts = [tokens(100 + at, 200) for at in range(24)]
    wanted = shop.reference("middle", lambda: [prompts])[0]
    with (
        shop.store("middle") as store,
        shop.replica("middle", transfer=transfer_config(address(store))) as replica,
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
                outcome.external_tokens += sum(answer.cached)
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
        transfer = transfer_config(address(store))
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
        transfer = transfer_config(address(store))
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
        with shop.replica("others-first", transfer=transfer_config(address(store))) as replica:
            replica.ask(prompts[0])
        for name, more in kinds.items():
            reference = "llama" if name == "salt" else f"other-{name}"
            wanted = shop.reference(reference, lambda: prompts, **more)
            options = {"salt": "of another team"} if name == "salt" else {}
            transfer = transfer_config(address(store), **options)
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
        shop.replica("full", transfer=transfer_config(address(store))) as replica,
    ):
        for turn in range(2):
            for batch, other in zip(prompts, wanted, strict=True):
                got = replica.ask(batch, reset=True)
                outcome.compare(got, other, what=f"turn {turn}")
                outcome.external_tokens += sum(got.cached)
    return outcome


def server(shop: Workshop) -> Outcome:
    """The OpenAI-style server: requests that say what to share, and the connector's metrics."""
    outcome = Outcome(ENGINE, "server")
    wanted = shop.reference("llama", lambda: batches(1))[0].tokens[0]
    prompt = batches(1)[0][0]
    not_saved, not_looked_up = {"kvstore": {"save": False}}, {"kvstore": {"lookup": False}}
    with (
        shop.store("server") as store,
        ServerProcess(
            shop.model(), shop.log("server"), transfer_config(address(store), **PATIENT)
        ) as process,
    ):
        asked: tuple[tuple[str, dict[str, Any]], ...] = (
            ("not saved", {"kv_transfer_params": not_saved}),
            ("saved", {}),
            ("loaded", {}),
            ("not looked up", {"kv_transfer_params": not_looked_up}),
        )
        for what, more in asked:
            before = process.counter("vllm:external_prefix_cache_hits_total")
            began_s = time.monotonic()
            answer = process.complete(prompt, **more)
            outcome.seconds += time.monotonic() - began_s
            if answer["choices"][0]["token_ids"] != wanted:
                outcome.outputs_equal = False
                outcome.problems.append(f"{what}: other tokens than without a connector")
            hits = process.counter("vllm:external_prefix_cache_hits_total") - before
            outcome.notes[what] = hits
            outcome.demand(hits == (_SHARED if what == "loaded" else 0), f"{what}: {hits:.0f} tokens")
            if what == "saved":
                await_blocks(store, 9)
            process.reset()
        outcome.external_tokens = process.counter("vllm:external_prefix_cache_hits_total")
        outcome.notes["loaded_blocks"] = loaded = process.counter("vllm:kvstore_loaded_blocks_total")
        outcome.notes["saved_blocks"] = process.counter("vllm:kvstore_saved_blocks_total")
        outcome.notes["misses"] = process.counter("vllm:kvstore_misses_total")
        outcome.demand(loaded == 9, f"metrics say that {loaded:.0f} blocks were loaded")
    return outcome


def real_model(shop: Workshop) -> Outcome:
    """SmolLM2: a document that one replica has read is shared with another; and what new prompts cost."""
    outcome = Outcome(ENGINE, "real_model")
    source = find_model()
    if source is None:
        outcome.notes["skipped"] = "the demo's model is not there: run scripts/demo once"
        return outcome
    folder = shop.folder / "smollm2"
    write_folder(source, folder)
    document = document_tokens(source, 800)
    more: dict[str, Any] = {
        "model": folder,
        "dtype": "bfloat16",
        "skip_tokenizer_init": True,
        "kv_cache_memory_bytes": 256 << 20,
    }
    questions = [[*document, *tokens(at, 20)] for at in range(2)]
    with shop.store("real", dram_bytes=512 << 20) as store:
        transfer = transfer_config(address(store), **PATIENT)
        with (
            shop.replica("real-off", **more) as off,
            shop.replica("real-on", transfer=transfer, **more) as on,
        ):
            wanted = [off.ask([question]) for question in questions]
            outcome.compare(on.ask(questions[:1]), wanted[0], what="first replica")
            ratio = _ratio_when_new(outcome, on, off)
        with shop.replica("real-second", transfer=transfer, **more) as second:
            got = second.ask(questions[1:])
        outcome.compare(got, wanted[1], what="second replica")
    outcome.external_tokens = got.cached[0]
    outcome.notes["seconds_without"] = round(wanted[1].seconds, 3)
    outcome.notes["seconds_shared"] = round(got.seconds, 3)
    outcome.notes["ratio_when_new"] = ratio
    full = len(document) // 32 * 32
    outcome.demand(got.cached[0] >= 0.95 * full, f"reused {got.cached[0]} of {full} tokens")
    return outcome


def _ratio_when_new(outcome: Outcome, on: ReplicaProcess, off: ReplicaProcess) -> float:
    """Return how much longer new prompts take with the connector: medians of alternate runs. Not judged."""
    seconds: dict[str, list[float]] = {"on": [], "off": []}
    for turn in range(12):
        prompts = [tokens(7000 + turn, 300)]
        pair = [("on", on), ("off", off)]
        answers = {}
        for name, replica in pair if turn % 2 else reversed(pair):
            answers[name] = replica.ask(prompts, max_tokens=16)
            seconds[name].append(answers[name].seconds)
        outcome.compare(answers["on"], answers["off"], what=f"turn {turn}")
    medians = {name: statistics.median(times[2:]) for name, times in seconds.items()}
    return round(medians["on"] / medians["off"], 3)


def nothing_to_reuse(shop: Workshop) -> Outcome:
    """What the connector costs when nothing is reused: new prompts, by turns with and without. Not judged."""
    outcome = Outcome(ENGINE, "nothing_to_reuse")
    seconds: dict[str, list[float]] = {"on": [], "off": []}
    with (
        shop.store("nothing", dram_bytes=512 << 20) as store,
        shop.replica("nothing-on", transfer=transfer_config(address(store))) as on,
        shop.replica("nothing-off") as off,
    ):
        for turn in range(24):
            prompts = [tokens(5000 + 10 * turn + at, 300) for at in range(4)]
            pair = [("on", on), ("off", off)]
            answers = {}
            for name, replica in pair if turn % 2 else reversed(pair):
                answers[name] = replica.ask(prompts)
                seconds[name].append(answers[name].seconds)
            outcome.compare(answers["on"], answers["off"], what=f"turn {turn}")
    medians = {name: statistics.median(times[4:]) for name, times in seconds.items()}
    outcome.notes |= {f"median_{name}_s": round(median, 4) for name, median in medians.items()}
    outcome.notes["ratio"] = round(medians["on"] / medians["off"], 3)
    return outcome


SCENARIOS: tuple[Callable[[Workshop], Outcome], ...] = (
    reuse,
    store_never_there,
    store_in_trouble,
    killed_in_the_middle,
    preempted,
    two_at_once,
    others_on_one_store,
    full_store,
    events,
    nothing_to_reuse,
    reuse_hybrid,
    real_model,
    server,
    reuse_in_processes,
    reuse_by_two_ranks,
)
