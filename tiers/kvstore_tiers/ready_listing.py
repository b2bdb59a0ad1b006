"""ReadyListing: the server's side of the table of READY blocks in dram; see ``kvstore.ready_table``."""

import fcntl
import logging
import mmap
import os
import time
from collections.abc import Callable, Iterable

import xxhash

from kvstore.keys import KEY_BYTES
from kvstore.log_limit import LimitedWarning
from kvstore.ready_table import (
    BEAT_OFFSET,
    BUCKET_BYTES,
    ENTRY_BYTES,
    ERA_OFFSET,
    FIELDS,
    FIRST_SHIFT,
    IN_USE_OFFSET,
    SEALED_BYTES,
    TABLE_SEALS,
    Listed,
    TableFormat,
    bucket_mask,
    name_spread,
    offset_in,
    places,
    table_bytes,
)
from kvstore.tier import ALIGNMENT_BYTES, STORAGE_KEY_BYTES, ListedBlock, StorageKey
from kvstore_tiers.memory_room import memory_room_bytes

_log = logging.getLogger(__name__)

_SLICE_BYTES = 256 << 10
"""Memory that is added at a time: in some 70 us (measured)."""

_LOSSES = 512
"""More entries are wanted where one in so many blocks took the place of another.

A client that asks for 64 blocks finds all of them or asks the server. One in 500 loses its place where a
bucket of eight has 2.2 blocks on average, and one in 50 000 with half as many.
"""

_WARNING_INTERVAL_S = 3600.0

_ROOM_FOR_OTHERS = 4
"""The table grows only where so many times as much memory is to be had."""

_NOTHING = bytes(ENTRY_BYTES)
_NO_ENTRY = bytes(SEALED_BYTES)


class ReadyListing:
    """Writes the table. One event loop's thread; without memory, before ``open``, it lists nothing.

    An entry that is not written whole when somebody reads it has no valid seal. The memory is sealed so that
    no mapping but this one can write it, not even of who has the file: what stands there can be trusted here.
    """

    def __init__(
        self,
        clock_ns: Callable[[], int] = time.monotonic_ns,
        *,
        room_bytes: Callable[[], int | None] = memory_room_bytes,
    ) -> None:
        self._clock_ns = clock_ns
        self._room_bytes = room_bytes
        self._no_memory = LimitedWarning(_log, interval_s=_WARNING_INTERVAL_S)
        self._map: mmap.mmap | None = None
        self._format = TableFormat(0, b"")
        self._num_in_use = self._num_wanted = 0
        self._backed_bytes = 0
        self._num_new = self._num_lost = 0
        self._era = self._seed = 0
        self._is_retired = False
        self.fd = -1
        """File descriptor of the table, readable and writable; owned by the listing. -1: there is none."""

    def open(self, table_format: TableFormat, num_at_first: int) -> None:
        """Get memory for so many entries. Raises OSError if it cannot be had, or not be sealed."""
        fd = os.memfd_create("kvstore-ready", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        first_bytes = table_bytes(num_at_first)
        try:
            os.truncate(fd, table_format.total_bytes)
            os.posix_fallocate(fd, 0, first_bytes)
            os.pwrite(fd, table_format.pack(), 0)
            mapping = mmap.mmap(fd, table_format.total_bytes, flags=mmap.MAP_SHARED)
            mapping.madvise(mmap.MADV_DONTDUMP)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, TABLE_SEALS)
        except BaseException:
            os.close(fd)
            raise
        self._map, self._format, self.fd = mapping, table_format, fd
        self._num_in_use = self._num_wanted = num_at_first
        self._backed_bytes = first_bytes
        self._num_new = self._num_lost = 0
        self._is_retired = False
        self._write_live(self._num_in_use, IN_USE_OFFSET)
        self.begin_era()

    def close(self) -> None:
        """Have nobody use the table any more, and let go of it. Idempotent."""
        self.retire()
        mapping, self._map = self._map, None
        if mapping is not None:
            mapping.close()
            os.close(self.fd)
            self.fd = -1

    def add_all(self, blocks: Iterable[ListedBlock], name_end: bytes, length_bytes: int) -> None:
        """List READY blocks, each in the place of another one if need be.

        ``name_end`` is what the storage keys of all of them have behind the block key. What is listed already
        is written again, and reads the same meanwhile.
        """
        mapping = self._map
        if mapping is None:
            return
        mask, seed, spread = bucket_mask(self._num_in_use), self._seed, name_spread(name_end)
        number_of, seal_of, pack = int.from_bytes, xxhash.xxh3_64_intdigest, FIELDS.pack
        # Of thousands a second: nothing is called that can be spared.
        for name, slot, payload_sum, generation in blocks:
            number = number_of(name[:8], "little") ^ spread
            bucket = ALIGNMENT_BYTES + (number & mask) * BUCKET_BYTES
            at = bucket + (number >> FIRST_SHIFT) * ENTRY_BYTES
            if mapping[at : at + STORAGE_KEY_BYTES] != name:
                at = self._place(mapping[bucket : bucket + BUCKET_BYTES], bucket, at, name)
            fields = pack(name, slot, payload_sum, generation, length_bytes)
            mapping[at : at + SEALED_BYTES] = fields + seal_of(fields, seed).to_bytes(8, "little")
        if self._num_new >= self._num_in_use // 8:
            self._look_at_losses()

    def _place(self, held: bytes, bucket: int, first: int, name: StorageKey) -> int:
        """Return where to list a block in a bucket that holds this: its entry, a free one, or ``first``."""
        within = offset_in(held, name)
        if within >= 0:
            return bucket + within
        self._num_new += 1
        if self._is_free(held, first - bucket):
            return first
        for at in range(0, BUCKET_BYTES, ENTRY_BYTES):
            if self._is_free(held, at):
                return bucket + at
        self._num_lost += 1
        return first

    def _is_free(self, held: bytes, at: int) -> bool:
        entry = held[at : at + SEALED_BYTES]
        return entry == _NO_ENTRY or not self._is_of_this_era(entry)

    def _look_at_losses(self) -> None:
        """Want more entries if many blocks of late lost their places, and there is memory to spare."""
        loses, self._num_new, self._num_lost = self._num_lost * _LOSSES > self._num_new, 0, 0
        if not loses or self.wants_to_grow or self._num_in_use >= self._format.num_entries:
            return
        more_bytes = table_bytes(2 * self._num_in_use) - self._backed_bytes
        room_bytes = self._room_bytes()
        if room_bytes is None or room_bytes >= _ROOM_FOR_OTHERS * more_bytes:
            self._num_wanted = 2 * self._num_in_use

    @property
    def wants_to_grow(self) -> bool:
        """Whether there should be more entries."""
        return self._num_wanted > self._num_in_use and self._map is not None and not self._is_retired

    def grow(self) -> None:
        """Add a slice of memory for more entries, if they are wanted; with the last, another era begins."""
        if not self.wants_to_grow:
            return
        wanted_bytes = table_bytes(self._num_wanted)
        slice_bytes = min(_SLICE_BYTES, wanted_bytes - self._backed_bytes)
        try:
            os.posix_fallocate(self.fd, self._backed_bytes, slice_bytes)
        except OSError as error:
            self._no_memory.warn("dram: no memory to list more blocks: %s", os.strerror(error.errno or 0))
            self._num_wanted = self._num_in_use
            return
        self._backed_bytes += slice_bytes
        if self._backed_bytes == wanted_bytes:
            self._num_in_use = self._num_wanted
            self._write_live(self._num_in_use, IN_USE_OFFSET)
            self.begin_era()
            _log.info("dram: clients find up to %d blocks without asking", self._num_in_use)

    @property
    def num_in_use(self) -> int:
        """Entries that blocks may be in."""
        return self._num_in_use

    def listed(self, name: StorageKey) -> Listed | None:
        """Return where a block is listed to be: slot, generation and checksum; None: it is not."""
        at = self._find(name)
        if not at or self._map is None:
            return None
        entry = self._map[at : at + SEALED_BYTES]
        if not self._is_of_this_era(entry):
            return None
        _, slot, payload_sum, generation, _ = FIELDS.unpack_from(entry)
        return slot, generation, payload_sum

    def remove(self, name: StorageKey) -> None:
        """List a block no more: nobody who looks from now on finds it."""
        at = self._find(name)
        if at and self._map is not None:
            self._map[at : at + ENTRY_BYTES] = _NOTHING

    def begin_era(self) -> None:
        """List nothing of what was listed, from now on."""
        if self._map is None or self._is_retired:
            return
        # No entry that is there has a seal of the new era: it makes room for others.
        self._era += 1
        self._seed = self._format.seed(self._era)
        self._write_live(self._era, ERA_OFFSET)
        self.beat()

    def beat(self) -> None:
        """Say that the server lives, and so that what it lists holds."""
        if not self._is_retired:
            self._write_live(self._clock_ns(), BEAT_OFFSET)

    def retire(self) -> None:
        """Have nobody use the table any more."""
        self._is_retired = True
        self._write_live(0, ERA_OFFSET)

    def _write_live(self, value: int, offset: int) -> None:
        # A slice is written by one store of eight bytes; pack_into would write byte by byte.
        if self._map is not None:
            self._map[offset : offset + 8] = value.to_bytes(8, "little")

    def _is_of_this_era(self, entry: bytes) -> bool:
        return int.from_bytes(entry[-8:], "little") == xxhash.xxh3_64_intdigest(entry[:-8], self._seed)

    def _find(self, name: StorageKey) -> int:
        mapping = self._map
        if mapping is None:
            return 0
        bucket, _ = places(name, name[KEY_BYTES:], bucket_mask(self._num_in_use))
        within = offset_in(mapping[bucket : bucket + BUCKET_BYTES], name)
        return bucket + within if within >= 0 else 0
