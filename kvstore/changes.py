"""CopyChanges: which copies became READY and which are gone, for those who tell others of it."""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Protocol

from kvstore.keys import BlockKey, NamespaceDigest

MAX_CHANGES = 131_072
"""Changes that wait to be told, at most; at most about 200 bytes each, and the keys they are about."""

ChangedRun = tuple[bool, str, NamespaceDigest, Sequence[BlockKey], BlockKey | None]
"""Copies that may be served from now on (``True``), or may not any more, in the order in which that came.

``(is_ready, tier, namespace, keys, parent)``: all of one tier and namespace. Of blocks that became READY each
is the child of the one before, and ``parent`` is the key before the first: None of the first block of a
sequence, and of blocks that are gone. A bare tuple, since one is made for each put.
"""


class Stored(Protocol):
    """A block that the directory has an entry of."""

    @property
    def change_id(self) -> tuple[NamespaceDigest, BlockKey, BlockKey | None] | None:
        """Its namespace, its key and its parent; None of a part that others stand for."""

    def residency(self) -> Sequence[str]:
        """Return the names of the tiers with a READY copy."""


def ready_changes(blocks: Iterable[Stored]) -> Iterator[ChangedRun]:
    """Yield the READY copies of blocks, one at a time, each as it is when it is yielded."""
    for block in blocks:
        about = block.change_id
        if about is not None:
            namespace, key, parent = about
            yield from ((True, tier, namespace, (key,), parent) for tier in block.residency())


class CopyChanges:
    """A bounded queue; what finds no room is counted and forgotten. One event loop's thread.

    It keeps keys and no blocks, so that what is gone need not live until it was told of. The blocks of a put
    are noted as one run, which takes as long as noting one block; those that leave one by one are joined.
    ``on_first`` is called when something is about to wait where nothing did. It must not take any.
    ``opened`` are namespaces that were opened lately, whose blocks nobody was told of.
    """

    def __init__(self, limit: int = MAX_CHANGES, *, on_first: Callable[[], None] | None = None) -> None:
        self._limit = limit
        self._on_first = on_first or _nothing
        self._waiting: deque[ChangedRun] = deque()
        self._num_waiting = 0
        self._num_taken = 0  # of the first run that waits
        self._leaving: tuple[str, NamespaceDigest] | None = None  # what the last run that waits is about,
        self._left: list[BlockKey] = []  # and its keys, if its blocks are gone and more may be joined
        self._lost: Counter[NamespaceDigest] = Counter()
        self.opened: deque[NamespaceDigest] = deque(maxlen=limit)

    def __len__(self) -> int:
        return self._num_waiting

    def note_ready(
        self, tier: str, namespace: NamespaceDigest, keys: Sequence[BlockKey], parent: BlockKey | None
    ) -> None:
        """Have blocks told of whose copies became READY, each the child of the one before.

        ``parent`` is the key before the first, None if it is the first of its sequence. The caller never
        changes ``keys``.
        """
        num_waiting = self._num_waiting + len(keys)
        if num_waiting > self._limit:
            self._lost[namespace] += num_waiting - self._limit
            keys = keys[: self._limit - self._num_waiting]
            num_waiting = self._limit
        if not keys:
            return
        if not self._num_waiting:
            self._on_first()
        self._leaving = None
        self._waiting.append((True, tier, namespace, keys, parent))
        self._num_waiting = num_waiting

    def note_gone(self, tier: str, namespace: NamespaceDigest, key: BlockKey) -> None:
        """Have a block told of whose copy may not be served any more."""
        if self._num_waiting >= self._limit:
            self._lost[namespace] += 1
            return
        if not self._num_waiting:
            self._on_first()
        self._num_waiting += 1
        if self._leaving == (tier, namespace):
            self._left.append(key)
            return
        self._leaving, self._left = (tier, namespace), [key]
        self._waiting.append((False, tier, namespace, self._left, None))

    def note_opened(self, namespace: NamespaceDigest) -> None:
        """Have those told that are READY of a namespace that was opened."""
        self._on_first()
        self.opened.append(namespace)

    def take(self, limit: int) -> list[ChangedRun]:
        """Return the changes that have waited longest, at most so many, in their order."""
        taken: list[ChangedRun] = []
        waiting, left = self._waiting, min(limit, self._num_waiting)
        self._num_waiting -= left
        while left:
            num_keys = len(waiting[0][3])
            if self._num_taken or num_keys > left:
                taken.append(self._take_part(left))
                left -= len(taken[-1][3])
            else:
                taken.append(waiting.popleft())
                left -= num_keys
        if not waiting:
            self._leaving = None  # its keys are the taker's
        return taken

    def _take_part(self, limit: int) -> ChangedRun:
        """Return what is left of the first run, at most so many of its changes."""
        is_ready, tier, namespace, keys, parent = self._waiting[0]
        start, stop = self._num_taken, self._num_taken + limit
        self._num_taken = stop
        if stop >= len(keys):
            self._num_taken = 0
            self._waiting.popleft()
        before = keys[start - 1] if is_ready and start else parent
        return (is_ready, tier, namespace, keys[start:stop], before)

    def take_lost(self) -> Mapping[NamespaceDigest, int]:
        """Return how many changes in each namespace found no room since this was last asked."""
        lost, self._lost = self._lost, Counter()
        return lost


def _nothing() -> None:
    """Stand in for nobody who waits."""
