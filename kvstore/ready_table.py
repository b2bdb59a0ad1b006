"""ReadyTable: which blocks are READY in the arena, as the server lists them in shared memory.

    page 0    header: magic, version, sizes, the instance of the arena, xxh3-64 over the fields before it;
              at 2048 what changes: the era, when the server last wrote it (ns of CLOCK_MONOTONIC), and how
              many entries are in use
    buckets   eight entries of 128 bytes each: storage key, slot, checksum, generation and length of a block,
              and a seal over them. Any of a bucket's may be a block's; one of them is looked at first

A reader needs no lock and no order of stores. The seal is the xxh3-64 of an entry's fields, seeded by the
arena's instance and the era: what is torn, half written, of another table or of an earlier era has another.
An entry is taken away before its block may not be served any more; where that is so of many at once, the era
ends. It is a cache of what the server knows: what is not listed, it is asked for.

How many entries it takes depends on the size of the blocks, which nobody knows beforehand. So the file is as
long as the smallest blocks would want it, and has memory only as far as it is in use: where blocks lose their
places to others, twice as many entries are, in another era.

The server makes the table and is the only one that can write it: the file is sealed against a change of
size, and against being written by other ways than the server's mapping.
"""

import fcntl
import mmap
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import xxhash

from kvstore.arena_view import INSTANCE_BYTES, SEALS
from kvstore.checksum import checksum
from kvstore.errors import ProtocolMismatch
from kvstore.keys import BlockKey
from kvstore.tier import ALIGNMENT_BYTES, STORAGE_KEY_BYTES

ENTRY_BYTES = 128
_ENTRIES_OF_BUCKET = 8
BUCKET_BYTES = _ENTRIES_OF_BUCKET * ENTRY_BYTES
FIRST_SHIFT = 61
"""Which entry is looked at first is in the bits of a block's number from there on."""

FIELDS = struct.Struct("<72sQQII")
"""Storage key, offset of the slot, checksum, generation, bytes of the block."""

SEALED_BYTES = FIELDS.size + 8
"""What of an entry is used: its fields and the seal over them."""

ERA_OFFSET = 2048
"""Where the era is, a u64; 0: nothing is to be used."""

BEAT_OFFSET = ERA_OFFSET + 8
"""Where the server says, several times a second, that it lives: a u64, ns of CLOCK_MONOTONIC."""

IN_USE_OFFSET = BEAT_OFFSET + 8
"""Where it says how many entries are in use, the first ones: a u64, a power of two."""

BEAT_PATIENCE_NS = 1_000_000_000
"""A table is not used whose server has been silent for so long: it may not have heard what ended."""

MAX_DIRECT_BLOCKS = 64
"""Most blocks of a request that are looked for in the table, or listed at once."""

_MIN_ENTRIES, _MAX_AT_FIRST, _MAX_ENTRIES = 1024, 1 << 21, 1 << 24
_F_SEAL_FUTURE_WRITE = 0x10  # Linux 5.1; the module fcntl does not name it

TABLE_SEALS = SEALS | _F_SEAL_FUTURE_WRITE
"""Seals every table carries once the server has mapped it."""

_BYTES_PER_ENTRY = 2 << 10
_FIRST_BYTES_PER_ENTRY = 32 << 10
_MAGIC = b"KVREADY\0"
_VERSION = 3
_HEADER = struct.Struct("<8sIIQ16s")
_HEADER_SUM = struct.Struct("<Q")
_LIVE = struct.Struct("<QQ")
_U64 = struct.Struct("<Q")
_AFTER_KEY = struct.Struct("<QQIIQ")

Listed = tuple[int, int, int]
"""Slot, generation and checksum of a block, as in ``ReadySlot``."""


@dataclass(frozen=True, slots=True)
class TableFormat:
    """Largest size of one table, and which arena it is about."""

    num_entries: int
    instance: bytes

    @classmethod
    def for_arena(cls, capacity_bytes: int, instance: bytes, *, may_grow: bool = True) -> "TableFormat":
        """Return the format for an arena of that capacity: two entries per 4 KiB, within bounds.

        One that may not grow has as many as others begin with.
        """
        if not may_grow:
            return cls(entries_at_first(capacity_bytes), instance)
        return cls(_num_entries(capacity_bytes // _BYTES_PER_ENTRY), instance)

    @property
    def total_bytes(self) -> int:
        """Size of the file."""
        return table_bytes(self.num_entries)

    def seed(self, era: int) -> int:
        """Return what the seals of an era are seeded with."""
        return xxhash.xxh3_64_intdigest(self.instance + era.to_bytes(8, "little"))

    def pack(self) -> bytes:
        """Return the stored header."""
        fields = _HEADER.pack(_MAGIC, _VERSION, ENTRY_BYTES, self.num_entries, self.instance)
        return fields + _HEADER_SUM.pack(checksum(fields))

    @classmethod
    def unpack(cls, data: bytes, *, file_bytes: int) -> "TableFormat":
        """Return the format stored in the first page of a table of ``file_bytes``.

        Raises:
            ProtocolMismatch: not a table, another version, or sizes that do not agree.
        """
        fields = data[: _HEADER.size]
        if len(data) < _HEADER.size + _HEADER_SUM.size or not fields.startswith(_MAGIC):
            raise ProtocolMismatch("ready table: the file that was sent is none")
        _, version, entry_bytes, num_entries, instance = _HEADER.unpack(fields)
        if version != _VERSION or entry_bytes != ENTRY_BYTES:
            raise ProtocolMismatch(f"ready table: format version {version}, expected {_VERSION}")
        (stored_sum,) = _HEADER_SUM.unpack_from(data, _HEADER.size)
        made = cls(num_entries, instance)
        is_power = num_entries >= _ENTRIES_OF_BUCKET and num_entries & (num_entries - 1) == 0
        if not is_power or stored_sum != checksum(fields) or made.total_bytes != file_bytes:
            raise ProtocolMismatch(f"ready table: the header does not fit its file of {file_bytes} bytes")
        return made


def _num_entries(wanted: int) -> int:
    """Return a power of two within bounds, not less if possible."""
    power = 1 << (max(1, wanted) - 1).bit_length()
    return min(max(power, _MIN_ENTRIES), _MAX_ENTRIES)


def entries_at_first(capacity_bytes: int) -> int:
    """Return how many are in use before it is known how small blocks are: two per 64 KiB, within bounds."""
    return min(_num_entries(capacity_bytes // _FIRST_BYTES_PER_ENTRY), _MAX_AT_FIRST)


def table_bytes(num_entries: int) -> int:
    """Return how much of the file so many entries take, the header included."""
    return ALIGNMENT_BYTES + num_entries * ENTRY_BYTES


def bucket_mask(num_in_use: int) -> int:
    """Return what of a block's number names its bucket, of so many entries."""
    return num_in_use // _ENTRIES_OF_BUCKET - 1


def name_spread(name_end: bytes) -> int:
    """Return what of a block's place comes from its storage key behind the block key."""
    return xxhash.xxh3_64_intdigest(name_end)


def places(key: bytes, name_end: bytes, mask: int) -> tuple[int, int]:
    """Return where the bucket of a block begins, and which of its entries is looked at first.

    ``name_end`` is its storage key behind the block key.
    """
    number = int.from_bytes(key[:8], "little") ^ name_spread(name_end)
    bucket = ALIGNMENT_BYTES + (number & mask) * BUCKET_BYTES
    return bucket, bucket + (number >> FIRST_SHIFT) * ENTRY_BYTES


def offset_in(bucket: bytes, name: bytes) -> int:
    """Return where in a bucket's bytes the entry of a storage key is; negative if it has none."""
    at = bucket.find(name)
    return at if at % ENTRY_BYTES == 0 else -1


class ReadyTable:
    """A client's read-only mapping of a table. Thread-safe; it goes with the last reference to it."""

    def __init__(self, mapping: mmap.mmap, table_format: TableFormat) -> None:
        self.format = table_format
        self._map = mapping
        self._seed = (0, 0)

    @classmethod
    def map(cls, fd: int, instance: bytes) -> "ReadyTable":
        """Map the table of an arena's instance behind a file descriptor, which stays the caller's.

        Raises:
            ProtocolMismatch: it is none of this version, is about another arena, could change size under the
                mapping, or there is no address space for it.
        """
        try:
            seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
            file_bytes = os.fstat(fd).st_size
            table_format = TableFormat.unpack(os.pread(fd, ALIGNMENT_BYTES, 0), file_bytes=file_bytes)
            if seals & TABLE_SEALS != TABLE_SEALS:
                raise ProtocolMismatch(
                    "ready table: the file that was sent may change its size, or be written"
                )
            if table_format.instance != instance or len(instance) != INSTANCE_BYTES:
                raise ProtocolMismatch("ready table: it is about another arena")
            mapping = mmap.mmap(fd, file_bytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
            mapping.madvise(mmap.MADV_DONTDUMP)
        except OSError as error:
            raise ProtocolMismatch(
                f"ready table: the file that was sent cannot be mapped: {error.strerror}"
            ) from error
        return cls(mapping, table_format)

    def era(self, now_s: float) -> int:
        """Return the era; 0 if nothing may be used: the server has said so, or has been silent too long.

        ``now_s`` is the time by ``time.monotonic()``.
        """
        era, beat_ns = _LIVE.unpack_from(self._map, ERA_OFFSET)
        age_ns = now_s * 1e9 - beat_ns
        is_fresh = -BEAT_PATIENCE_NS < age_ns < BEAT_PATIENCE_NS
        return era if is_fresh else 0

    def is_of_era(self, era: int) -> bool:
        """Whether that era has not ended."""
        now: int = _LIVE.unpack_from(self._map, ERA_OFFSET)[0]
        return now == era

    def find(
        self, keys: Sequence[BlockKey], name_end: bytes, length_bytes: int, era: int
    ) -> list[Listed] | None:
        """Return where blocks lie that are all listed with that length; None if one is not.

        ``name_end`` is what their storage keys have behind the block key. What they hold is the reader's to
        check after its copy: checksum, generation, and that the era has not ended.
        """
        mapping, mask, seed = self._map, self._mask(), self._seed_of(era)
        if mask < 0:
            return None
        spread = name_spread(name_end)
        number_of, seal_of, unpack = int.from_bytes, xxhash.xxh3_64_intdigest, _AFTER_KEY.unpack_from
        found: list[Listed] = []
        for key in keys:
            # As `places`, which would take half as long again.
            number = number_of(key[:8], "little") ^ spread
            bucket = ALIGNMENT_BYTES + (number & mask) * BUCKET_BYTES
            at = bucket + (number >> FIRST_SHIFT) * ENTRY_BYTES
            name = key + name_end
            entry = mapping[at : at + SEALED_BYTES]
            if not entry.startswith(name):
                held = mapping[bucket : bucket + BUCKET_BYTES]
                within = offset_in(held, name)
                if within < 0:
                    return None
                entry = held[within : within + SEALED_BYTES]
            offset, payload_sum, generation, stored_bytes, seal = unpack(entry, STORAGE_KEY_BYTES)
            if seal != seal_of(entry[: FIELDS.size], seed) or stored_bytes != length_bytes:
                return None
            found.append((offset, generation, payload_sum))
        return found

    def _mask(self) -> int:
        """Return what of a number names a bucket of those in use now; negative if they cannot be."""
        num_in_use: int = _U64.unpack_from(self._map, IN_USE_OFFSET)[0]
        is_power = num_in_use & (num_in_use - 1) == 0
        return bucket_mask(num_in_use) if is_power and num_in_use <= self.format.num_entries else -1

    def _seed_of(self, era: int) -> int:
        known, seed = self._seed
        if known != era:
            seed = self.format.seed(era)
            self._seed = (era, seed)  # one step: another thread reads the old pair or the new one
        return seed
