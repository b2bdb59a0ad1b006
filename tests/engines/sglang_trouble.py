"""Scenarios of SGLang with a store in trouble: away, frozen, emptied, full, slow, damaged; two replicas."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

from kvstore import KVStore
from tests.engines.scenario import Outcome, batches, tokens
from tests.engines.sglang_process import SglangReplica, storage
from tests.engines.sglang_workshop import ENGINE, LONG, SHARED, SglangWorkshop
from tests.engines.stored import address, await_blocks, corrupt_blocks, drop_pages, stuttering
from tests.store_damage import damage_memory
from tests.store_process import StoreProcess

Prompts = Sequence[Sequence[int]]

_LATE_S = 10.0
"""Far beyond every deadline; shorter delays are reported, not judged: the machine may be busy."""


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
    outcome.demand(ask(10, "warm") == SHARED, "warm: nothing was reused")
    store.pause()
    ask(11, "frozen, new prompt")
    ask(10, "frozen, stored prompt")
    store.resume()
    time.sleep(3)
    outcome.demand(ask(10, "goes on") == SHARED, "goes on: nothing was reused")
    store.kill()
    ask(10, "killed, stored prompt")
    ask(12, "killed, new prompt")
    store.start()
    time.sleep(3)
    ask(10, "back and empty")
    await_blocks(store, 10)
    outcome.external_tokens = ask(10, "stored again")
    outcome.demand(outcome.external_tokens == SHARED, "stored again: nothing was reused")
    damage_memory(store)
    outcome.demand(ask(10, "damaged") == 0, "damaged: pages were used")
    outcome.notes["corrupt_blocks"] = corrupt = corrupt_blocks(store)
    outcome.demand(corrupt > 0, "damaged: the store has noticed nothing")
    ask(13, "after the damage, new prompt")
    time.sleep(3)
    outcome.demand(ask(13, "after the damage, stored") == SHARED, "after the damage: nothing was reused")


def trouble_in_the_middle(shop: SglangWorkshop) -> Outcome:
    """The store freezes, is slow, is emptied, damaged, killed or restarted while batches are computed."""
    outcome = Outcome(ENGINE, "trouble_in_the_middle")
    prompts = [tokens(100 + at, 200) for at in range(12)]
    wanted = shop.reference("middle", lambda: [prompts])[0]
    with (
        shop.store("middle") as store,
        shop.replica(
            "middle", **storage(address(store), lookup_deadline_ms=1000, load_deadline_ms=5000)
        ) as replica,
    ):
        outcome.compare(replica.ask(prompts), wanted, what="first")
        for what, trouble in _TROUBLES.items():
            for delay_s in (0.0, 0.05):
                replica.begin(prompts, reset=True)
                time.sleep(delay_s)
                with trouble(store, prompts):
                    answer = replica.finish()
                outcome.compare(answer, wanted, what=what)
                note = {"from_storage": answer.external, "seconds": round(answer.seconds, 3)}
                outcome.notes[f"{what} after {delay_s} s"] = note
                outcome.demand(answer.seconds < wanted.seconds + _LATE_S, f"{what}: {answer.seconds:.1f} s")
                # The backend asks a store that was away again after 2 s at most; then all is stored anew.
                time.sleep(2.5)
                outcome.compare(replica.ask(prompts, reset=True), wanted, what=f"after {what}")
        for _ in range(10):
            await_blocks(store, 6 * len(prompts))
            last = replica.ask(prompts, reset=True)
            outcome.compare(last, wanted, what="at the end")
            outcome.external_tokens = last.external or 0
            if outcome.external_tokens:
                break
            time.sleep(2.5)
    outcome.demand(outcome.external_tokens > 0, "nothing was reused after all the trouble")
    outcome.notes["seconds_without"] = round(wanted.seconds, 3)
    return outcome


@contextmanager
def _frozen(store: StoreProcess, prompts: Prompts) -> Iterator[None]:
    store.pause()
    yield
    store.resume()


@contextmanager
def _slow(store: StoreProcess, prompts: Prompts) -> Iterator[None]:
    with stuttering(store):
        yield


@contextmanager
def _emptied(store: StoreProcess, prompts: Prompts) -> Iterator[None]:
    drop_pages(store, prompts)
    yield


@contextmanager
def _damaged(store: StoreProcess, prompts: Prompts) -> Iterator[None]:
    damage_memory(store)
    yield


@contextmanager
def _killed(store: StoreProcess, prompts: Prompts) -> Iterator[None]:
    store.kill()
    yield
    store.start()


@contextmanager
def _restarted(store: StoreProcess, prompts: Prompts) -> Iterator[None]:
    store.kill()
    store.start()
    yield


_TROUBLES: dict[str, Callable[[StoreProcess, Prompts], AbstractContextManager[None]]] = {
    "frozen": _frozen,
    "slow": _slow,
    "emptied": _emptied,
    "damaged": _damaged,
    "killed": _killed,
    "restarted": _restarted,
}


def full_store(shop: SglangWorkshop) -> Outcome:
    """A store that holds less than two prompts, so that pages leave it between lookup and load."""
    outcome = Outcome(ENGINE, "full_store")
    prompts = [batch for seed in range(10, 16) for batch in batches(seed)]
    wanted = shop.reference("many", lambda: prompts)
    with (
        shop.store("full", dram_bytes=2 << 20) as store,
        shop.replica("full", **storage(address(store), **LONG)) as replica,
    ):
        for turn in range(2):
            for batch, other in zip(prompts, wanted, strict=True):
                got = replica.ask(batch, reset=True)
                outcome.compare(got, other, what=f"turn {turn}")
                outcome.external_tokens += got.external or 0
        with KVStore.connect(store.socket_path) as client:
            outcome.notes["blocks"] = client.stats()["tiers"]["dram"]["blocks"]
    return outcome


def slow_store(shop: SglangWorkshop) -> Outcome:
    """A store that stands still most of the time, with the deadlines that are the default."""
    outcome = Outcome(ENGINE, "slow_store")
    prompts = [batch for seed in range(10, 16) for batch in batches(seed)]
    wanted = shop.reference("many", lambda: prompts)
    with (
        shop.store("slow") as store,
        shop.replica("slow", **storage(address(store))) as replica,
        stuttering(store),
    ):
        for turn in range(2):
            for batch, other in zip(prompts, wanted, strict=True):
                got = replica.ask(batch, reset=True)
                outcome.compare(got, other, what=f"turn {turn}")
                outcome.demand(got.seconds < other.seconds + _LATE_S, f"turn {turn}: {got.seconds:.1f} s")
                outcome.external_tokens += got.external or 0
    outcome.notes["seconds_without"] = round(2 * sum(one.seconds for one in wanted), 3)
    return outcome


def two_at_once(shop: SglangWorkshop) -> Outcome:
    """Two replicas answer the same prompts at the same time through one store, which is killed between."""
    outcome = Outcome(ENGINE, "two_at_once")
    prompts = [tokens(300, 200) + tokens(301 + at, 50) for at in range(8)]
    wanted = shop.reference("two", lambda: [prompts])[0]
    with shop.store("two") as store:
        pair = [shop.replica(f"two-{at}", **storage(address(store), **LONG)) for at in range(2)]
        for replica in pair:
            replica.launch()
        with ExitStack() as ending:
            for replica in pair:
                ending.push(replica.__exit__)
            for replica in pair:
                replica.wait_ready()
            for turn in range(4):
                for replica in pair:
                    replica.begin(prompts, reset=True)
                if turn == 2:
                    store.kill()
                    store.start()
                for replica in pair:
                    answer = replica.finish()
                    outcome.compare(answer, wanted, what=f"turn {turn}")
                    outcome.external_tokens += answer.external or 0
    outcome.demand(outcome.external_tokens > 0, "nothing was shared")
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
        shop.replica("random", environ=environ, **storage(address(store), **LONG)) as replica,
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
