"""``publish``: stores what was written and gives its slots back, in one pass."""

import pytest

from kvstore.checksum import checksum
from kvstore.errors import InvalidRequest
from tests.core.manager_harness import BLOCK_BYTES, SPACE, running

CHAIN = SPACE.chain(range(16))
SUMS = [checksum(bytes(BLOCK_BYTES))] * 4


async def _lent(store, chain=CHAIN):
    reserved = await store.manager.reserve(chain, owner=store.owner, timeout_s=1)
    return [slot.slot for slot in reserved.slots]


async def test_published_blocks_are_matched_and_nothing_stays_lent():
    async with running() as store:
        slots = await _lent(store)

        assert store.manager.putter.publish(CHAIN, slots, owner=store.owner, checksums=SUMS) == (4, 0)

        assert (await store.manager.match(CHAIN)).blocks == 4
        assert not store.manager.has_anything(store.owner)
        assert store.manager.stats()["puts_blocks"]["stored"] == 4


async def test_what_another_writer_stored_meanwhile_is_not_stored_again():
    async with running() as store:
        slots, other = await _lent(store), store.manager.new_owner()
        theirs = await store.manager.reserve(CHAIN[:2], owner=other, timeout_s=1)
        store.manager.putter.publish(
            CHAIN[:2], [at.slot for at in theirs.slots], owner=other, checksums=SUMS[:2]
        )

        assert store.manager.putter.publish(CHAIN, slots, owner=store.owner, checksums=SUMS) == (2, 0)

        assert store.dram.used_bytes == 4 * BLOCK_BYTES
        assert store.manager.stats()["puts_blocks"]["duplicate"] == 2


async def test_slots_that_were_lent_for_too_short_a_time_are_late():
    async with running(lease_s=0.0) as store:
        slots = await _lent(store)
        store.manager.expire()

        assert store.manager.putter.publish(CHAIN, slots, owner=store.owner, checksums=SUMS) == (0, 4)

        assert store.dram.used_bytes == 0
        assert store.manager.stats()["overdue_slots"] == 0


async def test_slots_of_another_owner_are_late_and_stay_his():
    async with running() as store:
        slots, stranger = await _lent(store), store.manager.new_owner()

        assert store.manager.putter.publish(CHAIN, slots, owner=stranger, checksums=SUMS) == (0, 4)

        assert store.manager.has_anything(store.owner)
        store.manager.return_slots(slots, owner=store.owner)


async def test_an_ended_epoch_takes_no_blocks():
    async with running() as store:
        slots = await _lent(store)
        await store.manager.advance_epoch(SPACE.model)

        assert store.manager.putter.publish(CHAIN, slots, owner=store.owner, checksums=SUMS).stored == 0

        assert store.dram.used_bytes == 0


async def test_a_number_of_slots_that_does_not_fit_changes_nothing():
    async with running() as store:
        slots = await _lent(store)

        with pytest.raises(InvalidRequest, match="4 blocks, 3 slots"):
            store.manager.putter.publish(CHAIN, slots[:3], owner=store.owner, checksums=SUMS)

        assert store.manager.has_anything(store.owner)
        store.manager.return_slots(slots, owner=store.owner)


async def test_a_block_whose_child_came_first_is_published_under_its_parent():
    async with running() as store:
        tail = await _lent(store, CHAIN[2:])
        store.manager.putter.publish(CHAIN[2:], tail, owner=store.owner, checksums=SUMS[2:])
        head = await _lent(store, CHAIN[:2])

        assert store.manager.putter.publish(CHAIN[:2], head, owner=store.owner, checksums=SUMS[:2]) == (2, 0)

        assert (await store.manager.match(CHAIN)).blocks == 4
