"""Beliefs: which blocks a shared tier probably holds, without asking it.

Others change what a shared tier holds, so a belief decides only what costs little if it is wrong: whether a
block that leaves the top tier needs a demotion, and whether a block that is used again is written once more.
It is forgotten when a probe or a read contradicts it, when the tier was down, or when there are too many.
"""

from collections import OrderedDict

from kvstore.tier import StorageKey

MAX_BELIEFS = 262_144
"""Blocks remembered per tier; about 150 bytes each."""


class Beliefs:
    """A bounded set; the ones noted longest ago go first."""

    def __init__(self, limit: int = MAX_BELIEFS) -> None:
        self._limit = limit
        self._names: OrderedDict[StorageKey, None] = OrderedDict()

    def __contains__(self, name: StorageKey) -> bool:
        return name in self._names

    def __len__(self) -> int:
        return len(self._names)

    def note(self, name: StorageKey) -> None:
        """Believe that the tier holds a block."""
        self._names[name] = None
        self._names.move_to_end(name)
        if len(self._names) > self._limit:
            self._names.popitem(last=False)

    def forget(self, name: StorageKey) -> None:
        """Believe it no more."""
        self._names.pop(name, None)

    def clear(self) -> None:
        """Forget everything: the tier may have lost it."""
        self._names.clear()
