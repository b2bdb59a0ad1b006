"""Keeps a process's memory out of core dumps, and out of reach of other processes of its user."""

import ctypes
import logging
import os
import resource

logger = logging.getLogger(__name__)

_PR_SET_DUMPABLE = 4


def forbid_core_dumps() -> None:
    """Leave no core dump of this process, neither in a file nor through a program that the kernel starts."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # A dump that is piped to a program is not bound by the limit; that a process is not dumpable is.
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0):
        logger.warning("core dumps: prctl(PR_SET_DUMPABLE): %s", os.strerror(ctypes.get_errno()))
