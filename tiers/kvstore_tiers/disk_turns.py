"""DiskTurns: payload operations of one disk in threads, several small ones per turn, and their duration."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from kvstore.tier import ReadStatus, WriteStatus
from kvstore_tiers.jobs import Abandoned, Jobs

T = TypeVar("T")

_TURN_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class DiskOutcome:
    """How one payload read or write ended; ``fault`` names what failed, for people."""

    status: ReadStatus | WriteStatus
    fault: str = ""


class DiskTurns:
    """Runs operations and knows since when the oldest is under way. ``run`` on one event loop's thread."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._started_s: dict[object, float] = {}
        self._is_abandoned = False

    def oldest_s(self) -> float:
        """Return how long the oldest operation has been under way; 0 if there is none."""
        oldest_s = min(list(self._started_s.values()), default=None)
        return 0.0 if oldest_s is None else self._clock() - oldest_s

    def abandon(self) -> None:
        """Begin no operation any more, also none of a turn whose thread comes back late."""
        self._is_abandoned = True

    def timed(self, call: Callable[[], T]) -> T:
        """Run a call in this thread, counted as under way."""
        token = object()
        self._started_s[token] = self._clock()
        try:
            return call()
        finally:
            self._started_s.pop(token, None)

    async def run(
        self, jobs: Jobs, deadline_s: float, sized: Sequence[tuple[int, Callable[[], DiskOutcome]]]
    ) -> list[DiskOutcome | None]:
        """Run calls, given with their bytes, in order; None where time ran out before, or they are stuck."""
        turns: list[list[Callable[[], DiskOutcome]]] = []
        room = 0
        for size, call in sized:
            if not turns or room < size:
                turns.append([])
                room = _TURN_BYTES
            turns[-1].append(call)
            room -= size
        patience_s = deadline_s - self._clock()
        try:
            results = await jobs.run_within([self._turn(calls) for calls in turns], patience_s)
        except Abandoned:
            return [None] * len(sized)
        outcomes: list[DiskOutcome | None] = []
        for calls, result in zip(turns, results, strict=True):
            outcomes += result if result is not None else [None] * len(calls)
        return outcomes

    def _turn(self, calls: Sequence[Callable[[], DiskOutcome]]) -> Callable[[], list[DiskOutcome]]:
        def turn() -> list[DiskOutcome]:
            outcomes: list[DiskOutcome] = []
            for call in calls:
                if not self._is_abandoned:
                    outcomes.append(self.timed(call))
            return outcomes

        return turn
