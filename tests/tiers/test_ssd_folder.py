"""SsdTier: folders that are full, foreign, read-only, deleted or in use."""

import asyncio
import fcntl
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from kvstore.errors import TierUnavailable
from kvstore.tier import ReadRequest, ReadStatus, WriteRequest, WriteStatus
from kvstore_tiers.ssd import SsdTier
from kvstore_tiers.ssd_index import map_size_bytes, max_records
from tests.tiers.blocks import LAYOUT, aligned, block_id, header, to_write
from tests.tiers.ssd_tiers import CAPACITY, LENGTH, ROOT, disk_bytes, opened, put, soon, statuses


async def test_the_disk_never_holds_more_than_slab_and_index_over_runs(tmp_path: Path) -> None:
    for run in range(3):
        async with opened(tmp_path / "a") as tier:
            for number in range(run * 1000, run * 1000 + 160):
                if not tier.has_room(LENGTH):
                    await tier.drop([(await tier.scan())[0].block])
                assert await put(tier, number) == [WriteStatus.OK]
        assert disk_bytes(tmp_path / "a") <= CAPACITY + map_size_bytes(CAPACITY) + 65536


async def test_an_index_without_room_makes_a_tier_full_before_it_fails(tmp_path: Path) -> None:
    capacity = 100 << 20
    most = max_records(capacity)
    assert most < capacity // 4096
    async with opened(tmp_path / "a", capacity_bytes=capacity) as tier:
        request = to_write(1, 100)
        for start in range(0, capacity // 4096, 512):
            requests = [
                WriteRequest(header(number, request.buffer[:100].tobytes()), request.buffer)
                for number in range(start, start + 512)
            ]
            written = await tier.write(requests, deadline_s=soon())
            assert set(written) <= {WriteStatus.OK, WriteStatus.FULL}
        assert len(await tier.scan()) == most
        assert not tier.has_room(100)
        await tier.drop([block_id(number) for number in range(1000)])
        assert await put(tier, 1) == [WriteStatus.OK]


async def test_files_are_private(tmp_path: Path) -> None:
    async with opened(tmp_path / "a"):
        modes = {path.stat().st_mode & 0o077 for path in [tmp_path / "a", *(tmp_path / "a").rglob("*")]}
        assert modes == {0}


async def test_a_second_process_is_refused_with_the_owner_and_the_folder(tmp_path: Path) -> None:
    async with opened(tmp_path / "a"):
        with pytest.raises(TierUnavailable, match=rf"{tmp_path}/a: in use by process {os.getpid()}"):
            await SsdTier(tmp_path / "a", capacity_bytes=CAPACITY).open()
    async with opened(tmp_path / "a"):
        pass


async def test_a_folder_others_may_write_to_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a").chmod(0o777)
    with pytest.raises(TierUnavailable, match="chmod 700"):
        await SsdTier(tmp_path / "a", capacity_bytes=CAPACITY).open()


@pytest.mark.parametrize("name", ["slab", "lock", "dirty"])
async def test_planted_symbolic_links_are_not_followed(tmp_path: Path, name: str) -> None:
    (tmp_path / "a").mkdir(mode=0o700)
    (tmp_path / "victim").write_text("mine")
    (tmp_path / "a" / name).symlink_to(tmp_path / "victim")
    with pytest.raises(TierUnavailable, match="symbolic links are not followed"):
        await SsdTier(tmp_path / "a", capacity_bytes=CAPACITY).open()
    assert (tmp_path / "victim").read_text() == "mine"


async def test_a_file_in_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("")
    with pytest.raises(TierUnavailable, match="cannot be used: File exists"):
        await SsdTier(tmp_path / "a", capacity_bytes=CAPACITY).open()


async def test_a_deleted_folder_takes_the_tier_down_and_nothing_else(tmp_path: Path) -> None:
    tier = SsdTier(tmp_path / "a", capacity_bytes=CAPACITY)
    await tier.open()
    await put(tier, 1)
    await asyncio.to_thread(subprocess.run, ["rm", "-r", str(tmp_path / "a")], check=True)
    assert await put(tier, 2) == [WriteStatus.UNAVAILABLE]
    assert "was deleted" in tier.health().reason
    assert await statuses(tier, 1) == [ReadStatus.UNAVAILABLE]
    await tier.close()


async def test_a_forked_child_leaves_the_tier_alone(tmp_path: Path) -> None:
    async with opened(tmp_path / "a") as tier:
        await put(tier, 1)
        tier._pid = -1
        assert await statuses(tier, 1) == [ReadStatus.UNAVAILABLE]
        assert await put(tier, 2) == [WriteStatus.UNAVAILABLE]
        await tier.close()
        tier._pid = os.getpid()
        assert await statuses(tier, 1) == [ReadStatus.OK]


def in_own_mounts(folder: Path, mount_options: str, script: str) -> str:
    """Run a script with a small tmpfs on ``folder``; returns what it says."""
    setup = f"mount -t tmpfs -o {mount_options} tmpfs {folder} && exec {sys.executable} -"
    prologue = "import asyncio, time\nfrom pathlib import Path\n"
    prologue += f"FOLDER = Path({str(folder)!r}) / 'a'\n"
    done = subprocess.run(
        ["unshare", "-Urm", "sh", "-c", setup],
        input=prologue + textwrap.dedent(script),
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    if "unshare" in done.stderr or "mount:" in done.stderr:
        pytest.skip(f"no user namespaces or mounts here: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_disk_too_small_is_refused_at_open_and_left_as_it_was(tmp_path: Path) -> None:
    said = in_own_mounts(
        tmp_path,
        "size=24m",
        """
        from kvstore_tiers.ssd import SsdTier
        from kvstore.errors import TierUnavailable
        try:
            asyncio.run(SsdTier(FOLDER, capacity_bytes=64 << 20).open())
        except TierUnavailable as error:
            print(error)
        print((FOLDER / "slab").exists())
        """,
    )
    assert "No space left on device: free space on that disk, or lower the capacity" in said
    assert said.endswith("False\n")


def test_a_disk_filled_by_others_does_not_touch_what_was_reserved(tmp_path: Path) -> None:
    said = in_own_mounts(
        tmp_path,
        "size=32m",
        """
        from kvstore_tiers.ssd import SsdTier
        from tests.tiers.blocks import *
        async def main():
            tier = SsdTier(FOLDER, capacity_bytes=8 << 20)
            await tier.open()
            try:
                (FOLDER / "other").write_bytes(bytes(32 << 20))
            except OSError as error:
                print(error.strerror)
            far = time.monotonic() + 30
            statuses = await tier.write([to_write(n, 100_000) for n in range(90)], deadline_s=far)
            print(statuses.count(WriteStatus.OK), statuses.count(WriteStatus.FULL))
            await tier.drop([block_id(n) for n in range(90)])
            print(await tier.write([to_write(5, 100_000)], deadline_s=far))
            await tier.close()
        from kvstore.tier import WriteStatus
        asyncio.run(main())
        """,
    )
    assert said.splitlines() == ["No space left on device", "81 9", "[<WriteStatus.OK: 'ok'>]"]


def test_a_read_only_disk_is_refused_with_the_remedy(tmp_path: Path) -> None:
    said = in_own_mounts(
        tmp_path,
        "size=1m,ro",
        """
        from kvstore_tiers.ssd import SsdTier
        from kvstore.errors import TierUnavailable
        try:
            asyncio.run(SsdTier(FOLDER, capacity_bytes=1 << 20).open())
        except TierUnavailable as error:
            print(error)
        """,
    )
    assert "Read-only file system: remount it writable, or name another folder" in said


async def test_the_lock_ends_with_the_process(tmp_path: Path) -> None:
    async with opened(tmp_path / "a"):
        pass
    fd = os.open(tmp_path / "a" / "lock", os.O_RDWR)
    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(fd)


async def test_reads_of_a_short_request_do_not_reach_other_blocks(tmp_path: Path) -> None:
    async with opened(tmp_path / "a") as tier:
        await put(tier, 1)
        request = ReadRequest(block_id(1), LAYOUT, 10, aligned(10))
        (outcome,) = await tier.read([request], deadline_s=soon())
        assert outcome.status is ReadStatus.MISMATCH
        assert bytes(request.buffer[:10]) == bytes(10)
