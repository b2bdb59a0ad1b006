"""Batch and Ending: one call of the remote tier, how a thread does a share of it, and how its items ended."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from kvstore.miss import MissReason
from kvstore.tier import BlockId
from kvstore_tiers.remote_node import RemoteNode, Work

_SHARE_MIN_BLOCKS = 2

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Batch(Generic[T]):
    """The items of one call, in order, and how a thread does some of them.

    A node's items are dealt out to at most ``max_shares`` threads. ``block_of`` names an item's block.
    ``work`` takes numbered items, and whether their node must be told that it was named by another (ASKING).
    """

    items: Sequence[T]
    block_of: Callable[[T], BlockId]
    work: Callable[[Sequence[tuple[int, T]], bool], Work]
    max_shares: int
    is_write: bool
    deadline_s: float


@dataclass(slots=True)
class Ending:
    """How a call ended for items that got no outcome of their own, by their place in the call.

    ``reasons`` has an entry for those whose node was not asked or did not answer. ``moved`` ones are at
    another node: (node, whether it must be told so).
    """

    reasons: dict[int, MissReason] = field(default_factory=dict)
    moved: dict[int, tuple[RemoteNode, bool]] = field(default_factory=dict)

    def note(self, indexes: Iterable[int], reason: MissReason) -> None:
        """Say why items may have no outcome."""
        self.reasons.update(dict.fromkeys(indexes, reason))

    def reason(self, index: int) -> MissReason:
        """Return why an item has no outcome."""
        return self.reasons.get(index, MissReason.UNAVAILABLE)


def shares_of(numbered: Sequence[tuple[int, T]], most: int) -> list[Sequence[tuple[int, T]]]:
    """Deal requests out like cards, so that the leading blocks of a chain come first in every share."""
    count = max(1, min(most, len(numbered) // _SHARE_MIN_BLOCKS))
    return [numbered[first::count] for first in range(count)]
