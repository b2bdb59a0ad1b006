"""SsdTier: order of use and limits over kills and restarts."""

import asyncio
import subprocess
import sys
from pathlib import Path

from kvstore.tier import ReadStatus, WriteStatus
from kvstore_tiers.ssd import SsdTier
from kvstore_tiers.ssd_index import map_size_bytes
from tests.tiers.blocks import block_id
from tests.tiers.ssd_tiers import CAPACITY, LENGTH, ROOT, SLOT, disk_bytes, opened, put, statuses


def use_and_kill(folder: Path, *numbers: int) -> None:
    command = [sys.executable, "-m", "tests.tiers.ssd_reader", str(folder), *map(str, numbers)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as reader:
        assert reader.stdout is not None
        assert reader.stdout.readline() == "stored\n"
        reader.kill()


async def test_uses_are_kept_over_a_kill_also_when_nothing_is_written(tmp_path: Path) -> None:
    async with opened(tmp_path / "a") as tier:
        await put(tier, *range(6))
    await asyncio.to_thread(use_and_kill, tmp_path / "a", 3, 0)
    async with opened(tmp_path / "a") as tier:
        assert [found.block for found in await tier.scan()] == [block_id(n) for n in (1, 2, 4, 5, 3, 0)]


async def test_a_read_is_a_use(tmp_path: Path) -> None:
    async with opened(tmp_path / "a") as tier:
        await put(tier, *range(4))
        await statuses(tier, 1)
    async with opened(tmp_path / "a") as tier:
        assert [found.block for found in await tier.scan()] == [block_id(n) for n in (0, 2, 3, 1)]


async def put_ten_times_the_limit(tier: SsdTier, first: int) -> list[int]:
    """Put blocks, dropping the oldest where there is no room; returns the numbers that must be there."""
    numbers = range(first, first + 10 * CAPACITY // SLOT)
    for start in range(0, len(numbers), 34):
        batch = numbers[start : start + 34]
        while not tier.has_room(LENGTH, len(batch)):
            await tier.drop([found.block for found in (await tier.scan())[:17]])
        assert await put(tier, *batch) == [WriteStatus.OK] * len(batch)
    return [*numbers[-(CAPACITY // SLOT // 2) :]]


async def test_ten_times_the_limit_over_restarts_never_takes_more_than_limit_and_index(
    tmp_path: Path,
) -> None:
    most = CAPACITY + map_size_bytes(CAPACITY) + 65536
    held: list[int] = []
    for run in range(3):
        async with opened(tmp_path / "a") as tier:
            assert await statuses(tier, *held) == [ReadStatus.OK] * len(held)
            held = await put_ten_times_the_limit(tier, 10_000 * run)
            assert disk_bytes(tmp_path / "a") <= most
        assert disk_bytes(tmp_path / "a") <= most
        (tmp_path / "a" / "dirty").touch()


async def test_an_index_that_cannot_be_used_does_not_stay_on_disk_beside_the_new_one(tmp_path: Path) -> None:
    async with opened(tmp_path / "a") as tier:
        await put(tier, 1)
    for leftover in ("index.damaged", "index/rebuilt.mdb"):
        target = tmp_path / "a" / leftover
        target.mkdir() if leftover == "index.damaged" else target.write_bytes(bytes(4 << 20))
    (tmp_path / "a" / "index.damaged" / "data.mdb").write_bytes(bytes(4 << 20))
    (tmp_path / "a" / "index" / "data.mdb").write_bytes(b"\xff" * 65536)
    async with opened(tmp_path / "a"):
        assert disk_bytes(tmp_path / "a") <= CAPACITY + map_size_bytes(CAPACITY) + 65536


async def test_a_smaller_capacity_makes_the_index_smaller_too(tmp_path: Path) -> None:
    large, small = 256 << 20, 4 << 20
    async with opened(tmp_path / "a", capacity_bytes=large) as tier:
        await put(tier, *range(10))
    async with opened(tmp_path / "a", capacity_bytes=small) as tier:
        assert await statuses(tier, *range(10)) == [ReadStatus.OK] * 10
        assert disk_bytes(tmp_path / "a") <= small + map_size_bytes(small) + 65536
        assert await put(tier, 20) == [WriteStatus.OK]
    async with opened(tmp_path / "a", capacity_bytes=large) as tier:
        assert await statuses(tier, *range(10), 20) == [ReadStatus.OK] * 11
