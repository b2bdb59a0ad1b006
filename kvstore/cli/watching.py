"""Watch: asks a store for its stats again and again, and says so while it does not answer."""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from kvstore.cli.store_figures import Sample, Stats, sample
from kvstore.errors import KVStoreError

MAX_SAMPLES = 240
"""Samples that are remembered."""


@dataclass(frozen=True, slots=True)
class Outage:
    """A store that does not answer: why, and since when (``since_s``, as ``time_s`` in Unix time)."""

    time_s: float
    since_s: float
    problem: str

    def as_dict(self) -> dict[str, object]:
        """Return a JSON-ready copy."""
        return {
            "time_s": round(self.time_s, 3),
            "is_up": False,
            "since_s": round(self.since_s, 3),
            "problem": self.problem,
        }


class Watch:
    """Takes samples of a store by ``read``, one call each. ``history`` has the latest, outages among them.

    ``of``: ``fetch`` or ``match``, the lookups that are counted.
    """

    def __init__(
        self,
        read: Callable[[], Stats],
        *,
        of: str,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._read = read
        self.of = of
        self._clock = clock
        self._wall_clock = wall_clock
        self._before: tuple[Stats, float] | None = None
        self._away_since_s: float | None = None
        self.history: deque[Sample | Outage] = deque(maxlen=MAX_SAMPLES)

    def first(self) -> Sample:
        """Take the first sample.

        Raises:
            KVStoreError: the store does not answer, or not to this caller.
        """
        taken = self._take()
        self.history.append(taken)
        return taken

    def next(self) -> Sample | Outage:
        """Take a sample, or note that there is none to be had."""
        taken: Sample | Outage
        try:
            taken = self._take()
        except KVStoreError as error:
            now_s = self._wall_clock()
            if self._away_since_s is None:
                self._away_since_s = now_s
            self._before = None
            taken = Outage(now_s, self._away_since_s, " ".join(str(error).split()))
        self.history.append(taken)
        return taken

    def last_sample(self) -> Sample | None:
        """Return the latest sample that there is, also while the store is away."""
        return next((taken for taken in reversed(self.history) if isinstance(taken, Sample)), None)

    def back_since_s(self) -> float | None:
        """Return when the store answered again after it was away; None if neither is remembered."""
        back_s: float | None = None
        for taken in reversed(self.history):
            if isinstance(taken, Outage):
                return back_s
            back_s = taken.time_s
        return None

    def _take(self) -> Sample:
        stats, now_s = self._read(), self._clock()
        before = None if self._before is None else (self._before[0], now_s - self._before[1])
        self._before, self._away_since_s = (stats, now_s), None
        return sample(stats, of=self.of, time_s=self._wall_clock(), before=before)
