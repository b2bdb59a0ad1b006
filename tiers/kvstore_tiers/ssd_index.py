"""SsdIndex: which slab slot holds which block, in an LMDB environment.

Key ``s`` holds the superblock (magic, version). Key ``b`` + storage key (40 bytes) holds one record:

    header (192) | slab offset u64 | slot bytes u32 | generation u64 | recency u64 | xxh3-64 of all before

Concurrency. One process (the folder is locked by the tier), one writing thread at a time; no read
transaction outlives ``load``. The environment must not be used in a forked child.

Space. The file is preallocated to the map size, so that a full disk shows at open. The map size follows from
the number of slots of 64 KiB. A record takes 281 bytes and pages may be half full: 640 bytes are reckoned for
each, beside what copy on write needs for the transactions of the moment.
"""

import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import lmdb

from kvstore.checksum import checksum
from kvstore.errors import CorruptBlock
from kvstore.tier import ALIGNMENT_BYTES, HEADER_BYTES, BlockHeader
from kvstore_tiers.slots import padded

_MAGIC = b"KVSSD\0\0\0"
_VERSION = 1
_SUPERBLOCK = struct.Struct("<8sI")
_SUPERBLOCK_KEY = b"s"
_RECORD = struct.Struct(f"<{HEADER_BYTES}sQIQQ")
_RECORD_SUM = struct.Struct("<Q")
_FIXED_MAP_BYTES = 16 << 20
_COPY_ON_WRITE_BYTES = 6 << 20
_RECKONED_BYTES_PER_RECORD = 640
_MAP_BYTES_PER_RECORD = 1024
_SMALLEST_COUNTED_SLOT_BYTES = 64 << 10
_MAX_READERS = 8


@dataclass(frozen=True, slots=True)
class IndexRecord:
    """Where one copy lies. ``generation`` tells copies of the same block apart; recency grows with use."""

    header: BlockHeader
    offset: int
    slot_bytes: int
    generation: int
    recency: int

    @property
    def key(self) -> bytes:
        """The LMDB key."""
        return b"b" + self.header.block.storage_key

    def pack(self) -> bytes:
        """Return the stored form."""
        body = _RECORD.pack(self.header.pack(), self.offset, self.slot_bytes, self.generation, self.recency)
        return body + _RECORD_SUM.pack(checksum(body))

    @classmethod
    def unpack(cls, key: bytes, value: bytes) -> "IndexRecord":
        """Return the record stored under ``key``.

        Raises:
            CorruptBlock: damaged, impossible, or a record of another block.
        """
        body = value[: _RECORD.size]
        if len(value) != _RECORD.size + _RECORD_SUM.size or value[_RECORD.size :] != _RECORD_SUM.pack(
            checksum(body)
        ):
            raise CorruptBlock(f"index: a record of {len(value)} bytes does not match its checksum")
        header, offset, slot_bytes, generation, recency = _RECORD.unpack(body)
        record = cls(BlockHeader.unpack(header), offset, slot_bytes, generation, recency)
        block = record.header.block
        if block.key != key[1:33] or block.part.pack() != key[33:]:
            raise CorruptBlock("index: a record names another block than its key")
        if slot_bytes != padded(record.header.length_bytes) or offset % ALIGNMENT_BYTES or not slot_bytes:
            raise CorruptBlock(f"index: a slot of {slot_bytes} bytes at {offset} is impossible")
        return record


@dataclass(frozen=True, slots=True)
class Change:
    """One change of the index: store a record, renew one that is still there, or delete one.

    ``renew`` and ``delete`` act only while the stored record is of the same generation.
    """

    kind: str
    record: IndexRecord

    @classmethod
    def store(cls, record: IndexRecord) -> "Change":
        """Store a record, in place of any other of the block."""
        return cls("store", record)

    @classmethod
    def renew(cls, record: IndexRecord) -> "Change":
        """Rewrite a record with a new recency."""
        return cls("renew", record)

    @classmethod
    def delete(cls, record: IndexRecord) -> "Change":
        """Delete a record."""
        return cls("delete", record)


class IndexIsForeign(Exception):
    """The environment holds another format."""


class SsdIndex:
    """An open environment."""

    def __init__(self, environment: "lmdb.Environment", folder: Path, map_bytes: int) -> None:
        self._env = environment
        self._folder = folder
        self._map_bytes = map_bytes
        self._is_broken = False

    @classmethod
    def open(cls, folder: Path, *, capacity_bytes: int) -> "SsdIndex":
        """Open or create the environment in ``folder`` and reserve its space on disk.

        Raises:
            OSError, lmdb.Error: it cannot be opened, or the space cannot be had.
        """
        index = cls.open_unreserved(folder, capacity_bytes=capacity_bytes)
        try:
            index._env.reader_check()
            _reserve(folder / "data.mdb", index._map_bytes)
        except BaseException:
            index._env.close()
            raise
        return index

    @classmethod
    def open_unreserved(cls, folder: Path, *, capacity_bytes: int) -> "SsdIndex":
        """Open or create the environment and take no space on disk: to examine what is there.

        Raises:
            OSError, lmdb.Error: it cannot be opened.
        """
        map_bytes = map_size_bytes(capacity_bytes)
        folder.mkdir(mode=0o700, exist_ok=True)
        return cls(_open_environment(folder, map_bytes), folder, map_bytes)

    def load(self) -> tuple[list[IndexRecord], list[bytes]]:
        """Return all sound records, and the keys of damaged ones.

        Raises:
            IndexIsForeign: another format, or no superblock over existing records.
            lmdb.Error: the environment cannot be read.
        """
        records: list[IndexRecord] = []
        damaged: list[bytes] = []
        superblock = _SUPERBLOCK.pack(_MAGIC, _VERSION)
        found: bytes | None = None
        with self._env.begin() as transaction, transaction.cursor() as cursor:
            for key, value in cursor:
                if key == _SUPERBLOCK_KEY:
                    found = value
                    continue
                try:
                    records.append(IndexRecord.unpack(key, value))
                except CorruptBlock:
                    damaged.append(key)
        if found is None and not records and not damaged:
            with self._env.begin(write=True) as transaction:
                transaction.put(_SUPERBLOCK_KEY, superblock)
        elif found != superblock:
            raise IndexIsForeign(f"format {found!r}, expected {superblock!r}")
        return records, damaged

    def delete_keys(self, keys: Sequence[bytes]) -> None:
        """Delete records by key, in one transaction."""
        with self._env.begin(write=True) as transaction:
            for key in keys:
                transaction.delete(key)

    def commit(self, changes: Sequence[Change]) -> None:
        """Apply changes in order, in one transaction that is on disk when this returns.

        Raises:
            lmdb.MapFullError: no room; nothing was changed.
            lmdb.Error: the disk failed; what was changed is in doubt.
        """
        if self._is_broken:
            self._env.close()
            self._env = _open_environment(self._folder, self._map_bytes)
            self._is_broken = False
        try:
            self._commit(changes)
        except lmdb.PanicError:
            # A meta page could not be written, after which LMDB refuses this environment for good.
            self._is_broken = True
            raise

    def _commit(self, changes: Sequence[Change]) -> None:
        with self._env.begin(write=True) as transaction:
            for change in changes:
                key = change.record.key
                if change.kind == "store":
                    transaction.put(key, change.record.pack())
                    continue
                held = transaction.get(key)
                if held is None or _generation_of(held) != change.record.generation:
                    continue
                if change.kind == "renew":
                    transaction.put(key, change.record.pack())
                else:
                    transaction.delete(key)

    def commit_nothing(self) -> None:
        """Commit a transaction that changes one byte: pages freed by the one before become usable."""
        with self._env.begin(write=True) as transaction:
            transaction.put(_SUPERBLOCK_KEY, _SUPERBLOCK.pack(_MAGIC, _VERSION))

    def try_to_write(self) -> None:
        """Start a change and abandon it: exercises the free list (for the check after an unclean end)."""
        with self._env.begin(write=True) as transaction:
            transaction.put(_SUPERBLOCK_KEY, b"\0" * _SUPERBLOCK.size)
            transaction.abort()

    def close(self) -> None:
        """Write what is left in memory and close."""
        self._env.sync(True)
        self._env.close()


def _open_environment(folder: Path, map_bytes: int) -> "lmdb.Environment":
    return lmdb.open(
        str(folder),
        map_size=map_bytes,
        mode=0o600,
        metasync=True,
        map_async=False,
        max_readers=_MAX_READERS,
        max_dbs=0,
    )


def _reserve(path: Path, size_bytes: int) -> None:
    """Have the disk set this size aside for the file; a file that cannot have it stays as it was."""
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        had_bytes = os.fstat(fd).st_size
        try:
            os.posix_fallocate(fd, 0, size_bytes)
        except OSError:
            os.ftruncate(fd, had_bytes)
            raise
    finally:
        os.close(fd)


def map_size_bytes(capacity_bytes: int) -> int:
    """Return the size of the index of a tier with that capacity."""
    slots = -(-capacity_bytes // _SMALLEST_COUNTED_SLOT_BYTES)
    return padded(_FIXED_MAP_BYTES + slots * _MAP_BYTES_PER_RECORD)


def max_records(capacity_bytes: int) -> int:
    """Return how many records the index of a tier with that capacity holds for sure."""
    return (map_size_bytes(capacity_bytes) - _COPY_ON_WRITE_BYTES) // _RECKONED_BYTES_PER_RECORD


def _generation_of(value: bytes) -> int:
    if len(value) != _RECORD.size + _RECORD_SUM.size:
        return -1
    generation: int = _RECORD.unpack_from(value)[3]
    return generation
