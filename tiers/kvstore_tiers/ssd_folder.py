"""SsdFolder: the folder of one ssd tier: made, locked against a second process, marked while in use.

lock    locked (flock) for as long as the tier is open; holds the owner's process id
dirty   there from open to close; found at open, it tells of an unclean end
slab    payloads            index/   LMDB environment
sealed  there while all that was ever written to the slab is encrypted
index.damaged/              an index that cannot be used, while it is being removed
"""

import errno
import fcntl
import logging
import os
import shutil
import stat
import weakref
from collections.abc import Callable
from pathlib import Path

from kvstore.errors import TierUnavailable
from kvstore_tiers.disk_io import DiskIO, OsDiskIO

_log = logging.getLogger(__name__)

_REMEDIES = {
    errno.EACCES: "run as its owner, or name another folder",
    errno.EPERM: "run as its owner, or name another folder",
    errno.EROFS: "remount it writable, or name another folder",
    errno.ENOSPC: "free space on that disk, or lower the capacity",
    errno.EDQUOT: "raise the quota, or lower the capacity",
    errno.EFBIG: "raise the file size limit (ulimit -f), or lower the capacity",
    errno.ELOOP: "symbolic links are not followed: remove the link",
    errno.ENOTDIR: "name a folder",
    errno.EMFILE: "raise the limit on open files (ulimit -n)",
}


def unavailable(name: str, folder: Path, doing: str, error: OSError) -> TierUnavailable:
    """Return the error for people: what was tried, where, what the system said, and the remedy."""
    remedy = _REMEDIES.get(error.errno or 0, "check the disk")
    return TierUnavailable(f"{name}: folder {folder}: {doing}: {error.strerror or error}: {remedy}")


def is_same_file(path: Path, held: os.stat_result) -> bool:
    """Return whether a path names a file that is held open. Raises OSError if the disk does not say."""
    try:
        named = path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return (held.st_dev, held.st_ino) == (named.st_dev, named.st_ino)


class SsdFolder:
    """The files of one ssd tier. ``acquire`` and ``release`` frame its use."""

    def __init__(self, path: Path, *, name: str, io: DiskIO | None = None) -> None:
        self.path = path
        self.io = io or OsDiskIO()
        self._name = name
        self._lock_fd = -1

    @property
    def slab_path(self) -> Path:
        """The file of payloads."""
        return self.path / "slab"

    @property
    def index_path(self) -> Path:
        """The folder of the LMDB environment."""
        return self.path / "index"

    @property
    def _dirty_path(self) -> Path:
        return self.path / "dirty"

    @property
    def _sealed_path(self) -> Path:
        return self.path / "sealed"

    @property
    def _leftover_path(self) -> Path:
        return self.path / "index.damaged"

    def acquire(self) -> None:
        """Make the folder if need be, check who may write to it, and lock it.

        Raises:
            TierUnavailable: it cannot be used, or another process uses it (the message names both).
        """
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._check_owner()
            self._lock()
        except OSError as error:
            raise unavailable(self._name, self.path, "cannot be used", error) from error

    def settle_seal(self, *, is_sealed: bool) -> None:
        """Say whether from now on all payloads are encrypted, or none. Raises OSError.

        Where that changes, what is there is of no use: the index is removed, and so is a slab that was
        written to in the clear.
        """
        was_sealed = os.path.lexists(self._sealed_path)
        if was_sealed == is_sealed:
            return
        if os.path.lexists(self.slab_path):
            self.discard_index("its blocks are encrypted" if was_sealed else "its blocks are not encrypted")
        if was_sealed:
            self.io.unlink(self._sealed_path)
            self._sync_folder(self.path)
            return
        if os.path.lexists(self.slab_path):
            self.io.unlink(self.slab_path)
            self._sync_folder(self.path)
        self._make(self._sealed_path)

    def is_dirty(self) -> bool:
        """Return whether the last use did not end with ``release``."""
        return os.path.lexists(self._dirty_path)

    def mark_dirty(self) -> None:
        """Note on disk that the tier is in use. Raises OSError."""
        self._make(self._dirty_path)

    def mark_clean(self) -> None:
        """Note on disk that everything was written. Raises OSError."""
        if self.is_dirty():
            self.io.unlink(self._dirty_path)
        self._sync_folder(self.path)

    def sync(self) -> None:
        """Make the files' names survive a power loss. Raises OSError."""
        self._sync_folder(self.index_path)
        self._sync_folder(self.path)

    def discard_index(self, reason: str) -> None:
        """Remove the index, so that the tier starts empty and holds no second one. Raises OSError."""
        _log.warning(
            "%s: folder %s: starting empty, the index cannot be used: %s", self._name, self.path, reason
        )
        self.remove_leftovers()
        if os.path.lexists(self.index_path):
            self.index_path.rename(self._leftover_path)
        self.remove_leftovers()

    def remove_leftovers(self) -> None:
        """Remove what an interrupted ``discard_index`` left. Raises OSError."""
        if self._leftover_path.is_dir() and not self._leftover_path.is_symlink():
            shutil.rmtree(self._leftover_path)
        elif os.path.lexists(self._leftover_path):
            self.io.unlink(self._leftover_path)

    def is_present(self) -> bool:
        """Return whether the folder is the one that this object locked. Raises OSError."""
        return is_same_file(self.path / "lock", os.fstat(self._lock_fd))

    def release(self) -> None:
        """Unlock. Idempotent."""
        if self._lock_fd >= 0:
            # A child that was forked outside Python may still have the descriptor, and with it the lock.
            fcntl.flock(self._lock_fd, fcntl.LOCK_UN)
            self._leave_lock()

    def _make(self, path: Path) -> None:
        """Make an empty file that survives a power loss. Raises OSError."""
        flags = os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW
        self.io.close(self.io.open(path, flags, 0o600))
        self._sync_folder(self.path)

    def _check_owner(self) -> None:
        status = self.path.stat()
        if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise TierUnavailable(
                f"{self._name}: folder {self.path}: mode {status.st_mode & 0o777:o}, others may write to it: "
                "chmod 700 it, or name a folder below it that does not exist yet"
            )
        if os.geteuid() not in {0, status.st_uid}:
            raise TierUnavailable(
                f"{self._name}: folder {self.path}: belongs to user {status.st_uid}, this process runs as "
                f"{os.geteuid()}: run as its owner, or name another folder"
            )

    def _lock(self) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        fd = os.open(self.path / "lock", flags, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
        except BlockingIOError as error:
            owner = os.pread(fd, 32, 0).decode("ascii", "replace").strip() or "unknown"
            os.close(fd)
            raise TierUnavailable(
                f"{self._name}: folder {self.path}: in use by process {owner}: "
                "stop it, or name another folder"
            ) from error
        except OSError:
            os.close(fd)
            raise
        self._lock_fd = fd
        _call_in_children(weakref.WeakMethod(self._leave_lock))

    def _leave_lock(self) -> None:
        """Close the lock's file. In a forked child the lock itself stays its parent's."""
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1

    def _sync_folder(self, path: Path) -> None:
        fd = self.io.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            self.io.fsync(fd)
        finally:
            self.io.close(fd)


def _call_in_children(method: "weakref.WeakMethod[Callable[[], None]]") -> None:
    """Have forked children call a method, as long as its object lives: else they keep what it has locked."""

    def call() -> None:
        bound = method()
        if bound is not None:
            bound()

    os.register_at_fork(after_in_child=call)
