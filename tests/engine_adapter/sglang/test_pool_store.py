"""When a pool's pages leave the store alone: only after the store itself did not answer."""

from typing import Any

from kvstore.client_state import ClientStats
from kvstore.keys import PrefixChain
from kvstore.miss import MissReason
from kvstore.results import PrefixMatch
from kvstore.testing import FakeClock
from kvstore_engine_adapter.counts import Counts
from kvstore_engine_adapter.sglang.options import BackendOptions
from kvstore_engine_adapter.sglang.pages import FlatPages
from kvstore_engine_adapter.sglang.pool_store import PoolStore
from kvstore_engine_adapter.store_breaker import StoreBreaker
from tests.engine_adapter.sglang.sglang_stand_in import HostPool, hashes
from tests.engine_adapter.sglang.test_identity import identity


class MissingClient:
    """A client of a store that has nothing, for one reason; ``is_silent``: for it did not answer."""

    def __init__(self, reason: MissReason, *, is_silent: bool) -> None:
        self._reason = reason
        self._is_silent = is_silent
        self.num_asked = 0

    def match(self, chain: PrefixChain, **_: object) -> PrefixMatch:
        self.num_asked += 1
        return PrefixMatch(0, (), self._reason)

    def client_stats(self) -> ClientStats:
        return ClientStats(timeouts=self.num_asked if self._is_silent else 0)


def pool_store(client: Any, clock: FakeClock) -> PoolStore:
    options = BackendOptions(store="unix:/kv.sock")
    breaker = StoreBreaker(clock)
    pages = FlatPages(HostPool())
    return PoolStore(client, identity(), pages, options, breaker=breaker, counts=Counts(), clock=clock)


def test_a_store_that_did_not_answer_is_left_alone_for_a_while() -> None:
    client, clock = MissingClient(MissReason.TIMED_OUT, is_silent=True), FakeClock()
    pool = pool_store(client, clock)
    assert [pool.find(hashes(2)) for _ in range(3)] == [0, 0, 0]
    assert client.num_asked == 1
    clock.advance(0.2)
    pool.find(hashes(2))
    assert client.num_asked == 2


def test_a_store_that_answers_for_a_tier_that_is_away_is_asked_on() -> None:
    for reason in (MissReason.TIMED_OUT, MissReason.UNAVAILABLE, MissReason.BREAKER_OPEN):
        client = MissingClient(reason, is_silent=False)
        pool = pool_store(client, FakeClock())
        assert [pool.find(hashes(2)) for _ in range(3)] == [0, 0, 0]
        assert client.num_asked == 3
