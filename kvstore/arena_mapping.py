"""Mappings of an arena that huge pages fit into, and the huge pages themselves.

Between pages of 4 KiB a copy is slower: the processor looks up one address in 512 times as many entries, and
stops reading ahead at the end of each. Measured (2 cores, 2 MiB blocks, out of cache, GB/s): 8.6 out of an
arena of small pages and 8.0 into it, checksum included; 11.4 and 11.8 with huge ones.

The kernel gives shared memory no huge pages by itself unless the whole machine is set so, but makes them of a
given range when asked (MADV_COLLAPSE, Linux 6.1). Every mapping of the file has them from then on, if it
starts at a multiple of their size. All of this is an attempt: what fails costs speed and nothing else.
"""

import contextlib
import ctypes
import mmap
import os
import time

import numpy as np

HUGE_PAGE_BYTES = 2 << 20

_MADV_COLLAPSE = 25
_PATIENCE_S = 0.25
_S_PER_BYTE = 1.0 / (1 << 30)
_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000


def map_file(
    fd: int, size_bytes: int, *, is_writable: bool = False, is_prefaulted: bool = False
) -> tuple[mmap.mmap, int]:
    """Map a whole file shared; returns the mapping and where in it the file starts.

    Raises:
        OSError: there is no address space for it.
    """
    flags = mmap.MAP_SHARED | (mmap.MAP_POPULATE if is_prefaulted else 0)
    protection = mmap.PROT_READ | (mmap.PROT_WRITE if is_writable else 0)
    if size_bytes >= HUGE_PAGE_BYTES:
        with contextlib.suppress(OSError, AttributeError):
            return _map_aligned(fd, size_bytes, flags, protection)
    return mmap.mmap(fd, size_bytes, flags=flags, prot=protection), 0


def _map_aligned(fd: int, size_bytes: int, flags: int, protection: int) -> tuple[mmap.mmap, int]:
    """Map the file over the part of a larger anonymous mapping that starts where a huge page may.

    The anonymous mapping owns the addresses: the file is unmapped with it.
    """
    room = mmap.mmap(
        -1,
        size_bytes + HUGE_PAGE_BYTES,
        flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE,
        prot=protection,
    )
    address = _address(room)
    start = -address % HUGE_PAGE_BYTES
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int64,
    ]
    placed = libc.mmap(address + start, size_bytes, protection, flags | _MAP_FIXED, fd, 0)
    if placed != address + start:
        room.close()
        raise OSError(ctypes.get_errno(), "mmap")
    return room, start


def use_huge_pages(fd: int, size_bytes: int) -> int:
    """Have the kernel back a file with huge pages as far as it can; returns how many bytes. Blocks.

    To be done before small pages are in it, which would be copied. Where memory is in pieces the kernel moves
    other pages away first: that is given up once it takes longer than ``_PATIENCE_S`` and ``_S_PER_BYTE``.
    """
    whole_bytes = size_bytes // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
    if not whole_bytes:
        return 0
    try:
        mapping, start = map_file(fd, size_bytes, is_writable=True)
    except OSError:
        return 0
    done_bytes = 0
    until_s = time.monotonic() + _PATIENCE_S + whole_bytes * _S_PER_BYTE
    with mapping, contextlib.suppress(OSError):
        while done_bytes < whole_bytes and time.monotonic() < until_s:
            # The kernel makes none of a range without any page. A write fails where a store would be a crash.
            os.pwrite(fd, b"\0", done_bytes)
            mapping.madvise(_MADV_COLLAPSE, start + done_bytes, HUGE_PAGE_BYTES)
            done_bytes += HUGE_PAGE_BYTES
    return done_bytes


def _address(mapping: mmap.mmap) -> int:
    return int(np.frombuffer(mapping, np.uint8).ctypes.data)
