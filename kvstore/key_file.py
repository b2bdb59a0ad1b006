"""KeyFile: the records of tenants' keys, kept across restarts beside the blocks that need them.

A file is replaced as a whole, and what it held before is overwritten before its name goes: no record that was
taken out stays in a file, nor in a freed part of one. (What a journal, a snapshot or the disk itself keeps of
overwritten bytes is out of reach.)

    keys        magic, number of records u64, the records, xxh3-64 over all of it
    keys.new    the next one, while it is being written
    keys.old    the last one, until it is overwritten
"""

import contextlib
import hashlib
import os
import stat
import struct
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from kvstore.checksum import checksum
from kvstore.errors import CorruptBlock

_NAME = "keys"
_MAGIC = b"KVKEYS\0\1"
_HEAD = struct.Struct("<8sQ")
_SUM = struct.Struct("<Q")
_MAX_BYTES = 256 << 20
_NO_FOLLOW = os.O_CLOEXEC | os.O_NOFOLLOW


class KeyFile:
    """Small files with the same content, one per disk, each replaced as a whole. Methods block.

    ``in_use`` returns the folders that are this store's at the time: no file in another one is touched, since
    its keys may be another store's.
    """

    def __init__(
        self, folders: Sequence[Path], *, record_bytes: int, in_use: Callable[[], Collection[Path]]
    ) -> None:
        self._folders = tuple(folders)
        self._record_bytes = record_bytes
        self._in_use = in_use
        self._seen: set[Path] = set()
        self._written: dict[Path, tuple[bytes, os.stat_result]] = {}

    def read(self) -> tuple[list[bytes], list[str]]:
        """Return the records of all sound files, and one line for each file that is damaged.

        What an interrupted ``write`` left behind is overwritten and removed.
        """
        records: dict[bytes, None] = {}
        problems: list[str] = []
        self._seen = set(self._in_use())
        self._written.clear()
        for folder in self._folders:
            if folder not in self._seen:
                continue
            path = folder / _NAME
            with contextlib.suppress(OSError):
                _clean(path)
            try:
                records |= dict.fromkeys(self._read(path))
            except CorruptBlock as error:
                problems.append(str(error))
        return list(records), problems

    def write(self, records: Sequence[bytes]) -> list[str]:
        """Replace the files durably; one line for each that could not be. What holds the same stays."""
        body = _HEAD.pack(_MAGIC, len(records)) + b"".join(records)
        digest = hashlib.sha256(body).digest()
        problems: list[str] = []
        ours = self._in_use()
        for folder in self._folders:
            path = folder / _NAME
            if folder not in ours:
                problems.append(f"{path}: its folder is not in use by this store now")
                continue
            if path in self._written and self._written[path][0] == digest:
                continue
            try:
                _replace(path, body + _SUM.pack(checksum(body)))
                self._written[path] = digest, path.lstat()
            except OSError as error:
                problems.append(
                    f"{path}: cannot be written: {error.strerror}: make room, or let us write there"
                )
        return problems

    def forget_changed(self) -> list[Path]:
        """Return the files that are not as they were written here; the next ``write`` replaces them."""
        changed = [path for path, (_, written) in self._written.items() if not _is_as_written(path, written)]
        for path in changed:
            del self._written[path]
        ours = self._in_use()
        return [path for path in changed if path.parent in ours]

    @property
    def num_files(self) -> int:
        """How many files there are to be."""
        return len(self._folders)

    def has_come(self) -> bool:
        """Return whether a folder is in use that was not when the files were read."""
        return not self._seen.issuperset(self._in_use())

    def _read(self, path: Path) -> list[bytes]:
        try:
            fd = os.open(path, os.O_RDONLY | _NO_FOLLOW)
        except OSError:
            # No file, or a disk that cannot be read: none of its blocks is served either.
            return []
        with os.fdopen(fd, "rb") as file:
            data = file.read(_MAX_BYTES)
            found = os.fstat(fd)
        body, size = data[: -_SUM.size], self._record_bytes
        if len(body) < _HEAD.size or data[-_SUM.size :] != _SUM.pack(checksum(body)):
            raise CorruptBlock(f"{path}: is damaged: its checksum does not match")
        magic, count = _HEAD.unpack_from(body)
        if magic != _MAGIC or len(body) != _HEAD.size + count * size:
            raise CorruptBlock(f"{path}: is damaged, or of another version")
        self._written[path] = hashlib.sha256(body).digest(), found
        return [body[at : at + size] for at in range(_HEAD.size, len(body), size)]


def _is_as_written(path: Path, written: os.stat_result) -> bool:
    try:
        found = path.lstat()
    except OSError:
        return False
    return _mark(found) == _mark(written)


def _mark(status: os.stat_result) -> tuple[int, int, int, int]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _replace(path: Path, data: bytes) -> None:
    """Replace a file, and overwrite what it held. Raises OSError."""
    _clean(path)
    draft, old = path.with_suffix(".new"), path.with_suffix(".old")
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _NO_FOLLOW, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    if path.exists():
        os.link(path, old)
    draft.replace(path)
    _sync(path.parent)
    _shred(old)


def _clean(path: Path) -> None:
    """Overwrite and remove what an interrupted replacement left. Raises OSError."""
    _shred(path.with_suffix(".old"))
    _shred(path.with_suffix(".new"))


def _shred(path: Path) -> None:
    """Overwrite a file, if there is one, and remove it. Raises OSError."""
    try:
        fd = os.open(path, os.O_WRONLY | _NO_FOLLOW)
    except FileNotFoundError:
        return
    try:
        status = os.fstat(fd)
        if stat.S_ISREG(status.st_mode) and status.st_nlink == 1:
            os.pwrite(fd, bytes(status.st_size), 0)
            os.fsync(fd)
    finally:
        os.close(fd)
    path.unlink()
    _sync(path.parent)


def _sync(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
