"""Short slices: a server that wakes beside busy processes runs soon, because it asks for little at a time.

Linux (EEVDF, from 6.12) lets a thread without any privilege ask for a slice of its own. Who asks for a short
one gets no more of a core, but sooner: what counts is when the slice would be over.
"""

import ctypes
import logging
import os
import platform
import struct

logger = logging.getLogger(__name__)

SLICE_S = 100e-6
"""What the server asks for: the least that Linux gives, and about what a request takes."""

_CALLS = {"x86_64": (314, 315), "aarch64": (274, 275)}
"""The numbers of ``sched_setattr`` and ``sched_getattr``, which Python does not have."""

_ATTRIBUTES = struct.Struct("<IIQiIQQQII")
_SIZE_AT, _POLICY_AT, _RUNTIME_AT = 0, 1, 5


def ask_for_short_slices(seconds: float = SLICE_S) -> bool:
    """Have this thread, and those that it starts, run in slices of so many seconds; False if it cannot be.

    Nothing but the slice is changed. Kernels before 6.12 take it and do nothing with it.
    """
    numbers = _CALLS.get(platform.machine())
    if numbers is None or platform.system() != "Linux":
        return False
    set_number, get_number = numbers
    system_call = ctypes.CDLL(None, use_errno=True).syscall
    held = ctypes.create_string_buffer(_ATTRIBUTES.size)
    if system_call(get_number, 0, held, _ATTRIBUTES.size, 0):
        return _failed()
    fields = list(_ATTRIBUTES.unpack(held.raw))
    if fields[_POLICY_AT] != os.SCHED_OTHER:
        return False
    fields[_SIZE_AT], fields[_RUNTIME_AT] = _ATTRIBUTES.size, int(seconds * 1e9)
    wanted = ctypes.create_string_buffer(_ATTRIBUTES.pack(*fields), _ATTRIBUTES.size)
    return not system_call(set_number, 0, wanted, 0) or _failed()


def _failed() -> bool:
    logger.info("server: no short slices: %s", os.strerror(ctypes.get_errno()))
    return False
