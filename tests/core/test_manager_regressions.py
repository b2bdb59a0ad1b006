"""Bugs that were found in the manager, each named by what must hold."""

import asyncio

import numpy as np

from kvstore import space
from kvstore.keys import Namespace
from kvstore.lease import LeaseTable
from kvstore.miss import MissReason
from kvstore.tier import Slot
from tests.core.gated_tier import GatedTier
from tests.core.manager_harness import BLOCK_BYTES, SPACE, running


async def stored_below(*lower, tokens=20):
    """Put a chain through a store that is closed again, so that only the tiers below have it."""
    chain = SPACE.chain(range(tokens))
    async with running(*lower) as store:
        await store.put(chain)
        await store.manager.flush(timeout_s=5)
    return chain


async def test_blocks_a_shared_tier_lost_are_written_there_again():
    remote = GatedTier("remote", is_shared=True)
    async with running(remote, blocks=8) as store:
        chain = SPACE.chain(range(20))
        await store.put(chain)
        await store.manager.flush(timeout_s=5)
        remote.stored.clear()
        await store.put(SPACE.chain(range(100, 132)))
        await store.manager.flush(timeout_s=5)
        assert (await store.manager.match(chain)).blocks == 0

        await store.put(chain)
        await store.manager.flush(timeout_s=5)

        assert set(chain.keys) <= {block.key for block in remote.stored}


class HeldTier(GatedTier):
    """A shared tier whose reads wait for ``may_read``, while it answers probes."""

    def __init__(self):
        super().__init__("remote", is_shared=True)
        self.is_reading, self.may_read = asyncio.Event(), asyncio.Event()

    async def read(self, requests, *, deadline_s):
        self.is_reading.set()
        await self.may_read.wait()
        return await super().read(requests, deadline_s=deadline_s)


async def test_blocks_that_are_on_their_way_up_for_another_are_matched():
    remote = HeldTier()
    chain = await stored_below(remote)
    async with running(remote) as store:
        fetching = asyncio.create_task(store.fetch(chain, timeout_s=30))
        await remote.is_reading.wait()
        found = await store.manager.match(chain)
        remote.may_read.set()

        assert (found.blocks, found.tiers, found.reason) == (5, ("remote",) * 5, None)
        assert await fetching == (["remote"] * 5, None)


async def test_blocks_that_only_a_shared_tier_holds_cost_no_entry():
    remote = GatedTier("remote", is_shared=True)
    async with running(remote, blocks=8) as store:
        for start in range(0, 4000, 100):
            await store.put(SPACE.chain(range(start, start + 16)))
            await store.manager.flush(timeout_s=5)

        assert sum(1 for _ in store.manager._state.directory.entries()) <= 8


async def test_an_evicted_block_that_a_shared_tier_lost_too_was_evicted_not_never_seen():
    remote = GatedTier("remote", is_shared=True)
    async with running(remote, blocks=4) as store:
        old = SPACE.chain(range(16))
        await store.put(old)
        await store.manager.flush(timeout_s=5)
        await store.put(SPACE.chain(range(100, 116)))
        remote.stored.clear()

        assert (await store.manager.match(old)).reason is MissReason.EVICTED


async def test_a_shared_tier_that_was_down_is_no_reason_to_let_the_only_copy_go():
    remote = GatedTier("remote", is_shared=True)
    async with running(remote, blocks=8) as store:
        old = SPACE.chain(range(16))
        await store.put(old)
        await store.manager.flush(timeout_s=5)
        remote.stored.clear()
        remote.is_up = False
        store.manager._upkeep.doubt_tiers_that_are_down()
        remote.is_up = True

        await store.put(SPACE.chain(range(100, 132)))

        assert (await store.manager.match(old)).tiers == ("remote",) * 4


async def test_a_fetch_serves_what_there_is_room_for_while_another_tier_is_busy():
    ssd, remote = GatedTier("ssd"), GatedTier("remote", is_shared=True)
    chain = await stored_below(ssd, tokens=16)
    async with running(ssd, remote, blocks=4) as store:
        leased = SPACE.chain(range(100, 108))
        await store.put(leased)
        await store.manager.flush(timeout_s=5)
        kept = await store.manager.fetch(leased, owner=store.owner)
        remote.gate.clear()
        store.manager._mover._queues["remote"].in_flight = 1

        fetched = await asyncio.wait_for(store.fetch(chain[:4], timeout_s=0.2), 5)

        store.manager._mover._queues["remote"].in_flight = 0
        assert fetched == (["ssd"] * 2, MissReason.NO_ROOM)
        store.manager.release(kept.lease)


async def test_the_tail_of_a_chain_on_top_makes_room_for_its_head_below():
    ssd = GatedTier("ssd")
    chain = await stored_below(ssd, tokens=64)
    async with running(ssd, blocks=8) as store:
        assert await store.manager.prefetch(chain[8:]) == 8

        assert await store.fetch(chain) == (["ssd"] * 8, MissReason.NO_ROOM)


async def test_a_tier_that_is_down_does_not_hide_the_copies_behind_it():
    ssd, remote = GatedTier("ssd"), GatedTier("remote", is_shared=True)
    chain = await stored_below(ssd, remote)
    async with running(ssd, remote) as store:
        ssd.is_up = False

        assert (await store.manager.match(chain)).tiers == ("remote",) * 5
        assert await store.fetch(chain) == (["remote"] * 5, None)
        ssd.is_up = True


async def test_a_put_is_no_duplicate_of_what_only_a_tier_that_is_down_holds():
    ssd = GatedTier("ssd")
    chain = await stored_below(ssd)
    async with running(ssd) as store:
        ssd.is_up = False
        assert (await store.manager.match(chain)).reason is MissReason.UNAVAILABLE

        assert await store.put(chain) == 5

        assert await store.fetch(chain) == (["dram"] * 5, None)
        ssd.is_up = True


async def test_a_damaged_block_is_counted_once_however_many_tiers_are_below():
    ssd, remote = GatedTier("ssd"), GatedTier("remote", is_shared=True)
    async with running(ssd, remote) as store:
        ssd.gate.clear()
        remote.gate.clear()
        first, chain = SPACE.chain(range(50, 54)), SPACE.chain(range(4))
        await store.put(first)
        await asyncio.sleep(0)
        await store.put(chain)
        fetched = await store.manager.fetch(chain, owner=store.owner)
        async with store.dram.writing([fetched.blocks[0].slot], BLOCK_BYTES) as (buffer,):
            np.asarray(buffer)[17] ^= 1
        store.manager.release(fetched.lease)
        ssd.gate.set()
        remote.gate.set()

        await store.manager.flush(timeout_s=5)

        assert store.manager.stats()["corrupt_blocks"] == {"dram": 1}


async def test_a_block_that_was_damaged_in_a_shared_tier_is_missed_as_corrupt_from_then_on():
    remote = GatedTier("remote", is_shared=True)
    chain = await stored_below(remote, tokens=4)
    async with running(remote) as store:
        next(iter(remote.stored.values()))[1][100] ^= 1
        assert await store.fetch(chain) == ([], MissReason.CORRUPT)
        remote.stored.clear()

        assert (await store.manager.match(chain)).reason is MissReason.CORRUPT


async def test_a_check_of_a_store_that_drops_blocks_finds_nothing_wrong():
    ssd = GatedTier("ssd")
    async with running(ssd) as store:
        chain = SPACE.chain(range(8))
        await store.put(chain)
        await store.manager.flush(timeout_s=5)
        dropping, go_on = asyncio.Event(), asyncio.Event()
        drop = ssd.drop

        async def slow_drop(blocks):
            dropping.set()
            await go_on.wait()
            await drop(blocks)

        ssd.drop = slow_drop
        task = asyncio.create_task(store.manager.drop(chain))
        await dropping.wait()

        assert await store.manager.check(sample_blocks=0) == []

        go_on.set()
        assert await task == 2


async def test_a_fetch_waits_for_room_until_others_end_their_leases():
    ssd = GatedTier("ssd")
    chain = await stored_below(ssd, tokens=16)
    async with running(ssd, blocks=4) as store:
        other = SPACE.chain(range(100, 116))
        await store.put(other)
        await store.manager.flush(timeout_s=5)
        kept = await store.manager.fetch(other, owner=store.owner)
        waiting = asyncio.create_task(store.fetch(chain, timeout_s=5))
        await asyncio.sleep(0)

        store.manager.release(kept.lease)

        assert await waiting == (["ssd"] * 4, None)


async def test_a_namespace_of_a_live_owner_is_not_forgotten(monkeypatch):
    monkeypatch.setattr("kvstore.directory.MAX_NAMESPACES", 2)
    async with running() as store:
        mine = Namespace(model="mine", layout=SPACE.layout)
        store.manager.open_namespace(mine, owner=store.owner)

        for number in range(10):
            other = Namespace(model=f"other {number}", layout=SPACE.layout)
            store.manager.open_namespace(other)
            assert (await store.manager.match(other.chain(range(4)))).blocks == 0

        assert (await store.manager.match(mine.chain(range(4)))).blocks == 0


async def test_a_block_whose_damaged_copy_is_still_leased_is_not_loaded_over_it():
    ssd = GatedTier("ssd")
    async with running(ssd) as store:
        chain = SPACE.chain(range(4))
        await store.put(chain)
        await store.manager.flush(timeout_s=5)
        fetched = await store.manager.fetch(chain, owner=store.owner)
        async with store.dram.writing([fetched.blocks[0].slot], BLOCK_BYTES) as (buffer,):
            np.asarray(buffer)[17] ^= 1
        assert await store.manager.report_damage(chain) == 1

        other = await store.manager.fetch(chain, owner=store.manager.new_owner())

        assert (other.blocks, other.reason) == ((), MissReason.CORRUPT)
        store.manager.release(fetched.lease)
        assert await store.fetch(chain) == (["ssd"], None)


async def test_a_chain_that_names_a_block_twice_leaks_no_slot():
    ssd = GatedTier("ssd")
    chain = await stored_below(ssd, tokens=4)
    async with running(ssd) as store:
        twice = type(chain)(chain.namespace, chain.keys * 2, chain.block_tokens)

        await store.manager.fetch(twice, owner=store.owner)

        store.manager.release_owner(store.owner)
        assert store.dram.used_bytes == BLOCK_BYTES


async def test_a_block_that_is_being_written_below_is_dropped_all_the_same():
    ssd = GatedTier("ssd")
    async with running(ssd) as store:
        chain = SPACE.chain(range(4))
        ssd.gate.clear()
        await store.put(chain)
        await asyncio.sleep(0)
        dropping = asyncio.create_task(store.manager.drop(chain))
        await asyncio.sleep(0)
        ssd.gate.set()

        assert await dropping == 1

        assert (await store.manager.match(chain)).reason is MissReason.DROPPED
        assert ssd.stored == {}


async def test_tiers_below_learn_of_uses_above_them():
    ssd = GatedTier("ssd")
    async with running(ssd) as store:
        chain = SPACE.chain(range(12))
        await store.put(chain)
        await store.manager.flush(timeout_s=5)
        await store.fetch(chain)

        await store.manager._uses.tell()

        assert [block.key for block in ssd.touched] == list(reversed(chain.keys))


async def test_a_tier_that_never_closes_does_not_hold_up_the_end(monkeypatch):
    monkeypatch.setattr("kvstore.closing._CLOSE_S", 0.01)
    ssd = GatedTier("ssd")
    async with running(ssd) as store:
        await store.put(SPACE.chain(range(12)))
        await store.manager.flush(timeout_s=5)
        monkeypatch.setattr(ssd, "close", asyncio.Event().wait)

        await asyncio.wait_for(store.manager.close(), 5)
        store.manager.check = lambda: asyncio.sleep(0, [])


async def test_closing_goes_on_when_its_caller_is_cancelled():
    ssd = GatedTier("ssd")
    async with running(ssd) as store:
        ssd.gate.clear()
        await store.put(SPACE.chain(range(12)))
        closing = asyncio.create_task(store.manager.close())
        await asyncio.sleep(0)
        closing.cancel()
        await asyncio.wait([closing])
        ssd.gate.set()

        await store.manager.close()

        assert ssd.closed
        store.manager.check = lambda: asyncio.sleep(0, [])


def test_watching_the_deadlines_of_many_lent_slots_is_no_work_for_each():
    table = LeaseTable()
    owner = table.new_owner()
    sweeps = []
    table._is_pending = lambda watch: bool(sweeps.append(watch)) or True

    for number in range(20_000):
        table.lend(owner, [Slot(number)], length_bytes=64, deadline_s=1e9 + number)

    assert len(sweeps) < 60_000


async def test_others_have_their_turn_while_room_is_made_for_a_large_put(monkeypatch):
    monkeypatch.setattr(space, "_STEP_BLOCKS", 4)
    async with running(blocks=32) as store:
        await store.put(SPACE.chain(range(128)))
        num_turns = 0

        async def take_turns():
            nonlocal num_turns
            while True:
                num_turns += 1
                await asyncio.sleep(0)

        others = asyncio.create_task(take_turns())
        reserved = await store.manager.reserve(SPACE.chain(range(1000, 1080)), owner=store.owner)
        others.cancel()
        store.manager.return_slots([slot.slot for slot in reserved.slots], owner=store.owner)

        assert len(reserved.slots) == 20
        assert num_turns >= 20 // 4
