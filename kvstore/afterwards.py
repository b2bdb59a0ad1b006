"""Afterwards: what an answer need not wait for, done right behind it."""

import logging
from collections.abc import Callable

logger = logging.getLogger(__name__)


class Afterwards:
    """Work of a store that nobody waits for: telling policies of uses, counting.

    Between ``begin`` and ``settle``, which belong to one answer, ``do`` puts work off.
    Nothing else of the event loop may run in between: the next request finds everything as if nothing had
    been put off. Work is done in the order in which it was put off.
    """

    def __init__(self) -> None:
        self._is_waiting = False
        self._work: list[Callable[[], object]] = []

    def begin(self) -> None:
        """Put off what comes now."""
        self._is_waiting = True

    def do(self, work: Callable[[], object]) -> None:
        """Do it, at once or in ``settle``."""
        if self._is_waiting:
            self._work.append(work)
        else:
            work()

    def settle(self) -> None:
        """Do what was put off, and put nothing more off. Whoever needs its effects may call it early.

        The answer is given: work that fails is logged, and keeps none behind it from being done.
        """
        self._is_waiting = False
        if self._work:
            work, self._work = self._work, []
            for item in work:
                try:
                    item()
                except Exception:
                    logger.exception("what was put off behind an answer failed")
