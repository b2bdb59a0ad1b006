"""DiskIO: the system calls that the ssd tier makes on its own files, as a seam for tests.

A test hands in one that fails the N-th operation, shortens it, or tears it. LMDB makes its own calls.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol


class DiskIO(Protocol):
    """The calls, each with the meaning and the errors (OSError) of its namesake in ``os``."""

    def open(self, path: str | os.PathLike[str], flags: int, mode: int = 0o777) -> int:
        """As ``os.open``."""

    def close(self, fd: int) -> None:
        """As ``os.close``."""

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """As ``os.preadv``."""

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """As ``os.pwritev``."""

    def fdatasync(self, fd: int) -> None:
        """As ``os.fdatasync``."""

    def fsync(self, fd: int) -> None:
        """As ``os.fsync``."""

    def posix_fallocate(self, fd: int, offset: int, length: int) -> None:
        """As ``os.posix_fallocate``."""

    def ftruncate(self, fd: int, length: int) -> None:
        """As ``os.ftruncate``."""

    def unlink(self, path: str | os.PathLike[str]) -> None:
        """As ``os.unlink``."""


class OsDiskIO:
    """The real one."""

    def open(self, path: str | os.PathLike[str], flags: int, mode: int = 0o777) -> int:
        """As ``os.open``."""
        return os.open(path, flags, mode)

    def close(self, fd: int) -> None:
        """As ``os.close``."""
        os.close(fd)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """As ``os.preadv``."""
        return os.preadv(fd, buffers, offset)

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """As ``os.pwritev``."""
        return os.pwritev(fd, buffers, offset)

    def fdatasync(self, fd: int) -> None:
        """As ``os.fdatasync``."""
        os.fdatasync(fd)

    def fsync(self, fd: int) -> None:
        """As ``os.fsync``."""
        os.fsync(fd)

    def posix_fallocate(self, fd: int, offset: int, length: int) -> None:
        """As ``os.posix_fallocate``."""
        os.posix_fallocate(fd, offset, length)

    def ftruncate(self, fd: int, length: int) -> None:
        """As ``os.ftruncate``."""
        os.ftruncate(fd, length)

    def unlink(self, path: str | os.PathLike[str]) -> None:
        """As ``os.unlink``."""
        Path(path).unlink()
