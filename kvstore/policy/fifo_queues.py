"""S3-FIFO and SIEVE: queues that nothing is moved in at a use, which only marks its block."""

from collections.abc import Iterator

from kvstore.policy.blockwise import BlockwisePolicy, Queue
from kvstore.policy.protocol import Offer
from kvstore.tier import StorageKey

_SMALL_RATIO = 0.1
_MAX_USES = 3
_USES_TO_STAY = 2


class S3FifoPolicy(BlockwisePolicy):
    """S3-FIFO (Yang et al., SOSP 2023): a small queue for new blocks, a main one, and ghosts."""

    def __init__(self, capacity_bytes: int = 0) -> None:
        super().__init__(capacity_bytes)
        self._small, self._main, self._ghosts = Queue(), Queue(), Queue()
        self._uses: dict[StorageKey, int] = {}

    def candidates(self, *, now_s: float, offer: Offer | None = None) -> Iterator[StorageKey]:
        """Yield from the small queue while it is over its share, else from the main one.

        On the way blocks that were used go on to the main queue, or to its end.
        """
        limit_bytes = _SMALL_RATIO * self._capacity_bytes
        small_named: set[StorageKey] = set()
        main_named: set[StorageKey] = set()
        small_bytes = 0
        small, main = self._in_small(small_named), self._in_main(main_named)
        while True:
            is_over = self._small.used_bytes - small_bytes > limit_bytes
            block = next(small if is_over else main, None) or next(main if is_over else small, None)
            if block is None:
                return
            if block in self._small:
                small_named.add(block)
                small_bytes += self._sizes[block]
            else:
                main_named.add(block)
            yield block

    def _in_small(self, named: set[StorageKey]) -> Iterator[StorageKey]:
        for block, size_bytes in self._small.lasting(named):
            if self._uses.get(block, 0) >= _USES_TO_STAY:
                self._small.discard(block)
                self._main.append(block, size_bytes)
                self._uses.pop(block, None)
            else:
                yield block

    def _in_main(self, named: set[StorageKey]) -> Iterator[StorageKey]:
        for block, _ in self._main.lasting(named):
            uses = self._uses.get(block, 0)
            if not uses:
                yield block
                continue
            self._main.move_to_end(block)
            if uses > 1:
                self._uses[block] = uses - 1
            else:
                del self._uses[block]

    def _add(self, block: StorageKey, size_bytes: int) -> None:
        (self._main if self._ghosts.discard(block) else self._small).append(block, size_bytes)

    def _use(self, block: StorageKey) -> None:
        self._uses[block] = min(_MAX_USES, self._uses.get(block, 0) + 1)

    def _drop(self, block: StorageKey, size_bytes: int, *, is_evicted: bool) -> None:
        self._uses.pop(block, None)
        if self._small.discard(block):
            if is_evicted:
                self._ghosts.append(block, size_bytes)
                self._ghosts.trim((1 - _SMALL_RATIO) * self._capacity_bytes)
        else:
            self._main.discard(block)

    def _forget_ghost(self, block: StorageKey) -> None:
        self._ghosts.discard(block)


class _Node:
    """A block in SIEVE's queue; ``newer`` and ``older`` are its neighbours."""

    __slots__ = ("block", "is_used", "newer", "older")

    def __init__(self, block: StorageKey | None) -> None:
        self.block = block
        self.is_used = False
        self.newer: _Node = self
        self.older: _Node = self


class SievePolicy(BlockwisePolicy):
    """SIEVE (Zhang et al., NSDI 2024): a hand goes from old to new, and takes what was not used since."""

    def __init__(self, capacity_bytes: int = 0) -> None:
        super().__init__(capacity_bytes)
        self._end = _Node(None)  # its ``newer`` is the oldest block, its ``older`` the newest
        self._nodes: dict[StorageKey, _Node] = {}
        self._hand = self._end

    def candidates(self, *, now_s: float, offer: Offer | None = None) -> Iterator[StorageKey]:
        """Yield blocks in the hand's way that were not used since it passed, clearing marks as it does."""
        node = self._hand
        named: set[_Node] = set()
        while len(named) < len(self._nodes):
            if node.block is None:
                node = node.newer
                continue
            if node.is_used:
                node.is_used = False
            elif node not in named:
                named.add(node)
                yield node.block
            node = node.newer

    def _add(self, block: StorageKey, size_bytes: int) -> None:
        node, end = _Node(block), self._end
        node.older, node.newer = end.older, end
        end.older.newer = node
        end.older = node
        self._nodes[block] = node

    def _use(self, block: StorageKey) -> None:
        self._nodes[block].is_used = True

    def _drop(self, block: StorageKey, size_bytes: int, *, is_evicted: bool) -> None:
        node = self._nodes.pop(block)
        if is_evicted or self._hand is node:
            self._hand = node.newer
        node.older.newer = node.newer
        node.newer.older = node.older
