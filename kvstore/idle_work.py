"""IdleWork: what a server does only while nobody wants anything of it."""

import logging
from collections import deque
from collections.abc import Callable

_MOST_LEFT = 4096

logger = logging.getLogger(__name__)


class IdleWork:
    """Pieces of work that may be left undone, and chores that come again, for idle moments of an event loop.

    Each takes a fraction of a millisecond of its thread. They are done one at a time, by turns, by whoever
    knows that the loop has nothing else to do; until somebody says that he does (``take_turns``), each is
    done at once. Of thousands of pieces the oldest are left undone.
    """

    def __init__(self) -> None:
        self._left: deque[Callable[[], object]] = deque(maxlen=_MOST_LEFT)
        self._chores: list[tuple[Callable[[], object], Callable[[], bool]]] = []
        self._takes_turns = False
        self._was_chore = False

    def take_turns(self) -> None:
        """Leave work for ``step`` from now on: somebody calls it whenever the loop is idle."""
        self._takes_turns = True

    @property
    def is_left(self) -> bool:
        """Whether there is anything to do."""
        return bool(self._left) or any(is_due() for _, is_due in self._chores)

    def leave_undone(self) -> None:
        """Forget the pieces that are left."""
        self._left.clear()

    def do(self, piece: Callable[[], object]) -> None:
        """Do a piece when there is nothing else to do."""
        if self._takes_turns:
            self._left.append(piece)
        else:
            piece()

    def keep_up(self, chore: Callable[[], object], *, is_due: Callable[[], bool]) -> None:
        """Do a chore whenever it is due. One that fails is done no more."""
        self._chores.append((chore, is_due))

    def give_up(self, chore: Callable[[], object]) -> None:
        """Do a chore no more."""
        self._chores = [each for each in self._chores if each[0] != chore]

    def note_due(self) -> None:
        """Take note that a chore may have become due."""
        while not self._takes_turns and self.is_left:
            self.step()

    def step(self) -> None:
        """Do a piece, or a chore that is due, by turns. What it raises is logged."""
        chore = None if self._was_chore and self._left else self._due()
        self._was_chore = chore is not None
        try:
            if chore is not None:
                chore()
            elif self._left:
                self._left.popleft()()
        except Exception:
            logger.exception("work of an idle moment failed")
            if chore is not None:
                self.give_up(chore)

    def _due(self) -> Callable[[], object] | None:
        """Return a chore that is due, if one is, and let the others go before it the next time."""
        for at, (chore, is_due) in enumerate(self._chores):
            if is_due():
                self._chores.append(self._chores.pop(at))
                return chore
        return None
