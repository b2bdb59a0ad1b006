"""Deletes and stores whose index commit failed: what they were to undo is not found by the next start."""

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvstore.tier import ReadStatus, WriteStatus
from kvstore_tiers.ssd import SsdTier
from kvstore_tiers.ssd_record import Change
from kvstore_tiers.ssd_store import CommitOutcome, SsdStore
from tests.tiers.blocks import block_id
from tests.tiers.remote_calls import until
from tests.tiers.ssd_tiers import CAPACITY, SLOT, opened, put, statuses

FAILED = CommitOutcome(WriteStatus.UNAVAILABLE, "writing failed: Input/output error")


class FailingStore:
    """A store whose commits fail while ``is_failing``; ``does_it_all_the_same`` though they happened."""

    def __init__(self, inner: SsdStore) -> None:
        self.inner = inner
        self.is_failing = True
        self.does_it_all_the_same = False
        self.num_failed = 0

    def commit(self, changes: Sequence[Change]) -> list[CommitOutcome]:
        if not self.is_failing:
            return self.inner.commit(changes)
        self.num_failed += 1
        if self.does_it_all_the_same:
            self.inner.commit(changes)
        return [FAILED] * len(changes)

    def __getattr__(self, name: str) -> object:
        return getattr(self.inner, name)


def make_failing(tier: SsdTier) -> FailingStore:
    assert tier._store is not None
    failing = FailingStore(tier._store)
    tier._store = failing  # type: ignore[assignment]
    return failing


async def found_after_a_restart(folder: Path) -> list[int]:
    async with opened(folder) as tier:
        return [int.from_bytes(header.block.key, "little") for header in await tier.scan()]


async def test_a_block_whose_delete_could_not_be_committed_is_gone_after_a_restart(tmp_path: Path) -> None:
    """Its record stayed, and the next start matched it until somebody read it."""
    async with opened(tmp_path / "a") as tier:
        await put(tier, 1, 2)
        disk = make_failing(tier)
        await tier.drop([block_id(1)])
        assert tier.used_bytes == SLOT
        disk.is_failing = False

    assert await found_after_a_restart(tmp_path / "a") == [2]


async def test_the_delete_is_tried_again_at_once_and_needs_no_orderly_end(tmp_path: Path) -> None:
    tier = SsdTier(tmp_path / "a", capacity_bytes=CAPACITY, renew_interval_s=3600)
    await tier.open()
    await put(tier, 1, 2)
    disk = make_failing(tier)
    await tier.drop([block_id(1)])
    await until(lambda: disk.num_failed >= 2)  # the delete, and its repair soon after
    disk.is_failing = False
    await put(tier, 3)  # whatever is committed next takes the repair along
    records, _ = disk.inner._index.load()
    assert sorted(record.header.block.key[0] for record in records) == [2, 3]
    await tier.close()


async def test_without_another_write_the_repair_comes_with_the_next_interval(tmp_path: Path) -> None:
    tier = SsdTier(tmp_path / "a", capacity_bytes=CAPACITY, renew_interval_s=0.02)
    await tier.open()
    await put(tier, 1)
    disk = make_failing(tier)
    await tier.drop([block_id(1)])
    disk.is_failing = False
    await until(lambda: len(disk.inner._index.load()[0]) == 0)
    await tier.close()


async def test_a_block_that_is_stored_again_is_not_deleted_by_the_repair(tmp_path: Path) -> None:
    async with opened(tmp_path / "a") as tier:
        await put(tier, 1)
        disk = make_failing(tier)
        await tier.drop([block_id(1)])
        disk.is_failing = False
        assert await put(tier, 1) == [WriteStatus.OK]
    async with opened(tmp_path / "a") as tier:
        assert await statuses(tier, 1) == [ReadStatus.OK]


async def test_the_slot_of_an_undeleted_record_serves_another_block(tmp_path: Path) -> None:
    async with opened(tmp_path / "a", capacity_bytes=SLOT) as tier:
        await put(tier, 1)
        disk = make_failing(tier)
        await tier.drop([block_id(1)])
        disk.is_failing = False
        assert await put(tier, 2) == [WriteStatus.OK]
        assert await statuses(tier, 1, 2) == [ReadStatus.ABSENT, ReadStatus.OK]
    async with opened(tmp_path / "a", capacity_bytes=SLOT) as tier:
        assert await statuses(tier, 1, 2) == [ReadStatus.ABSENT, ReadStatus.OK]


async def test_a_damaged_copy_whose_delete_failed_is_not_found_again(tmp_path: Path) -> None:
    async with opened(tmp_path / "a") as tier:
        await put(tier, 1)
        with (tmp_path / "a" / "slab").open("r+b") as slab:
            slab.seek(100)
            slab.write(b"damage")
        disk = make_failing(tier)
        assert await statuses(tier, 1) == [ReadStatus.CORRUPT]
        disk.is_failing = False

    assert await found_after_a_restart(tmp_path / "a") == []


@pytest.mark.parametrize("is_replacement", [True, False])
async def test_a_store_that_failed_and_happened_is_undone_without_another_write(
    tmp_path: Path, is_replacement: bool
) -> None:
    async with opened(tmp_path / "a") as tier:
        await put(tier, *([1] if is_replacement else []))
        disk = make_failing(tier)
        disk.does_it_all_the_same = True
        assert await put(tier, 1) == [WriteStatus.UNAVAILABLE]
        disk.is_failing = False
        await tier.drop([block_id(1)])

    assert await found_after_a_restart(tmp_path / "a") == []


@pytest.mark.parametrize("seed", range(20))
async def test_whatever_fails_a_start_finds_what_the_tier_said_it_has(tmp_path: Path, seed: int) -> None:
    """Stores, replacements and drops while commits fail at random, done or not; then an orderly end."""
    dice = random.Random(seed)
    held: set[int] = set()
    async with opened(tmp_path / "a") as tier:
        disk = make_failing(tier)
        for _ in range(60):
            disk.is_failing, disk.does_it_all_the_same = dice.random() < 0.4, dice.random() < 0.5
            number = dice.randrange(6)
            if dice.random() < 0.5:
                if await put(tier, number) == [WriteStatus.OK]:
                    held.add(number)
            else:
                await tier.drop([block_id(number)])
                held.discard(number)
            if not tier.health().is_up:
                tier._breaker.succeeded()
            await asyncio.sleep(0)
        disk.is_failing = False
        expected = sorted(number for number in range(6) if tier.holds(block_id(number).storage_key))
        assert expected == sorted(held)

    assert sorted(await found_after_a_restart(tmp_path / "a")) == expected
    async with opened(tmp_path / "a") as tier:
        assert await statuses(tier, *expected) == [ReadStatus.OK] * len(expected)
        assert tier.used_bytes == len(expected) * SLOT
