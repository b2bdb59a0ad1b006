"""Which of any blocks are stored, and leases on what a match finds: what the manager answers."""

import pytest

from kvstore.errors import NamespaceNotOpen
from kvstore.keys import NamespaceDigest
from kvstore.miss import MissReason
from kvstore.tier import Probe
from tests.core.gated_tier import GatedTier
from tests.core.manager_harness import BLOCK_BYTES, SPACE, running

WINDOW = 4


class StoppingTier(GatedTier):
    """A shared tier that answers for a window of blocks, up to the one with the first absent block."""

    def __init__(self, **options):
        super().__init__("remote", is_shared=True, **options)
        self.asked = []

    async def probe(self, blocks, *, deadline_s):
        self.asked.append(len(blocks))
        if not self.is_up:
            return Probe([None] * len(blocks), MissReason.UNAVAILABLE, num_known=0)
        known = [block in self.stored for block in blocks[:WINDOW]]
        tiers = [self.name if is_here else None for is_here in known]
        num_known = None if len(blocks) <= WINDOW else WINDOW
        return Probe(tiers + [None] * (len(blocks) - len(tiers)), num_known=num_known)


async def test_blocks_of_every_tier_exist_in_any_order():
    disk = GatedTier("ssd")
    async with running(disk, blocks=16) as store:
        chain = SPACE.chain(range(64))
        await store.put(chain[:8])
        await store.manager.flush(timeout_s=5)
        await store.manager.demote(chain[2:8])
        keys = [chain.keys[at] for at in (9, 0, 7, 0, 15)]

        assert await store.manager.exists(SPACE.digest, keys) == [False, True, True, True, False]
        assert store.manager.stats()["exists"] == {"requests": 1, "blocks": 5, "present": 3}


async def test_a_shared_tier_is_asked_until_it_has_answered_for_every_block():
    remote = StoppingTier()
    async with running(remote, blocks=32) as store:
        chain = SPACE.chain(range(4 * 20))
        for at in range(0, 20, 3):
            await store.put(chain[at : at + 1])
        assert await store.manager.flush(timeout_s=5)
        shelf = store.manager._state.directory.shelf(SPACE.digest, None)
        for at in range(0, 20, 3):
            store.manager._state.forget_copy(shelf.entries[chain.keys[at]], "dram", None)

        present = await store.manager.exists(SPACE.digest, chain.keys, timeout_s=5)

        assert present == [at % 3 == 0 for at in range(20)]
        assert len(remote.asked) <= 20 // WINDOW + 1


async def test_a_shared_tier_that_is_down_or_late_has_nothing():
    remote = GatedTier("remote", is_shared=True)
    async with running(remote) as store:
        chain = SPACE.chain(range(8))
        await store.put(chain[:1])
        remote.gate.clear()
        assert await store.manager.exists(SPACE.digest, chain.keys, timeout_s=0.01) == [True, False]
        remote.gate.set()
        remote.is_up = False
        assert await store.manager.exists(SPACE.digest, chain.keys, timeout_s=5) == [True, False]


async def test_a_copy_in_a_tier_that_is_down_does_not_exist():
    disk = GatedTier("ssd")
    async with running(disk) as store:
        chain = SPACE.chain(range(8))
        await store.put(chain)
        await store.manager.flush(timeout_s=5)
        await store.manager.demote(chain[1:])
        disk.is_up = False

        assert await store.manager.exists(SPACE.digest, chain.keys) == [True, False]


async def test_blocks_of_a_namespace_that_is_not_open_are_refused():
    async with running() as store:
        with pytest.raises(NamespaceNotOpen):
            await store.manager.exists(NamespaceDigest(bytes(32)), [])


async def test_a_match_leases_the_leading_blocks_in_the_top_tier_and_no_others():
    disk = GatedTier("ssd")
    async with running(disk, blocks=16) as store:
        chain = SPACE.chain(range(32))
        await store.put(chain)
        await store.manager.flush(timeout_s=5)
        await store.manager.demote(chain[5:])

        found = await store.manager.match_and_lease(chain, owner=store.owner)

        assert found.match.tiers == ("dram",) * 5 + ("ssd",) * 3
        assert len(found.blocks) == 5
        assert await store.manager.drop(chain) == 3
        store.manager.release(found.lease, owner=store.owner)
        assert await store.manager.drop(chain) == 5


async def test_a_match_leases_no_more_than_the_pin_budget():
    async with running(blocks=8, pin_budget_ratio=0.5) as store:
        chain = SPACE.chain(range(24))
        await store.put(chain)

        found = await store.manager.match_and_lease(chain, owner=store.owner)

        assert (found.match.blocks, len(found.blocks)) == (6, 4)


async def test_an_owner_that_has_ended_is_leased_nothing():
    async with running() as store:
        chain = SPACE.chain(range(4))
        await store.put(chain)
        owner = store.manager.new_owner()
        store.manager.release_owner(owner)

        found = await store.manager.match_and_lease(chain, owner=owner)

        assert (found.match.blocks, found.blocks, found.lease) == (1, (), None)


async def test_a_renewed_lease_is_kept_past_its_first_deadline():
    clock = [0.0]
    async with running(blocks=4, lease_s=10.0) as store:
        store.manager._state.clock = lambda: clock[0]
        chain = SPACE.chain(range(16))
        await store.put(chain)
        found = await store.manager.match_and_lease(chain, owner=store.owner)
        clock[0] = 9.0
        assert store.manager.renew(found.lease, owner=store.owner) == 10.0
        clock[0] = 18.0
        store.manager.expire()
        assert await store.manager.drop(chain) == 0
        clock[0] = 19.0
        store.manager.expire()

        assert store.manager.renew(found.lease, owner=store.owner) == 0.0
        assert await store.manager.drop(chain) == 4
        assert store.manager.stats()["lease_events"] == {
            "granted": 1,
            "renewed": 1,
            "expired": 4,
            "stale_renewals": 1,
        }


async def test_an_overdue_slot_is_neither_committed_nor_given_to_others():
    async with running(blocks=4, lease_s=0.0) as store:
        chain = SPACE.chain(range(16))
        reserved = await store.manager.reserve(chain, owner=store.owner, timeout_s=1)
        slots = [slot.slot for slot in reserved.slots]
        store.manager.expire()

        assert store.manager.stats()["overdue_slots"] == 4
        assert store.manager.has_anything(store.owner)
        other = await store.manager.reserve(
            SPACE.chain(range(100, 104)), owner=store.manager.new_owner(), timeout_s=0.01
        )
        assert other.slots == ()
        assert store.manager.commit(chain, slots, owner=store.owner, checksums=[0] * 4) == [False] * 4
        store.manager.return_slots(slots, owner=store.owner)
        assert store.dram.used_bytes == 0
        assert store.dram.has_room(BLOCK_BYTES, 4)


@pytest.mark.parametrize("missing", [0, 1, 4, 5])
async def test_a_match_ends_at_the_first_block_that_is_not_stored_and_a_peek_finds_all_or_nothing(missing):
    chain = SPACE.chain(range(6 * 4))
    async with running() as store:
        await store.put(chain[:missing])
        await store.put(chain[missing + 1 :])
        for blocks in range(1, 7):
            leading = chain[:blocks]
            found = store.manager.match_at_once(leading)
            assert found.blocks == min(blocks, missing)
            assert (found.reason is None) == (blocks <= missing)
            assert (store.manager.peek_at_once(leading) is None) == (blocks > missing)
