"""Two namespaces that name blocks by the same raw keys share nothing: no place in any order, no record."""

from dataclasses import replace

import pytest

from kvstore.keys import PrefixChain
from kvstore.miss import MissReason
from kvstore.state import WriteMode
from kvstore.tier import TierNews, WriteStatus
from tests.core.gated_tier import GatedTier
from tests.core.manager_harness import BLOCK_BYTES, SPACE, running

OTHER = replace(SPACE, tenant_salt=b"other")
CHAIN = SPACE.chain(range(16))
SAME = PrefixChain(OTHER.digest, CHAIN.keys, OTHER.block_tokens)


async def reasons(store, chain):
    return {report.reason for report in await store.manager.why(chain)}


async def test_every_block_of_both_can_leave_when_room_is_needed():
    """Both were one name in the eviction order, so that one of the two stayed for ever."""
    async with running(blocks=8) as store:
        store.manager.open_namespace(OTHER)
        assert await store.put(CHAIN) + await store.put(SAME) == 8

        assert await store.put(SPACE.chain(range(100, 132))) == 8
        assert store.manager.stats()["tiers"]["dram"]["blocks"] == 8


@pytest.mark.parametrize("is_first_dropped", [True, False])
async def test_what_is_left_of_one_after_the_other_went_is_evicted_and_counted(is_first_dropped):
    async with running(blocks=8) as store:
        store.manager.open_namespace(OTHER)
        await store.put(CHAIN)
        await store.put(SAME)
        gone, kept = (CHAIN, SAME) if is_first_dropped else (SAME, CHAIN)
        assert await store.manager.drop(gone) == 4

        assert store.manager.stats()["tiers"]["dram"]["blocks"] == 4
        assert await store.fetch(kept) == (["dram"] * 4, None)
        assert await store.put(SPACE.chain(range(100, 132))) == 8
        assert store.manager.stats()["evictions_blocks"] == {"dram/space": 4}


async def test_a_use_of_one_keeps_the_other_from_leaving_no_longer():
    chain = SPACE.chain(range(80))
    same = PrefixChain(OTHER.digest, chain.keys, OTHER.block_tokens)
    async with running(blocks=40, high_water_ratio=1.0, low_water_ratio=1.0) as store:
        store.manager.open_namespace(OTHER)
        await store.put(same)
        await store.put(chain)
        await store.fetch(same)

        await store.put(SPACE.chain(range(100, 104)))

        assert (await store.manager.match(same)).blocks == 20
        assert (await store.manager.match(chain)).blocks < 20


async def test_a_lease_on_one_keeps_the_other_from_nothing():
    async with running(blocks=8) as store:
        store.manager.open_namespace(OTHER)
        await store.put(CHAIN)
        await store.put(SAME)
        fetched = await store.manager.fetch(CHAIN, owner=store.owner)

        assert await store.manager.drop(SAME) == 4
        assert await store.manager.drop(CHAIN) == 0
        store.manager.release(fetched.lease)


async def test_damage_of_one_is_nothing_of_the_other():
    ssd = GatedTier("ssd")
    async with running(ssd) as store:
        store.manager.open_namespace(OTHER)
        await store.put(CHAIN)
        await store.put(SAME)
        await store.manager.flush(timeout_s=5)
        await store.manager.demote(CHAIN)
        await store.manager.demote(SAME)
        for block, (_, data) in ssd.stored.items():
            data[7] ^= block.namespace == SPACE.digest

        assert await store.fetch(CHAIN) == ([], MissReason.CORRUPT)
        assert await store.fetch(SAME) == (["ssd"] * 4, None)
        assert await reasons(store, SAME) == {None}


async def test_the_reason_why_one_is_gone_is_not_told_of_the_other():
    async with running(blocks=4) as store:
        store.manager.open_namespace(OTHER)
        await store.put(CHAIN)
        await store.put(SPACE.chain(range(100, 116)))

        assert await reasons(store, CHAIN) == {MissReason.EVICTED}
        assert await reasons(store, SAME) == {MissReason.NEVER_SEEN}


async def test_a_put_of_one_leaves_the_record_of_the_other():
    async with running(blocks=16) as store:
        store.manager.open_namespace(OTHER)
        await store.put(CHAIN)
        await store.manager.drop(CHAIN)
        await store.put(SAME)

        assert await reasons(store, CHAIN) == {MissReason.DROPPED}


async def test_a_belief_about_one_writes_the_other_all_the_same():
    """A shared tier is written to on the second use of a block, unless it is believed to have it."""
    remote = GatedTier("remote", is_shared=True)
    async with running(remote, blocks=16, write_mode=WriteMode.SECOND_HIT) as store:
        store.manager.open_namespace(OTHER)
        for chain in (CHAIN, SAME):
            await store.put(chain)
            await store.fetch(chain)
            assert await store.manager.flush(timeout_s=5)

        assert sorted(block.namespace for block in remote.stored) == sorted(
            [SPACE.digest] * 4 + [OTHER.digest] * 4
        )


async def test_both_wait_in_one_write_queue():
    ssd = GatedTier("ssd")
    async with running(ssd, blocks=16) as store:
        store.manager.open_namespace(OTHER)
        ssd.gate.clear()
        await store.put(CHAIN)
        await store.put(SAME)
        assert store.manager.stats()["tiers"]["ssd"]["queued_blocks"] == 8
        ssd.gate.set()
        assert await store.manager.flush(timeout_s=5)

        assert len(ssd.stored) == 8


async def test_a_write_budget_that_refused_one_remembers_nothing_of_the_other():
    ssd = GatedTier("ssd")
    ssd.write_status = WriteStatus.NOT_ADMITTED
    async with running(ssd, blocks=16) as store:
        store.manager.open_namespace(OTHER)
        await store.put(CHAIN)
        assert await store.manager.flush(timeout_s=5)
        ssd.write_status = WriteStatus.OK
        await store.put(SAME)
        assert await store.manager.flush(timeout_s=5)

        assert {block.namespace for block in ssd.stored} == {OTHER.digest}


class LosingTier(GatedTier):
    """A tier of whose copies some were lost."""

    lost = ()

    def take_news(self):
        lost, self.lost = self.lost, ()
        return TierNews(lost=lost)


async def test_copies_lost_with_a_disk_are_those_of_their_namespace():
    ssd = LosingTier("ssd")
    async with running(ssd, blocks=16) as store:
        store.manager.open_namespace(OTHER)
        await store.put(CHAIN)
        await store.put(SAME)
        await store.manager.flush(timeout_s=5)
        await store.manager.demote(CHAIN)
        await store.manager.demote(SAME)
        lost = [header for header, _ in ssd.stored.values() if header.block.namespace == OTHER.digest]
        for header in lost:
            del ssd.stored[header.block]
        ssd.lost = lost
        await store.manager._learner.take_news()

        assert await reasons(store, SAME) == {MissReason.UNAVAILABLE}
        assert await store.fetch(CHAIN) == (["ssd"] * 4, None)


async def test_an_earlier_runs_copies_of_both_are_filed():
    ssd = GatedTier("ssd")
    async with running(ssd) as store:
        store.manager.open_namespace(OTHER)
        await store.put(CHAIN)
        await store.put(SAME)
    async with running(ssd) as again:
        again.manager.open_namespace(OTHER)
        assert again.manager.stats()["tiers"]["ssd"]["blocks"] == 8
        assert again.manager._state.directory.used_bytes("ssd", OTHER.digest) == 4 * BLOCK_BYTES
        for chain in (CHAIN, SAME):
            assert await again.fetch(chain) == (["ssd"] * 4, None)
