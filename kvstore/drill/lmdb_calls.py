"""LMDB's calls on its own files, led through the module ``os`` of this process."""

import ctypes
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lmdb

from kvstore.drill.shared_library import SharedLibrary
from kvstore.drill.store_process import PartFailed

_SSIZE, _INT, _POINTER, _SIZE, _OFFSET = (
    ctypes.c_ssize_t,
    ctypes.c_int,
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int64,
)


class _Part(ctypes.Structure):
    """One ``struct iovec``."""

    _fields_ = (("start", _POINTER), ("length", _SIZE))


class LmdbCalls:
    """The calls of one process. ``lead_to_os`` cannot be undone."""

    def __init__(self) -> None:
        """Find LMDB's library.

        Raises:
            PartFailed: it is none whose calls can be led elsewhere.
        """
        # The package has two forms: an extension module, and one over cffi that is not looked into.
        module = getattr(lmdb, "cpython", None)
        if module is None:
            raise PartFailed("lmdb: is not the extension module, its calls cannot be watched")
        self._library = SharedLibrary(Path(module.__file__))

    def lead_to_os(self) -> None:
        """Have every call that opens, reads, writes, syncs or cuts a file go to ``os``.

        Raises:
            PartFailed: the system does not allow it, or the library writes in another way.
        """
        num_led = 0
        for names, function, result, arguments in _replacements():
            led = [name for name in names if self._library.calls(name)]
            if not led:
                continue
            prototype = ctypes.CFUNCTYPE(result, *arguments, use_errno=True)
            callback = prototype(_as_system_call(function))
            # The library may call it for as long as the process lives, so it must never be freed.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(callback))
            address = ctypes.cast(callback, _POINTER).value
            assert address is not None, "a function has an address"
            for name in led:
                self._library.lead(name, address)
            num_led += "pwrite" in names or "fdatasync" in names
        if num_led < 2:
            raise PartFailed("lmdb: it calls neither pwrite nor fdatasync, its writes cannot be watched")


def _replacements() -> list[tuple[tuple[str, ...], Callable[..., int | None], Any, tuple[Any, ...]]]:
    """Return names, replacement, type of the result and of the arguments of each call."""
    at = (_INT, _POINTER, _SIZE, _OFFSET)
    parts_at = (_INT, _POINTER, _INT, _OFFSET)
    return [
        (
            ("open", "open64"),
            lambda path, flags, mode: os.open(path, flags, mode),
            _INT,
            (ctypes.c_char_p, _INT, _INT),
        ),
        (("pread", "pread64"), lambda fd, *where: os.preadv(fd, [_view(*where[:2])], where[2]), _SSIZE, at),
        (
            ("pwrite", "pwrite64"),
            lambda fd, *where: os.pwritev(fd, [_view(*where[:2])], where[2]),
            _SSIZE,
            at,
        ),
        (
            ("pwritev", "pwritev64"),
            lambda fd, parts, n, at: os.pwritev(fd, _views(parts, n), at),
            _SSIZE,
            parts_at,
        ),
        (("write",), lambda fd, start, length: os.write(fd, _view(start, length)), _SSIZE, at[:3]),
        (("writev",), lambda fd, parts, num: os.writev(fd, _views(parts, num)), _SSIZE, parts_at[:3]),
        (("fsync",), lambda fd: os.fsync(fd), _INT, (_INT,)),
        (("fdatasync",), lambda fd: os.fdatasync(fd), _INT, (_INT,)),
        (("ftruncate", "ftruncate64"), lambda fd, length: os.ftruncate(fd, length), _INT, (_INT, _OFFSET)),
    ]


def _as_system_call(function: Callable[..., int | None]) -> Callable[..., int]:
    def call(*arguments: Any) -> int:  # Any: what the prototype says
        try:
            return function(*arguments) or 0
        except OSError as error:
            ctypes.set_errno(error.errno or 0)
            return -1

    return call


def _view(start: int, length: int) -> memoryview:
    return memoryview((ctypes.c_char * length).from_address(start)).cast("B")


def _views(parts: int, num_parts: int) -> list[memoryview]:
    array = (_Part * num_parts).from_address(parts)
    return [_view(part.start, part.length) for part in array]
