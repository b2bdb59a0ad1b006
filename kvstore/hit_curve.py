"""HitCurve: what share of the lookups would hit at each size, from sampled stack distances."""

import math
from array import array

_SMALLEST_BYTES = 1024
_BINS_PER_DOUBLING = 16
"""Sizes are told apart to 4.4 %."""


class HitCurve:
    """Lookups by the size from which on they hit: a histogram whose bins grow with the size.

    ``lookups`` counts every one, ``samples`` those whose distance was taken, each of which stands for
    ``weight`` lookups. The weights of few but often used blocks, sampled or not, can miss the count by much:
    the difference is taken for lookups that hit at any size (SHARDS-adj in Waldspurger et al., FAST'15,
    section 5.2).
    """

    __slots__ = ("_bins", "_weight", "limit_bytes", "lookups", "samples")

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = max(limit_bytes, _SMALLEST_BYTES)
        self.lookups = 0.0
        self.samples = 0.0
        self._weight = 0.0
        self._bins = array("d", bytes(8 * (int(_position(self.limit_bytes)) + 2)))

    def note_hit(self, from_bytes: float, weight: float) -> None:
        """Count a sampled lookup that hits at sizes from ``from_bytes`` on."""
        self.samples += 1
        self._weight += weight
        if from_bytes <= self.limit_bytes:
            self._bins[int(_position(from_bytes))] += weight

    def note_miss(self, weight: float) -> None:
        """Count a sampled lookup of a block that was not put before, or longer ago than any size keeps."""
        self.samples += 1
        self._weight += weight

    def age(self) -> None:
        """Have what was counted until now count half."""
        self.lookups /= 2
        self.samples /= 2
        self._weight /= 2
        for at, value in enumerate(self._bins):
            self._bins[at] = value / 2

    def add(self, other: "HitCurve") -> None:
        """Add the lookups of another curve of the same limit."""
        assert other.limit_bytes == self.limit_bytes, "curves of different limits"
        self.lookups += other.lookups
        self.samples += other.samples
        self._weight += other._weight
        for at, value in enumerate(other._bins):
            self._bins[at] += value

    def hit_ratio(self, size_bytes: float) -> float:
        """Return the share of lookups that hit at a size of at most ``limit_bytes``; 0.0 of no lookups."""
        if self.lookups <= 0:
            return 0.0
        position = _position(min(size_bytes, self.limit_bytes))
        whole = int(position)
        hits = sum(self._bins[:whole]) + (position - whole) * self._bins[whole]
        return min(1.0, max(0.0, (hits + self.lookups - self._weight) / self.lookups))


def _position(size_bytes: float) -> float:
    return max(0.0, _BINS_PER_DOUBLING * math.log2(max(size_bytes, 1) / _SMALLEST_BYTES))
