"""ServerCounters: what the server of one store has seen, and how its process does."""

import mmap
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from kvstore.counters import Durations

DELAY_BOUNDS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0)
"""Classes that the event loop's delays are counted in."""


@dataclass(slots=True)
class EventCounters:
    """What was told of blocks that came and went, and to how many ``listeners``."""

    listeners: int = 0
    batches: int = 0
    blocks: int = 0
    lost_blocks: int = 0
    replays: int = 0

    def as_dict(self) -> dict[str, object]:
        """Return a JSON-ready copy."""
        return {
            "listeners": self.listeners,
            "batches": self.batches,
            "blocks": self.blocks,
            "lost_blocks": self.lost_blocks,
            "replays": self.replays,
        }


@dataclass(slots=True)
class ServerCounters:
    """Counts since the start; part of the stats. ``open_connections`` are greeted clients of the socket now.

    ``prefill_tokens_per_s`` is what its operator said of the engines beside it; 0: nothing.
    """

    connections: int = 0
    open_connections: int = 0
    refused_connections: int = 0
    protocol_errors: int = 0
    silent_greetings: int = 0
    idle_ended: int = 0
    slow_readers: int = 0
    lingering: int = 0
    failed_requests: int = 0
    corrupt_reports: int = 0
    requests: Counter[str] = field(default_factory=Counter)
    loop_delay: Durations = field(default_factory=lambda: Durations(DELAY_BOUNDS_S))
    prefill_tokens_per_s: float = 0.0
    events: EventCounters = field(default_factory=EventCounters)
    access_log: Callable[[], dict[str, int]] | None = None
    traces: Callable[[], dict[str, int]] | None = None

    def as_dict(self) -> dict[str, object]:
        """Return a JSON-ready copy."""
        return {
            "connections": self.connections,
            "open_connections": self.open_connections,
            "refused_connections": self.refused_connections,
            "protocol_errors": self.protocol_errors,
            "silent_greetings": self.silent_greetings,
            "idle_ended": self.idle_ended,
            "slow_readers": self.slow_readers,
            "lingering": self.lingering,
            "failed_requests": self.failed_requests,
            "corrupt_reports": self.corrupt_reports,
            "requests": dict(self.requests),
            "resident_bytes": resident_bytes(),
            "loop_delay": self.loop_delay.as_dict(),
            "prefill_tokens_per_s": self.prefill_tokens_per_s,
            "events": self.events.as_dict(),
            **({} if self.access_log is None else {"access_log": self.access_log()}),
            **({} if self.traces is None else {"traces": self.traces()}),
        }


def resident_bytes() -> int:
    """Return this process's memory that is resident, shared pages included; 0 if it is not told."""
    try:
        with open("/proc/self/statm", encoding="ascii") as told:  # noqa: PTH123 (half of Path's time)
            return int(told.read().split()[1]) * mmap.PAGESIZE
    except OSError:
        return 0
