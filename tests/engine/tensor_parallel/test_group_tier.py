"""The store as two ranks see it: rank 1's part store runs in this process, the store is a real one."""

import asyncio
import contextlib

import pytest
import torch

from kvstore.async_client import AsyncKVStore
from kvstore.hints import Hints
from kvstore.keys import Namespace
from kvstore.layout import KVLayout, Part
from kvstore.manager import BlockManager
from kvstore.miss import MissReason
from kvstore.state import ManagerSettings
from kvstore_engine_adapter.page_pool import PagePool
from kvstore_engine_adapter.tensor_parallel import messages
from kvstore_engine_adapter.tensor_parallel.group_tier import GroupTier, GroupVramTier, LentSlots
from kvstore_engine_adapter.tensor_parallel.part_store import PartStore
from kvstore_engine_adapter.tensor_parallel.rank_group import RankLost
from kvstore_tiers.store import StoreTier
from tests.engine.conftest import CPU
from tests.store_process import StoreProcess

LAYOUT = KVLayout("float32", 2, 16, 4, 8)
PAGES = KVLayout("float32", 2, 16, 2, 8)
PARTS = [Part(0, 2, 0, 2), Part(0, 2, 2, 4)]
SPACE = Namespace("m", LAYOUT, "w in 2 shards")
CHAIN = SPACE.chain(list(range(5 * 16)))
BLOCKS = len(CHAIN)


class OneFollower:
    """Rank 1's side of a group, answered in this process; ``spoil`` may change answers."""

    def __init__(self, store):
        self.store = store
        self.size = len(PARTS)
        self.is_lost = False
        self.spoil = None
        self.may_answer_reads = asyncio.Event()
        self.may_answer_reads.set()

    def tell(self, message):
        self.store.know(message.namespace())

    async def ask(self, message, kind):
        if self.is_lost:
            raise RankLost("rank 1 is gone")
        answer = await self.store.answer(message)
        if isinstance(message, messages.Read):
            await self.may_answer_reads.wait()
        assert isinstance(answer, kind)
        return [answer if self.spoil is None else self.spoil(message, answer)]


class Replica:
    """A manager over two ranks' pages."""

    def __init__(self, address):
        self.pools = [PagePool(PAGES, 8, CPU) for _ in PARTS]
        self.follower = OneFollower(PartStore(address, self.pools[1], PARTS[1]))
        lent = LentSlots()
        top = GroupVramTier(self.pools[0], 8, lent=lent)
        lower = GroupTier(StoreTier(address), self.follower, lent)
        self.manager = BlockManager(top, [lower], settings=ManagerSettings())

    async def compute(self):
        """Fill a page of every rank with each block's number, and publish them."""
        owner = self.manager.new_owner()
        slots = self.manager.reserve_unnamed_at_once(BLOCKS, PAGES.block_bytes, owner=owner)
        for number, slot in enumerate(slots):
            for rank, pool in enumerate(self.pools):
                pool.tensor[slot] = 10 * number + rank
        self.manager.commit(CHAIN, slots, owner=owner, part=PARTS[0])
        self.manager.release_owner(owner)
        assert await self.manager.flush(timeout_s=30)

    async def fetch(self, timeout_s=30):
        """Load what is stored; returns the numbers in the pages of each block, and why there are no more."""
        owner = self.manager.new_owner()
        fetched = await self.manager.fetch(CHAIN, owner=owner, part=PARTS[0], timeout_s=timeout_s)
        numbers = []
        for block in fetched.blocks:
            pages = [pool.tensor[block.slot] for pool in self.pools]
            assert all(bool((page == page.flatten()[0]).all()) for page in pages)
            numbers.append(tuple(int(page.flatten()[0]) for page in pages))
        return numbers, fetched.reason

    async def match(self):
        return await self.manager.match(CHAIN, part=PARTS[0], timeout_s=30)


@contextlib.asynccontextmanager
async def replica(store):
    replica = Replica(str(store.socket_path))
    await replica.follower.store.open()
    await replica.manager.open()
    replica.manager.open_namespace(SPACE)
    try:
        yield replica
        assert await replica.manager.check() == []
    finally:
        await replica.manager.close(drain_s=0.1)
        await replica.follower.store.close()


@pytest.fixture
def store(tmp_path):
    with StoreProcess(tmp_path) as process:
        yield process


EVERYTHING = [(10 * number, 10 * number + 1) for number in range(BLOCKS)]


async def test_another_replica_loads_every_part_into_the_same_slots(store):
    async with replica(store) as first, replica(store) as second:
        await first.compute()
        assert (await second.match()).tiers == ("dram",) * BLOCKS
        assert await second.fetch() == (EVERYTHING, None)


async def test_a_block_of_which_one_rank_has_no_part_is_a_miss_for_all(store):
    async with replica(store) as first, replica(store) as second:
        await first.compute()
        client = await AsyncKVStore.connect(str(store.socket_path))
        async with client:
            await client.open_namespace(SPACE)
            assert await client.drop(CHAIN[3:4], part=PARTS[1]) == 1
        matched = await second.match()
        assert matched.blocks == 3
        assert matched.reason is MissReason.DROPPED
        assert await second.fetch() == (EVERYTHING[:3], MissReason.DROPPED)


async def test_a_reader_of_whole_blocks_finds_none_of_the_parts(store):
    async with replica(store) as first:
        await first.compute()
        client = await AsyncKVStore.connect(str(store.socket_path))
        async with client:
            await client.open_namespace(SPACE)
            assert (await client.match(CHAIN, timeout_s=30)).blocks == 0
            assert (await client.match(CHAIN, part=PARTS[1], timeout_s=30)).blocks == BLOCKS


async def test_a_load_that_fails_on_one_rank_fails_on_all(store):
    def corrupt_from_the_third(message, answer):
        if not isinstance(message, messages.Read):
            return answer
        return messages.Outcomes([*answer.statuses[:2], *["corrupt"] * (BLOCKS - 2)], answer.reasons)

    async with replica(store) as first, replica(store) as second:
        await first.compute()
        second.follower.spoil = corrupt_from_the_third
        assert await second.fetch() == (EVERYTHING[:2], MissReason.CORRUPT)


async def test_a_rank_that_does_not_answer_holds_up_nobody_and_its_pages_stay_lent(store):
    async with replica(store) as first, replica(store) as second:
        await first.compute()
        second.follower.may_answer_reads.clear()
        assert await second.fetch(timeout_s=1) == ([], MissReason.TIMED_OUT)
        assert second.manager.stats()["tiers"]["vram"]["used_bytes"] == BLOCKS * PAGES.block_bytes
        second.follower.may_answer_reads.set()
        assert await second.fetch() == (EVERYTHING, None)


async def test_a_write_that_fails_on_one_rank_counts_as_none(store):
    def unavailable(message, answer):
        if not isinstance(message, messages.Write):
            return answer
        return messages.Outcomes(["unavailable"] * len(answer.statuses), answer.reasons)

    async with replica(store) as first:
        first.follower.spoil = unavailable
        await first.compute()
        drops = first.manager.stats()["write_drops_blocks"]
        assert drops["store/unavailable"] == BLOCKS


async def test_when_a_rank_is_lost_nothing_is_found_or_written(store):
    async with replica(store) as first, replica(store) as second:
        await first.compute()
        second.follower.is_lost = True
        assert (await second.match()).reason is MissReason.UNAVAILABLE
        assert (await second.fetch())[0] == []


async def test_without_a_server_nothing_is_found_and_nothing_waits(tmp_path):
    with StoreProcess(tmp_path) as process:
        async with replica(process) as first:
            await first.compute()
        async with replica(process) as second:
            process.kill()
            assert await second.fetch() == ([], MissReason.UNAVAILABLE)


async def test_a_buffer_is_known_for_as_long_as_it_is_lent():
    lent, page = LentSlots(), torch.zeros(64, dtype=torch.uint8).numpy().data
    with lent.noting([5], [page]):
        with lent.noting([5], [page]):
            assert lent.slot_of(page[:10].toreadonly()) == 5
        assert lent.slot_of(page) == 5
    with pytest.raises(KeyError):
        lent.slot_of(page)


async def test_hints_reach_the_store_for_every_part(store):
    async with replica(store) as first:
        await first.compute()
        first.manager.note_hints(CHAIN, Hints(ends_session=True), part=PARTS[0])
    async with await AsyncKVStore.connect(store.socket_path) as client:
        assert (await client.stats())["hinted_requests"] == len(PARTS)
