"""Counts: counters by name that threads add to, and that are taken now and then."""

import threading
from collections import Counter


class Counts:
    """Thread-safe counters by name."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    def add(self, name: str, count: int = 1) -> None:
        """Count something, ``count`` times."""
        if count:
            with self._lock:
                self._counts[name] += count

    def take(self) -> dict[str, int]:
        """Return what was counted since the last time."""
        if not self._counts:
            return {}
        with self._lock:
            taken, self._counts = self._counts, Counter()
        return dict(taken)
