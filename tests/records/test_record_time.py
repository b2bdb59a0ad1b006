"""The time of a record: by the monotonic clock in a process, by the wall clock across a restart."""

from pathlib import Path

import pytest

from kvstore.records import MAX_TTL_S, RecordAbsence
from tests.record_kit import Kit, Store

YEARS_S = 10 * 365 * 86_400.0
HOUR_S = 3600.0


async def left_s(store: Store) -> float | None:
    record = (await store.look("n")).record
    return None if record is None else record.expires_in_s


@pytest.fixture
def disk(tmp_path: Path) -> Kit:
    return Kit(tmp_path)


@pytest.mark.parametrize("where", ["memory", "disk"])
async def test_a_record_is_there_until_its_time_is_over_and_not_after(tmp_path: Path, where: str) -> None:
    kit = Kit(None if where == "memory" else tmp_path)
    async with kit.store() as store:
        await store.set("n", b"1", ttl_s=HOUR_S)
        kit.clock.moved_s += HOUR_S - 60
        assert await store.value("n") == b"1"
        kit.clock.moved_s += 61

        assert (await store.look("n")).reason is RecordAbsence.EXPIRED
        await store.truth.sweep()
        assert (await store.look("n")).reason is RecordAbsence.EXPIRED
        assert store.stats()["records"] == 0


async def test_a_put_gives_the_record_its_time_anew(disk: Kit) -> None:
    async with disk.store() as store:
        await store.set("n", b"1", ttl_s=HOUR_S)
        disk.clock.moved_s += HOUR_S - 60
        await store.set("n", b"2", ttl_s=HOUR_S)
        disk.clock.moved_s += HOUR_S - 60
        await store.truth.sweep()

        assert await store.value("n") == b"2"


@pytest.mark.parametrize("jump_s", [-YEARS_S, -2 * HOUR_S, 2 * HOUR_S, YEARS_S])
async def test_a_wall_clock_that_jumps_changes_nothing_in_a_process(disk: Kit, jump_s: float) -> None:
    async with disk.store() as store:
        await store.set("n", b"1", ttl_s=HOUR_S)

        disk.wall.moved_s += jump_s
        await store.truth.sweep()

        found = await left_s(store)
        assert found is not None
        assert HOUR_S - 60 < found <= HOUR_S


async def test_across_a_restart_the_time_that_passed_counts(disk: Kit) -> None:
    async with disk.store() as store:
        await store.set("n", b"1", ttl_s=2 * HOUR_S)
        await store.set("short", b"1", ttl_s=HOUR_S / 2)
    disk.wall.moved_s += HOUR_S  # the monotonic clock begins anew somewhere

    async with disk.store() as store:
        found = await left_s(store)
        assert found is not None
        assert HOUR_S - 60 < found <= HOUR_S
        assert (await store.look("short")).reason is RecordAbsence.EXPIRED


@pytest.mark.parametrize("jump_s", [-YEARS_S, -2 * HOUR_S])
async def test_a_clock_that_was_set_back_gives_no_record_more_than_its_time(disk: Kit, jump_s: float) -> None:
    async with disk.store() as store:
        await store.set("n", b"1", ttl_s=HOUR_S)
    disk.wall.moved_s += jump_s

    async with disk.store() as store:
        found = await left_s(store)
        assert found is not None
        assert found <= HOUR_S
        disk.clock.moved_s += HOUR_S
        assert await left_s(store) is None


async def test_the_time_left_survives_a_disk_that_is_opened_anew(disk: Kit) -> None:
    """The process goes on, so the monotonic clock does: the wall clock has no say."""
    async with disk.store() as store:
        await store.set("n", b"1", ttl_s=HOUR_S)
        disk.wall.moved_s += YEARS_S
        store.truth.local._note_fault("a fault for the test")
        disk.clock.moved_s += 10

        found = await left_s(store)
        assert found is not None
        assert HOUR_S - 60 < found <= HOUR_S - 10


async def test_a_record_that_names_no_time_is_kept_for_the_longest(disk: Kit) -> None:
    async with disk.store() as store:
        await store.set("n", b"1")

        found = await left_s(store)
        assert found is not None
        assert MAX_TTL_S - 60 < found <= MAX_TTL_S
