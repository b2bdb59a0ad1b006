"""AwakeSelector: an event loop's selector that does not go to sleep right after there was something to do.

An idle virtual core takes tens of microseconds to wake, and requests of one client follow each other at about
that distance. Measured with benchmarks/data_plane.py, 2 cores, one block of 64 KiB at a time: 57 us for a
server that goes to sleep at once, 36 us for one that stays awake.

While a client copies blocks into the arena or out of it, the server has nothing to do, and the message that
follows would find it asleep: ``stay_awake`` tells how long that takes.

Before it waits, awake or asleep, work is done that was left for an idle moment, a piece between two looks.
"""

import math
import os
import selectors
import time
from collections.abc import Callable
from selectors import SelectorKey

from kvstore.idle_work import IdleWork

AWAKE_S = 60e-6
"""What an event keeps the selector awake for, unless there is one core only."""

_WORK_PATIENCE_S = 0.01
"""How often a loop that is never idle does a piece of what was left all the same."""


class AwakeSelector(selectors.EpollSelector):
    """Looks again and again for ``awake_s`` after the last event, and only then sleeps.

    Whoever else wants the core has it between two looks. One event costs at most ``awake_s`` of a core that
    nobody wants: of a server that is asked 1000 times a second, 6 %.
    """

    def __init__(self, awake_s: float = AWAKE_S, *, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._awake_s = awake_s if len(os.sched_getaffinity(0)) > 1 else 0.0
        self._clock = clock
        self._awake_until_s = self._worked_s = 0.0
        self.idle_work = IdleWork()
        """What to do while nothing is ready."""
        self.idle_work.take_turns()

    def stay_awake(self, seconds: float) -> None:
        """Do not go to sleep for so long from now: an event is expected."""
        if self._awake_s:
            self._awake_until_s = max(self._awake_until_s, self._clock() + seconds)

    def select(self, timeout: float | None = None) -> list[tuple[SelectorKey, int]]:
        """Return what is ready, waiting up to ``timeout`` seconds (None: for ever) for something to be."""
        look = super().select
        if self.idle_work.is_left:
            ready, timeout = self._work(timeout)
            if ready:
                return ready
        if timeout is None or timeout > 0:
            awake_until_s = self._awake_until_s
            if timeout is not None and (began_s := self._clock()) < awake_until_s:
                awake_until_s = min(awake_until_s, began_s + timeout)
                timeout = max(0.0, began_s + timeout - awake_until_s)
            while (now_s := self._clock()) < awake_until_s:
                ready = look(0)
                if ready:
                    self._awake_until_s = max(self._awake_until_s, now_s + self._awake_s)
                    return ready
                os.sched_yield()
        ready = look(timeout)
        if ready:
            self._awake_until_s = max(self._awake_until_s, self._clock() + self._awake_s)
        return ready

    def _work(self, timeout: float | None) -> tuple[list[tuple[SelectorKey, int]], float | None]:
        """Do what was left until something is ready, or the time is over; returns that, and the time left.

        Where something always is, a piece now and then is done all the same.
        """
        now_s = self._clock()
        ends_s = math.inf if timeout is None else now_s + timeout
        while self.idle_work.is_left:
            ready = super().select(0)
            now_s = self._clock()
            is_wanted = bool(ready) or now_s >= ends_s
            if not is_wanted or now_s >= self._worked_s + _WORK_PATIENCE_S:
                self._worked_s = now_s
                self.idle_work.step()
            if ready:
                self._awake_until_s = max(self._awake_until_s, now_s + self._awake_s)
            if is_wanted:
                return ready, 0.0
        return [], None if timeout is None else max(0.0, ends_s - now_s)
