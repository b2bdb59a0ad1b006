"""Scenarios of SGLang with the storage backend. Each takes a Workshop and returns an Outcome."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.engines.scenario import Outcome, Workshop, batches, tokens
from tests.engines.sglang_process import LONG_MS, SglangReplica, sglang_python, storage
from tests.engines.stored import address, await_blocks, corrupt_blocks
from tests.store_damage import damage_memory
from tests.store_process import StoreProcess

ENGINE = "sglang"
_SHARED = 288
_LATE_S = 10.0
"""Far beyond every deadline; shorter delays are reported, not judged: the machine may be busy."""

_LONG: dict[str, object] = {"lookup_deadline_ms": LONG_MS, "load_deadline_ms": LONG_MS}


class SglangWorkshop(Workshop):
    """A folder with models and logs, and the answers of SGLang without a storage backend."""

    def python(self) -> Path:
        """Return SGLang's own Python."""
        return sglang_python()

    def replica(self, name: str, *, model: Path | None = None, **arguments: object) -> SglangReplica:  # type: ignore[override]  # what scenarios use of it is the same
        """Return an engine that is not started."""
        return SglangReplica(model or self.model(), self.log(name), **arguments)  # type: ignore[arg-type]


def reuse(shop: SglangWorkshop) -> Outcome:
    """A producer, then a fresh consumer, over the zero-copy interface."""
    return _reuse(shop, "reuse", {})


def reuse_generic(shop: SglangWorkshop) -> Outcome:
    """The same over the generic interface, from host pages in another layout."""
    return _reuse(shop, "reuse_generic", {"hicache_mem_layout": "layer_first"}, interface_v1=False)


def _reuse(
    shop: SglangWorkshop, scenario: str, more: dict[str, object], *, interface_v1: bool = True
) -> Outcome:
    outcome = Outcome(ENGINE, scenario)
    wanted = shop.reference("llama", lambda: batches(1))
    with shop.store(scenario) as store:
        arguments = storage(address(store), interface_v1=interface_v1, **_LONG) | more
        for who in ("producer", "consumer"):
            with shop.replica(f"{scenario}-{who}", **arguments) as replica:
                got = [replica.ask(batch) for batch in batches(1)]
            for one, other in zip(got, wanted, strict=True):
                outcome.compare(one, other, what=who)
            outcome.notes[who] = [one.cached for one in got]
            outcome.notes[f"{who}, from storage"] = [one.external for one in got]
    outcome.external_tokens = got[0].external or 0
    outcome.demand(outcome.external_tokens == _SHARED, f"{outcome.external_tokens} of {_SHARED} tokens")
    return outcome


def store_never_there(shop: SglangWorkshop) -> Outcome:
    """No store at all."""
    outcome = Outcome(ENGINE, "store_never_there")
    wanted = shop.reference("llama", lambda: batches(1))
    with shop.replica("nobody", **storage(f"unix:{shop.folder}/nobody.sock")) as replica:
        for batch, other in zip(batches(1), wanted, strict=True):
            outcome.compare(replica.ask(batch), other)
    outcome.notes["seconds_without"] = round(sum(one.seconds for one in wanted), 3)
    return outcome


def store_in_trouble(shop: SglangWorkshop) -> Outcome:
    """One engine while its store freezes, goes on, is killed, comes back empty, is full of damage."""
    outcome = Outcome(ENGINE, "store_in_trouble")
    seeds = range(10, 14)
    wanted = shop.reference("trouble", lambda: [[tokens(seed, 300)] for seed in seeds])
    with (
        shop.store("trouble") as store,
        shop.replica("trouble", **storage(address(store), lookup_deadline_ms=1000)) as replica,
    ):
        _ask_in_trouble(outcome, replica, store, dict(zip(seeds, wanted, strict=True)))
    outcome.notes["seconds_without"] = round(max(one.seconds for one in wanted), 3)
    return outcome


def _ask_in_trouble(
    outcome: Outcome, replica: SglangReplica, store: StoreProcess, wanted: dict[int, Any]
) -> None:
    def ask(seed: int, what: str) -> float:
        answer = replica.ask([tokens(seed, 300)], reset=True)
        outcome.compare(answer, wanted[seed], what=what)
        outcome.notes[what] = {"from_storage": answer.external, "seconds": round(answer.seconds, 3)}
        outcome.demand(answer.seconds < _LATE_S, f"{what}: {answer.seconds:.1f} s")
        return answer.external or 0

    ask(10, "cold")
    await_blocks(store, 10)
    outcome.demand(ask(10, "warm") == _SHARED, "warm: nothing was reused")
    store.pause()
    ask(11, "frozen, new prompt")
    ask(10, "frozen, stored prompt")
    store.resume()
    time.sleep(3)
    outcome.demand(ask(10, "goes on") == _SHARED, "goes on: nothing was reused")
    store.kill()
    ask(10, "killed, stored prompt")
    ask(12, "killed, new prompt")
    store.start()
    time.sleep(3)
    ask(10, "back and empty")
    await_blocks(store, 10)
    outcome.external_tokens = ask(10, "stored again")
    outcome.demand(outcome.external_tokens == _SHARED, "stored again: nothing was reused")
    damage_memory(store)
    outcome.demand(ask(10, "damaged") == 0, "damaged: pages were used")
    outcome.notes["corrupt_blocks"] = corrupt = corrupt_blocks(store)
    outcome.demand(corrupt > 0, "damaged: the store has noticed nothing")
    ask(13, "after the damage, new prompt")
    time.sleep(3)
    outcome.demand(ask(13, "after the damage, stored") == _SHARED, "after the damage: nothing was reused")


def killed_in_the_middle(shop: SglangWorkshop) -> Outcome:
    """The store freezes, is killed and restarts while batches are computed."""
    outcome = Outcome(ENGINE, "killed_in_the_middle")
    prompts = [tokens(100 + at, 200) for at in range(24)]
    wanted = shop.reference("middle", lambda: [prompts])[0]
    with shop.store("middle") as store, shop.replica("middle", **storage(address(store))) as replica:
        outcome.compare(replica.ask(prompts), wanted, what="first")
        for what, hurt, heal in (
            ("frozen", store.pause, store.resume),
            ("killed", store.kill, store.start),
        ):
            for delay_s in (0.0, 0.03, 0.1):
                replica.begin(prompts, reset=True)
                time.sleep(delay_s)
                hurt()
                answer = replica.finish()
                heal()
                outcome.compare(answer, wanted, what=what)
                note = {"from_storage": answer.external, "seconds": round(answer.seconds, 3)}
                outcome.notes[f"{what} after {delay_s} s"] = note
                outcome.demand(answer.seconds < wanted.seconds + _LATE_S, f"{what}: {answer.seconds:.1f} s")
                time.sleep(2)
                replica.ask(prompts, reset=True)
    outcome.notes["seconds_without"] = round(wanted.seconds, 3)
    return outcome


def others_on_one_store(shop: SglangWorkshop) -> Outcome:
    """Another page size, dtype and model find nothing of each other's."""
    kinds: dict[str, dict[str, object]] = {
        "page_size": {"page_size": 64},
        "dtype": {"dtype": "bfloat16"},
        "model": {"model": shop.model(seed=2)},
    }
    return _others(shop, "others_on_one_store", kinds)


def other_layout_and_salt(shop: SglangWorkshop) -> Outcome:
    """Another layout of host pages and another salt find nothing of each other's."""
    kinds: dict[str, dict[str, object]] = {"layout": {"hicache_mem_layout": "layer_first"}, "salt": {}}
    return _others(shop, "other_layout_and_salt", kinds)


def _others(shop: SglangWorkshop, scenario: str, kinds: dict[str, dict[str, object]]) -> Outcome:
    outcome = Outcome(ENGINE, scenario)
    prompt = batches(1)[0]
    with shop.store(scenario) as store:
        with shop.replica(f"{scenario}-first", **storage(address(store), **_LONG)) as replica:
            replica.ask(prompt)
            await_blocks(store, 9)
        for name, more in kinds.items():
            is_same_computation = name in ("layout", "salt", "page_size")
            reference, given = ("llama", {}) if is_same_computation else (f"other-{name}", more)
            wanted = shop.reference(reference, lambda: batches(1), **given)
            options = {"salt": "of another team"} if name == "salt" else {}
            arguments = storage(address(store), **_LONG, **options) | more
            with shop.replica(f"{scenario}-{name}", **arguments) as replica:
                got = replica.ask(prompt)
            outcome.compare(got, wanted[0], what=name)
            outcome.notes[name] = got.cached[0]
            outcome.demand(got.cached[0] == 0, f"{name}: {got.cached[0]} tokens of another's")
    return outcome


def random_failures(shop: SglangWorkshop) -> Outcome:
    """SGLang's own switches: calls of the backend that come late or fail at random."""
    outcome = Outcome(ENGINE, "random_failures")
    prompts = batches(1)
    wanted = shop.reference("llama", lambda: prompts)
    environ = {
        "SGLANG_TEST_HICACHE_BACKEND_RANDOM_DELAY": "0.05",
        "SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE": "0.3",
    }
    with (
        shop.store("random") as store,
        shop.replica("random", environ=environ, **storage(address(store), **_LONG)) as replica,
    ):
        for turn in range(8):
            for batch, other in zip(prompts, wanted, strict=True):
                got = replica.ask(batch, reset=True)
                outcome.compare(got, other, what=f"turn {turn}")
                outcome.external_tokens += got.external or 0
        outcome.demand(
            "failure_prob=0.3" in replica.log.read_text(errors="replace"), "SGLang injected no failures"
        )
    outcome.demand(outcome.external_tokens > 0, "nothing was reused at all")
    return outcome


SCENARIOS: tuple[Callable[[SglangWorkshop], Outcome], ...] = (
    reuse,
    reuse_generic,
    store_never_there,
    store_in_trouble,
    killed_in_the_middle,
    random_failures,
    others_on_one_store,
    other_layout_and_salt,
)
