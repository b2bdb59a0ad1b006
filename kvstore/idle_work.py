"""IdleWork: what a server does only while nobody wants anything of it."""

import logging
from collections import deque
from collections.abc import Callable

_MOST_LEFT = 4096

logger = logging.getLogger(__name__)


class IdleWork:
    """Pieces of work that may be left undone, each a fraction of a millisecond of the event loop's thread.

    Done in order, one at a time, by whoever knows that the loop has nothing else to do; until somebody says
    that he does (``take_turns``), each is done at once. Of thousands the oldest are left undone.
    """

    def __init__(self) -> None:
        self._left: deque[Callable[[], object]] = deque(maxlen=_MOST_LEFT)
        self._takes_turns = False
        self._is_due: Callable[[], bool] = bool
        self._chore: Callable[[], object] = bool

    def take_turns(self) -> None:
        """Leave work for ``step`` from now on: somebody calls it whenever the loop is idle."""
        self._takes_turns = True

    @property
    def is_left(self) -> bool:
        """Whether there is anything to do."""
        return bool(self._left) or self._is_due()

    def keep_up(self, chore: Callable[[], object], *, is_due: Callable[[], bool]) -> None:
        """Do a chore too, before anything else, whenever it is due. One that fails is done no more."""
        self._chore, self._is_due = chore, is_due

    def do(self, piece: Callable[[], object]) -> None:
        """Do a piece when there is nothing else to do; one that returns True is then done again."""
        if self._takes_turns:
            self._left.append(piece)
            return
        while piece() is True:
            pass

    def step(self) -> None:
        """Do what is due, or else one piece of what is left. What it raises is logged."""
        is_due = self._is_due()
        try:
            if is_due:
                self._chore()
            elif self._left and (piece := self._left.popleft())() is True:
                self._left.append(piece)
        except Exception:
            logger.exception("work of an idle moment failed")
            if is_due:
                self._is_due = bool
