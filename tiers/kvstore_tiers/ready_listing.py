"""ReadyListing: the server's side of the table of READY blocks in dram; see ``kvstore.ready_table``."""

import fcntl
import mmap
import os
import time
from collections.abc import Callable, Iterable

import xxhash

from kvstore.keys import KEY_BYTES
from kvstore.ready_table import (
    BEAT_OFFSET,
    BUCKET_BYTES,
    ENTRY_BYTES,
    ERA_OFFSET,
    FIELDS,
    FIRST_SHIFT,
    SEALED_BYTES,
    TABLE_SEALS,
    Listed,
    TableFormat,
    name_spread,
    offset_in,
    places,
)
from kvstore.tier import ALIGNMENT_BYTES, STORAGE_KEY_BYTES, ListedBlock, StorageKey

_NOTHING = bytes(ENTRY_BYTES)
_NO_ENTRY = bytes(SEALED_BYTES)


class ReadyListing:
    """Writes the table. One event loop's thread; without memory, before ``open``, it lists nothing.

    An entry that is not written whole when somebody reads it has no valid seal. The memory is sealed so that
    no mapping but this one can write it, not even of who has the file: what stands there can be trusted here.
    """

    def __init__(self, clock_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self._clock_ns = clock_ns
        self._map: mmap.mmap | None = None
        self._format = TableFormat(0, b"")
        self._era = self._seed = 0
        self._is_retired = False
        self.fd = -1
        """File descriptor of the table, readable and writable; owned by the listing. -1: there is none."""

    def open(self, table_format: TableFormat) -> None:
        """Get the memory. Raises OSError if it cannot be had, or not be sealed against others."""
        fd = os.memfd_create("kvstore-ready", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.posix_fallocate(fd, 0, table_format.total_bytes)
            os.pwrite(fd, table_format.pack(), 0)
            mapping = mmap.mmap(fd, table_format.total_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
            mapping.madvise(mmap.MADV_DONTDUMP)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, TABLE_SEALS)
        except BaseException:
            os.close(fd)
            raise
        self._map, self._format, self.fd = mapping, table_format, fd
        self._is_retired = False
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
        mask, seed, spread = self._format.mask, self._seed, name_spread(name_end)
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

    def _place(self, held: bytes, bucket: int, first: int, name: StorageKey) -> int:
        """Return where to list a block in a bucket that holds this: its entry, a free one, or ``first``."""
        within = offset_in(held, name)
        if within >= 0:
            return bucket + within
        if self._is_free(held, first - bucket):
            return first
        free = (at for at in range(0, BUCKET_BYTES, ENTRY_BYTES) if self._is_free(held, at))
        return bucket + next(free, first - bucket)

    def _is_free(self, held: bytes, at: int) -> bool:
        entry = held[at : at + SEALED_BYTES]
        return entry == _NO_ENTRY or not self._is_of_this_era(entry)

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
        bucket, _ = places(name, name[KEY_BYTES:], self._format.mask)
        within = offset_in(mapping[bucket : bucket + BUCKET_BYTES], name)
        return bucket + within if within >= 0 else 0
