"""SsdIndex: which slab slot holds which block, in an LMDB environment.

Key ``s`` holds the superblock (magic, version), key ``w`` what is left of the write budget, key ``b`` and a
storage key (72 bytes) one record (see ssd_record).

Concurrency. One process (the folder is locked by the tier), one writing thread at a time; no read
transaction outlives ``load``. The environment must not be used in a forked child.

Space. The file is preallocated to the map size, so that a full disk shows at open. The map size follows from
the number of slots of 64 KiB. A record takes up to 341 bytes and pages may be half full: 784 bytes are
reckoned for each, beside what copy on write needs for the transactions of the moment.
"""

import os
import struct
from collections.abc import Sequence
from pathlib import Path

import lmdb

from kvstore_tiers.slots import padded
from kvstore_tiers.ssd_folder import is_same_file
from kvstore_tiers.ssd_record import BUDGET_KEY, BudgetNote, Change, IndexRecord
from kvstore_tiers.ssd_record_table import RecordTable

__all__ = ["Change", "IndexIsForeign", "IndexRecord", "SsdIndex", "map_size_bytes", "max_records"]

_MAGIC = b"KVSSD\0\0\0"
_VERSION = 2
_SUPERBLOCK = struct.Struct("<8sI")
_SUPERBLOCK_KEY = b"s"
_FIXED_MAP_BYTES = 16 << 20
_COPY_ON_WRITE_BYTES = 6 << 20
_RECKONED_BYTES_PER_RECORD = 784
_MAP_BYTES_PER_RECORD = 1024
_SMALLEST_COUNTED_SLOT_BYTES = 64 << 10
_MAX_READERS = 8
_DATA = "data.mdb"
_REBUILT = "rebuilt.mdb"
_CHANGES_PER_TRANSACTION = 512


INDEX_DAMAGE = (
    lmdb.BadValsizeError,
    lmdb.CorruptedError,
    lmdb.CursorFullError,
    lmdb.IncompatibleError,
    lmdb.InvalidError,
    lmdb.PageFullError,
    lmdb.PageNotFoundError,
    lmdb.VersionMismatchError,
)
"""Errors that tell of damage in the file, which no other attempt makes up for."""


class IndexIsForeign(Exception):
    """The environment holds another format, of another version or of none; ``num_records`` are lost."""

    def __init__(self, superblock: bytes | None, *, num_records: int) -> None:
        super().__init__(f"it is of {_format_of(superblock)}, this is version {_VERSION}")
        self.num_records = num_records


class SsdIndex:
    """An open environment."""

    def __init__(self, environment: "lmdb.Environment", folder: Path, map_bytes: int) -> None:
        self._env = environment
        self._folder = folder
        self._map_bytes = map_bytes
        self._is_broken = False
        self._file: os.stat_result | None = None

    @classmethod
    def open(cls, folder: Path, *, capacity_bytes: int) -> "SsdIndex":
        """Open or create the environment in ``folder`` and reserve its space on disk.

        Raises:
            OSError, lmdb.Error: it cannot be opened, or the space cannot be had.
        """
        index = cls.open_unreserved(folder, capacity_bytes=capacity_bytes)
        try:
            index._env.reader_check()
            _reserve(folder / _DATA, index._map_bytes)
            index._file = (folder / _DATA).stat()
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
        for leftover in folder.glob(f"{_REBUILT}*"):
            leftover.unlink()
        return cls(_open_environment(folder, map_bytes), folder, map_bytes)

    def load(self) -> tuple[RecordTable, list[bytes]]:
        """Return all sound records, and the keys of damaged ones.

        Raises:
            IndexIsForeign: another format, or no superblock over existing records.
            lmdb.Error: the environment cannot be read.
        """
        superblock = _SUPERBLOCK.pack(_MAGIC, _VERSION)
        with self._env.begin() as transaction, transaction.cursor() as cursor:
            stored = dict(cursor)
        found = stored.pop(_SUPERBLOCK_KEY, None)
        stored.pop(BUDGET_KEY, None)
        records, damaged = RecordTable.of(stored)
        if found is None and not stored:
            with self._env.begin(write=True) as transaction:
                transaction.put(_SUPERBLOCK_KEY, superblock)
        elif found != superblock:
            raise IndexIsForeign(found, num_records=len(stored))
        return records, damaged

    def budget_left_bytes(self) -> int | None:
        """Return what an earlier run had left of its write budget; None if it had none.

        Raises:
            lmdb.Error: the environment cannot be read.
        """
        with self._env.begin() as transaction:
            value = transaction.get(BUDGET_KEY)
        return None if value is None else BudgetNote.unpack(value).left_bytes

    def is_at(self, folder: Path) -> bool:
        """Return whether the file in a folder is this one. Raises OSError if the disk does not say."""
        return self._file is not None and is_same_file(folder / _DATA, self._file)

    def is_larger_than(self, folder: Path, capacity_bytes: int) -> bool:
        """Return whether its file is larger than a tier of that capacity needs: LMDB never shrinks one."""
        return (folder / _DATA).stat().st_size > map_size_bytes(capacity_bytes)

    def rebuild(self, folder: Path, records: Sequence[IndexRecord], *, capacity_bytes: int) -> "SsdIndex":
        """Put a new file with these records in place of this one, close this, and return the new one.

        Raises:
            OSError, lmdb.Error: it cannot be written; the file is as it was.
        """
        try:
            left_bytes = self.budget_left_bytes()
        except INDEX_DAMAGE:
            left_bytes = 0
        finally:
            self._env.close()
        map_bytes = map_size_bytes(capacity_bytes)
        environment = lmdb.open(str(folder / _REBUILT), subdir=False, map_size=map_bytes, mode=0o600)
        try:
            new = SsdIndex(environment, folder, map_bytes)
            new.commit_nothing()
            changes = [Change.store(record) for record in records]
            changes += [] if left_bytes is None else [Change.note_budget(left_bytes)]
            for start in range(0, len(changes), _CHANGES_PER_TRANSACTION):
                new.commit(changes[start : start + _CHANGES_PER_TRANSACTION])
        finally:
            environment.close()
        (folder / _REBUILT).replace(folder / _DATA)
        return SsdIndex.open(folder, capacity_bytes=capacity_bytes)

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
            self._file = (self._folder / _DATA).stat()
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
                if change.is_unconditional:
                    transaction.put(key, change.record.pack())
                elif change.concerns(transaction.get(key)):
                    if change.kind == "delete":
                        transaction.delete(key)
                    else:
                        transaction.put(key, change.record.pack())

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
        """Write what is left in memory and close, also when that fails. Idempotent.

        Raises:
            lmdb.Error: not everything is on disk.
        """
        try:
            self._env.sync(True)
        finally:
            self._env.close()


def _format_of(superblock: bytes | None) -> str:
    if superblock is not None and len(superblock) == _SUPERBLOCK.size:
        magic, version = _SUPERBLOCK.unpack(superblock)
        if magic == _MAGIC:
            return f"version {version}"
    return f"format {superblock!r}"


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
