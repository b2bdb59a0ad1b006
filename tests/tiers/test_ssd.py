"""SsdTier: restarts, damage, limits, and folders that cannot be used."""

import asyncio
import fcntl
import os
import random
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from kvstore.errors import TierUnavailable
from kvstore.testing import FakeClock
from kvstore.tier import ReadRequest, ReadStatus, WriteRequest, WriteStatus
from kvstore_tiers.ssd import SsdTier
from kvstore_tiers.ssd_index import Change, IndexRecord, SsdIndex, map_size_bytes, max_records
from tests.tiers import ssd_writer
from tests.tiers.blocks import LAYOUT, aligned, block_id, header, payload, to_read, to_write

LENGTH = 40_000
SLOT = 40_960
CAPACITY = 4 << 20
ROOT = Path(__file__).parents[2]


def soon() -> float:
    return time.monotonic() + 30


@asynccontextmanager
async def opened(folder: Path, *, capacity_bytes: int = CAPACITY) -> AsyncIterator[SsdTier]:
    tier = SsdTier(folder, capacity_bytes=capacity_bytes)
    await tier.open()
    try:
        yield tier
        assert tier.check() == []
    finally:
        await tier.close()


async def put(tier: SsdTier, *numbers: int, length: int = LENGTH) -> list[WriteStatus]:
    return await tier.write([to_write(number, length) for number in numbers], deadline_s=soon())


async def statuses(tier: SsdTier, *numbers: int, length: int = LENGTH) -> list[ReadStatus]:
    requests = [to_read(number, length) for number in numbers]
    outcomes = await tier.read(requests, deadline_s=soon())
    for number, request, outcome in zip(numbers, requests, outcomes, strict=True):
        if outcome.status is ReadStatus.OK:
            assert bytes(request.buffer[:length]) == payload(number, length)
    return [outcome.status for outcome in outcomes]


def disk_bytes(folder: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())


# Restarts


async def test_blocks_and_their_order_of_use_are_there_after_a_restart(tmp_path: Path) -> None:
    async with opened(tmp_path / "a") as tier:
        await put(tier, *range(10))
        await tier.drop([block_id(3)])
        await tier.touch([block_id(0)])
    async with opened(tmp_path / "a") as tier:
        kept = [1, 2, 4, 5, 6, 7, 8, 9, 0]
        assert [found.block for found in await tier.scan()] == [block_id(number) for number in kept]
        assert await statuses(tier, *kept, 3) == [ReadStatus.OK] * 9 + [ReadStatus.ABSENT]
        assert tier.used_bytes == 9 * SLOT
        assert tier.health().is_up


async def test_a_killed_writer_loses_nothing_it_acknowledged_and_leaves_nothing_torn(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    dice = random.Random(7)
    may_hold: dict[int, set[int | None]] = {number: {None} for number in range(60)}
    first = 0
    for _ in range(6):
        first = await asyncio.to_thread(run_writer_and_kill_it, folder, first, dice, may_hold)
        async with opened(folder, capacity_bytes=ssd_writer.CAPACITY) as tier:
            for number, versions in may_hold.items():
                found = await version_of(tier, number, versions)
                assert found in versions
                versions.intersection_update({found})


def run_writer_and_kill_it(
    folder: Path, first: int, dice: random.Random, may_hold: dict[int, set[int | None]]
) -> int:
    command = [sys.executable, "-m", "tests.tiers.ssd_writer", str(folder), str(first)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        for count, line in enumerate(writer.stdout):
            if count == dice.randrange(20, 120) or count > 150:
                writer.kill()
            word, *values = line.split()
            numbers = [int(value) for value in values]
            if word == "start":
                may_hold[numbers[0]].add(numbers[1])
                first = numbers[1] + 1
            elif word == "ack":
                may_hold[numbers[0]] = {numbers[1]}
            elif word == "start-drop":
                may_hold[numbers[0]].add(None)
            elif word == "drop":
                may_hold[numbers[0]] = {None}
        writer.kill()
    return first


async def version_of(tier: SsdTier, number: int, versions: set[int | None]) -> int | None:
    request = to_read(number, ssd_writer.LENGTH)
    (outcome,) = await tier.read([request], deadline_s=soon())
    if outcome.status is ReadStatus.ABSENT:
        return None
    assert outcome.status is ReadStatus.OK
    data = bytes(request.buffer[: ssd_writer.LENGTH])
    found = [v for v in versions if v is not None and payload(number + 1000 * v, ssd_writer.LENGTH) == data]
    assert len(found) == 1
    return found[0]


async def test_twenty_thousand_blocks_are_known_again(tmp_path: Path) -> None:
    folder, blocks, data = tmp_path / "a", 20_000, bytes(65536)
    capacity = blocks * 65536
    async with opened(folder, capacity_bytes=capacity):
        pass
    index = SsdIndex.open(folder / "index", capacity_bytes=capacity)
    for start in range(0, blocks, 10_000):
        numbers = range(start, start + 10_000)
        records = [IndexRecord(header(n, data), 65536 * n, 65536, n + 1, n + 1) for n in numbers]
        index.commit([Change.store(record) for record in records])
    index.close()
    tier = SsdTier(folder, capacity_bytes=capacity)
    await tier.open()
    assert len(await tier.scan()) == blocks
    await tier.close()


async def test_a_larger_capacity_keeps_what_is_there_and_a_smaller_one_what_fits(tmp_path: Path) -> None:
    async with opened(tmp_path / "a", capacity_bytes=5 * SLOT) as tier:
        await put(tier, *range(5))
    async with opened(tmp_path / "a", capacity_bytes=8 * SLOT) as tier:
        assert await statuses(tier, *range(5)) == [ReadStatus.OK] * 5
        assert await put(tier, 5, 6, 7) == [WriteStatus.OK] * 3
    async with opened(tmp_path / "a", capacity_bytes=2 * SLOT) as tier:
        assert sorted(await statuses(tier, *range(8)), key=str).count(ReadStatus.OK) == 2
        assert (tmp_path / "a" / "slab").stat().st_size == 2 * SLOT
        assert tier.used_bytes == 2 * SLOT


async def test_an_index_of_another_format_is_set_aside(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with opened(tmp_path / "a") as tier:
        await put(tier, 1)
    index = SsdIndex.open(tmp_path / "a" / "index", capacity_bytes=CAPACITY)
    with index._env.begin(write=True) as transaction:
        transaction.put(b"s", b"KVSSD\0\0\0\x63\0\0\0")
    index.close()
    async with opened(tmp_path / "a") as tier:
        assert await statuses(tier, 1) == [ReadStatus.ABSENT]
        assert await put(tier, 1) == [WriteStatus.OK]
    assert "starting empty" in caplog.text
    assert not (tmp_path / "a" / "index.damaged").exists()


async def test_without_its_slab_an_index_is_worth_nothing(tmp_path: Path) -> None:
    async with opened(tmp_path / "a") as tier:
        await put(tier, 1)
    (tmp_path / "a" / "slab").unlink()
    async with opened(tmp_path / "a") as tier:
        assert await statuses(tier, 1) == [ReadStatus.ABSENT]
        assert tier.used_bytes == 0


@pytest.mark.parametrize("cut", [0, 4096, 100_000])
async def test_a_cut_index_after_a_crash_costs_its_content_and_nothing_else(tmp_path: Path, cut: int) -> None:
    async with opened(tmp_path / "a") as tier:
        await put(tier, *range(50))
    (tmp_path / "a" / "dirty").touch()
    data = tmp_path / "a" / "index" / "data.mdb"
    with data.open("r+b") as file:
        file.seek(cut)
        file.write(b"\xa5" * (data.stat().st_size - cut))
    async with opened(tmp_path / "a") as tier:
        assert set(await statuses(tier, *range(50))) <= {ReadStatus.OK, ReadStatus.ABSENT}
        await tier.drop([block_id(number) for number in range(50)])
        assert await put(tier, 1) == [WriteStatus.OK]


async def test_bit_flips_anywhere_in_the_index_never_lead_to_wrong_bytes(tmp_path: Path) -> None:
    async with opened(tmp_path / "a", capacity_bytes=CAPACITY) as tier:
        await put(tier, *range(20))
    data = tmp_path / "a" / "index" / "data.mdb"
    sound = data.read_bytes()
    used = len(sound.rstrip(b"\0"))
    dice = random.Random(11)
    for _ in range(8):
        (tmp_path / "a" / "dirty").touch()
        damaged = bytearray(sound[:used])
        for _ in range(40):
            damaged[dice.randrange(used)] ^= 1 << dice.randrange(8)
        data.write_bytes(damaged + sound[used:])
        async with opened(tmp_path / "a") as tier:
            allowed = {ReadStatus.OK, ReadStatus.ABSENT, ReadStatus.CORRUPT, ReadStatus.MISMATCH}
            assert set(await statuses(tier, *range(20))) <= allowed


# Damage


async def test_a_flipped_bit_is_found_and_its_slot_is_not_used_again(tmp_path: Path) -> None:
    async with opened(tmp_path / "a", capacity_bytes=3 * SLOT) as tier:
        await put(tier, 1, 2)
        with (tmp_path / "a" / "slab").open("r+b") as slab:
            slab.seek(100)
            byte = slab.read(1)[0]
            slab.seek(100)
            slab.write(bytes([byte ^ 4]))
        assert sorted(await statuses(tier, 1, 2), key=str) == [ReadStatus.CORRUPT, ReadStatus.OK]
        assert ReadStatus.ABSENT in await statuses(tier, 1, 2)
        assert tier.counters["corrupt"] == 1
        assert tier.used_bytes == 2 * SLOT
        assert await put(tier, 3) == [WriteStatus.OK]
        assert await put(tier, 4) == [WriteStatus.FULL]
    async with opened(tmp_path / "a", capacity_bytes=3 * SLOT) as tier:
        assert tier.used_bytes == 2 * SLOT


async def test_a_block_filed_under_another_key_is_not_served(tmp_path: Path) -> None:
    async with opened(tmp_path / "a") as tier:
        await put(tier, 1)
    index = SsdIndex.open(tmp_path / "a" / "index", capacity_bytes=CAPACITY)
    with index._env.begin(write=True) as transaction:
        value = transaction.get(b"b" + block_id(1).storage_key)
        transaction.put(b"b" + block_id(2).storage_key, value)
    index.close()
    async with opened(tmp_path / "a") as tier:
        assert await statuses(tier, 1, 2) == [ReadStatus.OK, ReadStatus.ABSENT]


async def test_a_sound_record_of_another_block_over_the_same_slot_is_never_wrong(tmp_path: Path) -> None:
    async with opened(tmp_path / "a") as tier:
        await put(tier, 1)
    index = SsdIndex.open(tmp_path / "a" / "index", capacity_bytes=CAPACITY)
    foreign = IndexRecord(header(2, payload(2, LENGTH)), 0, SLOT, 99, 99)
    index.commit([Change.store(foreign)])
    index.close()
    async with opened(tmp_path / "a") as tier:
        assert await statuses(tier, 1, 2) == [ReadStatus.ABSENT, ReadStatus.CORRUPT]


async def test_a_read_that_fails_is_a_status_and_the_tier_heals(tmp_path: Path) -> None:
    clock = FakeClock()
    tier = SsdTier(tmp_path / "a", capacity_bytes=CAPACITY, clock=clock)
    await tier.open()
    later = clock.now_s + 1000
    await tier.write([to_write(1, LENGTH)], deadline_s=later)
    sound, tier._store.slab = tier._store.slab, BrokenSlab()
    for _ in range(3):
        (outcome,) = await tier.read([to_read(1, LENGTH)], deadline_s=later)
        assert outcome.status is ReadStatus.UNAVAILABLE
    assert tier.health().reason == "reading failed: Input/output error"
    assert await tier.write([to_write(2, LENGTH)], deadline_s=later) == [WriteStatus.UNAVAILABLE]
    tier._store.slab = sound
    clock.advance(1)
    (outcome,) = await tier.read([to_read(1, LENGTH)], deadline_s=later)
    assert outcome.status is ReadStatus.OK
    assert tier.health().is_up
    assert tier.used_bytes == SLOT
    await tier.close()


class BrokenSlab:
    def read(self, offset: int, buffer: memoryview, length_bytes: int) -> None:
        raise OSError(5, "Input/output error")

    write = read


class StuckSlab:
    def __init__(self) -> None:
        self.is_moving = threading.Event()

    def read(self, offset: int, buffer: memoryview, length_bytes: int) -> None:
        self.is_moving.wait(30)
        raise OSError(5, "Input/output error")


async def test_a_stuck_disk_takes_the_tier_down_and_holds_nobody_else(tmp_path: Path) -> None:
    clock = FakeClock()
    tier = SsdTier(tmp_path / "a", capacity_bytes=CAPACITY, clock=clock, io_threads=1)
    await tier.open()
    await tier.write([to_write(1, LENGTH)], deadline_s=clock.now_s + 10)
    sound, tier._store.slab = tier._store.slab, StuckSlab()
    stuck = asyncio.create_task(tier.read([to_read(1, LENGTH)], deadline_s=clock.now_s + 10))
    await asyncio.sleep(0)
    (outcome,) = await tier.read([to_read(1, LENGTH)], deadline_s=clock.now_s + 0.05)
    assert outcome.status is ReadStatus.TIMED_OUT
    clock.advance(3)
    assert tier.health().reason == "a disk operation has taken 3 s so far"
    (outcome,) = await tier.read([to_read(1, LENGTH)], deadline_s=clock.now_s + 10)
    assert outcome.status is ReadStatus.UNAVAILABLE
    tier._store.slab.is_moving.set()
    assert [outcome.status for outcome in await stuck] == [ReadStatus.UNAVAILABLE]
    tier._store.slab = sound
    assert tier.health().is_up
    await tier.close()


async def test_writers_at_the_same_time_share_commits(tmp_path: Path) -> None:
    async with opened(tmp_path / "a") as tier:
        await asyncio.gather(*(put(tier, number) for number in range(40)))
        assert tier.counters["commits"] < 30
        assert await statuses(tier, *range(40)) == [ReadStatus.OK] * 40


async def test_uses_of_very_many_blocks_are_kept_at_close(tmp_path: Path) -> None:
    async with opened(tmp_path / "a", capacity_bytes=32 << 20) as tier:
        for start in range(0, 6000, 500):
            await put(tier, *range(start, start + 500), length=10)
        await tier.touch([block_id(number) for number in reversed(range(6000))])
    async with opened(tmp_path / "a", capacity_bytes=32 << 20) as tier:
        found = [header.block for header in await tier.scan()]
        assert found == [block_id(number) for number in reversed(range(6000))]


async def test_a_slot_is_not_reused_while_it_is_read(tmp_path: Path) -> None:
    async with opened(tmp_path / "a", capacity_bytes=SLOT) as tier:
        for number in range(30):
            assert await put(tier, number) == [WriteStatus.OK]
            read, _, written = await asyncio.gather(
                statuses(tier, number), tier.drop([block_id(number)]), put(tier, number + 1)
            )
            assert read[0] in (ReadStatus.OK, ReadStatus.ABSENT)
            await tier.drop([block_id(number + 1)])
            assert written[0] in (WriteStatus.OK, WriteStatus.FULL)


# Limits and folders


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


# Recency and limits over kills and restarts


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
