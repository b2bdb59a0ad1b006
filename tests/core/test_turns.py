"""Work on many blocks gives way to others between slices, and every slice leaves the state consistent."""

import asyncio
import contextlib

import pytest

from kvstore.checksum import checksum
from kvstore.client_slots import COMMIT_SLICE_BLOCKS, ClientSlots
from kvstore.messages import ChainRef, Commit, FilledSlots, Store, Stored, WrittenSlot
from kvstore.miss import MissReason
from kvstore.policy import POLICIES
from kvstore.putting import PUT_SLICE_BLOCKS
from tests.core.manager_harness import BLOCK_BYTES, SPACE, running

ZERO_SUM = checksum(bytes(BLOCK_BYTES))
MANY = 2 * PUT_SLICE_BLOCKS + 100


def chain_of(blocks, start):
    return SPACE.chain(list(range(start, start + 4 * blocks)))


class Watch:
    """Counts the turns that others had, and what was wrong with the state in any of them."""

    def __init__(self, manager, *, every=1):
        self._manager = manager
        self._every = every
        self.turns = 0
        self.problems = []

    async def run(self):
        while True:
            await asyncio.sleep(0)
            self.turns += 1
            if self.turns % self._every == 0:
                self.problems += await self._manager.check(sample_blocks=0)


@contextlib.asynccontextmanager
async def watching(manager, *, every=1):
    watch = Watch(manager, every=every)
    task = asyncio.create_task(watch.run())
    try:
        yield watch
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def turns_until(is_so):
    for _ in range(100_000):
        if is_so():
            return
        await asyncio.sleep(0)
    pytest.fail("it has not become so")


async def fill(manager, owner, chain):
    reserved = await manager.reserve(chain, owner=owner, timeout_s=30)
    slots = [slot.slot for slot in reserved.slots]
    manager.putter.publish(chain[: len(slots)], slots, owner=owner, checksums=[ZERO_SUM] * len(slots))
    return len(slots)


async def test_a_put_of_thousands_of_blocks_on_a_full_store_gives_way():
    async with running(blocks=MANY, high_water_ratio=1.0) as harness:
        manager = harness.manager
        assert await fill(manager, harness.owner, chain_of(MANY, 0)) == MANY
        async with watching(manager, every=16) as watch:
            reserved = await manager.reserve(chain_of(MANY, 1_000_000), owner=harness.owner, timeout_s=30)
        assert [slot.position for slot in reserved.slots] == list(range(MANY))
        assert reserved.reason is None
        assert watch.turns >= MANY // 64
        assert watch.problems == []
        manager.return_slots([slot.slot for slot in reserved.slots], owner=harness.owner)


async def test_what_is_dropped_of_a_put_in_slices_is_counted_to_its_end():
    present = chain_of(MANY, 0)
    async with running(blocks=PUT_SLICE_BLOCKS + 8, high_water_ratio=1.0) as harness:
        manager = harness.manager
        last = present[MANY - 4 :]
        assert await fill(manager, harness.owner, last) == 4
        leased = await manager.fetch(last, owner=harness.owner)

        reserved = await manager.reserve(present, owner=harness.owner, timeout_s=0.0)

        assert len(reserved.slots) == PUT_SLICE_BLOCKS + 4
        assert reserved.present == 4
        assert reserved.reason is MissReason.NO_ROOM
        assert manager.stats()["puts_blocks"]["dropped"] == MANY - PUT_SLICE_BLOCKS - 8
        (*_, report) = await manager.why(present[MANY - 6 : MANY - 4])
        assert report.reason is MissReason.NO_ROOM
        manager.return_slots([slot.slot for slot in reserved.slots], owner=harness.owner)
        manager.release(leased.lease, owner=harness.owner)


async def test_a_put_in_slices_that_is_cancelled_gives_back_every_slot():
    async with running(blocks=MANY, high_water_ratio=1.0) as harness:
        manager = harness.manager
        put = asyncio.create_task(manager.reserve(chain_of(MANY, 0), owner=harness.owner, timeout_s=30))
        await turns_until(lambda: manager.has_anything(harness.owner))
        put.cancel()
        with pytest.raises(asyncio.CancelledError):
            await put
        assert not manager.has_anything(harness.owner)
        assert harness.dram.used_bytes == 0


async def test_a_large_commit_gives_way_and_ends_with_its_owner():
    blocks = 4 * COMMIT_SLICE_BLOCKS
    chain = chain_of(blocks, 0)
    async with running(blocks=blocks, high_water_ratio=1.0) as harness:
        manager, owner = harness.manager, harness.manager.new_owner()
        slots = ClientSlots(manager, owner)
        lent = slots.lend(await manager.reserve(chain, owner=owner, timeout_s=30))
        commit = Commit(ChainRef(chain, None), tuple(WrittenSlot(*slot, ZERO_SUM) for slot in lent.slots))
        assert slots.commit_at_once(commit) is None
        async with watching(manager) as watch:
            work = asyncio.create_task(slots.commit(commit))
            await turns_until(lambda: manager.match_at_once(chain).blocks > 0)
            assert manager.match_at_once(chain).blocks < blocks
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
            manager.release_owner(owner)
        assert watch.problems == []
        assert 0 < (await manager.match(chain)).blocks < blocks
        assert manager.stats()["lease_events"].get("stale_returns", 0) == 0


async def lent_for(manager, slots, chain):
    """Slots for a chain, as if zeros had been written there."""
    lent = slots.lend(await manager.reserve(chain, owner=slots._owner, timeout_s=30))
    _, offsets, generations = zip(*lent.slots, strict=True)
    return FilledSlots(offsets, generations, (ZERO_SUM,) * len(offsets))


async def test_a_large_store_of_new_blocks_is_answered_at_once_and_filed_behind_the_answer():
    chain = chain_of(1024, 0)
    async with running(blocks=1024, high_water_ratio=1.0) as harness:
        manager = harness.manager
        slots = ClientSlots(manager, harness.owner)
        filled = await lent_for(manager, slots, chain)
        manager.afterwards.begin()
        assert slots.store_at_once(Store(ChainRef(chain), filled)) == Stored(1024)
        assert not manager.has_anything(harness.owner)
        manager.afterwards.settle()
        assert manager.match_at_once(chain).blocks == 1024
        assert manager.stats()["puts_blocks"]["stored"] == 1024


@pytest.mark.parametrize("num_known", [0, 1])
async def test_a_store_of_more_or_of_known_blocks_gives_way(num_known):
    blocks = 1025 - num_known
    chain, other = chain_of(blocks, 0), chain_of(blocks, 1_000_000)
    async with running(blocks=2 * blocks, high_water_ratio=1.0) as harness:
        manager = harness.manager
        slots = ClientSlots(manager, harness.owner)
        filled = await lent_for(manager, slots, other)
        assert await fill(manager, harness.owner, chain[blocks - num_known :]) == num_known
        store = Store(ChainRef(chain), filled)
        assert slots.store_at_once(store) is None
        async with watching(manager) as watch:
            assert (await slots.store(store)).stored == blocks - num_known
        assert watch.turns >= blocks // COMMIT_SLICE_BLOCKS - 1
        assert watch.problems == []
        assert manager.match_at_once(chain).blocks == blocks
        assert not manager.has_anything(harness.owner)


async def test_dropping_thousands_of_blocks_gives_way():
    async with running(blocks=MANY, high_water_ratio=1.0) as harness:
        manager = harness.manager
        await fill(manager, harness.owner, chain_of(MANY, 0))
        async with watching(manager, every=16) as watch:
            assert await manager.drop(chain_of(MANY, 0)) == MANY
        assert watch.turns >= MANY // 64 - 1
        assert watch.problems == []


@pytest.mark.parametrize("name", POLICIES)
async def test_making_room_in_the_background_gives_way_however_long_a_chain_is(name):
    # In the order of some policies parents come before their children: one leaf brings its chain along.
    async with running(blocks=MANY, high_water_ratio=1.0, low_water_ratio=0.25) as harness:
        manager = harness.manager
        await manager.change_policy(name)
        await fill(manager, harness.owner, chain_of(MANY, 0))
        async with watching(manager, every=16) as watch:
            await manager._space.age()
        assert len(manager.policy_of("dram")) <= MANY // 4
        assert watch.turns >= MANY * 3 // 4 // 128
        assert watch.problems == []


async def test_making_room_at_a_quota_gives_way():
    async with running(blocks=2 * MANY, high_water_ratio=1.0, namespace_quota_ratio=0.5) as harness:
        manager = harness.manager
        await fill(manager, harness.owner, chain_of(MANY, 0))
        async with watching(manager, every=16) as watch:
            assert (
                await fill(manager, harness.owner, chain_of(PUT_SLICE_BLOCKS, 1_000_000)) == PUT_SLICE_BLOCKS
            )
        assert watch.turns >= PUT_SLICE_BLOCKS // 128
        assert watch.problems == []


@pytest.mark.parametrize("name", POLICIES)
async def test_a_change_of_policy_gives_way_and_what_comes_meanwhile_is_ordered_too(name):
    before = "lru" if name == "gittins" else "gittins"
    async with running(blocks=1024, high_water_ratio=1.0) as harness:
        manager = harness.manager
        await manager.change_policy(before)
        for start in range(0, 1024, 128):
            await fill(manager, harness.owner, chain_of(128, 1_000 * start))
        async with watching(manager, every=3) as watch:
            change = asyncio.create_task(manager.change_policy(name))
            number, came_meanwhile = 0, 0
            while not change.done():
                number += 1
                # New blocks, for which others leave; uses; and blocks that are dropped.
                came_meanwhile += await fill(
                    manager, harness.owner, chain_of(16, 10_000_000 + 1_000 * number)
                )
                fetched = await manager.fetch(chain_of(64, 128_000 * (number % 8)), owner=harness.owner)
                if fetched.lease is not None:
                    manager.release(fetched.lease, owner=harness.owner)
                await manager.drop(chain_of(4, 10_000_000 + 1_000 * (number - 1)))
        assert await change == before
        assert came_meanwhile
        assert watch.turns >= 1024 // 128
        assert watch.problems == []
        assert manager.stats()["policy"] == name
        assert type(manager.policy_of("dram")) is type(POLICIES[name](0))


async def test_two_changes_of_policy_come_one_after_the_other():
    async with running(blocks=512, high_water_ratio=1.0) as harness:
        manager = harness.manager
        await fill(manager, harness.owner, chain_of(512, 0))
        befores = await asyncio.gather(manager.change_policy("lru"), manager.change_policy("fifo"))
        assert befores == ["gittins", "lru"]
        assert manager.stats()["policy"] == "fifo"


async def test_a_change_of_policy_goes_on_without_its_caller():
    async with running(blocks=512, high_water_ratio=1.0) as harness:
        manager = harness.manager
        await fill(manager, harness.owner, chain_of(512, 0))
        change = asyncio.create_task(manager.change_policy("lru"))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        change.cancel()
        await asyncio.gather(change, return_exceptions=True)
        assert await manager.change_policy("fifo") == "lru"


async def test_a_store_closes_in_the_middle_of_a_change_of_policy():
    async with running(blocks=512, high_water_ratio=1.0) as harness:
        manager = harness.manager
        await fill(manager, harness.owner, chain_of(512, 0))
        change = asyncio.create_task(manager.change_policy("lru"))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    await asyncio.wait([change])
