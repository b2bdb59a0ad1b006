"""The ssd tier's own system calls, real until a test makes them wait or fail."""

import os
import threading

from kvstore_tiers.disk_io import OsDiskIO


class BrokenIO(OsDiskIO):
    """Real, but for payloads while ``error`` is not 0; counts the calls for payloads."""

    def __init__(self, error: int = 0) -> None:
        self.error = error
        self.num_reads = 0
        self.num_writes = 0

    def _fail(self) -> None:
        if self.error:
            raise OSError(self.error, os.strerror(self.error))

    def preadv(self, fd: int, buffers: list[memoryview], offset: int) -> int:  # type: ignore[override]
        self.num_reads += 1
        self._fail()
        return super().preadv(fd, buffers, offset)

    def pwritev(self, fd: int, buffers: list[memoryview], offset: int) -> int:  # type: ignore[override]
        self.num_writes += 1
        self._fail()
        return super().pwritev(fd, buffers, offset)


class StuckIO(OsDiskIO):
    """Real, until ``stick`` names a call that then waits for ``is_moving``."""

    def __init__(self) -> None:
        self.sticking = ""
        self.is_moving = threading.Event()
        self.is_stuck = threading.Event()

    def _wait(self, call: str) -> None:
        if call == self.sticking:
            self.is_stuck.set()
            self.is_moving.wait(60)

    def preadv(self, fd: int, buffers: list[memoryview], offset: int) -> int:  # type: ignore[override]
        self._wait("preadv")
        return super().preadv(fd, buffers, offset)

    def pwritev(self, fd: int, buffers: list[memoryview], offset: int) -> int:  # type: ignore[override]
        self._wait("pwritev")
        return super().pwritev(fd, buffers, offset)

    def fdatasync(self, fd: int) -> None:
        self._wait("fdatasync")
        super().fdatasync(fd)

    def posix_fallocate(self, fd: int, offset: int, length: int) -> None:
        self._wait("posix_fallocate")
        super().posix_fallocate(fd, offset, length)
