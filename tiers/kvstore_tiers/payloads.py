"""Payloads: reads and writes of payloads in the slab of one disk, several per system call where they touch.

A call for many payloads is cut into turns of a thread, in the order they were asked for, since those of a
chain's start are wanted first. Within a turn, payloads in slots that touch are moved by one system call: for
blocks of 64 KiB that takes a quarter of the time (measured: 1.3 GB/s one by one, 4.3 GB/s sixteen at once).
Where such a call fails, each of its payloads is tried by itself, so that a bad sector costs one block.
"""

import errno
import functools
from collections.abc import Callable, Iterator, Sequence

from kvstore.checksum import checksum
from kvstore.errors import CorruptBlock
from kvstore.tier import ReadStatus, WriteStatus
from kvstore_tiers.disk_turns import DiskOutcome, DiskTurns, Turn
from kvstore_tiers.jobs import Jobs
from kvstore_tiers.slab import Payload, Slab
from kvstore_tiers.ssd_record import IndexRecord

Place = tuple[memoryview, IndexRecord]
"""A payload's buffer and where it lies."""

_TURN_BYTES = 4 << 20
_RUN_BYTES = 2 << 20
"""Most bytes of one system call for several payloads: a deadline is looked at between two of them."""

_RUN_PAYLOADS = 256


class Payloads:
    """Moves payloads in threads. No call raises for a fault of the disk; none begins after its deadline."""

    def __init__(self, clock: Callable[[], float], turns: DiskTurns, *, reads: Jobs, writes: Jobs) -> None:
        self._clock = clock
        self._turns = turns
        self._reads = reads
        self._writes = writes

    async def read(self, slab: Slab, places: Sequence[Place], deadline_s: float) -> list[DiskOutcome]:
        """Read payloads into their buffers, and take their checksums."""

        def read_run(run: Sequence[Place]) -> list[DiskOutcome]:
            return self._read_run(slab, run, deadline_s)

        return await self._move(self._reads, places, deadline_s, read_run, DiskOutcome(ReadStatus.TIMED_OUT))

    async def write(self, slab: Slab, places: Sequence[Place], deadline_s: float) -> list[DiskOutcome]:
        """Write payloads into their slots."""

        def write_run(run: Sequence[Place]) -> list[DiskOutcome]:
            return self._write_run(slab, run, deadline_s)

        return await self._move(
            self._writes, places, deadline_s, write_run, DiskOutcome(WriteStatus.TIMED_OUT)
        )

    async def _move(
        self,
        jobs: Jobs,
        places: Sequence[Place],
        deadline_s: float,
        move: Callable[[Sequence[Place]], list[DiskOutcome]],
        late: DiskOutcome,
    ) -> list[DiskOutcome]:
        parts = list(_turns_of(places))
        turns = [self._turn(part, move, late) for part in parts]
        outcomes: list[DiskOutcome] = []
        for part, ended in zip(parts, await self._turns.run(jobs, deadline_s, turns), strict=True):
            outcomes += [late] * len(part) if ended is None else ended
        return outcomes

    def _turn(
        self,
        places: Sequence[Place],
        move: Callable[[Sequence[Place]], list[DiskOutcome]],
        late: DiskOutcome,
    ) -> Turn:
        def turn() -> list[DiskOutcome]:
            outcomes = [late] * len(places)
            for run in _runs_of(places):
                if self._turns.is_abandoned:
                    break
                ended = self._turns.timed(functools.partial(move, [places[index] for index in run]))
                for index, outcome in zip(run, ended, strict=True):
                    outcomes[index] = outcome
            return outcomes

        return turn

    def _read_run(self, slab: Slab, run: Sequence[Place], deadline_s: float) -> list[DiskOutcome]:
        if self._clock() >= deadline_s:
            return [DiskOutcome(ReadStatus.TIMED_OUT)] * len(run)
        try:
            _at_once(slab.read, slab.read_run, run)
        except (CorruptBlock, OSError) as error:
            if len(run) > 1:
                return [outcome for place in run for outcome in self._read_run(slab, [place], deadline_s)]
            if isinstance(error, CorruptBlock):
                return [DiskOutcome(ReadStatus.CORRUPT)]
            return [DiskOutcome(ReadStatus.UNAVAILABLE, f"reading failed: {error.strerror}")]
        return [DiskOutcome(ReadStatus.OK if _is_sound(place) else ReadStatus.CORRUPT) for place in run]

    def _write_run(self, slab: Slab, run: Sequence[Place], deadline_s: float) -> list[DiskOutcome]:
        if self._clock() >= deadline_s:
            return [DiskOutcome(WriteStatus.TIMED_OUT)] * len(run)
        try:
            _at_once(slab.write, slab.write_run, run)
        except OSError as error:
            if len(run) > 1:
                return [outcome for place in run for outcome in self._write_run(slab, [place], deadline_s)]
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                return [DiskOutcome(WriteStatus.FULL)]
            return [DiskOutcome(WriteStatus.UNAVAILABLE, f"writing failed: {error.strerror}")]
        return [DiskOutcome(WriteStatus.OK)] * len(run)


def _at_once(
    one: Callable[[int, memoryview, int], None],
    several: Callable[[int, Sequence[Payload]], None],
    run: Sequence[Place],
) -> None:
    buffer, record = run[0]
    if len(run) == 1:
        one(record.offset, buffer, record.header.length_bytes)
    else:
        several(record.offset, [(buffer, record.header.length_bytes) for buffer, record in run])


def _is_sound(place: Place) -> bool:
    buffer, record = place
    return checksum(buffer[: record.header.length_bytes]) == record.header.checksum


def _turns_of(places: Sequence[Place]) -> Iterator[Sequence[Place]]:
    """Cut into consecutive parts of a bounded size, or of one payload that is larger."""
    start = num_bytes = 0
    for index, (_, record) in enumerate(places):
        if index > start and num_bytes + record.slot_bytes > _TURN_BYTES:
            yield places[start:index]
            start, num_bytes = index, 0
        num_bytes += record.slot_bytes
    if start < len(places):
        yield places[start:]


def _runs_of(places: Sequence[Place]) -> Iterator[list[int]]:
    """Yield the indexes of payloads whose slots touch, in the order of the slots, so many at once at most."""
    run: list[int] = []
    stop = num_bytes = 0
    for index in sorted(range(len(places)), key=lambda index: places[index][1].offset):
        record = places[index][1]
        num_bytes += record.slot_bytes
        if run and (record.offset != stop or num_bytes > _RUN_BYTES or len(run) == _RUN_PAYLOADS):
            yield run
            run, num_bytes = [], record.slot_bytes
        run.append(index)
        stop = record.offset + record.slot_bytes
    if run:
        yield run
