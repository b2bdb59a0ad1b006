"""Epochs, quotas, pin budgets, write modes, demotion, draining, and the explanation of misses."""

import dataclasses

import pytest

from kvstore.epoch_file import EpochFile
from kvstore.errors import CorruptBlock, InvalidRequest, TierUnavailable
from kvstore.miss import MissReason
from kvstore.results import first_difference
from kvstore.state import WriteMode
from kvstore.tier import WriteStatus
from tests.core.gated_tier import GatedTier
from tests.core.manager_harness import BLOCK_BYTES, SPACE, running

NEXT_EPOCH = SPACE.at_epoch(1)
OTHER = dataclasses.replace(SPACE, tenant_salt=b"other")


async def test_an_advanced_epoch_makes_every_older_block_unreachable_at_once():
    ssd = GatedTier("ssd")
    async with running(ssd) as store:
        chain = SPACE.chain(range(20))
        await store.put(chain)
        await store.manager.flush(timeout_s=5)

        assert await store.manager.advance_epoch("m") == 1

        assert (await store.manager.match(chain)).reason is MissReason.OTHER_EPOCH
        assert await store.fetch(chain) == ([], MissReason.OTHER_EPOCH)
        assert await store.manager.prefetch(chain) == 0
        assert await store.put(chain) == 0


async def test_blocks_of_the_new_epoch_are_stored_and_served():
    async with running() as store:
        store.manager.open_namespace(NEXT_EPOCH)
        await store.manager.advance_epoch("m")
        chain = NEXT_EPOCH.chain(range(20))

        assert await store.put(chain) == 5

        assert await store.fetch(chain) == (["dram"] * 5, None)


async def test_another_models_blocks_outlive_an_epoch():
    async with running() as store:
        chain = SPACE.chain(range(20))
        await store.put(chain)

        await store.manager.advance_epoch("another")

        assert await store.fetch(chain) == (["dram"] * 5, None)


async def test_the_space_of_an_ended_epoch_is_reclaimed():
    ssd = GatedTier("ssd")
    async with running(ssd) as store:
        await store.put(SPACE.chain(range(20)))
        await store.manager.flush(timeout_s=5)
        await store.manager.advance_epoch("m")

        await store.manager.reclaim()

        assert store.dram.used_bytes == 0
        assert ssd.stored == {}


async def test_a_slot_lent_before_an_epoch_ended_is_not_published():
    async with running() as store:
        chain = SPACE.chain(range(4))
        (slot,) = (await store.manager.reserve(chain, owner=store.owner)).slots
        await store.manager.advance_epoch("m")

        assert store.manager.commit(chain, [slot.slot], owner=store.owner, checksums=[1]) == [False]

        store.manager.release_owner(store.owner)


async def test_an_epoch_is_kept_across_a_restart(tmp_path):
    file = EpochFile([tmp_path / "epochs"])
    ssd = GatedTier("ssd")
    chain = SPACE.chain(range(20))
    async with running(ssd, epoch_file=file) as store:
        await store.put(chain)
        await store.manager.flush(timeout_s=5)
        await store.manager.advance_epoch("m")

    async with running(ssd, epoch_file=file) as again:
        assert again.manager.epoch("m") == 1
        assert await again.fetch(chain) == ([], MissReason.OTHER_EPOCH)


async def test_what_is_stored_is_dropped_when_the_epochs_are_lost(tmp_path):
    ssd = GatedTier("ssd")
    async with running(ssd) as store:
        await store.put(SPACE.chain(range(20)))
        await store.manager.flush(timeout_s=5)
    (tmp_path / "epochs").write_bytes(b"damage")

    async with running(ssd, epoch_file=EpochFile([tmp_path / "epochs"])) as again:
        assert (await again.manager.match(SPACE.chain(range(20)))).blocks == 0
        assert ssd.stored == {}


@pytest.mark.parametrize("at", [0, 20, 40, 45])
def test_a_damaged_epoch_file_is_seen(tmp_path, at):
    file = EpochFile([tmp_path / "epochs"])
    file.write({"model": 3, "m2": 1})
    data = bytearray((tmp_path / "epochs").read_bytes())
    data[at] ^= 1
    (tmp_path / "epochs").write_bytes(data)

    with pytest.raises(CorruptBlock):
        file.read()


def test_an_epoch_file_in_a_folder_that_is_gone_says_where_and_why(tmp_path):
    with pytest.raises(TierUnavailable, match="epochs cannot be kept"):
        EpochFile([tmp_path / "gone" / "epochs"]).write({"m": 1})


async def test_a_namespace_at_its_quota_evicts_its_own_blocks_only():
    async with running(blocks=8, namespace_quota_ratio=0.5) as store:
        store.manager.open_namespace(OTHER)
        others = OTHER.chain(range(12))
        await store.put(others)

        for start in range(0, 500, 100):
            await store.put(SPACE.chain(range(start, start + 16)))

        assert (await store.manager.match(others)).blocks == 3
        used = store.manager._state.directory.used_bytes("dram", SPACE.digest)
        assert used == 4 * BLOCK_BYTES


async def test_a_put_beyond_the_quota_is_dropped_and_counted():
    async with running(blocks=8, namespace_quota_ratio=0.5) as store:
        assert await store.put(SPACE.chain(range(40))) == 4

        assert store.manager.stats()["puts_blocks"]["over_quota"] == 6


async def test_a_load_beyond_the_quota_is_a_miss_with_that_reason():
    ssd = GatedTier("ssd")
    chain = SPACE.chain(range(32))
    async with running(ssd) as store:
        await store.put(chain)
        await store.manager.flush(timeout_s=5)

    async with running(ssd, blocks=8, namespace_quota_ratio=0.5) as again:
        assert await again.fetch(chain) == (["ssd"] * 4, MissReason.QUOTA)


async def test_leases_beyond_the_pin_budget_are_refused():
    async with running(blocks=8, pin_budget_ratio=0.5) as store:
        chain = SPACE.chain(range(32))
        await store.put(chain)

        first = await store.manager.fetch(chain, owner=store.owner)
        second = await store.manager.fetch(chain, owner=store.owner)

        assert (len(first.blocks), first.reason) == (4, MissReason.QUOTA)
        assert len(second.blocks) == 4
        store.manager.release_owner(store.owner)


async def test_write_back_writes_a_block_when_it_leaves():
    ssd = GatedTier("ssd")
    async with running(ssd, blocks=4, write_mode=WriteMode.BACK) as store:
        old = SPACE.chain(range(16))
        await store.put(old)
        assert store.manager.stats()["tiers"]["ssd"]["queued_blocks"] == 0
        assert ssd.stored == {}

        await store.put(SPACE.chain(range(50, 66)))

        assert (await store.manager.match(old)).tiers == ("ssd",) * 4


async def test_a_flush_under_write_back_writes_down_what_only_memory_has():
    ssd = GatedTier("ssd")
    async with running(ssd, write_mode=WriteMode.BACK, write_queue_blocks=3) as store:
        await store.put(SPACE.chain(range(40)))

        assert await store.manager.flush(timeout_s=60)

        assert len(ssd.stored) == 10
        assert await store.put(SPACE.chain(range(50, 58))) == 2


async def test_write_back_loses_nothing_at_an_orderly_end():
    ssd = GatedTier("ssd")
    chain = SPACE.chain(range(40))
    async with running(ssd, write_mode=WriteMode.BACK, write_queue_blocks=3) as store:
        await store.put(chain)

    async with running(ssd) as again:
        assert (await again.manager.match(chain)).blocks == 10


async def test_write_on_second_hit_writes_what_is_used_again():
    ssd = GatedTier("ssd")
    async with running(ssd, write_mode=WriteMode.SECOND_HIT) as store:
        used, unused = SPACE.chain(range(8)), SPACE.chain(range(50, 58))
        await store.put(used)
        await store.put(unused)

        await store.fetch(used)
        await store.manager.flush(timeout_s=5)

        assert {block.key for block in ssd.stored} == set(used.keys)


async def test_a_block_that_was_never_used_again_was_not_admitted():
    ssd = GatedTier("ssd")
    async with running(ssd, blocks=4, write_mode=WriteMode.SECOND_HIT) as store:
        old = SPACE.chain(range(16))
        await store.put(old)

        await store.put(SPACE.chain(range(50, 66)))

        assert (await store.manager.match(old)).reason is MissReason.NOT_ADMITTED


async def test_a_demotion_that_the_budget_refuses_is_named_as_the_reason():
    ssd = GatedTier("ssd")
    ssd.write_status = WriteStatus.NOT_ADMITTED
    async with running(ssd, blocks=4, write_mode=WriteMode.BACK) as store:
        old = SPACE.chain(range(16))
        await store.put(old)

        await store.put(SPACE.chain(range(50, 66)))

        assert (await store.manager.match(old)).reason is MissReason.NOT_ADMITTED


async def test_demoted_blocks_are_below_and_no_longer_on_top():
    ssd = GatedTier("ssd")
    async with running(ssd) as store:
        chain = SPACE.chain(range(20))
        await store.put(chain)

        assert await store.manager.demote(chain[2:]) == 3

        assert (await store.manager.match(chain)).tiers == ("dram",) * 2 + ("ssd",) * 3


async def test_a_leased_block_is_not_demoted():
    ssd = GatedTier("ssd")
    async with running(ssd) as store:
        chain = SPACE.chain(range(8))
        await store.put(chain)
        fetched = await store.manager.fetch(chain[:1], owner=store.owner)

        assert await store.manager.demote(chain) == 1

        store.manager.release(fetched.lease)


async def test_a_draining_store_takes_no_more_blocks_and_serves_on():
    ssd = GatedTier("ssd")
    async with running(ssd, write_mode=WriteMode.BACK) as store:
        chain = SPACE.chain(range(20))
        await store.put(chain)

        assert await store.manager.drain(timeout_s=5) == 0

        assert len(ssd.stored) == 5
        assert await store.put(SPACE.chain(range(50, 58))) == 0
        assert await store.fetch(chain) == (["dram"] * 5, None)


async def test_a_drain_says_how_many_blocks_are_left_over():
    ssd = GatedTier("ssd")
    async with running(ssd, write_mode=WriteMode.BACK) as store:
        ssd.write_status = WriteStatus.UNAVAILABLE
        await store.put(SPACE.chain(range(20)))

        assert await store.manager.drain(timeout_s=5) == 5


async def test_why_names_the_first_block_that_differs_and_what_else_is_there():
    async with running() as store:
        await store.put(SPACE.chain([*range(8), 7, 7, 7, 7]))
        asked = SPACE.chain([*range(8), 8, 8, 8, 8, 9, 9, 9, 9])

        reports = await store.manager.why(asked)

        assert first_difference(reports) == 2
        assert [report.tiers for report in reports] == [("dram",), ("dram",), (), ()]
        assert reports[2].reason is MissReason.NEVER_SEEN
        assert reports[2].siblings == 1
        assert reports[3].siblings == 0


async def test_why_says_when_a_block_went_and_by_whose_pressure():
    async with running(blocks=4) as store:
        store.manager.open_namespace(OTHER)
        old = SPACE.chain(range(16))
        await store.put(old)
        await store.put(OTHER.chain(range(16)))

        (report, *_) = await store.manager.why(old)

        assert (report.reason, report.gone_tier) == (MissReason.EVICTED, "dram")
        assert report.pressed_by == OTHER.digest.hex()[:12]
        assert report.gone_s >= 0
        assert report.as_dict()["pressed_by"] == report.pressed_by


async def test_why_names_the_tier_a_probe_found_and_the_trouble_it_met():
    remote = GatedTier("remote", is_shared=True)
    chain = SPACE.chain(range(8))
    async with running(remote) as store:
        await store.put(chain)
        await store.manager.flush(timeout_s=5)
    async with running(remote) as again:
        assert [report.tiers for report in await again.manager.why(chain)] == [("remote",), ("remote",)]

        remote.is_up = False

        assert {report.reason for report in await again.manager.why(chain)} == {MissReason.UNAVAILABLE}


async def test_why_names_an_ended_epoch():
    async with running() as store:
        chain = SPACE.chain(range(8))
        await store.put(chain)
        await store.manager.advance_epoch("m")

        reports = await store.manager.why(chain)

        assert {report.reason for report in reports} == {MissReason.OTHER_EPOCH}


def test_the_epochs_of_several_disks_are_the_highest_of_any(tmp_path):
    one, other = tmp_path / "a", tmp_path / "b"
    EpochFile([one]).write({"m": 3, "n": 1})
    EpochFile([other]).write({"m": 1, "n": 4})

    assert EpochFile([one, other]).read() == {"m": 3, "n": 4}


def test_one_sound_epoch_file_is_enough(tmp_path):
    one, other = tmp_path / "a", tmp_path / "b"
    EpochFile([one, other]).write({"m": 3})
    one.write_bytes(b"damage")

    assert EpochFile([one, other]).read() == {"m": 3}


async def test_an_epoch_ended_on_one_node_ends_on_another_that_shares_a_remote_tier():
    remote = GatedTier("remote", is_shared=True)
    async with running(remote) as one, running(remote) as other:
        chain = SPACE.chain(range(20))
        await other.put(chain)

        await one.manager.advance_epoch("m")
        await other.manager._epochs._follow()

        assert other.manager.epoch("m") == 1
        assert await other.fetch(chain) == ([], MissReason.OTHER_EPOCH)


async def test_of_a_namespace_that_is_open_already_no_news_is_asked_for():
    async with running() as store:
        news = store.manager._epochs._has_news
        store.manager.open_namespace(OTHER)
        assert news.is_set()
        news.clear()
        for _ in range(100):
            store.manager.open_namespace(OTHER)
        assert not news.is_set()


async def test_an_epoch_a_remote_tier_forgot_is_told_to_it_again():
    remote = GatedTier("remote", is_shared=True)
    async with running(remote) as store:
        await store.manager.advance_epoch("m")
        remote.stored.clear()

        await store.manager._epochs._follow()

        assert len(remote.stored) == 1


async def test_a_remote_tier_that_is_behind_does_not_lower_an_epoch():
    remote = GatedTier("remote", is_shared=True)
    async with running(remote) as behind:
        await behind.manager.advance_epoch("m")
    async with running(remote) as store:
        for _ in range(3):
            store.manager._state.directory.raise_epoch("m", 3)

        await store.manager._epochs._follow()

        assert store.manager.epoch("m") == 3


async def test_an_epoch_the_remote_tier_does_not_take_is_no_success_and_is_told_later():
    remote = GatedTier("remote", is_shared=True)
    async with running(remote) as store:
        remote.write_status = WriteStatus.FULL

        with pytest.raises(TierUnavailable, match="could not be told"):
            await store.manager.advance_epoch("m")

        assert store.manager.epoch("m") == 1
        remote.write_status = WriteStatus.OK
        await store.manager._epochs._follow()
        assert len(remote.stored) == 1


async def test_an_epoch_cannot_be_told_to_a_remote_tier_that_is_down():
    remote = GatedTier("remote", is_shared=True)
    async with running(remote) as store:
        remote.is_up = False

        with pytest.raises(TierUnavailable, match="remote: epoch 1"):
            await store.manager.advance_epoch("m")

        remote.is_up = True


async def test_a_node_knows_the_epochs_of_others_before_it_serves(tmp_path):
    remote = GatedTier("remote", is_shared=True)
    file = EpochFile([tmp_path / "epochs"])
    file.write({"m": 1})
    async with running(remote) as one:
        await one.manager.advance_epoch("m")
        await one.manager.advance_epoch("m")

    async with running(remote, epoch_file=file) as other:
        assert other.manager.epoch("m") == 2


@pytest.mark.parametrize("model", ["\ud800", "a\udfff", "é" * 4096, "x" * 4097])
async def test_no_epoch_is_kept_of_a_model_that_no_namespace_can_name(tmp_path, model):
    file = EpochFile([tmp_path / "epochs"])
    remote = GatedTier("remote", is_shared=True)
    async with running(remote, epoch_file=file) as store:
        with pytest.raises(InvalidRequest, match="model"):
            await store.manager.advance_epoch(model)
        assert store.manager.stats()["epochs"] == {}

    file.write({model: 3, "m": 1})  # an earlier version kept it
    async with running(remote, epoch_file=file) as again:
        assert again.manager.stats()["epochs"] == {"m": 1}


def test_a_folder_that_cannot_be_read_has_no_say_in_the_epochs(tmp_path):
    (tmp_path / "file").write_text("a file in place of a folder")
    sound = tmp_path / "sound"

    assert EpochFile([sound, tmp_path / "file" / "epochs"]).read() == {}


async def test_a_put_beyond_the_quota_is_missed_as_that():
    async with running(blocks=8, namespace_quota_ratio=0.5) as store:
        chain = SPACE.chain(range(40))
        await store.put(chain)

        assert (await store.manager.match(chain)).reason is MissReason.QUOTA


async def test_why_and_match_agree_on_a_tier_that_is_down():
    ssd = GatedTier("ssd")
    chain = SPACE.chain(range(8))
    async with running(ssd) as store:
        await store.put(chain)
        await store.manager.flush(timeout_s=5)
    async with running(ssd) as again:
        ssd.is_up = False

        reports = await again.manager.why(chain)

        assert (await again.manager.match(chain)).reason is MissReason.UNAVAILABLE
        assert {(report.tiers, report.reason) for report in reports} == {((), MissReason.UNAVAILABLE)}
        ssd.is_up = True


async def test_a_block_that_a_write_budget_refused_is_not_offered_again_on_its_way_out():
    ssd = GatedTier("ssd")
    async with running(ssd, blocks=4) as store:
        ssd.write_status = WriteStatus.NOT_ADMITTED
        old = SPACE.chain(range(16))
        await store.put(old)
        await store.manager.flush(timeout_s=5)
        ssd.write_status = WriteStatus.OK

        await store.put(SPACE.chain(range(50, 66)))

        assert not {block.key for block in ssd.stored} & set(old.keys)
        assert (await store.manager.match(old)).reason is MissReason.NOT_ADMITTED
