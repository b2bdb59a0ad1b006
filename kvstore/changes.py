"""CopyChanges: which copies became READY and which are gone, for those who tell others of it."""

from collections import deque
from typing import NamedTuple

from kvstore.keys import BlockKey, NamespaceDigest

MAX_CHANGES = 131_072
"""Changes that wait to be told, at most; about 200 bytes each."""


class CopyChange(NamedTuple):
    """One copy of a block that may be served from now on, or may not any more.

    ``parent`` is None of the first block of a sequence, and where it is not known.
    """

    is_ready: bool
    tier: str
    namespace: NamespaceDigest
    key: BlockKey
    parent: BlockKey | None


class CopyChanges:
    """A bounded queue. Noting costs one append; what finds no room is counted and forgotten.

    ``opened`` are namespaces that were opened lately, whose blocks nobody was told of.
    """

    def __init__(self, limit: int = MAX_CHANGES) -> None:
        self._limit = limit
        self._waiting: deque[CopyChange] = deque()
        self._num_lost = 0
        self.opened: deque[NamespaceDigest] = deque(maxlen=limit)

    def __len__(self) -> int:
        return len(self._waiting)

    def note(self, change: CopyChange) -> None:
        """Have a change told."""
        if len(self._waiting) < self._limit:
            self._waiting.append(change)
        else:
            self._num_lost += 1

    def take(self, limit: int) -> list[CopyChange]:
        """Return the changes that have waited longest, at most so many, in their order."""
        waiting = self._waiting
        return [waiting.popleft() for _ in range(min(limit, len(waiting)))]

    def take_lost(self) -> int:
        """Return how many changes found no room since this was last asked."""
        lost, self._num_lost = self._num_lost, 0
        return lost
