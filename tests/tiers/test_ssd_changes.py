"""Folders that come late, files that vanish under an open tier, disks that never open."""

import asyncio
import os
import shutil
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kvstore.errors import TierUnavailable
from kvstore.manager import BlockManager
from kvstore.tier import ReadStatus, WriteStatus
from kvstore_tiers.dram import DramTier
from kvstore_tiers.ssd import SsdTier
from kvstore_tiers.ssd_array import SsdArray
from kvstore_tiers.ssd_copies import Numbers
from tests.tiers.blocks import block_id, payload, to_read, to_write
from tests.tiers.faulty_io import StuckIO

LENGTH = 8192
CAPACITY = 1 << 20
ROOT = Path(__file__).parents[2]


def soon() -> float:
    return time.monotonic() + 30


def disk(folder: Path, **settings: object) -> SsdTier:
    return SsdTier(folder, capacity_bytes=CAPACITY, renew_interval_s=0.02, **settings)  # type: ignore[arg-type]


def array(folder: Path, *names: str, **ios: StuckIO) -> SsdArray:
    numbers = Numbers()
    disks = [
        disk(
            folder / name,
            numbers=numbers,
            io=ios.get(name),
            open_timeout_s=0.5 if name in ios else 60.0,
        )
        for name in names
    ]
    return SsdArray(disks, retry_interval_s=0.02)


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not is_so():  # noqa: ASYNC110  # what is waited for happens in other tasks and threads
            await asyncio.sleep(0.01)


async def put(tier: SsdTier | SsdArray, *numbers: int) -> list[WriteStatus]:
    return await tier.write([to_write(number, LENGTH) for number in numbers], deadline_s=soon())


async def found(tier: SsdTier | SsdArray, *numbers: int) -> list[ReadStatus]:
    requests = [to_read(number, LENGTH) for number in numbers]
    outcomes = await tier.read(requests, deadline_s=soon())
    for number, request, outcome in zip(numbers, requests, outcomes, strict=True):
        if outcome.status is ReadStatus.OK:
            assert bytes(request.buffer[:LENGTH]) == payload(number, LENGTH)
    return [outcome.status for outcome in outcomes]


# Folders that come late


async def filled(folder: Path, *names: str) -> None:
    """Put blocks 0 to 8, a third on each of three folders."""
    tier = array(folder, *names)
    await tier.open()
    await put(tier, *range(9))
    await tier.close()


async def test_a_folder_that_could_not_be_opened_is_used_once_it_can(tmp_path: Path) -> None:
    await filled(tmp_path, "a", "b", "c")
    (tmp_path / "b").chmod(0o777)
    tier = array(tmp_path, "a", "b", "c")
    await tier.open()
    assert (await found(tier, *range(9))).count(ReadStatus.OK) == 6
    assert "chmod 700" in tier.health().reason
    (tmp_path / "b").chmod(0o700)
    await until(lambda: len(tier.disks) == 3)
    assert await found(tier, *range(9)) == [ReadStatus.OK] * 9
    assert tier.capacity_bytes == 3 * CAPACITY
    assert tier.health().reason == ""
    news = tier.take_news()
    assert (len(news.found), len(news.lost)) == (3, 0)
    assert (len(tier.take_news().found), tier.check()) == (0, [])
    await tier.close()


async def test_a_folder_in_use_by_another_store_is_taken_when_that_ends(tmp_path: Path) -> None:
    other = disk(tmp_path / "b")
    await other.open()
    tier = array(tmp_path, "a", "b")
    await tier.open()
    assert "in use by process" in tier.health().reason
    await other.close()
    await until(lambda: len(tier.disks) == 2)
    await tier.close()


async def test_a_block_stored_again_meanwhile_is_kept_once(tmp_path: Path) -> None:
    await filled(tmp_path, "a", "b")
    (tmp_path / "b").chmod(0o777)
    tier = array(tmp_path, "a", "b")
    await tier.open()
    await put(tier, *range(9))
    (tmp_path / "b").chmod(0o700)
    await until(lambda: len(tier.disks) == 2)
    await until(lambda: len(tier.disks[1].copies) == 0)
    assert len(tier.take_news().found) == 0
    assert await found(tier, *range(9)) == [ReadStatus.OK] * 9
    await tier.close()


async def test_a_folder_that_stays_unusable_keeps_nothing_from_closing(tmp_path: Path) -> None:
    (tmp_path / "b").write_text("")
    tier = array(tmp_path, "a", "b")
    await tier.open()
    await asyncio.sleep(0.1)
    assert "File exists" in tier.health().reason
    await tier.close()
    assert not tier.health().is_up


async def test_a_disk_that_hangs_while_opening_does_not_hold_the_others(tmp_path: Path) -> None:
    io = StuckIO()
    io.sticking = "posix_fallocate"
    tier = array(tmp_path, "a", "b", b=io)
    await tier.open()
    assert "has not opened in 0.5 s" in tier.health().reason
    assert await put(tier, 1) == [WriteStatus.OK]
    io.is_moving.set()
    await until(lambda: len(tier.disks) == 2)
    await tier.close()


async def test_closing_does_not_wait_for_a_folder_that_hangs_while_opening(tmp_path: Path) -> None:
    io = StuckIO()
    (tmp_path / "b").write_text("")
    tier = array(tmp_path, "a", "b", b=io)
    await tier.open()
    io.sticking = "posix_fallocate"
    (tmp_path / "b").unlink()
    await asyncio.to_thread(io.is_stuck.wait, 10)
    async with asyncio.timeout(20):
        await tier.close()
    io.is_moving.set()


# Files that vanish


def delete_index(folder: Path) -> None:
    (folder / "index" / "data.mdb").unlink()


def replace_index(folder: Path) -> None:
    shutil.copy(folder / "index" / "data.mdb", folder / "index" / "copy")
    (folder / "index" / "copy").replace(folder / "index" / "data.mdb")


def delete_index_folder(folder: Path) -> None:
    shutil.rmtree(folder / "index")


def delete_slab(folder: Path) -> None:
    (folder / "slab").unlink()


def replace_slab(folder: Path) -> None:
    shutil.copy(folder / "slab", folder / "copy")
    (folder / "copy").replace(folder / "slab")


def replace_folder(folder: Path) -> None:
    folder.rename(folder.with_name("moved"))
    shutil.copytree(folder.with_name("moved"), folder)


VANISHING = [
    (delete_index, "its index was deleted or replaced"),
    (replace_index, "its index was deleted or replaced"),
    (delete_index_folder, "its index was deleted or replaced"),
    (delete_slab, "its slab was deleted or replaced"),
    (replace_slab, "its slab was deleted or replaced"),
    (replace_folder, "the folder was deleted or replaced"),
    (shutil.rmtree, "the folder was deleted or replaced"),
]
IDS = [vanish.__name__ for vanish, _ in VANISHING]


@pytest.mark.parametrize(("vanish", "reason"), VANISHING, ids=IDS)
async def test_files_that_vanish_are_noticed_by_the_next_write(
    tmp_path: Path, vanish: Callable[[Path], None], reason: str
) -> None:
    tier = SsdTier(tmp_path / "a", capacity_bytes=CAPACITY, renew_interval_s=1000)
    await tier.open()
    assert await put(tier, 1, 2) == [WriteStatus.OK] * 2
    await asyncio.to_thread(vanish, tmp_path / "a")
    assert await put(tier, 3) == [WriteStatus.UNAVAILABLE]
    assert not tier.health().is_up
    assert tier.health().reason == f"folder {tmp_path / 'a'}: {reason}: restart to begin anew"
    assert await found(tier, 1, 2, 3) == [ReadStatus.UNAVAILABLE] * 3
    await tier.close()


@pytest.mark.parametrize(("vanish", "reason"), VANISHING, ids=IDS)
async def test_files_that_vanish_are_noticed_without_a_write_and_said_once(
    tmp_path: Path,
    vanish: Callable[[Path], None],
    reason: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    tier = disk(tmp_path / "a")
    await tier.open()
    await put(tier, 1)
    await asyncio.to_thread(vanish, tmp_path / "a")
    await until(lambda: not tier.health().is_up)
    assert tier.is_gone
    await asyncio.sleep(0.1)
    assert caplog.text.count(reason) == 1
    await tier.close()


@pytest.mark.parametrize(("vanish", "reason"), VANISHING, ids=IDS)
async def test_a_restart_after_files_vanished_serves_right_bytes_or_none(
    tmp_path: Path, vanish: Callable[[Path], None], reason: str
) -> None:
    tier = disk(tmp_path / "a")
    await tier.open()
    await put(tier, *range(8))
    await asyncio.to_thread(vanish, tmp_path / "a")
    await put(tier, *range(8, 16))
    assert reason in tier.health().reason
    await tier.close()
    again = disk(tmp_path / "a")
    await again.open()
    assert set(await found(again, *range(16))) <= {ReadStatus.OK, ReadStatus.ABSENT, ReadStatus.CORRUPT}
    assert await put(again, *range(16)) == [WriteStatus.OK] * 16
    assert await found(again, *range(16)) == [ReadStatus.OK] * 16
    await again.close()


async def test_after_a_fault_of_a_read_the_files_are_looked_after(tmp_path: Path) -> None:
    tier = SsdTier(tmp_path / "a", capacity_bytes=CAPACITY, renew_interval_s=1000)
    await tier.open()
    await put(tier, 1)
    await asyncio.to_thread(delete_slab, tmp_path / "a")
    await asyncio.to_thread(os.ftruncate, tier._slab._fd, 0)
    assert await found(tier, 1) == [ReadStatus.CORRUPT]
    await until(lambda: tier.is_gone)
    await tier.close()


async def test_a_disk_whose_index_was_deleted_is_lost_to_the_array_and_the_others_serve(
    tmp_path: Path,
) -> None:
    tier = array(tmp_path, "a", "b", "c")
    await tier.open()
    await put(tier, *range(9))
    await asyncio.to_thread(delete_index, tmp_path / "b")
    await until(lambda: tier.disks[1].is_gone)
    assert tier.health().is_up
    assert "its index was deleted" in tier.health().reason
    news = tier.take_news()
    assert len(news.lost) == 3
    assert tier.take_news().lost == ()
    assert {header.block for header in news.lost} | {header.block for header in await tier.scan()} == {
        block_id(number) for number in range(9)
    }
    assert (tier.capacity_bytes, tier.used_bytes) == (2 * CAPACITY, 6 * LENGTH)
    assert await put(tier, *range(9)) == [WriteStatus.OK] * 9
    assert await found(tier, *range(9)) == [ReadStatus.OK] * 9
    await tier.close()


# Disks that never open


async def test_a_disk_that_hangs_while_opening_is_given_up_with_a_clear_error(tmp_path: Path) -> None:
    io = StuckIO()
    io.sticking = "posix_fallocate"
    tier = disk(tmp_path / "a", io=io, open_timeout_s=0.1)
    with pytest.raises(
        TierUnavailable, match=rf"ssd: folder {tmp_path}/a: has not opened in 0.1 s: the disk"
    ):
        await tier.open()
    with pytest.raises(TierUnavailable, match="an earlier attempt to open it has not ended"):
        await tier.open()
    assert not tier.health().is_up
    await tier.close()
    io.is_moving.set()


async def test_what_opens_too_late_is_released_and_can_be_opened_again(tmp_path: Path) -> None:
    io = StuckIO()
    tier = disk(tmp_path / "a", io=io, open_timeout_s=0.1)
    io.sticking = "posix_fallocate"
    with pytest.raises(TierUnavailable):
        await tier.open()
    io.sticking = ""
    io.is_moving.set()
    await until(lambda: tier._opening is not None and tier._opening.has_ended)
    assert not (tmp_path / "a" / "dirty").exists()
    other = disk(tmp_path / "a")
    await other.open()
    await other.close()
    patient = disk(tmp_path / "a", io=io)
    await patient.open()
    assert await put(patient, 1) == [WriteStatus.OK]
    await patient.close()


async def test_a_start_that_is_cancelled_while_opening_leaves_the_folder_free(tmp_path: Path) -> None:
    io = StuckIO()
    io.sticking = "posix_fallocate"
    tier = disk(tmp_path / "a", io=io)
    opening = asyncio.create_task(tier.open())
    await asyncio.to_thread(io.is_stuck.wait, 10)
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    io.is_moving.set()
    await until(lambda: tier._opening is not None and tier._opening.has_ended)
    io.sticking = ""
    await tier.open()
    assert await put(tier, 1) == [WriteStatus.OK]
    await tier.close()


async def test_a_manager_over_a_disk_that_hangs_while_opening_does_not_start(tmp_path: Path) -> None:
    io = StuckIO()
    io.sticking = "posix_fallocate"
    manager = BlockManager(
        DramTier(capacity_bytes=1 << 20), [disk(tmp_path / "a", io=io, open_timeout_s=0.1)]
    )
    with pytest.raises(TierUnavailable, match="has not opened"):
        await manager.open()
    io.is_moving.set()


def test_a_process_whose_disk_hangs_while_opening_ends() -> None:
    script = """
    import asyncio, tempfile
    from pathlib import Path
    from kvstore.errors import TierUnavailable
    from kvstore_tiers.ssd import SsdTier
    from tests.tiers.faulty_io import StuckIO
    async def main(folder):
        io = StuckIO()
        io.sticking = "posix_fallocate"
        try:
            await SsdTier(folder, capacity_bytes=1 << 20, open_timeout_s=0.1, io=io).open()
        except TierUnavailable:
            print("refused")
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(main(Path(folder) / "a"))
    """
    started_s = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert (done.stdout, done.returncode) == ("refused\n", 0), done.stderr
    assert time.monotonic() - started_s < 40, "the stuck operation would have taken 60 s"
