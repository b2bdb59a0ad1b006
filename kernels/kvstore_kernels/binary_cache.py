"""BinaryCache: compiled kernels on disk, for this user alone."""

import contextlib
import hashlib
import os
import secrets
import stat
from pathlib import Path

_MAGIC = b"kvstore kernel 1\n"
_DIGEST_BYTES = 32
_MAX_BYTES = 64 << 20


class BinaryCache:
    """Files ``<key>.bin`` in one folder: magic, SHA-256 of the rest, the rest.

    What lies here runs on the GPU, so the folder must be this user's own and closed to others (it is made
    so); if it is not, or cannot be made or written, nothing is cached and kernels are compiled anew. A file
    is written aside and renamed, so other processes see all of it or nothing; one that is cut short or
    changed fails its digest and counts as absent. Any number of processes and threads may use one folder.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def read(self, key: str) -> bytes | None:
        """Return what was stored under a key, or None."""
        if not self._is_private():
            return None
        try:
            descriptor = os.open(self._path(key), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            return None
        with os.fdopen(descriptor, "rb") as file:
            data = file.read(_MAX_BYTES)
        head, body = data[: len(_MAGIC) + _DIGEST_BYTES], data[len(_MAGIC) + _DIGEST_BYTES :]
        return body if head == _MAGIC + hashlib.sha256(body).digest() else None

    def write(self, key: str, body: bytes) -> bool:
        """Store under a key; False if that was not possible."""
        if not self._is_private():
            return False
        unfinished = self._folder / f".{key}.{os.getpid()}.{secrets.token_hex(4)}"
        try:
            descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(_MAGIC + hashlib.sha256(body).digest() + body)
            unfinished.rename(self._path(key))
        except OSError:
            with contextlib.suppress(OSError):
                unfinished.unlink()
            return False
        return True

    def _path(self, key: str) -> Path:
        return self._folder / f"{key}.bin"

    def _is_private(self) -> bool:
        """Make the folder if there is none, and say whether it is one that only this user can write to."""
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            state = self._folder.lstat()
        except OSError:
            return False
        return stat.S_ISDIR(state.st_mode) and state.st_uid == os.geteuid() and not state.st_mode & 0o077
