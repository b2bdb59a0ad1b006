"""Lookups of an engine's requests: deadline, leases, what is not asked for again."""

import dataclasses
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvstore import KVLayout, KVStore, Namespace, PrefixChain
from kvstore.miss import MissReason
from kvstore.testing import FakeClock
from kvstore_engine_adapter.prefix_lookups import GroupChain, PrefixLookups
from tests.store_process import StoreProcess

NAMESPACE = Namespace("m", KVLayout.opaque(block_bytes=1024, block_tokens=4))
OTHER = Namespace("m", KVLayout.opaque(block_bytes=1024, block_tokens=4), rope="other")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[StoreProcess]:
    with StoreProcess(tmp_path) as process:
        yield process


@pytest.fixture
def client(store: StoreProcess) -> Iterator[KVStore]:
    with KVStore.connect(store.socket_path, timeout_s=30) as client:
        client.open_namespace(NAMESPACE)
        client.open_namespace(OTHER)
        yield client


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def lookups(client: KVStore, clock: FakeClock) -> Iterator[PrefixLookups]:
    made = PrefixLookups(client, [None], deadline_s=20.0, clock=clock)
    yield made
    made.close()


def chain(count: int = 8, *, seed: int = 0, namespace: Namespace = NAMESPACE) -> PrefixChain:
    return namespace.chain([seed * 1000 + at for at in range(4 * count)])


def put(client: KVStore, blocks: PrefixChain) -> None:
    assert client.put(blocks, [bytes(1024)] * len(blocks)).dropped == 0


def ask(lookups: PrefixLookups, name: str, start: int, blocks: PrefixChain) -> int:
    """Ask until there is an answer."""
    return ask_groups(lookups, name, start, lambda: [GroupChain(blocks[start:])])


def ask_groups(lookups: PrefixLookups, name: str, start: int, groups: Callable[[], list[GroupChain]]) -> int:
    until_s = time.monotonic() + 60
    while time.monotonic() < until_s:
        found = lookups.blocks_after(name, start, groups, patience_s=0.1)
        if found is not None:
            return found
    raise AssertionError("no answer")


def await_leases(client: KVStore, count: int) -> None:
    until_s = time.monotonic() + 60
    while client.stats()["live_leases"] != count:
        assert time.monotonic() < until_s
        time.sleep(0.01)


def test_what_is_found_is_leased_until_it_is_loaded(client: KVStore, lookups: PrefixLookups) -> None:
    put(client, chain(5))
    assert ask(lookups, "a", 0, chain()) == 5
    await_leases(client, 1)
    lookups.note_loaded("a")
    await_leases(client, 0)


def test_a_request_that_ends_lets_go_of_what_was_found(client: KVStore, lookups: PrefixLookups) -> None:
    put(client, chain(5))
    assert ask(lookups, "a", 0, chain()) == 5
    lookups.forget("a")
    await_leases(client, 0)


def test_blocks_that_the_engine_has_by_now_are_not_counted(client: KVStore, lookups: PrefixLookups) -> None:
    put(client, chain(5))
    assert ask(lookups, "a", 1, chain()) == 4
    assert ask(lookups, "a", 3, chain()) == 2
    assert ask(lookups, "a", 7, chain()) == 0
    assert ask(lookups, "a", 0, chain()) == 5


def test_what_could_not_be_loaded_is_not_offered_to_that_request_again(
    client: KVStore, lookups: PrefixLookups
) -> None:
    put(client, chain(5))
    assert ask(lookups, "a", 0, chain()) == 5
    lookups.note_failed("a", 2)
    assert ask(lookups, "a", 0, chain()) == 2
    assert ask(lookups, "a", 2, chain()) == 0
    assert ask(lookups, "b", 0, chain()) == 5


def test_a_first_block_that_is_missing_is_not_asked_for_again_for_a_while(
    client: KVStore, lookups: PrefixLookups, clock: FakeClock
) -> None:
    assert ask(lookups, "a", 0, chain()) == 0
    put(client, chain(5))
    assert lookups.blocks_after("b", 0, lambda: [GroupChain(chain())]) == 0
    assert lookups.counts.take()["miss_known_missing"] == 1
    clock.advance(1.1)
    assert ask(lookups, "c", 0, chain()) == 5


def test_a_block_that_the_engine_saves_is_no_longer_known_to_be_missing(
    client: KVStore, lookups: PrefixLookups
) -> None:
    assert ask(lookups, "a", 0, chain()) == 0
    put(client, chain(5))
    lookups.note_saved(chain(5).keys)
    assert ask(lookups, "b", 0, chain()) == 5


@pytest.mark.parametrize("reason", [MissReason.BREAKER_OPEN, MissReason.UNAVAILABLE, MissReason.TIMED_OUT])
def test_a_store_that_answers_for_a_tier_that_is_away_is_asked_on(
    client: KVStore, lookups: PrefixLookups, monkeypatch: pytest.MonkeyPatch, reason: MissReason
) -> None:
    put(client, chain(5))
    with monkeypatch.context() as away:
        found = client.match(chain(seed=1), lease=True)
        away.setattr(client, "match", lambda *_, **__: dataclasses.replace(found, reason=reason))
        assert ask(lookups, "a", 0, chain(seed=1)) == 0
    assert ask(lookups, "b", 0, chain()) == 5
    assert "miss_store_away" not in lookups.counts.take()


def test_after_its_deadline_a_request_goes_on_without_and_the_next_do_not_wait(
    store: StoreProcess, client: KVStore, lookups: PrefixLookups, clock: FakeClock
) -> None:
    put(client, chain(5))
    store.pause()
    assert lookups.blocks_after("a", 0, lambda: [GroupChain(chain())]) is None
    clock.advance(21)
    assert lookups.blocks_after("a", 0, lambda: [GroupChain(chain())]) == 0
    assert lookups.blocks_after("a", 0, lambda: [GroupChain(chain())]) == 0
    assert lookups.blocks_after("b", 0, lambda: [GroupChain(chain())]) == 0
    assert lookups.counts.take().keys() >= {"miss_late", "miss_store_away"}
    store.resume()
    clock.advance(3)
    assert ask(lookups, "c", 0, chain()) == 5
    lookups.forget("c")
    await_leases(client, 0)  # that of the late answer has been given back too


def test_all_groups_count_and_of_a_window_only_its_end(client: KVStore, lookups: PrefixLookups) -> None:
    put(client, chain(6))
    windowed = chain(8, namespace=OTHER)
    put(client, windowed[3:5])

    def groups() -> list[GroupChain]:
        return [GroupChain(chain()), GroupChain(windowed, window_blocks=2)]

    assert ask_groups(lookups, "a", 0, groups) == 5


def test_without_the_window_nothing_is_found(client: KVStore, lookups: PrefixLookups) -> None:
    put(client, chain(6))

    def groups() -> list[GroupChain]:
        return [GroupChain(chain()), GroupChain(chain(8, namespace=OTHER), window_blocks=2)]

    assert ask_groups(lookups, "a", 0, groups) == 0


def test_a_closed_client_is_a_miss(client: KVStore, lookups: PrefixLookups) -> None:
    client.close()
    assert ask(lookups, "a", 0, chain()) == 0
    assert "miss_unavailable" in lookups.counts.take()


def test_groups_that_are_asked_about_block_by_block_bound_nothing_and_are_told_whole(
    client: KVStore, lookups: PrefixLookups
) -> None:
    put(client, chain(5))
    theirs = chain(namespace=OTHER)
    put(client, theirs[3:5])

    def groups() -> list[GroupChain]:
        return [GroupChain(chain()), GroupChain(theirs, is_each=True)]

    assert ask_groups(lookups, "a", 0, groups) == 5
    assert lookups.each_found("a") == ((False, False, False, True, True, False, False, False),)
    assert lookups.tiers_found("a", 3) == ("dram", "dram")
    assert lookups.first_missing("a") == (5, "never_seen")
    lookups.note_loaded("a")
    assert lookups.each_found("a") == ()
    assert lookups.tiers_found("a", 0) == ()
    assert lookups.first_missing("a") is None


def test_a_lookup_that_found_everything_has_no_missing_block(client: KVStore, lookups: PrefixLookups) -> None:
    put(client, chain(3))
    assert ask(lookups, "a", 0, chain(3)) == 3
    assert lookups.first_missing("a") is None
