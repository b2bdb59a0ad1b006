"""Pinning a client's mappings of the arena for CUDA, so that a GPU copies from and to them without staging.

Nothing of CUDA is imported here: PyTorch or CuPy is used if the process has loaded one of them, else the CUDA
runtime library if the system has one. Compiled and type-checked only where there is no GPU.
"""

import ctypes
import sys
from collections.abc import Sequence
from typing import Any, Protocol

from kvstore.arena_view import ArenaView

REGISTERED = "registered"

_PORTABLE = 1
"""cudaHostRegisterPortable of the CUDA runtime API: pinned for every context of the process."""

_READ_ONLY = 8
"""cudaHostRegisterReadOnly: of memory that this process has mapped for reading only."""

_LIBRARIES = ("libcudart.so.13", "libcudart.so.12", "libcudart.so")


class Runtime(Protocol):
    """The two calls of the CUDA runtime API that are needed; each returns a status, 0 if it succeeded."""

    def register(self, address: int, length_bytes: int, flags: int) -> int:
        """Pin memory."""

    def unregister(self, address: int) -> int:
        """Unpin memory."""


class _TorchRuntime:
    def __init__(self, torch: Any) -> None:  # Any: PyTorch, seen without importing it
        self._cudart = torch.cuda.cudart()

    def register(self, address: int, length_bytes: int, flags: int) -> int:
        return int(self._cudart.cudaHostRegister(address, length_bytes, flags))

    def unregister(self, address: int) -> int:
        return int(self._cudart.cudaHostUnregister(address))


class _CupyRuntime:
    def __init__(self, cupy: Any) -> None:  # Any: CuPy, seen without importing it
        self._runtime = cupy.cuda.runtime

    def register(self, address: int, length_bytes: int, flags: int) -> int:
        try:
            self._runtime.hostRegister(address, length_bytes, flags)
        except self._runtime.CUDARuntimeError as error:
            return int(error.status)
        return 0

    def unregister(self, address: int) -> int:
        try:
            self._runtime.hostUnregister(address)
        except self._runtime.CUDARuntimeError as error:
            return int(error.status)
        return 0


class _LibraryRuntime:
    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def register(self, address: int, length_bytes: int, flags: int) -> int:
        return int(
            self._library.cudaHostRegister(
                ctypes.c_void_p(address), ctypes.c_size_t(length_bytes), ctypes.c_uint(flags)
            )
        )

    def unregister(self, address: int) -> int:
        return int(self._library.cudaHostUnregister(ctypes.c_void_p(address)))


class CudaRegistration:
    """Mappings that are pinned. They stay mapped until ``end``."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._pinned: list[ArenaView] = []

    def add(self, views: Sequence[ArenaView]) -> str:
        """Pin mappings, all or none; returns REGISTERED, or a clause that says why not."""
        for view in views:
            flags = _PORTABLE if view.is_writable else _PORTABLE | _READ_ONLY
            status = self._runtime.register(view.address, view.format.total_bytes, flags)
            if status:
                self.end()
                return f"cudaHostRegister refused with status {status}"
            self._pinned.append(view)
        return REGISTERED

    def end(self) -> None:
        """Unpin. Idempotent."""
        pinned, self._pinned = self._pinned, []
        for view in pinned:
            self._runtime.unregister(view.address)


def find_runtime() -> Runtime | str:
    """Return the CUDA runtime of this process, or a clause that says why there is none."""
    torch, cupy = sys.modules.get("torch"), sys.modules.get("cupy")
    if torch is not None:
        return _TorchRuntime(torch) if torch.cuda.is_available() else "PyTorch sees no CUDA device"
    if cupy is not None:
        return _CupyRuntime(cupy) if cupy.cuda.is_available() else "CuPy sees no CUDA device"
    for name in _LIBRARIES:
        try:
            library = ctypes.CDLL(name)
        except OSError:
            continue
        count = ctypes.c_int(0)
        if library.cudaGetDeviceCount(ctypes.byref(count)) or not count.value:
            return "there is no CUDA device"
        return _LibraryRuntime(library)
    return "there is no CUDA runtime library, and neither PyTorch nor CuPy is loaded"
