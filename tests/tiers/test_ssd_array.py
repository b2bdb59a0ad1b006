"""SsdArray: several folders as one tier; a folder that fails takes only its own blocks away."""

import asyncio
import errno
import shutil
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from kvstore.assembly import _ssd_tier
from kvstore.config import Config
from kvstore.errors import InvalidConfig, TierUnavailable
from kvstore.tier import ReadStatus, WriteStatus
from kvstore_tiers.ssd import SsdTier
from kvstore_tiers.ssd_array import SsdArray
from kvstore_tiers.ssd_copies import Numbers
from tests.tiers.blocks import block_id, payload, to_read, to_write
from tests.tiers.faulty_io import BrokenIO

LENGTH = 40_000
SLOT = 40_960
CAPACITY = 1 << 20
NAMES = ("a", "b", "c")


def array(
    folder: Path, names: tuple[str, ...] = NAMES, *, ios: dict[str, BrokenIO] | None = None
) -> SsdArray:
    numbers = Numbers()
    disks = [
        SsdTier(folder / name, capacity_bytes=CAPACITY, numbers=numbers, io=(ios or {}).get(name))
        for name in names
    ]
    return SsdArray(disks, retry_interval_s=0.02)


@asynccontextmanager
async def opened(
    folder: Path, names: tuple[str, ...] = NAMES, *, ios: dict[str, BrokenIO] | None = None
) -> AsyncIterator[SsdArray]:
    tier = array(folder, names, ios=ios)
    await tier.open()
    try:
        yield tier
        assert tier.check() == []
    finally:
        await tier.close()


def soon() -> float:
    return time.monotonic() + 30


async def put(tier: SsdArray, *numbers: int) -> list[WriteStatus]:
    return await tier.write([to_write(number, LENGTH) for number in numbers], deadline_s=soon())


async def statuses(tier: SsdArray, *numbers: int) -> list[ReadStatus]:
    requests = [to_read(number, LENGTH) for number in numbers]
    outcomes = await tier.read(requests, deadline_s=soon())
    for number, request, outcome in zip(numbers, requests, outcomes, strict=True):
        if outcome.status is ReadStatus.OK:
            assert bytes(request.buffer[:LENGTH]) == payload(number, LENGTH)
    return [outcome.status for outcome in outcomes]


async def test_blocks_are_spread_evenly_and_the_capacity_is_that_of_all(tmp_path: Path) -> None:
    async with opened(tmp_path) as tier:
        assert await put(tier, *range(30)) == [WriteStatus.OK] * 30
        assert [disk.used_bytes for disk in tier.disks] == [10 * SLOT] * 3
        assert tier.used_bytes == 30 * SLOT
        assert tier.capacity_bytes == 3 * CAPACITY


async def test_a_restart_finds_all_blocks_in_the_order_of_use_across_disks(tmp_path: Path) -> None:
    async with opened(tmp_path) as tier:
        for number in range(12):
            await put(tier, number)
        await tier.touch([block_id(2)])
    async with opened(tmp_path) as tier:
        order = [0, 1, 3, 4, 5, 6, 7, 8, 9, 10, 11, 2]
        assert [header.block for header in await tier.scan()] == [block_id(number) for number in order]
        assert await statuses(tier, *range(12)) == [ReadStatus.OK] * 12


async def test_all_disks_together_are_filled_and_no_further(tmp_path: Path) -> None:
    async with opened(tmp_path) as tier:
        most = 3 * (CAPACITY // SLOT)
        assert tier.has_room(LENGTH, most)
        assert not tier.has_room(LENGTH, most + 1)
        written = await put(tier, *range(most + 5))
        assert written.count(WriteStatus.OK) == most
        assert written.count(WriteStatus.FULL) == 5


async def test_a_replaced_block_stays_on_its_disk(tmp_path: Path) -> None:
    async with opened(tmp_path) as tier:
        await put(tier, *range(9))
        await put(tier, *range(9))
        assert [disk.used_bytes for disk in tier.disks] == [3 * SLOT] * 3


async def test_a_disk_with_errors_takes_only_its_own_blocks_away(tmp_path: Path) -> None:
    ios = {name: BrokenIO() for name in NAMES}
    async with opened(tmp_path, ios=ios) as tier:
        await put(tier, *range(9))
        disk = tier.disks[1]
        ios["b"].error = errno.EIO
        for _ in range(3):
            assert (await statuses(tier, *range(9))).count(ReadStatus.OK) == 6
        assert tier.health().is_up
        assert tier.health().reason == "reading failed: Input/output error"
        assert await put(tier, *range(20, 26)) == [WriteStatus.OK] * 6
        assert disk.used_bytes == 3 * SLOT


async def test_a_deleted_folder_costs_its_blocks_which_may_be_stored_again(tmp_path: Path) -> None:
    async with opened(tmp_path) as tier:
        await put(tier, *range(9))
        await asyncio.to_thread(shutil.rmtree, tmp_path / "b")
        await put(tier, *range(30, 33))
        found = await statuses(tier, *range(9))
        assert found.count(ReadStatus.OK) == 6
        assert found.count(ReadStatus.ABSENT) == 3
        assert "was deleted" in tier.health().reason
        assert await put(tier, *range(9)) == [WriteStatus.OK] * 9
        assert await statuses(tier, *range(9)) == [ReadStatus.OK] * 9


async def test_a_folder_that_cannot_be_opened_leaves_the_others_in_use(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with opened(tmp_path) as tier:
        await put(tier, *range(9))
    (tmp_path / "b").chmod(0o777)
    async with opened(tmp_path) as tier:
        assert (await statuses(tier, *range(9))).count(ReadStatus.OK) == 6
        assert tier.health().is_up
        assert "chmod 700" in tier.health().reason
        assert tier.capacity_bytes == 2 * CAPACITY
    assert "going on without a folder" in caplog.text


async def test_without_any_folder_it_does_not_open(tmp_path: Path) -> None:
    for name in NAMES:
        (tmp_path / name).write_text("")
    tier = array(tmp_path)
    with pytest.raises(TierUnavailable, match="File exists"):
        await tier.open()
    assert not tier.health().is_up


async def test_of_two_copies_left_on_two_disks_the_one_used_last_stays(tmp_path: Path) -> None:
    async with opened(tmp_path, ("a",)) as tier:
        await put(tier, 1, 2)
    async with opened(tmp_path, ("b",)) as tier:
        await put(tier, 8, 9, 7, 6, 1)
    async with opened(tmp_path, ("a", "b")) as tier:
        assert [disk.holds(block_id(1).storage_key) for disk in tier.disks] == [False, True]
        assert len(await tier.scan()) == 6
        assert await statuses(tier, 1, 2) == [ReadStatus.OK] * 2


async def test_a_second_disk_may_be_added_later_and_loses_nothing(tmp_path: Path) -> None:
    async with opened(tmp_path, ("a",)) as tier:
        await put(tier, *range(10))
    async with opened(tmp_path, ("a", "b")) as tier:
        assert await statuses(tier, *range(10)) == [ReadStatus.OK] * 10
        await put(tier, *range(20, 30))
        assert tier.disks[1].used_bytes == 10 * SLOT


def test_a_configuration_with_several_folders_makes_one_disk_for_each(tmp_path: Path) -> None:
    ssd = Config.from_dict(
        {"tiers": {"ssd": {"path": [str(tmp_path / "a"), str(tmp_path / "b")], "capacity_bytes": "1MiB"}}}
    ).ssd
    assert ssd is not None
    made = _ssd_tier(ssd)
    assert isinstance(made, SsdArray)
    assert made.capacity_bytes == 2 << 20


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, r"\[tiers.ssd\] path: is missing"),
        ({"path": ["/a", "/a/"]}, "names a folder twice"),
        ({"path": ["a"]}, "absolute path"),
        ({"path": []}, "list of 1 to 64"),
        ({"path": 5}, "absolute path"),
    ],
)
def test_folders_that_make_no_sense_are_refused(given: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidConfig, match=message):
        Config.from_dict({"tiers": {"ssd": {**given, "capacity_bytes": "1MiB"}}})
