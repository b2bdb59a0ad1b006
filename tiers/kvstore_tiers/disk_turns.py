"""DiskTurns: what is under way on one disk and since when, and the payload turns of its threads."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from kvstore.tier import ReadStatus, WriteStatus
from kvstore_tiers.jobs import Abandoned, Jobs

T = TypeVar("T")

Turn = Callable[[], "list[DiskOutcome]"]


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

    @property
    def is_abandoned(self) -> bool:
        """Whether no operation is to begin any more, also none of a turn whose thread comes back late."""
        return self._is_abandoned

    def oldest_s(self) -> float:
        """Return how long the oldest operation has been under way; 0 if there is none."""
        oldest_s = min(list(self._started_s.values()), default=None)
        return 0.0 if oldest_s is None else self._clock() - oldest_s

    def abandon(self) -> None:
        """Begin no operation any more."""
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
        self, jobs: Jobs, deadline_s: float, turns: Sequence[Turn]
    ) -> list[list[DiskOutcome] | None]:
        """Run turns, begun in order; None for those that time ran out for, or that are stuck."""
        try:
            return await jobs.run_within(turns, deadline_s - self._clock())
        except Abandoned:
            return [None] * len(turns)
