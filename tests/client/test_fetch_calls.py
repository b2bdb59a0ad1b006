"""Blocks that are read without a lease: what changes between answer and copy is never taken for the block."""

import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt
import pytest

from kvstore import KVStore, MissReason, PrefixChain
from kvstore.arena_link import ArenaCache
from kvstore.calls import FetchResult
from kvstore.client_state import ClientState
from kvstore.fetch_calls import PEEK_BYTES, FetchTally, fetch_at_once, fetch_plan, is_peeked
from kvstore.link import Link, unix_dial
from kvstore.messages import ChainRef, OpenNamespace, Ready
from kvstore.session import CallSession, follow
from tests.client.conftest import BLOCK_BYTES, NAMESPACE, PATIENT
from tests.store_process import StoreProcess

Payloads = npt.NDArray[np.uint8]
Buffers = Callable[[int, int], Sequence[Payloads]]


@pytest.fixture
def link(store: StoreProcess) -> Iterator[Link]:
    """A connection that knows the namespace."""
    opened = Link.open(unix_dial(store.socket_path), ArenaCache(), time.monotonic() + 10)
    opened.ask(OpenNamespace(NAMESPACE), time.monotonic() + 10)
    opened.opened.add(NAMESPACE.digest)
    yield opened
    opened.close()


def _at_once(link: Link, chain: PrefixChain, buffers: Buffers, tally: FetchTally) -> FetchResult | None:
    return fetch_at_once(
        link,
        ChainRef(chain),
        buffers,
        length_bytes=BLOCK_BYTES,
        deadline_s=time.monotonic() + 10,
        tally=tally,
    )


def _by_plan(link: Link, chain: PrefixChain, buffers: Buffers, tally: FetchTally) -> FetchResult:
    state = ClientState(PATIENT)
    state.open_namespace(NAMESPACE)
    session = CallSession(link, state, time.monotonic() + 10, NAMESPACE)
    plan = fetch_plan(session, chain, part=None, length_bytes=BLOCK_BYTES, buffers=buffers, tally=tally)
    return follow(plan, session)


class Targets:
    """Buffers of eight blocks; something happens when they are asked for the first time."""

    def __init__(self, happens: Callable[[], object] = lambda: None) -> None:
        self.bytes = np.zeros((8, BLOCK_BYTES), np.uint8)
        self.asked = 0
        self._happens = happens

    def __call__(self, start: int, stop: int) -> Sequence[Payloads]:
        self.asked += 1
        if self.asked == 1:
            self._happens()
        return list(self.bytes[start:stop])


def test_few_blocks_are_read_by_one_exchange_and_leave_no_lease(
    link: Link, sync_client: KVStore, chain: PrefixChain, payloads: Payloads
) -> None:
    sync_client.put(chain, payloads)
    targets = Targets()

    found = _at_once(link, chain, targets, FetchTally())

    assert found is not None
    assert (found.blocks, found.origins, found.reason) == (8, ("dram",) * 8, None)
    assert np.array_equal(targets.bytes, payloads)
    stats = sync_client.stats()
    assert stats["live_leases"] == 0
    assert stats["server"]["requests"]["peek"] == 1
    assert stats["fetch"]["hits_blocks"] == {"dram": 8}


def test_blocks_that_change_hands_before_the_copy_are_not_taken(
    link: Link, sync_client: KVStore, chain: PrefixChain, payloads: Payloads
) -> None:
    other = NAMESPACE.chain(range(100, 132))
    sync_client.put(chain, payloads)

    def change() -> None:
        sync_client.drop(chain)
        sync_client.put(other, payloads[::-1].copy())

    found = _by_plan(link, chain, Targets(change), FetchTally())

    assert (found.blocks, found.reason) == (0, MissReason.DROPPED)


def test_blocks_that_come_back_in_other_slots_are_fetched_again(
    link: Link, sync_client: KVStore, chain: PrefixChain, payloads: Payloads
) -> None:
    sync_client.put(chain, payloads)

    def change() -> None:
        sync_client.drop(chain)
        sync_client.put(chain, payloads)

    targets = Targets(change)
    found = _by_plan(link, chain, targets, FetchTally())

    assert (found.blocks, found.reason, targets.asked) == (8, None, 2)
    assert np.array_equal(targets.bytes, payloads)


def test_what_changes_hands_is_left_to_the_plan(
    link: Link, sync_client: KVStore, chain: PrefixChain, payloads: Payloads
) -> None:
    sync_client.put(chain, payloads)
    tally = FetchTally()
    targets = Targets(lambda: sync_client.drop(chain))

    assert _at_once(link, chain, targets, tally) is None
    assert _by_plan(link, chain, targets, tally).reason is MissReason.DROPPED


def test_a_partly_stored_chain_is_leased_by_the_same_request(
    link: Link, sync_client: KVStore, chain: PrefixChain, payloads: Payloads
) -> None:
    sync_client.put(chain[:3], payloads[:3])
    tally, targets = FetchTally(), Targets()

    assert _at_once(link, chain, targets, tally) is None
    assert isinstance(tally.peeked, Ready)
    found = _by_plan(link, chain, targets, tally)

    assert (found.blocks, found.reason) == (3, MissReason.NEVER_SEEN)
    assert np.array_equal(targets.bytes[:3], payloads[:3])
    stats = sync_client.stats()
    assert stats["fetch"]["requests"] == 1
    assert stats["live_leases"] == 0


def test_only_few_bytes_are_read_without_a_lease(chain: PrefixChain) -> None:
    assert is_peeked(chain, PEEK_BYTES // 8)
    assert not is_peeked(chain, PEEK_BYTES // 8 + 1)
    assert not is_peeked(NAMESPACE.chain(range(4 * 65)), BLOCK_BYTES)
