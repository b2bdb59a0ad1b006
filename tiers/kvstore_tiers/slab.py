"""Slab: one preallocated file that holds the payloads of the ssd tier, in slots at multiples of 4096.

With O_DIRECT the device reads and writes the caller's buffer itself; a buffer that is not aligned or not
padded to 4096 bytes goes through an aligned one of the thread. Where the file system refuses O_DIRECT the
page cache is used. Every method but ``open`` may be called from any thread.
"""

import errno
import logging
import mmap
import os
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from kvstore.checksum import as_bytes_array
from kvstore.errors import CorruptBlock
from kvstore.tier import ALIGNMENT_BYTES
from kvstore_tiers.disk_io import DiskIO, OsDiskIO
from kvstore_tiers.slots import padded
from kvstore_tiers.ssd_folder import is_same_file

_log = logging.getLogger(__name__)

Payload = tuple[memoryview, int]
"""A buffer and how many bytes of it are the payload."""


class Slab:
    """An open slab file."""

    def __init__(self, fd: int, *, is_direct: bool, io: DiskIO | None = None) -> None:
        self._fd = fd
        self._io = io or OsDiskIO()
        self._is_direct = is_direct
        self._bounce = threading.local()

    @classmethod
    def open(cls, path: Path, size_bytes: int, *, io: DiskIO | None = None) -> tuple["Slab", int]:
        """Open or create the file and reserve its space on disk; returns it and the size it had before.

        A file that is larger is kept as it is; ``shrink`` cuts it.

        Raises:
            OSError: it cannot be opened or the space cannot be had (a file that grew is cut back).
        """
        io = io or OsDiskIO()
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        is_direct = True
        try:
            fd = io.open(path, flags | os.O_DIRECT, 0o600)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            fd = io.open(path, flags, 0o600)
            is_direct = False
            _log.warning("ssd: %s: the file system has no O_DIRECT, the page cache is used", path)
        had_bytes = os.fstat(fd).st_size
        try:
            io.posix_fallocate(fd, 0, size_bytes)
        except OSError:
            _undo(io, fd, path, had_bytes)
            raise
        return cls(fd, is_direct=is_direct, io=io), had_bytes

    @property
    def is_direct(self) -> bool:
        """Whether O_DIRECT is in use."""
        return self._is_direct

    def is_at(self, path: Path) -> bool:
        """Return whether a path names this file. Raises OSError if the disk does not say."""
        return is_same_file(path, os.fstat(self._fd))

    def shrink(self, size_bytes: int) -> None:
        """Cut the file to this size."""
        self._io.ftruncate(self._fd, size_bytes)

    def write(self, offset: int, buffer: memoryview, length_bytes: int) -> None:
        """Write ``buffer[:length_bytes]`` at ``offset``; whole multiples of 4096 bytes are written.

        Raises:
            OSError: the device or file system failed.
        """
        self._write([self._source(buffer, length_bytes)], offset)

    def write_run(self, offset: int, payloads: Sequence[Payload]) -> None:
        """Write payloads one behind the other, each at a multiple of 4096, by one system call if possible.

        Raises:
            OSError: the device or file system failed: any of them may be written, in part too.
        """
        if self._is_direct and all(_is_fit(buffer, padded(length)) for buffer, length in payloads):
            self._write([buffer[: padded(length)] for buffer, length in payloads], offset)
            return
        for buffer, length in payloads:
            self.write(offset, buffer, length)
            offset += padded(length)

    def read(self, offset: int, buffer: memoryview, length_bytes: int) -> None:
        """Read ``length_bytes`` at ``offset`` into ``buffer``; up to its next multiple of 4096 may be used.

        Raises:
            OSError: the device or file system failed.
            CorruptBlock: the file ends before that.
        """
        size = padded(length_bytes) if self._is_direct else length_bytes
        is_fit = not self._is_direct or _is_fit(buffer, size)
        target = buffer[:size] if is_fit else self._bounce_of(size)
        self._read([target], offset, length_bytes)
        if not is_fit:
            np.copyto(as_bytes_array(buffer)[:length_bytes], as_bytes_array(target)[:length_bytes])

    def read_run(self, offset: int, payloads: Sequence[Payload]) -> None:
        """Read payloads that lie one behind the other, by one system call if possible; else as ``read``.

        Raises:
            OSError: the device or file system failed: any of them may be read.
            CorruptBlock: the file ends before that.
        """
        if self._is_direct and all(_is_fit(buffer, padded(length)) for buffer, length in payloads):
            targets = [buffer[: padded(length)] for buffer, length in payloads]
            last = payloads[-1][1]
            self._read(targets, offset, sum(map(len, targets)) - padded(last) + last)
            return
        for buffer, length in payloads:
            self.read(offset, buffer, length)
            offset += padded(length)

    def sync(self) -> None:
        """Make everything written so far survive a power loss.

        Raises:
            OSError: the device failed; what was written since the last success is in doubt.
        """
        self._io.fdatasync(self._fd)

    def close(self) -> None:
        """Close the file."""
        self._io.close(self._fd)

    def _write(self, sources: list[memoryview], offset: int) -> None:
        while sources:
            count = self._io.pwritev(self._fd, sources, offset)
            if not count:
                raise OSError(errno.EIO, "nothing was written")
            offset += count
            sources = _behind(sources, count)

    def _read(self, targets: list[memoryview], offset: int, wanted_bytes: int) -> None:
        done = 0
        while done < wanted_bytes:
            count = self._io.preadv(self._fd, targets, offset + done)
            if not count:
                raise CorruptBlock(f"slab: ends before offset {offset + wanted_bytes}")
            done += count
            targets = _behind(targets, count)

    def _source(self, buffer: memoryview, length_bytes: int) -> memoryview:
        if not self._is_direct:
            return buffer[:length_bytes]
        size = padded(length_bytes)
        if _is_fit(buffer, size):
            return buffer[:size]
        bounce = self._bounce_of(size)
        target = as_bytes_array(bounce)
        np.copyto(target[:length_bytes], as_bytes_array(buffer)[:length_bytes])
        target[length_bytes:] = 0
        return bounce

    def _bounce_of(self, size_bytes: int) -> memoryview:
        held: memoryview | None = getattr(self._bounce, "view", None)
        if held is None or len(held) < size_bytes:
            held = memoryview(mmap.mmap(-1, size_bytes))
            self._bounce.view = held
        return held[:size_bytes]


def _undo(io: DiskIO, fd: int, path: Path, had_bytes: int) -> None:
    """Leave the file as it was before its space could not be had."""
    try:
        io.ftruncate(fd, had_bytes)
        if not had_bytes:
            io.unlink(path)
    except OSError as error:
        _log.warning("ssd: %s: could not be cut back to %d bytes: %s", path, had_bytes, error)
    finally:
        io.close(fd)


def _behind(buffers: list[memoryview], done_bytes: int) -> list[memoryview]:
    """Return what is left of buffers of which the first bytes are done."""
    left: list[memoryview] = []
    for buffer in buffers:
        if done_bytes < len(buffer):
            left.append(buffer[done_bytes:])
        done_bytes = max(0, done_bytes - len(buffer))
    return left


def _is_fit(buffer: memoryview, size_bytes: int) -> bool:
    """Whether O_DIRECT can use the first ``size_bytes`` of the buffer."""
    if buffer.nbytes < size_bytes:
        return False
    address: int = as_bytes_array(buffer).__array_interface__["data"][0]
    return address % ALIGNMENT_BYTES == 0
