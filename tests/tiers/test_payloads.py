"""Payloads in slots that touch are moved by one system call; where it fails, each is tried by itself."""

import errno
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvstore.tier import ReadRequest, ReadStatus, WriteRequest, WriteStatus
from kvstore_tiers.disk_io import OsDiskIO
from kvstore_tiers.slab import Slab
from kvstore_tiers.ssd import SsdTier
from tests.tiers.blocks import LAYOUT, block_id, header, payload, to_read, to_write
from tests.tiers.faulty_io import BrokenIO
from tests.tiers.ssd_tiers import put, soon, statuses

CAPACITY = 16 << 20
LENGTH = 10_000
SLOT = 12_288


class BadSectorIO(OsDiskIO):
    """Real, but for reads and writes that touch the slab at one offset."""

    def __init__(self, bad_offset: int, *, reads: bool = True) -> None:
        self._bad_offset = bad_offset
        self._reads = reads

    def _meet(self, buffers: Sequence[memoryview], offset: int) -> None:
        if offset <= self._bad_offset < offset + sum(map(len, buffers)):
            raise OSError(errno.EIO, "Input/output error")

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if self._reads:
            self._meet(buffers, offset)
        return super().preadv(fd, buffers, offset)

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if not self._reads:
            self._meet(buffers, offset)
        return super().pwritev(fd, buffers, offset)


class StingyIO(OsDiskIO):
    """Real, but moves at most ``most_bytes`` in one call, a multiple of 4096."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes

    def _first(self, buffers: Sequence[memoryview]) -> list[memoryview]:
        left = self._most_bytes
        taken: list[memoryview] = []
        for buffer in buffers:
            if left:
                taken.append(buffer[:left])
                left -= len(taken[-1])
        return taken

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        return super().preadv(fd, self._first(buffers), offset)

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        return super().pwritev(fd, self._first(buffers), offset)


async def opened(folder: Path, io: OsDiskIO, **settings: object) -> SsdTier:
    tier = SsdTier(folder / "a", capacity_bytes=CAPACITY, io=io, **settings)  # type: ignore[arg-type]
    await tier.open()
    return tier


def skip_without_direct_io(tier: SsdTier) -> None:
    if not tier._slab.is_direct:
        pytest.skip("the file system has no O_DIRECT, without which payloads are moved one by one")


async def test_neighbours_are_moved_by_one_call(tmp_path: Path) -> None:
    io = BrokenIO()
    tier = await opened(tmp_path, io)
    skip_without_direct_io(tier)
    assert await put(tier, *range(20), length=LENGTH) == [WriteStatus.OK] * 20
    assert await statuses(tier, *range(20), length=LENGTH) == [ReadStatus.OK] * 20
    assert (io.num_writes, io.num_reads) == (1, 1)
    await tier.close()


async def test_blocks_asked_for_in_any_order_and_with_gaps_come_right(tmp_path: Path) -> None:
    io = BrokenIO()
    tier = await opened(tmp_path, io)
    skip_without_direct_io(tier)
    await put(tier, *range(30), length=LENGTH)
    await tier.drop([block_id(number) for number in (3, 4, 17)])
    order = [29, 0, 2, 1, 5, 16, 18, 28, 6]
    assert await statuses(tier, *order, length=LENGTH) == [ReadStatus.OK] * len(order)
    assert io.num_reads == 5
    await tier.close()


async def test_neighbours_of_several_sizes_come_right(tmp_path: Path) -> None:
    tier = await opened(tmp_path, OsDiskIO())
    lengths = [1, 4096, 4097, 100_000, 12_288, 8191] * 3
    requests = [to_write(number, length) for number, length in enumerate(lengths)]
    assert set(await tier.write(requests, deadline_s=soon())) == {WriteStatus.OK}
    reads = [to_read(number, length) for number, length in enumerate(lengths)]
    outcomes = await tier.read(reads, deadline_s=soon())
    assert {outcome.status for outcome in outcomes} == {ReadStatus.OK}
    assert [bytes(read.buffer[:length]) for read, length in zip(reads, lengths, strict=True)] == [
        payload(number, length) for number, length in enumerate(lengths)
    ]
    await tier.close()


async def test_a_bad_sector_among_neighbours_costs_one_block(tmp_path: Path) -> None:
    tier = await opened(tmp_path, BadSectorIO(3 * SLOT + 5000))
    await put(tier, *range(10), length=LENGTH)
    found = await statuses(tier, *range(10), length=LENGTH)
    assert found == [ReadStatus.OK] * 3 + [ReadStatus.UNAVAILABLE] + [ReadStatus.OK] * 6
    await tier.close()


async def test_a_sector_that_cannot_be_written_costs_one_block(tmp_path: Path) -> None:
    tier = await opened(tmp_path, BadSectorIO(3 * SLOT + 5000, reads=False))
    written = await put(tier, *range(10), length=LENGTH)
    assert written == [WriteStatus.OK] * 3 + [WriteStatus.UNAVAILABLE] + [WriteStatus.OK] * 6
    assert (await statuses(tier, *range(10), length=LENGTH)).count(ReadStatus.OK) == 9
    assert tier.used_bytes == 9 * SLOT
    await tier.close()


@pytest.mark.parametrize("most_bytes", [4096, 8192, 20_480, 65_536])
async def test_calls_that_move_only_a_part_are_gone_on_with(tmp_path: Path, most_bytes: int) -> None:
    tier = await opened(tmp_path, StingyIO(most_bytes))
    assert await put(tier, *range(20), length=LENGTH) == [WriteStatus.OK] * 20
    assert await statuses(tier, *range(20), length=LENGTH) == [ReadStatus.OK] * 20
    await tier.close()


async def test_buffers_that_the_device_cannot_use_come_right_among_those_it_can(tmp_path: Path) -> None:
    tier = await opened(tmp_path, OsDiskIO())
    requests = [to_write(number, LENGTH) for number in range(6)]
    odd = memoryview(bytearray(LENGTH + 1))[1:]
    odd[:] = payload(2, LENGTH)
    requests[2] = WriteRequest(header(2, payload(2, LENGTH)), odd)
    assert await tier.write(requests, deadline_s=soon()) == [WriteStatus.OK] * 6
    reads = [to_read(number, LENGTH) for number in range(6)]
    reads[4] = ReadRequest(block_id(4), LAYOUT, LENGTH, memoryview(bytearray(LENGTH + 1))[1:])
    assert {outcome.status for outcome in await tier.read(reads, deadline_s=soon())} == {ReadStatus.OK}
    assert [bytes(read.buffer[:LENGTH]) for read in reads] == [payload(n, LENGTH) for n in range(6)]
    await tier.close()


async def test_damage_among_neighbours_is_found_in_the_block_that_has_it(tmp_path: Path) -> None:
    tier = await opened(tmp_path, OsDiskIO())
    await put(tier, *range(10), length=LENGTH)
    with (tmp_path / "a" / "slab").open("r+b") as slab:
        slab.seek(6 * SLOT + 77)
        slab.write(b"other")
    found = await statuses(tier, *range(10), length=LENGTH)
    assert found == [ReadStatus.OK] * 6 + [ReadStatus.CORRUPT] + [ReadStatus.OK] * 3
    await tier.close()


async def test_no_call_for_many_blocks_begins_after_its_deadline(tmp_path: Path) -> None:
    io = BrokenIO()
    tier = await opened(tmp_path, io)
    skip_without_direct_io(tier)
    await put(tier, *range(10), length=LENGTH)
    before = time.monotonic() - 1
    outcomes = await tier.read([to_read(number, LENGTH) for number in range(10)], deadline_s=before)
    written = await tier.write([to_write(number, LENGTH) for number in range(10, 20)], deadline_s=before)
    assert {outcome.status for outcome in outcomes} == {ReadStatus.TIMED_OUT}
    assert set(written) == {WriteStatus.TIMED_OUT}
    assert (io.num_writes, io.num_reads) == (1, 0)
    await tier.close()


def test_without_direct_io_neighbours_are_moved_one_by_one(tmp_path: Path) -> None:
    with (tmp_path / "slab").open("w+b") as file:
        slab = Slab(file.fileno(), is_direct=False)
        lengths = [5000, 4096, 1]
        slab.write_run(4096, [(memoryview(bytearray(payload(n, n))), n) for n in lengths])
        found = [(memoryview(bytearray(length)), length) for length in lengths]
        slab.read_run(4096, found)
    assert [bytes(buffer) for buffer, _ in found] == [payload(length, length) for length in lengths]


async def test_more_than_one_turn_of_neighbours_comes_right(tmp_path: Path) -> None:
    io = BrokenIO()
    tier = await opened(tmp_path, io)
    skip_without_direct_io(tier)
    length = 300_000
    assert await put(tier, *range(40), length=length) == [WriteStatus.OK] * 40
    assert await statuses(tier, *range(40), length=length) == [ReadStatus.OK] * 40
    # 4 MiB hold 13 blocks of 74 pages, 2 MiB hold 6: turns of 13, 13, 13 and 1, in runs of at most 6.
    assert (io.num_writes, io.num_reads) == (10, 10)
    await tier.close()
