"""SsdTier: restarts, damage, and faults of single operations."""

import asyncio
import errno
import random
import subprocess
import sys
from pathlib import Path

import pytest

from kvstore.testing import FakeClock
from kvstore.tier import ReadStatus, WriteStatus
from kvstore_tiers.ssd import SsdTier
from kvstore_tiers.ssd_index import Change, IndexRecord, SsdIndex
from tests.tiers import ssd_writer
from tests.tiers.blocks import block_id, header, payload, to_read, to_write
from tests.tiers.faulty_io import BrokenIO, StuckIO
from tests.tiers.ssd_tiers import CAPACITY, LENGTH, ROOT, SLOT, opened, put, soon, statuses

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
    clock, io = FakeClock(), BrokenIO()
    tier = SsdTier(tmp_path / "a", capacity_bytes=CAPACITY, clock=clock, io=io)
    await tier.open()
    later = clock.now_s + 1000
    await tier.write([to_write(1, LENGTH)], deadline_s=later)
    io.error = errno.EIO
    for _ in range(3):
        (outcome,) = await tier.read([to_read(1, LENGTH)], deadline_s=later)
        assert outcome.status is ReadStatus.UNAVAILABLE
    assert tier.health().reason == "reading failed: Input/output error"
    assert await tier.write([to_write(2, LENGTH)], deadline_s=later) == [WriteStatus.UNAVAILABLE]
    io.error = 0
    clock.advance(1)
    (outcome,) = await tier.read([to_read(1, LENGTH)], deadline_s=later)
    assert outcome.status is ReadStatus.OK
    assert tier.health().is_up
    assert tier.used_bytes == SLOT
    await tier.close()


async def test_a_stuck_disk_takes_the_tier_down_and_holds_nobody_else(tmp_path: Path) -> None:
    clock, io = FakeClock(), StuckIO()
    tier = SsdTier(tmp_path / "a", capacity_bytes=CAPACITY, clock=clock, io_threads=1, io=io)
    await tier.open()
    await tier.write([to_write(1, LENGTH)], deadline_s=clock.now_s + 10)
    io.sticking = "preadv"
    stuck = asyncio.create_task(tier.read([to_read(1, LENGTH)], deadline_s=clock.now_s + 10))
    await asyncio.to_thread(io.is_stuck.wait, 10)
    (outcome,) = await tier.read([to_read(1, LENGTH)], deadline_s=clock.now_s + 0.05)
    assert outcome.status is ReadStatus.TIMED_OUT
    clock.advance(3)
    assert tier.health().reason == "a disk operation has taken 3 s so far"
    (outcome,) = await tier.read([to_read(1, LENGTH)], deadline_s=clock.now_s + 10)
    assert outcome.status is ReadStatus.UNAVAILABLE
    io.sticking = ""
    io.is_moving.set()
    assert [outcome.status for outcome in await stuck] == [ReadStatus.OK]
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
