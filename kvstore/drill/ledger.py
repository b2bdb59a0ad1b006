"""Ledger: what came of one kind of fault: tries, wrong bytes, lost blocks, late calls, violations."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

SLACK_S = 0.25
"""What a call may take beyond its own time: this process and the store share a busy machine's few cores."""

_MAX_NOTES = 20

Complain = Callable[[str], None]


@dataclass(slots=True)
class KindReport:
    """The result of one kind of fault. ``notes`` are one line per violation, the first twenty."""

    tries: int = 0
    wrong_bytes: int = 0
    lost: int = 0
    over_deadline: int = 0
    violations: int = 0
    seconds: float = 0.0
    calls: int = 0
    blocks_served: int = 0
    effects: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    skipped: str = ""

    @property
    def is_ok(self) -> bool:
        """Whether it was tried without a violation, or skipped for a reason."""
        has_run = self.tries > 0 or bool(self.skipped)
        return has_run and not (self.wrong_bytes or self.lost or self.over_deadline or self.violations)

    def as_dict(self) -> dict[str, object]:
        """Return a JSON-ready copy."""
        report: dict[str, object] = {
            "tries": self.tries,
            "wrong_bytes": self.wrong_bytes,
            "lost": self.lost,
            "over_deadline": self.over_deadline,
            "violations": self.violations,
            "seconds": round(self.seconds, 3),
            "calls": self.calls,
            "blocks_served": self.blocks_served,
        }
        if self.effects:
            report["effects"] = dict(self.effects)
        if self.notes:
            report["notes"] = list(self.notes)
        if self.skipped:
            report["skipped"] = self.skipped
        return report


class Ledger:
    """Counts for one kind of fault, from any thread. Every violation is also told at once."""

    def __init__(self, complain: Complain, clock: Callable[[], float] = time.monotonic) -> None:
        self.report = KindReport()
        self._complain = complain
        self._clock = clock
        self._lock = threading.Lock()

    def note_wrong(self, what: str, wrong_bytes: int) -> None:
        """Count bytes that were served and are not those of the block."""
        with self._lock:
            self.report.wrong_bytes += wrong_bytes
        self._note(f"{what}: {wrong_bytes} wrong bytes were served")

    def note_lost(self, what: str, blocks: int = 1) -> None:
        """Count blocks that were acknowledged as durable and are gone."""
        with self._lock:
            self.report.lost += blocks
        self._note(f"{what}: {blocks} blocks acknowledged as durable are gone")

    def note_violation(self, what: str) -> None:
        """Count any other broken promise."""
        with self._lock:
            self.report.violations += 1
        self._note(what)

    def note_effect(self, name: str, count: int) -> None:
        """Count what the fault did, to show that it did something."""
        with self._lock:
            self.report.effects[name] = self.report.effects.get(name, 0) + count

    def note_served(self, blocks: int) -> None:
        """Count blocks that were served and verified."""
        with self._lock:
            self.report.blocks_served += blocks

    @contextlib.contextmanager
    def timing(self, what: str, timeout_s: float) -> Iterator[None]:
        """Time a call of the data path: it must end within ``timeout_s`` and the slack."""
        started_s = self._clock()
        try:
            yield
        finally:
            took_s = self._clock() - started_s
            with self._lock:
                self.report.calls += 1
                is_over = took_s > timeout_s + SLACK_S
                self.report.over_deadline += is_over
            if is_over:
                self._note(f"{what}: took {took_s:.3f} s, its time was {timeout_s:.3f} s")

    def _note(self, line: str) -> None:
        with self._lock:
            if len(self.report.notes) < _MAX_NOTES:
                self.report.notes.append(line)
        self._complain(line)
