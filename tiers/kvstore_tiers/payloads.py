"""Payloads: the reads and writes of single payloads in a slab, as calls for a thread, verified."""

import errno
from collections.abc import Callable

from kvstore.checksum import checksum
from kvstore.errors import CorruptBlock
from kvstore.tier import ReadStatus, WriteStatus
from kvstore_tiers.disk_turns import DiskOutcome
from kvstore_tiers.slab import Slab
from kvstore_tiers.ssd_record import IndexRecord


class Payloads:
    """Makes calls; none raises for a fault of the disk, and none begins after its deadline."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock

    def read(
        self, slab: Slab, buffer: memoryview, record: IndexRecord, deadline_s: float
    ) -> Callable[[], DiskOutcome]:
        """Return the call that reads a copy into a buffer and takes its checksum."""

        def job() -> DiskOutcome:
            if self._clock() >= deadline_s:
                return DiskOutcome(ReadStatus.TIMED_OUT)
            length = record.header.length_bytes
            try:
                slab.read(record.offset, buffer, length)
            except CorruptBlock:
                return DiskOutcome(ReadStatus.CORRUPT)
            except OSError as error:
                return DiskOutcome(ReadStatus.UNAVAILABLE, f"reading failed: {error.strerror}")
            is_sound = checksum(buffer[:length]) == record.header.checksum
            return DiskOutcome(ReadStatus.OK if is_sound else ReadStatus.CORRUPT)

        return job

    def write(
        self, slab: Slab, buffer: memoryview, record: IndexRecord, deadline_s: float
    ) -> Callable[[], DiskOutcome]:
        """Return the call that writes a payload into its slot."""

        def job() -> DiskOutcome:
            if self._clock() >= deadline_s:
                return DiskOutcome(WriteStatus.TIMED_OUT)
            try:
                slab.write(record.offset, buffer, record.header.length_bytes)
            except OSError as error:
                if error.errno in (errno.ENOSPC, errno.EDQUOT):
                    return DiskOutcome(WriteStatus.FULL)
                return DiskOutcome(WriteStatus.UNAVAILABLE, f"writing failed: {error.strerror}")
            return DiskOutcome(WriteStatus.OK)

        return job
