"""StoreBreaker: after a store did not answer, says for how long it is not asked."""

from collections.abc import Callable

from kvstore.miss import MissReason

AWAY = (MissReason.TIMED_OUT, MissReason.UNAVAILABLE, MissReason.BREAKER_OPEN)
"""Reasons that mean 'there was no answer', rather than 'it is not there'."""

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 2.0


class StoreBreaker:
    """Pauses of 0.1 s, doubled up to 2 s, after a store did not answer; one answer ends them.

    Callers of several threads may share one: it is at worst asked once more.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._pause_s = 0.0
        self._closed_until_s = 0.0

    def may_ask(self) -> bool:
        """Whether a lookup may be made; each yes after a failure makes the next ones wait."""
        if not self._pause_s:
            return True
        now_s = self._clock()
        if now_s < self._closed_until_s:
            return False
        self._closed_until_s = now_s + self._pause_s
        return True

    def note(self, *, is_away: bool) -> None:
        """Learn whether the store has answered."""
        if not is_away:
            self._pause_s = 0.0
            return
        self._pause_s = min(_LONGEST_PAUSE_S, max(_FIRST_PAUSE_S, 2 * self._pause_s))
        self._closed_until_s = self._clock() + self._pause_s
