"""CopyChanges: which copies became READY and which are gone, for those who tell others of it."""

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

from kvstore.keys import BlockKey, NamespaceDigest

MAX_CHANGES = 131_072
"""Changes that wait to be told, at most; about 100 bytes each, and the blocks they are about."""


class Noted(Protocol):
    """The block that a change is about, as the directory knows it."""

    @property
    def change_id(self) -> "tuple[NamespaceDigest, BlockKey, BlockKey | None] | None":
        """Its namespace, its key and its parent (None: it has none, or it is not known).

        None of a part that others stand for.
        """


class Stored(Noted, Protocol):
    """A block that the directory has an entry of."""

    def residency(self) -> Sequence[str]:
        """Return the names of the tiers with a READY copy."""


class CopyChange(NamedTuple):
    """One copy of a block that may be served from now on, or may not any more.

    ``parent`` is None of the first block of a sequence, and where it is not known.
    """

    is_ready: bool
    tier: str
    namespace: NamespaceDigest
    key: BlockKey
    parent: BlockKey | None


def ready_changes(blocks: Iterable[Stored]) -> Iterator[CopyChange]:
    """Yield the READY copies of blocks, each as it is when it is yielded."""
    for block in blocks:
        about = block.change_id
        if about is not None:
            yield from (CopyChange(True, tier, *about) for tier in block.residency())


class CopyChanges:
    """A bounded queue. Noting costs one append; what finds no room is counted and forgotten.

    ``opened`` are namespaces that were opened lately, whose blocks nobody was told of.
    """

    def __init__(self, limit: int = MAX_CHANGES) -> None:
        self._limit = limit
        self._waiting: deque[tuple[bool, str, Noted]] = deque()
        self._lost: Counter[NamespaceDigest] = Counter()
        self.opened: deque[NamespaceDigest] = deque(maxlen=limit)

    def __len__(self) -> int:
        return len(self._waiting)

    def note(self, is_ready: bool, tier: str, block: Noted) -> None:
        """Have a change told."""
        if len(self._waiting) < self._limit:
            self._waiting.append((is_ready, tier, block))
        elif (about := block.change_id) is not None:
            self._lost[about[0]] += 1

    def take(self, limit: int) -> list[CopyChange]:
        """Return the changes that have waited longest, at most so many, in their order."""
        pop = self._waiting.popleft
        taken: list[CopyChange] = []
        for _ in range(min(limit, len(self._waiting))):
            is_ready, tier, block = pop()
            about = block.change_id
            if about is not None:
                taken.append(CopyChange(is_ready, tier, *about))
        return taken

    def take_lost(self) -> Mapping[NamespaceDigest, int]:
        """Return how many changes in each namespace found no room since this was last asked."""
        lost, self._lost = self._lost, Counter()
        return lost
