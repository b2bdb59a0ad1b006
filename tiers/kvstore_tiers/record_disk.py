"""RecordDisk: records in an LMDB environment of their own, each durable when a commit returns. Blocking.

    records/lock, dirty     as in an ssd folder (see ssd_folder)
    records/index/          the environment: ``entries`` (tenant and digest: head and name part) and
                            ``bodies`` (the same key: body)
    records/index.damaged/  an environment that could not be read, kept for whoever wants to look at it
    records/index.new/      an environment that is being written, to take the place of the first
    records/clear           there while bytes of records in the clear may lie in the environment

Space. The environment may grow to twice the capacity, since free pages between long values are not always of
use; and to a little more than it takes already, so that under a lower capacity too records can be dropped.
It takes disk space as it grows, in steps, before it writes: so a full disk is an answer, and no page of it is
ever missing.
"""

import contextlib
import logging
import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import lmdb

from kvstore.errors import CorruptBlock, TierUnavailable
from kvstore_tiers.child_check import run_check
from kvstore_tiers.record_anew import old_of, overwrite, take_place, write_anew
from kvstore_tiers.record_change import Change, DiskFault, DiskFull, Found
from kvstore_tiers.record_format import ID_BYTES, TENANT_BYTES, RecordHead, unpack_entry
from kvstore_tiers.ssd_folder import SsdFolder, is_same_file, unavailable

_log = logging.getLogger(__name__)

KEY_BYTES = TENANT_BYTES + ID_BYTES
_ENTRIES, _BODIES = b"entries", b"bodies"
_DATA = "data.mdb"
_MAX_READERS = 8
_PAGE_BYTES = 4096
_FIXED_MAP_BYTES = 16 << 20
_STEP_BYTES = 4 << 20
_SMALL_STEP_BYTES = 256 << 10
_SLACK_BYTES = 512 << 10
_PAGES_PER_CHANGE = 24
"""Tree pages that one change may write anew, in two trees and the list of free pages."""

EXIT_UNUSABLE = 3
"""Exit status of the check in a child for an environment that is damaged."""

_DAMAGE_STATUSES = (EXIT_UNUSABLE, -signal.SIGBUS, -signal.SIGSEGV, -signal.SIGABRT, -signal.SIGFPE)
_DAMAGE = (
    lmdb.BadValsizeError,
    lmdb.CorruptedError,
    lmdb.CursorFullError,
    lmdb.IncompatibleError,
    lmdb.InvalidError,
    lmdb.PageFullError,
    lmdb.PageNotFoundError,
    lmdb.VersionMismatchError,
)


class RecordDisk:
    """An open environment in ``folder``. One thread writes at a time; any may read."""

    def __init__(self, folder: SsdFolder, *, capacity_bytes: int) -> None:
        self._folder = folder
        self._capacity_bytes = capacity_bytes
        self._reading = threading.Lock()
        self._begin()

    def _begin(self) -> None:
        """Open the environment."""
        self._reserved_bytes = 0
        self._env = _open_environment(self._folder.index_path, map_size_bytes(self._capacity_bytes))
        self._map_bytes = self._env.info()["map_size"]
        self._entries = self._env.open_db(_ENTRIES)
        self._bodies = self._env.open_db(_BODIES)
        self._file = self._data_path.stat()

    @classmethod
    def open(
        cls, path: Path, *, capacity_bytes: int, is_sealed: bool, check_timeout_s: float = 60.0
    ) -> "tuple[RecordDisk, Found]":
        """Open or make the environment below ``path``, and return it with what it holds.

        What cannot be read is set aside. ``is_sealed`` says whether what is put from now on is encrypted;
        what is there stays, whether it is or not.

        Raises:
            TierUnavailable: folder or disk cannot be used.
        """
        folder = SsdFolder(path, name="records")
        folder.acquire()
        disk: RecordDisk | None = None
        try:
            _preflight(folder, capacity_bytes, check_timeout_s)
            folder.mark_dirty()
            disk, found = _open_or_begin_anew(folder, capacity_bytes)
            disk._settle_clear(is_sealed and all(head.is_sealed for _, head, _ in found.entries))
            folder.sync()
        except (OSError, lmdb.Error) as error:
            if disk is not None:
                disk._env.close()
            folder.release()
            if isinstance(error, OSError):
                raise unavailable("records", path, "cannot be used", error) from error
            raise TierUnavailable(
                f"records: folder {path}: cannot be opened: {error}: check the disk"
            ) from error
        except BaseException:
            folder.release()
            raise
        return disk, found

    def read(self, key: bytes) -> bytes | None:
        """Return a record in its stored form, None if there is none.

        Raises:
            DiskFault: the disk failed.
        """
        with _faults_mapped(), self._reading, self._env.begin() as transaction:
            entry = transaction.get(key, db=self._entries)
            if entry is None:
                return None
            return bytes(entry) + bytes(transaction.get(key, default=b"", db=self._bodies))

    def commit(self, changes: Sequence[Change]) -> None:
        """Make changes, all or none; on disk when this returns.

        Raises:
            DiskFull: no room.
            DiskFault: the disk failed, or the files were deleted.
        """
        with _faults_mapped():
            self._require_files()
            self._reserve(changes)
            with self._env.begin(write=True) as transaction:
                for change in changes:
                    record = change.record
                    if record is None:
                        if change.entry not in (None, transaction.get(change.key, db=self._entries)):
                            continue  # another record took its place
                        transaction.delete(change.key, db=self._entries)
                        transaction.delete(change.key, db=self._bodies)
                    else:
                        transaction.put(change.key, record.entry, db=self._entries)
                        transaction.put(change.key, record.body, db=self._bodies)

    @property
    def may_hold_clear(self) -> bool:
        """Whether bytes of records in the clear may lie in the files."""
        return os.path.lexists(self._clear_path)

    def scrub(self) -> None:
        """Write the environment anew with what it holds, and overwrite the old one.

        Raises:
            DiskFull: no room; nothing was changed.
            DiskFault: the disk failed, or the files were deleted.
        """
        with _faults_mapped():
            self._require_files()
            try:
                write_anew(self._env, self._draft_path)
            except (lmdb.Error, OSError) as error:
                raise DiskFull(f"records: folder {self._folder.path}: not written anew: {error}") from error
            with self._reading:
                self._env.close()
                take_place(self._draft_path / _DATA, self._data_path)
                shutil.rmtree(self._draft_path)
                self._begin()
            self._clear_path.unlink(missing_ok=True)
            self._folder.sync()

    def _settle_clear(self, is_all_sealed: bool) -> None:
        """Note whether anything here is in the clear; what an interrupted ``scrub`` left goes. OSError."""
        overwrite(old_of(self._data_path))
        if self._draft_path.is_dir() and not self._draft_path.is_symlink():
            shutil.rmtree(self._draft_path)
        if not is_all_sealed and not self.may_hold_clear:
            flags = os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW
            os.close(os.open(self._clear_path, flags, 0o600))

    def close(self, *, is_clean: bool) -> None:
        """Close, and unlock the folder. Idempotent."""
        try:
            with contextlib.suppress(lmdb.Error):
                self._env.sync(True)
            self._env.close()
            if is_clean:
                with contextlib.suppress(OSError):
                    self._folder.mark_clean()
        finally:
            self._folder.release()

    @property
    def _clear_path(self) -> Path:
        return self._folder.path / "clear"

    @property
    def _draft_path(self) -> Path:
        return self._folder.path / "index.new"

    @property
    def _data_path(self) -> Path:
        return self._folder.index_path / _DATA

    def _require_files(self) -> None:
        """Raise OSError if the files are not those that are open."""
        if not self._folder.is_present() or not is_same_file(self._data_path, self._file):
            raise FileNotFoundError("its files were deleted or replaced")

    def _reserve(self, changes: Sequence[Change]) -> None:
        """Have the disk set aside what a commit may write. Raises DiskFull, OSError."""
        stores = [change.record for change in changes if change.record is not None]
        pages = sum(record.head.stored_bytes // _PAGE_BYTES + 2 for record in stores)
        pages += _PAGES_PER_CHANGE * len(changes)
        used_bytes = (self._env.info()["last_pgno"] + 1) * _PAGE_BYTES
        wanted = min(self._map_bytes, used_bytes + pages * _PAGE_BYTES + _SLACK_BYTES)
        if wanted <= self._reserved_bytes:
            return
        for step in (_STEP_BYTES, _SMALL_STEP_BYTES):
            size = min(self._map_bytes, -(-wanted // step) * step)
            if self._try_to_take(size):
                return
        if stores:
            raise DiskFull(f"folder {self._folder.path}: the disk has no room for {wanted} bytes of records")

    def _try_to_take(self, size_bytes: int) -> bool:
        fd = os.open(self._data_path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        had_bytes = os.fstat(fd).st_size
        try:
            os.posix_fallocate(fd, 0, size_bytes)
        except OSError:
            os.ftruncate(fd, had_bytes)
            return False
        finally:
            os.close(fd)
        self._reserved_bytes = size_bytes
        return True

    def _load(self) -> Found:
        entries: list[tuple[bytes, RecordHead, bytes]] = []
        damaged: list[bytes] = []
        with self._env.begin() as transaction, transaction.cursor(db=self._entries) as cursor:
            for key, data in cursor:
                try:
                    head, name = unpack_entry(bytes(data))
                except CorruptBlock:
                    damaged.append(bytes(key))
                    continue
                if len(key) != KEY_BYTES or head.id != key[TENANT_BYTES:]:
                    damaged.append(bytes(key))
                else:
                    entries.append((bytes(key), head, name))
        if damaged:
            _log.error("records: folder %s: %d are damaged and forgotten", self._folder.path, len(damaged))
            with contextlib.suppress(DiskFull, DiskFault):
                self.commit([Change(key, None) for key in damaged])
        return Found(entries, len(damaged))


def examine(index: Path, capacity_bytes: int) -> None:
    """Read everything, begin and abandon a change: the check in a child. Raises lmdb.Error, OSError."""
    env = _open_environment(index, map_size_bytes(capacity_bytes))
    size_bytes = (index / _DATA).stat().st_size
    if (env.info()["last_pgno"] + 1) * _PAGE_BYTES > size_bytes:
        raise lmdb.CorruptedError("the file is shorter than what it holds")
    entries, bodies = env.open_db(_ENTRIES), env.open_db(_BODIES)
    with env.begin() as transaction:
        for database in (entries, bodies):
            with transaction.cursor(db=database) as cursor:
                for key, value in cursor:
                    _ = bytes(key), bytes(value)
    with env.begin(write=True) as transaction:
        transaction.put(b"\0", b"\0", db=entries)
        transaction.abort()
    env.close()


def map_size_bytes(capacity_bytes: int) -> int:
    """Return the most bytes that the environment for records of that many bytes takes on disk."""
    return _FIXED_MAP_BYTES + 2 * -(-capacity_bytes // _PAGE_BYTES) * _PAGE_BYTES


def _open_environment(index: Path, map_bytes: int) -> "lmdb.Environment":
    index.mkdir(mode=0o700, exist_ok=True)
    env = lmdb.open(
        str(index),
        map_size=map_bytes,
        mode=0o600,
        metasync=True,
        map_async=False,
        max_readers=_MAX_READERS,
        max_dbs=2,
    )
    used_bytes = (env.info()["last_pgno"] + 1) * _PAGE_BYTES
    if used_bytes + _FIXED_MAP_BYTES // 2 > env.info()["map_size"]:
        env.set_mapsize(used_bytes + _FIXED_MAP_BYTES)
    return env


def _open_or_begin_anew(folder: SsdFolder, capacity_bytes: int) -> tuple[RecordDisk, Found]:
    disk: RecordDisk | None = None
    try:
        disk = RecordDisk(folder, capacity_bytes=capacity_bytes)
        disk._env.reader_check()
        return disk, disk._load()
    except _DAMAGE as error:
        if disk is not None:
            disk._env.close()
        _set_aside(folder, str(error))
    except BaseException:
        if disk is not None:
            disk._env.close()
        raise
    disk = RecordDisk(folder, capacity_bytes=capacity_bytes)
    return disk, disk._load()


def _set_aside(folder: SsdFolder, reason: str) -> None:
    """Move a damaged environment out of the way. Raises OSError."""
    kept = folder.path / "index.damaged"
    _log.error(
        "records: folder %s: cannot be read: %s: beginning without records; what there was is in %s",
        *(folder.path, reason, kept),
    )
    if kept.is_dir() and not kept.is_symlink():
        shutil.rmtree(kept)
    folder.index_path.rename(kept)


def _preflight(folder: SsdFolder, capacity_bytes: int, timeout_s: float) -> None:
    """After an unclean end, let a child process be the first to read the environment."""
    if not folder.is_dirty() or not os.path.lexists(folder.index_path):
        return
    words = [str(folder.index_path), str(capacity_bytes)]
    try:
        child = run_check("kvstore_tiers.record_check", words, timeout_s=timeout_s)
    except subprocess.TimeoutExpired as error:
        raise TierUnavailable(
            f"records: folder {folder.path}: reading them took longer than {timeout_s:.0f} s: check the disk"
        ) from error
    if child.returncode in _DAMAGE_STATUSES:
        said = " ".join(child.stderr.decode("utf-8", "replace").strip().splitlines()[-1:])
        _set_aside(folder, f"reading it ended with status {child.returncode} {said}".rstrip())
    elif child.returncode:
        raise TierUnavailable(
            f"records: folder {folder.path}: could not be examined after an unclean end: nothing was changed;"
            " it is tried again"
        )


@contextlib.contextmanager
def _faults_mapped() -> Iterator[None]:
    try:
        yield
    except lmdb.MapFullError as error:
        raise DiskFull(f"records: no room: {error}") from error
    except (OSError, lmdb.Error) as error:
        raise DiskFault(str(error)) from error
