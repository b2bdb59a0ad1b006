"""Keeps a process's memory out of core dumps."""

import ctypes
import logging
import os
import resource

logger = logging.getLogger(__name__)

_PR_SET_DUMPABLE = 4


def leave_no_core_file() -> None:
    """Have the kernel write no core file when this process, or a child of it, crashes."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def become_undumpable() -> None:
    """Have the kernel make no core dump at all, nor let other processes of the user read this one's memory.

    A dump that the kernel pipes to a program is not bound by the limit on core files.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0):
        logger.warning("core dumps: prctl(PR_SET_DUMPABLE): %s", os.strerror(ctypes.get_errno()))
