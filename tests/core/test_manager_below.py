"""BlockManager with tiers below: writing through, promotion, demotion, damage, loss."""

import asyncio

import numpy as np
import pytest

from kvstore.miss import MissReason
from kvstore.tier import ReadStatus, WriteStatus
from tests.core.gated_tier import GatedTier
from tests.core.manager_harness import BLOCK_BYTES, SPACE, running


async def test_a_put_is_written_through_to_every_tier_below():
    ssd, remote = GatedTier("ssd"), GatedTier("remote", is_shared=True)
    async with running(ssd, remote) as store:
        chain = SPACE.chain(range(20))
        await store.put(chain)

        assert await store.manager.flush(timeout_s=5)

        assert len(ssd.stored) == len(remote.stored) == 5
        headers = [header for header, _ in ssd.stored.values()]
        assert [header.depth for header in headers] == [0, 1, 2, 3, 4]
        assert headers[0].parent == SPACE.digest
        assert headers[1].parent == chain.keys[0]


async def test_blocks_found_below_are_promoted_and_named_by_origin():
    ssd, remote = GatedTier("ssd"), GatedTier("remote", is_shared=True)
    chain = SPACE.chain(range(20))
    async with running(ssd, remote) as store:
        await store.put(chain)
        await store.manager.flush(timeout_s=5)
    for block in list(ssd.stored)[3:]:
        del ssd.stored[block]

    async with running(ssd, remote) as again:
        match = await again.manager.match(chain)
        assert match.tiers == ("ssd",) * 3 + ("remote",) * 2

        assert await again.fetch(chain) == (["ssd"] * 3 + ["remote"] * 2, None)
        assert await again.fetch(chain) == (["dram"] * 5, None)

        await again.manager.flush(timeout_s=5)
        assert len(ssd.stored) == 5


async def test_a_block_asked_for_by_fifty_requests_is_read_once():
    ssd = GatedTier("ssd")
    chain = SPACE.chain(range(20))
    async with running(ssd) as store:
        await store.put(chain)
        await store.manager.flush(timeout_s=5)

    async with running(ssd) as again:
        ssd.gate.clear()
        ssd.read_batches.clear()
        waiting = [asyncio.create_task(again.fetch(chain)) for _ in range(50)]
        await asyncio.sleep(0)
        ssd.gate.set()

        results = await asyncio.gather(*waiting)

        assert len(ssd.read_batches) == 1
        assert {tuple(origins) for origins, _ in results} == {("ssd",) * 5}


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        (ReadStatus.CORRUPT, MissReason.CORRUPT),
        (ReadStatus.MISMATCH, MissReason.CORRUPT),
        (ReadStatus.ABSENT, MissReason.UNAVAILABLE),
        (ReadStatus.TIMED_OUT, MissReason.TIMED_OUT),
        (ReadStatus.UNAVAILABLE, MissReason.UNAVAILABLE),
    ],
)
async def test_a_copy_that_cannot_be_read_is_a_miss_with_its_reason(status, reason):
    ssd = GatedTier("ssd")
    chain = SPACE.chain(range(20))
    async with running(ssd) as store:
        await store.put(chain)
        await store.manager.flush(timeout_s=5)

    async with running(ssd) as again:
        ssd.read_status = status

        assert await again.fetch(chain) == ([], reason)

        ssd.read_status = None
        assert again.dram.used_bytes == 0


async def test_a_corrupt_block_shortens_the_prefix_and_is_not_read_again():
    ssd = GatedTier("ssd")
    chain = SPACE.chain(range(20))
    async with running(ssd) as store:
        await store.put(chain)
        await store.manager.flush(timeout_s=5)
    third = list(ssd.stored)[2]
    ssd.stored[third][1][100] ^= 1

    async with running(ssd) as again:
        assert await again.fetch(chain) == (["ssd"] * 2, MissReason.CORRUPT)
        assert await again.fetch(chain) == (["dram"] * 2, MissReason.CORRUPT)
        assert again.manager.stats()["corrupt_blocks"] == {"ssd": 1}


async def test_a_fetch_returns_by_its_deadline_and_the_load_serves_the_next():
    ssd = GatedTier("ssd")
    chain = SPACE.chain(range(20))
    async with running(ssd) as store:
        await store.put(chain)
        await store.manager.flush(timeout_s=5)

    async with running(ssd) as again:
        ssd.gate.clear()
        ssd.read_batches.clear()
        assert await again.fetch(chain, timeout_s=0.01) == ([], MissReason.TIMED_OUT)

        ssd.gate.set()

        origins, reason = await again.fetch(chain)
        assert (len(origins), reason) == (5, None)
        assert len(ssd.read_batches) == 1


async def test_a_cancelled_fetch_keeps_nothing():
    ssd = GatedTier("ssd")
    chain = SPACE.chain(range(20))
    async with running(ssd) as store:
        await store.put(chain)
        await store.manager.flush(timeout_s=5)

    async with running(ssd, blocks=5) as again:
        ssd.gate.clear()
        task = asyncio.create_task(again.manager.fetch(chain, owner=again.owner))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        ssd.gate.set()
        await again.fetch(chain)

        assert await again.put(SPACE.chain(range(50, 70))) == 5


async def test_a_tier_that_raises_is_a_miss_and_the_store_goes_on():
    ssd = GatedTier("ssd")
    chain = SPACE.chain(range(20))
    async with running(ssd) as store:
        await store.put(chain)
        await store.manager.flush(timeout_s=5)

    async with running(ssd) as again:
        read, ssd.read = ssd.read, None

        assert await again.fetch(chain) == ([], MissReason.UNAVAILABLE)

        ssd.read = read
        assert await again.fetch(chain) == (["ssd"] * 5, None)


async def test_a_shared_tier_that_is_down_is_named_as_the_reason():
    remote = GatedTier("remote", is_shared=True)
    async with running(remote) as store:
        remote.is_up = False

        assert (await store.manager.match(SPACE.chain(range(4)))).reason is MissReason.UNAVAILABLE


async def test_a_block_without_a_lower_copy_is_demoted_before_it_leaves():
    ssd = GatedTier("ssd")
    async with running(ssd, blocks=4, write_queue_blocks=1) as store:
        ssd.gate.clear()
        old = SPACE.chain(range(16))
        await store.put(old)
        put = asyncio.create_task(store.put(SPACE.chain(range(50, 66)), timeout_s=5))
        await asyncio.sleep(0)
        ssd.gate.set()

        assert await put == 4

        assert (await store.manager.match(old)).tiers == ("ssd",) * 4


async def test_a_full_write_queue_drops_the_write_and_counts_it():
    ssd = GatedTier("ssd")
    async with running(ssd, write_queue_blocks=2, write_batch_blocks=1) as store:
        ssd.gate.clear()
        await store.put(SPACE.chain(range(40)))
        ssd.gate.set()
        await store.manager.flush(timeout_s=5)

        drops = store.manager.stats()["write_drops_blocks"]["ssd/queue_full"]
        assert len(ssd.stored) == 10 - drops
        assert drops >= 7


async def test_a_put_that_finds_no_room_by_its_deadline_is_dropped():
    ssd = GatedTier("ssd")
    async with running(ssd, blocks=4) as store:
        ssd.gate.clear()
        await store.put(SPACE.chain(range(16)))

        assert await store.put(SPACE.chain(range(50, 58)), timeout_s=0.01) == 0

        assert store.manager.stats()["puts_blocks"]["dropped"] == 2


async def test_a_lower_tier_that_refuses_does_not_stop_puts():
    ssd = GatedTier("ssd")
    async with running(ssd, blocks=4) as store:
        ssd.write_status = WriteStatus.UNAVAILABLE
        for start in range(0, 400, 100):
            assert await store.put(SPACE.chain(range(start, start + 16)), timeout_s=5) == 4


async def test_the_lower_tier_evicts_to_take_more():
    ssd = GatedTier("ssd", capacity_blocks=8)
    ssd.capacity_bytes = 8 * BLOCK_BYTES
    async with running(ssd) as store:
        for start in (0, 100, 200):
            await store.put(SPACE.chain(range(start, start + 16)))
            await store.manager.flush(timeout_s=5)

        assert len(ssd.stored) <= 8
        newest = [block.key for block in ssd.stored]
        assert set(SPACE.chain(range(200, 216)).keys) <= set(newest)


async def test_a_damaged_slot_is_not_written_below_and_not_matched_again():
    ssd = GatedTier("ssd")
    async with running(ssd) as store:
        chain = SPACE.chain(range(8))
        ssd.gate.clear()
        first = SPACE.chain(range(50, 54))
        await store.put(first)
        await asyncio.sleep(0)
        await store.put(chain)
        fetched = await store.manager.fetch(chain, owner=store.owner)
        async with store.dram.writing([fetched.blocks[1].slot], BLOCK_BYTES) as (buffer,):
            np.asarray(buffer)[17] ^= 1
        store.manager.release(fetched.lease)
        ssd.gate.set()

        await store.manager.flush(timeout_s=5)

        assert {block.key for block in ssd.stored} == {first.keys[0], chain.keys[0]}
        assert (await store.manager.match(chain)).blocks == 1


async def test_check_finds_and_drops_a_damaged_slot():
    async with running() as store:
        chain = SPACE.chain(range(8))
        await store.put(chain)
        fetched = await store.manager.fetch(chain, owner=store.owner)
        store.manager.release(fetched.lease)
        async with store.dram.writing([fetched.blocks[1].slot], BLOCK_BYTES) as (buffer,):
            np.asarray(buffer)[17] ^= 1

        problems = await store.manager.check()

        assert len(problems) == 1
        assert "in dram is corrupt" in problems[0]
        assert await store.fetch(chain) == (["dram"], MissReason.CORRUPT)


async def test_dropped_blocks_are_gone_from_every_tier():
    ssd, remote = GatedTier("ssd"), GatedTier("remote", is_shared=True)
    async with running(ssd, remote) as store:
        chain = SPACE.chain(range(20))
        await store.put(chain)
        await store.manager.flush(timeout_s=5)

        assert await store.manager.drop(chain) == 5

        assert (ssd.stored, remote.stored) == ({}, {})
        assert (await store.manager.match(chain)).reason is MissReason.DROPPED


async def test_blocks_that_only_a_shared_tier_has_are_dropped_and_counted():
    ssd, remote = GatedTier("ssd"), GatedTier("remote", is_shared=True)
    chain = SPACE.chain(range(20))
    async with running(remote) as other:
        await other.put(chain)
        await other.manager.flush(timeout_s=5)
    async with running(ssd, remote) as store:
        await store.put(chain[:2])
        await store.manager.flush(timeout_s=5)

        assert await store.manager.drop(chain) == 5
        assert remote.stored == {}
        assert await store.manager.drop(chain) == 0


async def test_a_leased_block_is_not_dropped():
    async with running() as store:
        chain = SPACE.chain(range(4))
        await store.put(chain)
        fetched = await store.manager.fetch(chain, owner=store.owner)

        assert await store.manager.drop(chain) == 0

        assert (await store.manager.match(chain)).blocks == 1
        store.manager.release(fetched.lease)


async def test_a_prefetch_brings_blocks_up_without_a_lease():
    ssd = GatedTier("ssd")
    chain = SPACE.chain(range(20))
    async with running(ssd) as store:
        await store.put(chain)
        await store.manager.flush(timeout_s=5)

    async with running(ssd) as again:
        assert await again.manager.prefetch(chain) == 5

        assert again.manager.stats()["live_leases"] == 0
        assert (await again.manager.match(chain)).tiers == ("dram",) * 5


async def test_a_chain_longer_than_the_room_is_served_as_far_as_it_goes():
    ssd = GatedTier("ssd")
    chain = SPACE.chain(range(40))
    async with running(ssd) as store:
        await store.put(chain)
        await store.manager.flush(timeout_s=5)

    async with running(ssd, blocks=4) as again:
        assert await again.fetch(chain) == (["ssd"] * 4, MissReason.NO_ROOM)


async def test_hits_and_misses_add_up_to_lookups():
    async with running() as store:
        chain = SPACE.chain(range(40))
        await store.put(chain[:4])

        await store.fetch(chain)
        await store.fetch(SPACE.chain(range(90, 98)))

        fetch = store.manager.stats()["fetch"]
        assert fetch["lookups_blocks"] == 12
        assert fetch["hits_blocks"] == {"dram": 4}
        assert fetch["misses_blocks"] == {"never_seen": 2, "behind_miss": 6}


async def test_a_fetch_of_an_owner_that_ended_leases_nothing():
    async with running() as store:
        chain = SPACE.chain(range(4))
        await store.put(chain)
        store.manager.release_owner(store.owner)

        fetched = await store.manager.fetch(chain, owner=store.owner)

        assert (fetched.blocks, fetched.lease) == ((), None)


async def test_closing_drains_what_waits_for_the_tiers_below():
    ssd = GatedTier("ssd")
    async with running(ssd) as store:
        await store.put(SPACE.chain(range(40)))
        await store.manager.close()

        assert len(ssd.stored) == 10
        assert ssd.closed
        store.manager.check = lambda: asyncio.sleep(0, [])


async def test_the_store_stays_below_its_high_water_mark():
    ssd = GatedTier("ssd")
    async with running(ssd, high_water_ratio=0.5, low_water_ratio=0.25) as store:
        for start in range(0, 1000, 100):
            await store.put(SPACE.chain(range(start, start + 8)))
            await store.manager.flush(timeout_s=5)
        for _ in range(20):
            await asyncio.sleep(0)

        assert store.dram.used_bytes <= 8 * BLOCK_BYTES


async def test_tiers_below_are_told_of_uses_the_latest_last():
    disk = TouchedTier("ssd")
    async with running(disk) as store:
        first, second = SPACE.chain(range(8)), SPACE.chain(range(50, 58))
        await store.put(first)
        await store.put(second)
        await store.manager.flush(timeout_s=5)
        for chain in (first, second, first):
            await store.fetch(chain)

        await store.manager._uses.tell()

        assert [block.key for block in disk.touched] == [*second.keys[::-1], *first.keys[::-1]]


class TouchedTier(GatedTier):
    def __init__(self, name):
        super().__init__(name)
        self.touched = []

    async def touch(self, blocks):
        self.touched += blocks
