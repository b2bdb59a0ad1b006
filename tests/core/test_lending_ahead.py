"""Slots lent for puts to come: how many there may be, and what becomes of blocks written into them."""

import numpy as np
import pytest

from kvstore.checksum import checksum
from kvstore.client_slots import ClientSlots
from kvstore.hints import Hints
from kvstore.messages import ChainRef, Commit, FilledSlots, Store, WrittenSlot
from kvstore.miss import MissReason
from kvstore.tier import BlockId, Slot
from kvstore.wire import AHEAD_BYTES
from tests.core.manager_harness import BLOCK_BYTES, SPACE, payload, running


def chain(first, blocks):
    return SPACE.chain(range(first, first + 4 * blocks))


def names_of(blocks):
    return [BlockId(SPACE.digest, SPACE.layout.whole, key).storage_key for key in blocks.keys]


def lend(store, count, owner=None):
    owner = store.owner if owner is None else owner
    return store.manager.putter.lend_ahead(chain(0, 1), None, count, owner=owner)


async def write(store, blocks, slots):
    for key, slot in zip(blocks.keys, slots, strict=True):
        async with store.dram.writing([slot], BLOCK_BYTES) as (buffer,):
            np.asarray(buffer)[:BLOCK_BYTES] = payload(key)


def publish(store, blocks, slots):
    sums = [checksum(payload(key)) for key in blocks.keys]
    return store.manager.putter.publish(blocks, slots, owner=store.owner, checksums=sums)


async def test_an_owner_has_its_share_and_all_of_them_a_sixteenth():
    most = AHEAD_BYTES // BLOCK_BYTES
    async with running(blocks=16 * 2 * most) as store:
        others = [store.manager.new_owner(may_freeze=True) for _ in range(3)]
        assert lend(store, most + 1) == []
        assert len(lend(store, most)) == most
        assert lend(store, 1) == []
        assert len(lend(store, most - 1, others[0])) == most - 1
        assert lend(store, 2, others[1]) == []
        assert len(lend(store, 1, others[1])) == 1
        assert lend(store, 1, others[2]) == []
        assert store.manager.stats()["lent_ahead_bytes"] == 2 * most * BLOCK_BYTES
        assert await store.manager.check() == []
        store.manager.release_owner(others[0])
        assert len(lend(store, most - 1, others[2])) == most - 1
        for owner in others:
            store.manager.release_owner(owner)
        store.manager.release_owner(store.owner)
        assert store.manager.stats()["lent_ahead_bytes"] == 0
        assert store.dram.used_bytes == 0


async def test_nothing_is_lent_ahead_above_the_high_water_mark():
    async with running(blocks=100, high_water_ratio=0.5, low_water_ratio=0.4) as store:
        assert await store.put(chain(1000, 47)) == 47
        assert lend(store, 4) == []
        assert len(lend(store, 3)) == 3
        assert store.manager.stats()["evictions_blocks"].get("dram/space", 0) == 0


async def test_what_is_lent_ahead_counts_in_its_owners_share_and_leaves_room_to_others():
    async with running(blocks=64) as store:
        owner = store.manager.new_owner(may_freeze=True)
        assert len(lend(store, 4, owner)) == 4
        reserved = await store.manager.reserve(chain(1000, 64), owner=owner, timeout_s=0)
        assert len(reserved.slots) == 28
        others = await store.manager.reserve(chain(5000, 32), owner=store.owner, timeout_s=0)
        assert len(others.slots) == 32
        store.manager.release_owner(owner)
        store.manager.release_owner(store.owner)


@pytest.mark.parametrize("is_draining", [False, True])
async def test_nothing_is_lent_ahead_where_a_put_may_have_to_make_room_first(is_draining):
    async with running(blocks=64, namespace_quota_ratio=1.0 if is_draining else 0.5) as store:
        if is_draining:
            await store.manager.drain(timeout_s=0)
        assert lend(store, 1) == []


async def test_what_is_lent_ahead_has_its_time_like_other_slots():
    async with running(blocks=64, lease_s=0.0) as store:
        slots = [slot for slot, _ in lend(store, 3)]
        ahead = store.manager.putter.ahead
        assert ahead.are_lent_for(chain(0, 3), None, slots, owner=store.owner)
        store.manager.expire()
        assert not ahead.are_lent_for(chain(0, 3), None, slots, owner=store.owner)
        assert publish(store, chain(0, 3), slots) == (0, 3)
        assert store.dram.used_bytes == store.manager.stats()["lent_ahead_bytes"] == 0


async def test_slots_for_blocks_of_another_length_are_refused():
    async with running(blocks=64) as store:
        slots = await store.manager.reserve_unnamed(1, BLOCK_BYTES // 2, owner=store.owner)
        for ours in (slots, [Slot(1)]):
            assert not store.manager.putter.ahead.are_lent_for(chain(0, 1), None, ours, owner=store.owner)
        store.manager.return_slots(slots, owner=store.owner)


async def test_of_a_put_what_is_missing_is_admitted():
    async with running(blocks=64) as store:
        assert await store.put(chain(0, 2)) == 2
        found = store.manager.putter.admit_written(chain(0, 4), part=None, hints=None)
        assert found == ([2, 3], 2, None, names_of(chain(0, 4)[2:]))
        assert store.manager.stats()["puts_blocks"]["present"] == 2


async def test_a_put_of_an_ended_epoch_or_of_a_store_that_drains_is_dropped():
    async with running(blocks=64) as store:
        await store.manager.advance_epoch("m")
        ended = store.manager.putter.admit_written(chain(0, 2), part=None, hints=None)
        assert ended == ([0, 1], 0, MissReason.OTHER_EPOCH, ())
    async with running(blocks=64) as store:
        await store.manager.drain(timeout_s=0)
        draining = store.manager.putter.admit_written(chain(0, 2), part=None, hints=None)
        assert draining == ([0, 1], 0, MissReason.UNAVAILABLE, ())
        assert store.manager.stats()["puts_blocks"]["dropped"] == 2


async def test_a_namespace_at_its_quota_has_no_more_blocks_published():
    async with running(blocks=16, namespace_quota_ratio=0.25) as store:
        assert await store.put(chain(0, 3)) == 3
        found = store.manager.putter.admit_written(chain(1000, 3), part=None, hints=None)
        assert found == ([0, 1, 2], 1, MissReason.QUOTA, names_of(chain(1000, 1)))
        assert store.manager.stats()["puts_blocks"]["over_quota"] == 2


async def test_above_the_high_water_mark_a_policy_may_refuse_what_was_written():
    async with running(blocks=128, high_water_ratio=0.5, low_water_ratio=0.4) as store:
        used = chain(0, 63)
        slots = [slot for slot, _ in lend(store, 4)]
        await write(store, chain(100_000, 4), slots)
        await store.put(used)
        for _ in range(8):
            assert len((await store.fetch(used))[0]) == 63
        once = Hints(is_one_off=True, priority=-4)
        found = store.manager.putter.admit_written(chain(100_000, 4), part=None, hints=once)
        assert found.missing == [0, 1, 2, 3]
        assert found.num_admitted < 4
        assert found.reason is MissReason.NOT_ADMITTED
        assert store.manager.stats()["puts_blocks"]["not_admitted"] == 4 - found.num_admitted
        store.manager.return_slots(slots, owner=store.owner)


def commit_blocks(manager, slots, first, count):
    """Reserve and commit blocks as a client that wants as many slots ahead; returns the answer."""
    about = ChainRef(chain(first, count))
    lent = slots.lend(manager.reserve_at_once(about.chain, owner=slots._owner))
    written = tuple(WrittenSlot(*slot, checksum(bytes(BLOCK_BYTES))) for slot in lent.slots)
    return slots.commit_at_once(Commit(about, written, count))


async def test_slots_at_hand_are_lent_anew_before_much_of_their_time_is_over(monkeypatch):
    async with running(blocks=256, lease_s=0.5) as store:
        now_s = 1000.0
        monkeypatch.setattr(store.manager._state, "clock", lambda: now_s)
        slots = ClientSlots(store.manager, store.owner)
        answer = commit_blocks(store.manager, slots, 0, 4)
        for number in range(1, 4):
            filled = FilledSlots(*zip(*answer.slots, strict=True), (checksum(bytes(BLOCK_BYTES)),) * 4)
            answer = slots.store_at_once(Store(ChainRef(chain(1000 * number, 4)), filled, 4))
        assert store.manager.stats()["lent_ahead_bytes"] == 8 * BLOCK_BYTES

        now_s += 0.3
        assert commit_blocks(store.manager, slots, 9000, 4).lent_us == 500_000
        store.manager.release_owner(store.owner)
        assert store.manager.stats()["lent_ahead_bytes"] == 0
