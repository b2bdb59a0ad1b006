"""Tally: what a backend did, in the log: a line per interval in which something happened, and faults."""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable

from kvstore_engine_adapter.counts import Counts

_INTERVAL_S = 10.0


class Tally:
    """Tells what was counted, at most once per interval. Thread-safe."""

    def __init__(
        self,
        logger: logging.Logger,
        counts: Counts,
        *,
        interval_s: float = _INTERVAL_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._logger = logger
        self._counts = counts
        self._interval_s = interval_s
        self._clock = clock
        self._lock = threading.Lock()
        self._next_s = clock()
        self._next_fault_s = 0.0
        self._totals: Counter[str] = Counter()
        self._told: dict[str, int] = {}

    def note_fault(self, error: BaseException) -> None:
        """Log a fault with its traceback, unless one was logged less than an interval ago."""
        with self._lock:
            now_s = self._clock()
            if now_s < self._next_fault_s:
                return
            self._next_fault_s = now_s + self._interval_s
        self._logger.warning(
            "kvstore: a call failed, and counts as a miss (like ones are only counted for %.0f s)",
            self._interval_s,
            exc_info=error,
        )

    def tell(self, *, at_once: bool = False) -> None:
        """Log what was counted since the last line, if it is time."""
        with self._lock:
            now_s = self._clock()
            if now_s < self._next_s and not at_once:
                return
            self._next_s = now_s + self._interval_s
        counted = self.counts()
        with self._lock:
            new = counted != self._told
            self._told = counted
        if new:
            told = ", ".join(f"{name} {count}" for name, count in sorted(counted.items()))
            self._logger.info("kvstore: since the start: %s", told)

    def counts(self) -> dict[str, int]:
        """Return all that was counted since the start."""
        with self._lock:
            self._totals.update(self._counts.take())
            return dict(self._totals)
