"""Visits: what the curve of sizes is told of, and which fetches belong to the match before them."""

import enum
from collections import OrderedDict
from typing import TypeAlias

from kvstore.keys import BlockKey, PrefixChain

_MAX_REMEMBERED = 1024
_MAX_AWAITED = 64


class VisitKind(enum.Enum):
    """What was asked. MATCH_HIT found blocks, which may be fetched next."""

    MATCH_HIT = enum.auto()
    MATCH_MISS = enum.auto()
    FETCH = enum.auto()
    PUT = enum.auto()


Visit: TypeAlias = tuple[VisitKind, int, int, PrefixChain]
"""What was asked, bytes of each block, a number of its part (0: the whole block or its first part), and
which blocks. A plain tuple, since one is made for every request; it keeps nothing of the store's alive."""


class FollowUps:
    """Tells a fetch of what a match found, which is the same request, from one that is a lookup of its own.

    A match that nobody follows up leaves its mark until a fetch of its first block comes. Bounded; what is
    forgotten makes a fetch count once more.
    """

    def __init__(self) -> None:
        self._awaited: OrderedDict[BlockKey, int] = OrderedDict()
        self._continued: OrderedDict[BlockKey, bool] = OrderedDict()

    def expect(self, chain: PrefixChain) -> None:
        """Take note of a match that found blocks."""
        first = chain.keys[0]
        self._awaited[first] = min(_MAX_AWAITED, self._awaited.get(first, 0) + 1)
        self._awaited.move_to_end(first)
        if len(self._awaited) > _MAX_REMEMBERED:
            self._awaited.popitem(last=False)

    def is_one(self, chain: PrefixChain) -> bool:
        """Whether a fetch follows a match up. A fetch in pieces is what its first piece is."""
        first = chain.keys[0]
        is_one = first in self._awaited
        if is_one:
            self._awaited[first] -= 1
            if not self._awaited[first]:
                del self._awaited[first]
        elif chain.parent is not None:
            is_one = self._continued.pop(chain.parent, False)
        self._continued[chain.keys[-1]] = is_one
        self._continued.move_to_end(chain.keys[-1])
        if len(self._continued) > _MAX_REMEMBERED:
            self._continued.popitem(last=False)
        return is_one
