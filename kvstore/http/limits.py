"""What clients of the HTTP face may ask of it: sizes, counts, times and rates."""

import math
from collections.abc import Callable
from dataclasses import dataclass

_MIB = 1 << 20
_GIB = 1 << 30
_SPARE_FDS = 64
_MIN_CONNECTIONS = 8

MAX_KEYS = 10_000
"""Blocks that one request may name."""

MAX_TIMEOUT_S = 60.0
"""Longest time that a request may ask for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of one HTTP face.

    ``max_requests`` are under way per key (the operator's are bounded by the number of connections),
    ``requests_per_s`` (0: no limit) begin. A request's header has
    ``header_s`` from its first byte, a connection without a request ``idle_s``. Whoever sends or takes
    nothing for ``stall_s``, or sends a body slower than ``body_bytes_per_s`` beyond that time, is dropped.
    Bodies taken in whole, of at most ``max_json_bytes`` each, take ``max_pending_body_bytes`` together.
    """

    max_connections: int = 1024
    max_requests: int = 64
    requests_per_s: float = 0.0
    header_s: float = 10.0
    idle_s: float = 75.0
    stall_s: float = 10.0
    body_bytes_per_s: int = 64 << 10
    max_json_bytes: int = _MIB
    max_batch_bytes: int = 4 * _GIB
    max_pending_body_bytes: int = 128 * _MIB
    max_leases: int = 256


def connection_cap(wanted: int, *, max_fds: int | None, others: int) -> int:
    """Return how many connections may be open: ``wanted``, or as many as descriptors are left for.

    ``max_fds`` is the limit on descriptors (None: none), ``others`` how many clients of other listeners may
    have.
    """
    if max_fds is None:
        return wanted
    return max(_MIN_CONNECTIONS, min(wanted, max_fds - others - _SPARE_FDS))


class TokenBucket:
    """Lets ``per_s`` requests a second begin, and a second's worth at once (0: any number)."""

    __slots__ = ("_at_s", "_clock", "_per_s", "_tokens")

    def __init__(self, per_s: float, clock: Callable[[], float]) -> None:
        self._per_s = per_s
        self._clock = clock
        self._tokens = self._size
        self._at_s = clock()

    @property
    def _size(self) -> float:
        return max(1.0, self._per_s)

    def take(self) -> int:
        """Take a token and return 0; without one return after how many seconds there is one."""
        if not self._per_s:
            return 0
        now_s = self._clock()
        self._tokens = min(self._size, self._tokens + (now_s - self._at_s) * self._per_s)
        self._at_s = now_s
        if self._tokens < 1.0:
            return math.ceil((1.0 - self._tokens) / self._per_s)
        self._tokens -= 1.0
        return 0
