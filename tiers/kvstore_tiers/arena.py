"""Arena: the one piece of shared memory that dram slots lie in: sealed, prefaulted, in huge pages."""

import ctypes
import fcntl
import os
import resource

from kvstore.arena_mapping import use_huge_pages
from kvstore.arena_view import INSTANCE_BYTES, SEALS, ArenaFormat, ArenaView, open_read_only
from kvstore.errors import ProtocolMismatch, TierUnavailable
from kvstore.tier import ALIGNMENT_BYTES
from kvstore_tiers.memory_room import available_bytes, cgroup_room_bytes

_MIB = 1 << 20
_CUDA_HOST_REGISTER_PORTABLE = 1
"""cudaHostRegisterPortable of the CUDA runtime API: pinned for every context of the process."""


class Arena:
    """A memfd that holds the slots, mapped writable in the server. ``fd`` is what clients are sent.

    Nothing stays behind when the server dies: the memory goes with its last file descriptor and mapping.
    """

    def __init__(self, fd: int, view: ArenaView, huge_bytes: int) -> None:
        self._fd = fd
        self.huge_bytes = huge_bytes
        """Bytes of it in huge pages, as far as the kernel had them when it was made."""
        self._cuda: ctypes.CDLL | None = None
        self.view = view

    @classmethod
    def create(cls, capacity_bytes: int, *, is_locked: bool = False, beside_bytes: int = 0) -> "Arena":
        """Make an arena with ``capacity_bytes`` of slot space, all of it backed by memory. Blocks.

        Touching memory for the first time costs about 0.5 s per GiB; it is paid here. ``is_locked`` keeps
        the arena out of swap. There has to be memory for ``beside_bytes`` more.

        Raises:
            TierUnavailable: the memory cannot be had: message with the amount, the limit and the remedy.
        """
        capacity_bytes = capacity_bytes // ALIGNMENT_BYTES * ALIGNMENT_BYTES
        arena_format = ArenaFormat(capacity_bytes, os.urandom(INSTANCE_BYTES))
        _check_limits(arena_format.total_bytes, beside_bytes, is_locked=is_locked)
        fd = os.memfd_create("kvstore-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.truncate(fd, arena_format.total_bytes)
            huge_bytes = use_huge_pages(fd, arena_format.total_bytes)
            os.posix_fallocate(fd, 0, arena_format.total_bytes)
            os.pwrite(fd, arena_format.pack(), 0)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
            view = ArenaView.map(fd, is_writable=True, is_prefaulted=True)
            if is_locked:
                _lock(view)
        except (OSError, ProtocolMismatch) as error:
            os.close(fd)
            reason = error.strerror if isinstance(error, OSError) else str(error)
            raise TierUnavailable(
                f"dram: {arena_format.total_bytes // _MIB} MiB cannot be had: {reason}: lower the capacity"
            ) from error
        return cls(fd, view, huge_bytes)

    @property
    def fd(self) -> int:
        """File descriptor of the arena, readable and writable; owned by the arena."""
        return self._fd

    @property
    def instance(self) -> bytes:
        """Random id of this arena (16 bytes)."""
        return self.view.instance

    def open_read_only(self) -> int:
        """Return a new descriptor of the arena that cannot be mapped for writing; the caller closes it."""
        return open_read_only(self._fd)

    def pin(self) -> str:
        """Register the memory with CUDA, so that copies to and from a GPU are direct; returns how that went.

        ``pinned``, or a clause for people where there is no CUDA or it refused: the arena works all the same,
        and copies go through the driver's own buffers. Compiled and reviewed only where there is no GPU.
        """
        library = _cuda_runtime()
        if library is None:
            return "there is no CUDA runtime library"
        address, length = ctypes.c_void_p(self.view.address), ctypes.c_size_t(self.view.format.total_bytes)
        count = ctypes.c_int(0)
        if library.cudaGetDeviceCount(ctypes.byref(count)) or not count.value:
            return "there is no CUDA device"
        status = library.cudaHostRegister(address, length, ctypes.c_uint(_CUDA_HOST_REGISTER_PORTABLE))
        if status:
            return f"cudaHostRegister refused with status {status}"
        self._cuda = library
        return "pinned"

    def close(self) -> None:
        """Let go of the memory. Idempotent."""
        cuda, self._cuda = self._cuda, None
        if cuda is not None:
            cuda.cudaHostUnregister(ctypes.c_void_p(self.view.address))
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        self.view.close()


def _check_limits(arena_bytes: int, beside_bytes: int, *, is_locked: bool) -> None:
    """Refuse before the first page is touched, since the kernel's way of refusing later is to kill."""
    both = arena_bytes + beside_bytes
    for total_bytes, limit_bytes, what, remedy in (
        (both, available_bytes(), "memory is available", "lower the capacity or free memory"),
        (
            both,
            cgroup_room_bytes(),
            "is left of the control group's limit",
            "lower the capacity or raise memory.max",
        ),
        (arena_bytes, _limit(resource.RLIMIT_FSIZE), "is the file size limit", "raise it (ulimit -f)"),
        (both, _limit(resource.RLIMIT_AS), "is the address space limit", "raise it (ulimit -v)"),
        (
            arena_bytes,
            _limit(resource.RLIMIT_MEMLOCK) if is_locked else None,
            "may be locked",
            "raise it (ulimit -l)",
        ),
    ):
        if limit_bytes is not None and total_bytes > limit_bytes:
            raise TierUnavailable(
                f"dram: an arena of {total_bytes // _MIB} MiB is wanted, "
                f"{max(0, limit_bytes) // _MIB} MiB {what}: {remedy}"
            )


def _limit(which: int) -> int | None:
    soft, _ = resource.getrlimit(which)
    return None if soft == resource.RLIM_INFINITY else soft


def _cuda_runtime() -> ctypes.CDLL | None:
    """Return the CUDA runtime that this process or system has, without importing a package of it."""
    for name in ("libcudart.so.13", "libcudart.so.12", "libcudart.so"):
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    return None


def _lock(view: ArenaView) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    address, length = ctypes.c_void_p(view.address), ctypes.c_size_t(view.format.total_bytes)
    if libc.mlock(address, length):
        number = ctypes.get_errno()
        raise OSError(number, f"mlock: {os.strerror(number)}")
