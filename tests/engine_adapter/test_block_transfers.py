"""Moves between an engine's pages and a store."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from kvstore import KVLayout, KVStore, Namespace, PrefixChain
from kvstore.miss import MissReason
from kvstore_engine_adapter.block_transfers import BlockLoads, BlockSaves, GroupMove, Move, Payloads
from tests.store_process import StoreProcess

BLOCK_BYTES = 8 << 20
NAMESPACE = Namespace("m", KVLayout.opaque(block_bytes=BLOCK_BYTES, block_tokens=4))
CHAIN = NAMESPACE.chain(list(range(20)))


@dataclass
class Taken:
    rows: Payloads

    def payloads(self) -> Payloads:
        return self.rows


class Pages:
    """Pages of one group in an array; ``fault`` is raised by a write."""

    def __init__(self) -> None:
        self.rows: Payloads = np.zeros((8, BLOCK_BYTES), np.uint8)
        self.fault: Exception | None = None

    def block_bytes(self, group: int) -> int:
        return BLOCK_BYTES

    def read(self, group: int, pages: Sequence[int]) -> Taken:
        return Taken(self.rows[list(pages)])

    def write(self, group: int, pages: Sequence[int], payloads: Payloads) -> None:
        if self.fault is not None:
            raise self.fault
        self.rows[list(pages)] = payloads


@pytest.fixture
def store(tmp_path: Path) -> Iterator[StoreProcess]:
    with StoreProcess(tmp_path, dram_bytes=64 << 20) as process:
        yield process


@pytest.fixture
def client(store: StoreProcess) -> Iterator[KVStore]:
    with KVStore.connect(store.socket_path, timeout_s=30) as client:
        client.open_namespace(NAMESPACE)
        yield client


def move(pages: Sequence[int], chain: PrefixChain = CHAIN) -> Move:
    return Move("a", (GroupMove(0, chain[: len(pages)], tuple(pages)),))


def load(loads: BlockLoads, what: Move) -> tuple[tuple[int, int], ...]:
    loads.begin(what)
    until_s = time.monotonic() + 60
    while not (done := loads.take_done(patience_s=0.1)):
        assert time.monotonic() < until_s
    assert loads.is_idle
    assert [one.request_id for one in done] == ["a"]
    return done[0].failed


def test_blocks_come_back_window_by_window_and_missing_ones_are_told(client: KVStore) -> None:
    theirs, ours = Pages(), Pages()
    theirs.rows[:] = np.arange(8, dtype=np.uint8)[:, None] + 1
    saves = BlockSaves(client, theirs, None, timeout_s=30)
    saves.begin(move([3, 5, 7]))
    saves.close(patience_s=60)
    assert saves.counts.take() == {"saved_blocks": 3, "saved_bytes": 3 * BLOCK_BYTES}
    loads = BlockLoads(client, ours, None, deadline_s=60)
    assert load(loads, move([1, 2, 0, 4, 6])) == ((0, 4), (0, 6))
    loads.close()
    assert ours.rows[:, -1].tolist() == [8, 4, 6, 0, 0, 0, 0, 0]


def test_a_load_tells_the_first_block_that_is_missing_and_why_unless_it_was_late(client: KVStore) -> None:
    client.put(CHAIN[:2], [bytes(BLOCK_BYTES)] * 2)
    gone = ((CHAIN.keys[2], MissReason.NEVER_SEEN),)
    for deadline_s, missing, counted in ((60.0, gone, "load_never_seen"), (-60.0, (), "load_late")):
        loads = BlockLoads(client, Pages(), None, deadline_s=deadline_s)
        loads.begin(move([0, 1, 2, 3]))
        loads.close()
        assert [one.missing for one in loads.take_done()] == [missing]
        assert loads.counts.take()[counted] == 1


def test_a_page_that_cannot_be_written_fails_the_load_and_nothing_else(client: KVStore) -> None:
    client.put(CHAIN[:2], [bytes(BLOCK_BYTES)] * 2)
    pages = Pages()
    pages.fault = RuntimeError("no device")
    loads = BlockLoads(client, pages, None, deadline_s=60)
    assert load(loads, move([1, 2])) == ((0, 1), (0, 2))
    pages.fault = None
    assert load(loads, move([1, 2])) == ()
    loads.close()


def test_a_load_that_begins_after_its_deadline_loads_nothing(client: KVStore) -> None:
    client.put(CHAIN[:2], [bytes(BLOCK_BYTES)] * 2)
    loads = BlockLoads(client, Pages(), None, deadline_s=-1.0)
    assert load(loads, move([1, 2])) == ((0, 1), (0, 2))
    loads.close()


def test_saves_behind_one_that_found_no_store_are_dropped_at_once(
    store: StoreProcess, client: KVStore
) -> None:
    store.kill()
    saves = BlockSaves(client, Pages(), None, clock=lambda: 1000.0)
    for at in range(4):
        saves.begin(move([at]))
    saves.close(patience_s=60)
    assert saves.counts.take() == {"dropped_blocks": 4}


def test_no_more_snapshots_are_held_than_the_queue_has_room_for(client: KVStore) -> None:
    saves = BlockSaves(client, Pages(), None, queue_bytes=2 * BLOCK_BYTES, timeout_s=30)
    saves.begin(move([1, 2, 3]))
    saves.begin(move([1, 2]))
    saves.close(patience_s=60)
    counts = saves.counts.take()
    assert (counts["dropped_blocks"], counts["saved_blocks"]) == (3, 2)
