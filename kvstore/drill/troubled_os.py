"""TroubledOs: functions for the module ``os`` of a store's process, through which trouble comes to its files.

Only files below one folder are concerned. Calls with a ``dir_fd``, and what Python's own file objects write,
are not seen.
"""

import fcntl
import os
from collections.abc import Callable, Sequence
from typing import Any

from kvstore.drill.trouble import Harm, Operation, Trouble
from kvstore.drill.write_log import WriteLog
from kvstore.tier import ALIGNMENT_BYTES

# Any, throughout: a file descriptor, a path or a buffer in all forms that ``os`` takes.


class TroubledOs:
    """One replacement per function, each with the meaning of its namesake."""

    def __init__(self, trouble: Trouble, folder: str) -> None:
        self._trouble = trouble
        self._roots = tuple({folder, os.path.realpath(folder)})
        self._real: dict[str, Callable[..., Any]] = {}

    def install(self) -> None:
        """Put the replacements into ``os``, once."""
        simple = {
            Operation.SIZE: ("posix_fallocate", "ftruncate"),
            Operation.NAME: ("unlink", "remove", "rename", "replace", "mkdir"),
            Operation.OPEN: ("open",),
        }
        own = {
            "close": self._close,
            "preadv": self._preadv,
            "pread": self._pread,
            "pwritev": self._pwritev,
            "pwrite": lambda fd, data, offset: self._pwritev(fd, [data], offset),
            "write": lambda fd, data: self._write_on("write", fd, [data]),
            "writev": lambda fd, parts: self._write_on("writev", fd, parts),
            "fsync": lambda fd: self._sync("fsync", fd),
            "fdatasync": lambda fd: self._sync("fdatasync", fd),
        }
        own |= {name: self._plain(kind, name) for kind, names in simple.items() for name in names}
        self._real = {name: getattr(os, name) for name in own}
        for name, function in own.items():
            setattr(os, name, function)

    def _plain(self, operation: Operation, name: str) -> Callable[..., Any]:
        def call(what: Any, *arguments: Any, **options: Any) -> Any:
            is_ours = options.get("dir_fd") is None and self._name_of(what) is not None
            if is_ours and self._trouble.begin(operation) in (Harm.FAIL, Harm.TEAR):
                raise self._failure()
            return self._real[name](what, *arguments, **options)

        return call

    def _close(self, fd: int) -> None:
        is_ours = self._name_of(fd) is not None
        harm = self._trouble.begin(Operation.CLOSE) if is_ours else Harm.NONE
        self._real["close"](fd)
        if harm in (Harm.FAIL, Harm.TEAR):
            raise self._failure()

    def _pread(self, fd: int, length: int, offset: int) -> bytes:
        buffer = bytearray(length)
        done = self._preadv(fd, [buffer], offset)
        return bytes(buffer[:done])

    def _preadv(self, fd: int, buffers: Sequence[Any], offset: int, flags: int = 0) -> int:
        if self._name_of(fd) is None:
            return int(self._real["preadv"](fd, buffers, offset, flags))
        harm = self._trouble.begin(Operation.READ)
        if harm in (Harm.FAIL, Harm.TEAR):
            raise self._failure()
        # Only the slab is read in pieces: no disk shortens a read of bytes that are there.
        is_cut = harm is Harm.SHORTEN and _is_direct(fd)
        parts = _first_half(_views(buffers), is_direct=True) if is_cut else buffers
        return int(self._real["preadv"](fd, parts, offset, flags))

    def _pwritev(self, fd: int, buffers: Sequence[Any], offset: int, flags: int = 0) -> int:
        def write(parts: Sequence[Any]) -> int:
            return int(self._real["pwritev"](fd, parts, offset, flags))

        return self._written(fd, buffers, offset, write)

    def _write_on(self, name: str, fd: int, data: Sequence[Any]) -> int:
        """Write at the file's own position."""

        def write(parts: Sequence[Any]) -> int:
            return int(self._real["writev"](fd, parts))

        if self._name_of(fd) is None:
            return int(self._real[name](fd, data[0] if name == "write" else data))
        return self._written(fd, data, os.lseek(fd, 0, os.SEEK_CUR), write)

    def _written(
        self, fd: int, buffers: Sequence[Any], offset: int, write: Callable[[Sequence[Any]], int]
    ) -> int:
        name = self._name_of(fd)
        if name is None:
            return write(buffers)
        harm = self._trouble.begin(Operation.WRITE)
        if harm is Harm.FAIL:
            raise self._failure()
        parts = _views(buffers)
        if harm in (Harm.TEAR, Harm.SHORTEN):
            parts = _first_half(parts, is_direct=_is_direct(fd))
        # The order may change meanwhile: what this log notes began while it was the log.
        log = self._trouble.log
        done = write(parts) if parts else 0
        if log is not None and done:
            _note(log, name, offset, parts, done, is_durable=_is_self_syncing(fd))
        if harm is Harm.TEAR:
            raise self._failure()
        return done

    def _sync(self, name: str, fd: int) -> None:
        file = self._name_of(fd)
        log = self._trouble.log
        num_covered = log.num_records if log is not None else 0
        if file is not None and self._trouble.begin(Operation.SYNC) in (Harm.FAIL, Harm.TEAR):
            raise self._failure()
        self._real[name](fd)
        if log is not None and file is not None:
            log.note_sync(file, num_covered=num_covered)

    def _name_of(self, what: Any) -> str | None:
        """Return a file's name below the folder; None for any other."""
        try:
            # Not Path: this runs for every call of the process.
            path = os.readlink(f"/proc/self/fd/{what}") if isinstance(what, int) else os.fsdecode(what)  # noqa: PTH115
        except (OSError, TypeError):
            return None
        for root in self._roots:
            if path == root or path.startswith(root + "/"):
                return path[len(root) + 1 :]
        return None

    def _failure(self) -> OSError:
        return OSError(self._trouble.error, os.strerror(self._trouble.error))


def _views(buffers: Sequence[Any]) -> list[memoryview]:
    return [memoryview(buffer).cast("B") for buffer in buffers]


def _first_half(parts: list[memoryview], *, is_direct: bool) -> list[memoryview]:
    """Return the first half of the bytes, in whole pages where the file takes no others."""
    left = sum(part.nbytes for part in parts) // 2
    if is_direct:
        left -= left % ALIGNMENT_BYTES
    kept: list[memoryview] = []
    for part in parts:
        kept.append(part[:left])
        left -= kept[-1].nbytes
    return [part for part in kept if part.nbytes]


def _note(
    log: WriteLog, name: str, offset: int, parts: list[memoryview], done: int, *, is_durable: bool
) -> None:
    written: list[memoryview] = []
    for part in parts:
        written.append(part[:done])
        done -= written[-1].nbytes
    log.note_write(name, offset, written, is_durable=is_durable)


def _is_direct(fd: int) -> bool:
    return bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)


def _is_self_syncing(fd: int) -> bool:
    return bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DSYNC)
