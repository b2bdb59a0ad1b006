"""BlockManager over a real arena and gated lower tiers; check() runs after every test."""

import numpy as np
import pytest

from kvstore.errors import InvalidRequest, TierFull
from kvstore.keys import Namespace
from kvstore.layout import KVLayout, Part
from kvstore.miss import MissReason
from tests.core.gated_tier import GatedTier
from tests.core.manager_harness import BLOCK_BYTES, SPACE, running

OTHER = Namespace(model="m", layout=SPACE.layout, tenant_salt=b"other")


async def test_what_was_put_is_fetched_from_dram():
    async with running() as store:
        chain = SPACE.chain(range(20))

        assert await store.put(chain) == 5

        assert await store.fetch(chain) == (["dram"] * 5, None)


async def test_a_match_names_the_leading_blocks_and_why_the_next_is_missing():
    async with running() as store:
        chain = SPACE.chain(range(20))
        await store.put(chain[:3])

        match = await store.manager.match(chain)

        assert (match.blocks, match.tiers) == (3, ("dram",) * 3)
        assert match.reason is MissReason.NEVER_SEEN


async def test_a_block_of_another_namespace_is_never_matched():
    async with running() as store:
        store.manager.open_namespace(OTHER)
        await store.put(SPACE.chain(range(20)))

        assert (await store.manager.match(OTHER.chain(range(20)))).blocks == 0


async def test_a_planted_key_of_another_namespace_is_not_served():
    async with running() as store:
        store.manager.open_namespace(OTHER)
        chain = SPACE.chain(range(4))
        await store.put(chain)

        stolen = type(chain)(OTHER.digest, chain.keys, 4)

        assert (await store.manager.match(stolen)).blocks == 0


async def test_a_namespace_that_was_not_opened_is_refused():
    async with running() as store:
        with pytest.raises(InvalidRequest, match="open_namespace"):
            await store.manager.match(OTHER.chain(range(4)))


async def test_namespaces_without_blocks_are_forgotten_beyond_the_limit(monkeypatch):
    monkeypatch.setattr("kvstore.directory.MAX_NAMESPACES", 3)
    async with running() as store:
        await store.put(SPACE.chain(range(4)))

        for salt in (b"1", b"2", b"3", b"4"):
            store.manager.open_namespace(Namespace(model="m", layout=SPACE.layout, tenant_salt=salt))

        assert (await store.manager.match(SPACE.chain(range(4)))).blocks == 1
        with pytest.raises(InvalidRequest, match="open_namespace"):
            await store.manager.match(
                Namespace(model="m", layout=SPACE.layout, tenant_salt=b"1").chain(range(4))
            )


async def test_a_reported_damage_is_looked_at_and_only_true_damage_is_dropped():
    async with running() as store:
        chain = SPACE.chain(range(8))
        await store.put(chain)
        assert await store.manager.report_damage(chain) == 0
        fetched = await store.manager.fetch(chain, owner=store.owner)
        store.manager.release(fetched.lease)
        async with store.dram.writing([fetched.blocks[1].slot], BLOCK_BYTES) as (buffer,):
            np.asarray(buffer)[17] ^= 1

        assert await store.manager.report_damage(chain) == 1

        assert (await store.manager.match(chain)).blocks == 1


async def test_parts_of_a_block_are_stored_apart():
    layout = KVLayout("float16", num_layers=2, block_tokens=4, num_kv_heads=2, head_dim=256)
    space = Namespace(model="tp", layout=layout)
    left, right = Part(0, 2, 0, 1), Part(0, 2, 1, 2)
    async with running() as store:
        store.manager.open_namespace(space)
        chain = space.chain(range(4))
        (slot,) = (await store.manager.reserve(chain, owner=store.owner, part=left)).slots
        store.manager.commit(chain, [slot.slot], owner=store.owner, part=left)
        store.manager.return_slots([slot.slot], owner=store.owner)

        assert (await store.manager.match(chain, part=left)).blocks == 1
        assert (await store.manager.match(chain, part=right)).blocks == 0
        assert (await store.manager.match(chain)).blocks == 0


async def test_a_second_put_of_stored_blocks_is_a_no_op():
    async with running() as store:
        chain = SPACE.chain(range(20))
        await store.put(chain)

        assert await store.put(chain) == 0

        assert store.manager.stats()["puts_blocks"]["present"] == 5


async def test_two_writers_of_one_block_leave_one_copy():
    async with running() as store:
        chain = SPACE.chain(range(4))
        second = store.manager.new_owner()
        (one,) = (await store.manager.reserve(chain, owner=store.owner)).slots
        (two,) = (await store.manager.reserve(chain, owner=second)).slots

        assert store.manager.commit(chain, [one.slot], owner=store.owner, checksums=[1]) == [True]
        assert store.manager.commit(chain, [two.slot], owner=second, checksums=[1]) == [False]

        store.manager.release_owner(second)
        store.manager.release_owner(store.owner)
        assert store.dram.used_bytes == BLOCK_BYTES
        await store.manager.drop(chain)


async def test_nothing_that_is_being_written_is_matched():
    async with running() as store:
        chain = SPACE.chain(range(4))
        await store.manager.reserve(chain, owner=store.owner)

        assert (await store.manager.match(chain)).blocks == 0

        store.manager.release_owner(store.owner)


async def test_slots_of_a_dead_writer_come_back():
    async with running() as store:
        await store.manager.reserve(SPACE.chain(range(20)), owner=store.owner)

        store.manager.release_owner(store.owner)

        assert store.dram.used_bytes == 0


async def test_a_commit_after_the_owner_lost_the_slot_stores_nothing():
    async with running() as store:
        chain = SPACE.chain(range(4))
        (slot,) = (await store.manager.reserve(chain, owner=store.owner)).slots
        store.manager.return_slots([slot.slot], owner=store.owner)

        assert store.manager.commit(chain, [slot.slot], owner=store.owner, checksums=[1]) == [False]
        assert (await store.manager.match(chain)).blocks == 0


async def test_a_slot_too_small_for_the_block_is_refused():
    async with running() as store:
        (slot,) = await store.manager.reserve_unnamed(1, 4096, owner=store.owner)

        with pytest.raises(InvalidRequest, match="4096"):
            store.manager.commit(SPACE.chain(range(4)), [slot], owner=store.owner)

        store.manager.release_owner(store.owner)


async def test_the_least_recently_used_chain_leaves_a_full_store_tail_first():
    async with running(blocks=4) as store:
        old, new = SPACE.chain(range(16)), SPACE.chain(range(100, 108))
        await store.put(old)

        await store.put(new)

        assert (await store.manager.match(new)).blocks == 2
        match = await store.manager.match(old)
        assert match.blocks <= 2
        assert match.reason is MissReason.EVICTED


async def test_a_leased_block_is_never_evicted():
    async with running(blocks=4) as store:
        chain = SPACE.chain(range(16))
        await store.put(chain)
        fetched = await store.manager.fetch(chain, owner=store.owner)

        assert await store.put(SPACE.chain(range(50, 58)), timeout_s=0.02) == 0

        assert (await store.manager.match(chain)).blocks == 4
        assert store.manager.stats()["puts_blocks"]["dropped"] == 2
        store.manager.release(fetched.lease)


async def test_blocks_on_disk_are_served_while_all_of_dram_is_leased():
    disk = GatedTier("ssd")
    async with running(disk, blocks=4, staging_blocks=4) as store:
        cold = SPACE.chain(range(100, 116))
        await store.put(cold)
        await store.manager.flush(timeout_s=5)
        hot = SPACE.chain(range(16))
        await store.put(hot)
        fetched = await store.manager.fetch(hot, owner=store.owner)
        assert store.dram.used_bytes == store.dram.capacity_bytes

        assert await store.fetch(cold) == (["ssd"] * 4, None)

        assert (await store.manager.match(hot)).tiers == ("dram",) * 4
        store.manager.release(fetched.lease)
        await store.manager._space.age()
        assert store.dram.used_bytes < store.dram.capacity_bytes


async def test_an_expired_lease_protects_no_more():
    async with running(blocks=4, lease_s=0.0) as store:
        chain = SPACE.chain(range(16))
        await store.put(chain)
        await store.manager.fetch(chain, owner=store.owner)

        store.manager.expire()

        assert await store.put(SPACE.chain(range(50, 58))) == 2


async def test_a_second_release_is_ignored_and_counted():
    async with running() as store:
        chain = SPACE.chain(range(4))
        await store.put(chain)
        fetched = await store.manager.fetch(chain, owner=store.owner)
        store.manager.release(fetched.lease)

        store.manager.release(fetched.lease)

        assert store.manager.stats()["lease_events"]["stale_releases"] == 1


async def test_unnamed_slots_beyond_the_room_are_refused_with_the_numbers():
    async with running(blocks=4) as store:
        with pytest.raises(TierFull, match="dram: no 5 slots of 8192 bytes free"):
            await store.manager.reserve_unnamed(5, BLOCK_BYTES, owner=store.owner, timeout_s=0.01)
