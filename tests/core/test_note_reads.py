"""Reads that a store is told of afterwards: hits, and uses of what is still there."""

import contextlib
import selectors
import socket
import time

import pytest

from kvstore.awake_selector import AwakeSelector
from kvstore.checksum import checksum
from kvstore.directory import Copy, CopyState
from kvstore.hints import Hints
from kvstore.idle_work import IdleWork
from kvstore.keys import Namespace
from kvstore.layout import Part
from kvstore.miss import MissReason
from kvstore.ready_table import MAX_DIRECT_BLOCKS, ReadyTable
from kvstore.results import Owner
from kvstore.state import WriteMode
from tests.core.gated_tier import GatedTier
from tests.core.manager_harness import BLOCK_BYTES, SPACE, running

CHAIN = SPACE.chain(range(16))
NAME_END = SPACE.layout.whole.pack() + SPACE.digest


def listed(store, chain, name_end=NAME_END):
    """The leading blocks that a client would find."""
    table = ReadyTable.map(store.dram.listing.fd, store.dram.arena.instance)
    store.dram.listing.beat()
    era = table.era(time.monotonic())
    found = [table.find([key], name_end, BLOCK_BYTES, era) for key in chain.keys]
    return next((at for at, slots in enumerate(found) if slots is None), len(found))


async def test_what_is_put_is_listed_where_it_lies():
    async with running() as store:
        await store.put(CHAIN)
        table = ReadyTable.map(store.dram.listing.fd, store.dram.arena.instance)
        store.dram.listing.beat()
        found = table.find(CHAIN.keys, NAME_END, BLOCK_BYTES, table.era(time.monotonic()))
        seen = store.manager.peek_at_once(CHAIN)

        assert found == [(copy.slot, copy.generation, copy.checksum) for copy in seen.copies]


async def put_written(store, chain):
    """Publish blocks in slots that were lent for them."""
    reserved = await store.manager.reserve(chain, owner=store.owner)
    slots = [slot.slot for slot in reserved.slots]
    sums = [checksum(bytes(BLOCK_BYTES))] * len(chain)
    assert store.manager.putter.publish(chain, slots, owner=store.owner, checksums=sums).stored == len(chain)


async def test_blocks_of_a_put_are_listed_as_they_are_stored_if_one_request_could_find_them_all():
    async with running(blocks=2 * MAX_DIRECT_BLOCKS + 1) as store:
        few, many = (
            SPACE.chain(range(4 * MAX_DIRECT_BLOCKS)),
            SPACE.chain(range(4, 8 + 4 * MAX_DIRECT_BLOCKS)),
        )
        await put_written(store, few)
        await put_written(store, many)

        assert listed(store, few) == MAX_DIRECT_BLOCKS
        assert listed(store, many) == 0


async def test_an_idle_loop_lists_what_was_put_and_nothing_of_what_has_left_by_then():
    idle_work = IdleWork()
    idle_work.take_turns()
    async with running(blocks=64) as store:
        store.manager.leave_for_idle(idle_work)
        await put_written(store, CHAIN)
        at_once = listed(store, CHAIN)
        await store.manager.drop(CHAIN[2:])
        while idle_work.is_left:
            idle_work.step()

        assert (at_once, listed(store, CHAIN)) == (0, 2)
        assert await store.manager.check() == []


@contextlib.contextmanager
def never_idle():
    """A selector that finds a request, whenever the loop looks, and for which no time passes meanwhile."""
    ours, theirs = socket.socketpair()
    with AwakeSelector(0.0, clock=lambda: 0.0) as selector, ours, theirs:
        selector.register(ours, selectors.EVENT_READ)
        theirs.send(b"a request that waits")
        yield selector


@pytest.mark.parametrize("are_others_put", [False, True])
async def test_a_loop_that_is_never_idle_still_lists_what_it_is_asked_for(are_others_put):
    async with running(blocks=8192) as store:
        with never_idle() as selector:
            store.manager.leave_for_idle(selector.idle_work)
            await put_written(store, CHAIN)
            for start in range(1000, 1000 + 256 * 64, 64):
                assert selector.select()
                if are_others_put:
                    await put_written(store, SPACE.chain(range(start, start + 64)))
                assert store.manager.peek_at_once(CHAIN) is not None

        assert listed(store, CHAIN) == 4


async def test_many_small_blocks_have_the_table_grow():
    async with running(blocks=8192) as store:
        before = store.dram.listing.num_in_use
        for start in range(0, 4 * 8000, 4 * 40):
            await put_written(store, SPACE.chain(range(start, start + 4 * 40)))

        assert store.dram.listing.num_in_use > before
        assert listed(store, SPACE.chain(range(start, start + 4 * 40))) == 40
        assert await store.manager.check() == []


async def test_blocks_that_come_up_from_a_tier_below_are_listed_however_many_they_are():
    async with running(GatedTier("ssd"), blocks=64) as store:
        store.lower[0].gate.set()
        chain = SPACE.chain(range(4 * 17))
        await store.put(chain)
        await store.manager.flush(timeout_s=10)
        assert await store.manager.demote(chain) == 17
        await store.manager.prefetch(chain, timeout_s=10)

        assert listed(store, chain) == 17


@pytest.mark.parametrize("how", ["drop", "epoch", "damage", "evict"])
async def test_what_may_not_be_served_is_listed_no_more(how):
    async with running(blocks=8) as store:
        await store.put(CHAIN)
        before = listed(store, CHAIN)
        if how == "drop":
            await store.manager.drop(CHAIN)
        elif how == "epoch":
            await store.manager.advance_epoch(SPACE.model)
        elif how == "damage":
            entry = store.manager._state.directory.shelf(SPACE.digest, None).entries[CHAIN.keys[0]]
            slot = entry.copies["dram"].slot
            async with store.dram.writing([slot], BLOCK_BYTES) as (buffer,):
                buffer[5] ^= 1
            assert await store.manager.report_damage(CHAIN[:1]) == 1
        else:
            await store.put(SPACE.chain(range(100, 132)))

        assert before == 4
        assert listed(store, CHAIN) == 0
        assert store.manager.peek_at_once(CHAIN) is None


async def test_a_block_that_is_kept_by_a_lease_as_it_is_damaged_is_listed_no_more():
    async with running(blocks=8) as store:
        await store.put(CHAIN)
        held = store.manager.fetch_at_once(CHAIN, owner=store.owner)
        entry = store.manager._state.directory.shelf(SPACE.digest, None).entries[CHAIN.keys[0]]
        store.manager._state.quarantine_top(entry, MissReason.ERASED)

        assert entry.copies["dram"].state is CopyState.DROPPING
        assert listed(store, CHAIN) == 0
        store.manager.release(held.lease, owner=store.owner)


async def test_a_namespace_that_was_forgotten_gets_no_block_listed():
    async with running() as store:
        await store.put(CHAIN)
        state = store.manager._state
        entries = list(state.directory.shelf(SPACE.digest, None).entries.values())
        state.directory.listing.begin_era()
        state.directory.forget_namespace(SPACE.digest)
        state.list_soon(entries)
        forgotten = listed(store, CHAIN)
        store.manager.open_namespace(SPACE)
        state.list_soon(entries)

        assert (forgotten, listed(store, CHAIN)) == (0, 4)


async def test_an_epoch_that_ends_lists_nothing_of_other_models_and_a_look_lists_them_again():
    async with running() as store:
        await store.put(CHAIN)
        await store.manager.advance_epoch("another")
        ended = listed(store, CHAIN)
        store.manager.peek_at_once(CHAIN)

        assert (ended, listed(store, CHAIN)) == (0, 4)


async def test_an_epoch_that_others_tell_again_ends_nothing_twice():
    async with running() as store:
        await store.manager.advance_epoch("another")
        await store.put(CHAIN)
        store.manager._state.directory.raise_epoch("another", 1)

        assert listed(store, CHAIN) == 4


async def test_of_a_long_chain_nothing_is_listed_at_once():
    async with running(blocks=MAX_DIRECT_BLOCKS + 2) as store:
        chain = SPACE.chain(range(4 * (MAX_DIRECT_BLOCKS + 1)))
        await store.put(chain)
        store.manager._state.directory.listing.begin_era()
        store.manager.peek_at_once(chain)

        assert listed(store, chain) == 0


async def test_what_comes_up_from_below_is_listed():
    async with running(GatedTier("ssd")) as store:
        await store.put(CHAIN)
        await store.manager.demote(CHAIN)
        below = listed(store, CHAIN)
        await store.fetch(CHAIN)

        assert (below, listed(store, CHAIN)) == (0, 4)


async def test_told_reads_are_hits_in_dram():
    async with running() as store:
        await store.put(CHAIN)
        store.manager.note_reads(CHAIN, hints=Hints(ends_session=True))
        stats = store.manager.stats()

        assert stats["fetch"]["hits_blocks"] == {"dram": 4}
        assert (stats["fetch"]["requests"], stats["fetch"]["lookups_blocks"]) == (1, 4)
        assert (stats["direct_blocks"], stats["hinted_requests"]) == (4, 1)


async def test_reads_of_blocks_that_have_left_are_hits_all_the_same():
    async with running() as store:
        await store.put(CHAIN)
        await store.manager.drop(CHAIN[2:])
        store.manager.note_reads(CHAIN)
        await store.manager.advance_epoch(SPACE.model)
        store.manager.note_reads(CHAIN)
        unknown = Namespace(model="unknown", layout=SPACE.layout).chain(range(4))
        store.manager.note_reads(unknown)
        store.manager.note_reads(CHAIN, part=Part(0, 99, 0, 99))
        stats = store.manager.stats()

        assert stats["fetch"]["hits_blocks"] == {"dram": 13}
        assert stats["direct_blocks"] == 13


async def test_a_told_read_is_a_use_that_keeps_a_block_from_leaving():
    async with running(blocks=4) as store:
        first, second = SPACE.chain(range(4)), SPACE.chain(range(100, 104))
        third, fourth = SPACE.chain(range(200, 204)), SPACE.chain(range(300, 304))
        await store.manager.change_policy("lru")
        for chain in (first, second, third, fourth):
            await store.put(chain)
        store.manager.note_reads(first)
        await store.put(SPACE.chain(range(400, 404)))

        assert (await store.manager.match(first)).blocks == 1
        assert (await store.manager.match(second)).blocks == 0


async def test_on_second_hit_a_told_read_writes_below():
    async with running(GatedTier("ssd"), write_mode=WriteMode.SECOND_HIT) as store:
        await store.put(CHAIN)
        store.manager.note_reads(CHAIN)
        assert await store.manager.flush(timeout_s=5)
        matched = await store.manager.why(CHAIN)

        assert all("ssd" in report.tiers for report in matched)


async def test_nobody_has_to_be_there_who_read():
    async with running() as store:
        await store.put(CHAIN)
        store.manager.release_owner(store.owner)
        store.manager.note_reads(CHAIN)
        store.owner = Owner(0)

        assert store.manager.stats()["fetch"]["hits_blocks"] == {"dram": 4}


async def test_a_check_finds_a_block_that_is_listed_and_may_not_be_served():
    async with running(GatedTier("ssd")) as store:
        await store.put(CHAIN)
        await store.manager.demote(CHAIN)
        listing, name = store.dram.listing, CHAIN.keys[3] + NAME_END
        listing.add_all([(name, 4096, 1, 1)], NAME_END, BLOCK_BYTES)
        problems = await store.manager.check()
        listing.remove(name)

        assert len(problems) == 1
        assert "without asking" in problems[0]


async def test_a_check_finds_a_block_that_is_listed_elsewhere_and_the_next_listing_mends_it():
    async with running() as store:
        await store.put(CHAIN)
        listing, name = store.dram.listing, CHAIN.keys[3] + NAME_END
        listing.add_all([(name, 4096, 1, 1)], NAME_END, BLOCK_BYTES)
        problems = await store.manager.check()

        assert len(problems) == 1
        assert "elsewhere" in problems[0]

        store.manager.peek_at_once(CHAIN)

        assert await store.manager.check() == []


async def test_a_copy_that_takes_the_place_of_a_listed_one_is_taken_out_with_it():
    async with running() as store:
        await store.put(CHAIN)
        directory = store.manager._state.directory
        entry = directory.shelf(SPACE.digest, None).entries[CHAIN.keys[0]]
        before = entry.copies["dram"]
        after = Copy(CopyState.READY, before.slot, before.checksum, generation=before.generation)
        directory.set_copy(entry, "dram", after)
        listed_before = listed(store, CHAIN)
        await store.manager.drop(CHAIN)

        assert (listed_before, listed(store, CHAIN)) == (4, 0)
