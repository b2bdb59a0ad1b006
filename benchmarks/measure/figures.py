"""Seconds of calls, summed up as one row for each peer, operation and shape."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

Row = dict[str, object]

Timed = Callable[[], list[float]]
"""Makes calls one after the other and returns the seconds that each took."""

_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
_CACHE_BYTES = 32 << 20
"""Taken for the largest cache where the system does not tell."""


def timed(calls: Sequence[Callable[[], object]]) -> Timed:
    """Return what makes these calls and times each of them."""

    def run() -> list[float]:
        seconds, clock = [], time.perf_counter
        for call in calls:
            started_s = clock()
            call()
            seconds.append(clock() - started_s)
        return seconds

    return run


@dataclass
class Figures:
    """Seconds of each call by round, and the CPU seconds of client and server over all of them."""

    peer: str
    op: str
    block_bytes: int
    batch: int
    rounds: list[list[float]] = field(default_factory=list)
    cpu_s: float = 0.0
    more: Row = field(default_factory=dict)
    """Further keys of the row."""

    @property
    def seconds(self) -> list[float]:
        """Every call, the shortest first."""
        return sorted(second for of_round in self.rounds for second in of_round)

    @property
    def median_s(self) -> float:
        """The middle call."""
        return statistics.median(self.seconds)

    @property
    def p99_s(self) -> float:
        """The call that 99 of 100 are shorter than; the longest where there are fewer than 100."""
        seconds = self.seconds
        return seconds[int(0.99 * len(seconds))]

    def row(self, memcpy: "Figures | None", bare: "Figures | None") -> Row:
        """Sum up, beside the plain copy and the bare round trip of the same shape where there are such."""
        row: Row = {
            "peer": self.peer,
            "op": self.op,
            "block_bytes": self.block_bytes,
            "batch": self.batch,
            "gb_per_s": None,
            "ratio_to_memcpy": None,
            "p50_us": round(1e6 * self.median_s, 1),
            "p99_us": round(1e6 * self.p99_s, 1),
            "cpu_s_per_gb": None,
            "calls": len(self.seconds),
            "p99_to_p50": round(self.p99_s / self.median_s, 2),
            **self.more,
        }
        if memcpy is not None:
            row |= self._beside_memcpy(memcpy)
        if bare is not None:
            row["ratio_to_bare"] = round(self.median_s / bare.median_s, 3)
        return row

    def _beside_memcpy(self, memcpy: "Figures") -> Row:
        num_bytes = self.block_bytes * self.batch
        over_us = 1e6 * (self.median_s - memcpy.median_s)
        by_round = [
            statistics.median(theirs) / statistics.median(ours)
            for ours, theirs in zip(self.rounds, memcpy.rounds, strict=True)
        ]
        return {
            "gb_per_s": round(num_bytes / self.median_s / 1e9, 3),
            "ratio_to_memcpy": round(memcpy.median_s / self.median_s, 3),
            "cpu_s_per_gb": round(self.cpu_s / (num_bytes * len(self.seconds)) * 1e9, 3),
            "ratio_low": round(min(by_round), 3),
            "ratio_high": round(max(by_round), 3),
            "overhead_us": round(over_us, 1),
            "overhead_us_per_block": round(over_us / self.batch, 2),
        }


class Bench:
    """Collects figures by peer, operation and shape. What runs while ``is_warm`` is false does not count."""

    def __init__(self) -> None:
        self._figures: dict[tuple[str, str, int, int], Figures] = {}
        self.is_warm = False
        self.failed: dict[str, str] = {}
        """Peers that broke down, and how; they have no rows."""

    def figures(self, peer: str, op: str, block_bytes: int, batch: int) -> Figures:
        """Return the figures of a row, which may be empty."""
        key = (peer, op, block_bytes, batch)
        return self._figures.setdefault(key, Figures(*key))

    def note(self, at: Figures, seconds: list[float], cpu_s: float) -> None:
        """Add a round."""
        if self.is_warm:
            at.rounds.append(seconds)
            at.cpu_s += cpu_s

    def run(self, at: Figures, run: Timed) -> None:
        """Make calls in this process as one round."""
        cpu_s = time.process_time()
        seconds = run()
        self.note(at, seconds, time.process_time() - cpu_s)

    def rows(self) -> list[Row]:
        """Sum up every row that was measured."""
        found: list[Row] = []
        for (peer, _, block_bytes, batch), at in self._figures.items():
            if at.rounds and peer not in self.failed:
                memcpy = self._figures.get(("memcpy", "copy", block_bytes, batch))
                bare = self._figures.get(("bare", "round_trip_and_copy", block_bytes, batch))
                found.append(at.row(memcpy, bare))
        return found


def cpu_seconds(pids: Sequence[int]) -> float:
    """CPU seconds that this process and the others have taken so far, all threads."""
    # The clock of another process: see clock_getcpuclockid in glibc.
    return time.process_time() + sum(time.clock_gettime((~pid << 3) | 2) for pid in pids)


def largest_cache_bytes() -> int:
    """Bytes of the largest cache that the first core uses."""
    sizes = [path.read_text().strip() for path in _CACHES.glob("index*/size")]
    return max((int(size[:-1]) << 10 for size in sizes if size.endswith("K")), default=_CACHE_BYTES)
