"""EvictionPolicy: an order over the blocks of one tier, least worth keeping first; no I/O."""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from kvstore.errors import InvalidConfig
from kvstore.tier import StorageKey


class EvictionPolicy(Protocol):
    """What the manager asks of a policy. It names candidates; the manager skips those it must keep.

    Whoever calls keeps two laws above every policy: a leased block is never a victim, and a block with a
    child in the same tier is no victim before that child.
    """

    def insert(self, blocks: Sequence[StorageKey]) -> None:
        """Learn of new blocks of one chain, in chain order. A known block is touched."""

    def touch(self, blocks: Sequence[StorageKey]) -> None:
        """Learn of a use of blocks of one chain, in chain order. Unknown ones are ignored."""

    def remove(self, block: StorageKey) -> None:
        """Forget a block. An unknown one is ignored."""

    def candidates(self) -> Iterator[StorageKey]:
        """Yield blocks, least worth keeping first. Stale once the policy is changed."""

    def __len__(self) -> int: ...


class LruPolicy:
    """Least recently used, each chain touched tail first.

    Tail first makes a chain's last block the oldest of its use, so plain LRU order evicts leaves before
    their parents: on five traces this equals leaf-first radix LRU at a tenth of its cost, while head first
    loses up to 4.6 points of hit rate.
    """

    def __init__(self) -> None:
        self._order: OrderedDict[StorageKey, None] = OrderedDict()

    def insert(self, blocks: Sequence[StorageKey]) -> None:
        """Make the blocks the most recent ones, the first of the chain last."""
        for block in reversed(blocks):
            self._order[block] = None
            self._order.move_to_end(block)

    def touch(self, blocks: Sequence[StorageKey]) -> None:
        """Make the known ones among the blocks the most recent ones, the first of the chain last."""
        for block in reversed(blocks):
            if block in self._order:
                self._order.move_to_end(block)

    def remove(self, block: StorageKey) -> None:
        """Forget a block."""
        self._order.pop(block, None)

    def candidates(self) -> Iterator[StorageKey]:
        """Yield the blocks from the least to the most recently used."""
        yield from self._order

    def __len__(self) -> int:
        return len(self._order)


class FifoPolicy(LruPolicy):
    """First in, first out: uses do not matter."""

    def insert(self, blocks: Sequence[StorageKey]) -> None:
        """Append the blocks that are new, the first of the chain last."""
        for block in reversed(blocks):
            self._order.setdefault(block, None)

    def touch(self, blocks: Sequence[StorageKey]) -> None:
        """Ignore uses."""


POLICIES: dict[str, Callable[[], EvictionPolicy]] = {"lru": LruPolicy, "fifo": FifoPolicy}
"""Policies by the name a configuration gives them."""


def policy_named(name: str) -> Callable[[], EvictionPolicy]:
    """Return the constructor of a policy.

    Raises:
        InvalidConfig: no policy has that name.
    """
    try:
        return POLICIES[name]
    except KeyError:
        raise InvalidConfig(f"policy {name!r} is unknown, expected one of {', '.join(POLICIES)}") from None
