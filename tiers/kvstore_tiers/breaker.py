"""CircuitBreaker: when to stop asking a faulty medium, and when to ask again. Pure; the clock is given.

closed     every call may go. ``max_faults`` faults in a row, or one timeout, open it.
open       no call may go until the delay has passed. It doubles with each failed probe, up to a limit.
half-open  one call may go, as a probe. Success closes, failure opens again.

No timer and no thread: the next call after the delay is the probe. Safe in threads.
"""

import threading
from collections.abc import Callable


class CircuitBreaker:
    """Guards one medium. Ask ``allows`` before a call, and report its end exactly once."""

    def __init__(
        self,
        *,
        clock: Callable[[], float],
        max_faults: int = 3,
        delay_s: float = 0.25,
        max_delay_s: float = 8.0,
    ) -> None:
        self._clock = clock
        self._max_faults = max_faults
        self._first_delay_s = delay_s
        self._max_delay_s = max_delay_s
        self._lock = threading.Lock()
        self._faults = 0
        self._delay_s = delay_s
        self._open_until_s: float | None = None
        self._probe_until_s: float | None = None
        self._reason = ""
        self._times_opened = 0

    @property
    def reason(self) -> str:
        """Why it is open, one clause for people; empty when closed."""
        return self._reason

    @property
    def delay_s(self) -> float:
        """How long it stays open before the next probe; doubles with each that failed."""
        return self._delay_s

    @property
    def times_opened(self) -> int:
        """How often it went from closed to open."""
        return self._times_opened

    def is_up(self) -> bool:
        """Return whether a call is worth trying now, without taking the probe."""
        with self._lock:
            return self._may_go()

    def allows(self) -> bool:
        """Return whether a call may go now; in half-open the caller that gets True is the probe."""
        with self._lock:
            if not self._may_go():
                return False
            if self._open_until_s is not None:
                self._probe_until_s = self._clock() + self._delay_s
            return True

    def succeeded(self) -> None:
        """Report that a call reached the medium and was answered."""
        with self._lock:
            self._faults = 0
            self._delay_s = self._first_delay_s
            self._open_until_s = self._probe_until_s = None
            self._reason = ""

    def failed(self, reason: str, *, is_timeout: bool = False) -> bool:
        """Report a fault; returns True if this one opened a closed breaker."""
        with self._lock:
            self._faults += 1
            if self._open_until_s is not None:
                if self._probe_until_s is not None:
                    self._delay_s = min(2 * self._delay_s, self._max_delay_s)
                    self._open(reason)
                return False
            if not is_timeout and self._faults < self._max_faults:
                return False
            self._times_opened += 1
            self._open(reason)
            return True

    def end_delay(self) -> None:
        """Let the next call be the probe, without waiting for the delay; nothing if it is closed."""
        with self._lock:
            if self._open_until_s is not None:
                self._open_until_s = min(self._open_until_s, self._clock())

    def abandoned(self) -> None:
        """Report that a call ended without a verdict; the next one is the probe."""
        with self._lock:
            self._probe_until_s = None

    def _may_go(self) -> bool:
        if self._open_until_s is None:
            return True
        now_s = self._clock()
        return now_s >= self._open_until_s and (self._probe_until_s is None or now_s >= self._probe_until_s)

    def _open(self, reason: str) -> None:
        self._reason = reason
        self._open_until_s = self._clock() + self._delay_s
        self._probe_until_s = None
