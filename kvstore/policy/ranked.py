"""LRU-2 and LFU: policies that rank each block by a number, and keep a heap of the ranks."""

import heapq
from collections import OrderedDict
from collections.abc import Iterator

from kvstore.policy.blockwise import BlockwisePolicy
from kvstore.policy.protocol import Offer
from kvstore.tier import StorageKey

Rank = tuple[int, int]

_SPARE_ENTRIES = 64
_MIN_HISTORIES = 65_536
_HISTORIES_PER_BLOCK = 8
_MANY_HISTORIES = 524_288


class RankedPolicy(BlockwisePolicy):
    """Evicts the block of the least rank."""

    def __init__(self, capacity_bytes: int = 0) -> None:
        super().__init__(capacity_bytes)
        self._ranks: dict[StorageKey, Rank] = {}
        # Entries whose rank is not their block's any more are passed over.
        self._heap: list[tuple[Rank, StorageKey]] = []
        self._now = 0

    def candidates(self, *, now_s: float, offer: Offer | None = None) -> Iterator[StorageKey]:
        """Yield the blocks by their ranks, without emptying the heap."""
        heap = self._heap
        frontier = [(heap[0], 0)] if heap else []
        while frontier:
            (rank, block), index = heapq.heappop(frontier)
            if self._ranks.get(block) == rank:
                yield block
            for child in (2 * index + 1, 2 * index + 2):
                if child < len(heap):
                    heapq.heappush(frontier, (heap[child], child))

    def _rank(self, block: StorageKey, rank: Rank) -> None:
        self._ranks[block] = rank
        heapq.heappush(self._heap, (rank, block))
        self._clean()

    def _clean(self) -> None:
        heap, ranks = self._heap, self._ranks
        while heap and ranks.get(heap[0][1]) != heap[0][0]:
            heapq.heappop(heap)
        if len(heap) > 2 * len(ranks) + _SPARE_ENTRIES:
            self._heap = [(rank, block) for block, rank in ranks.items()]
            heapq.heapify(self._heap)

    def _tick(self) -> int:
        self._now += 1
        return self._now

    def _drop(self, block: StorageKey, size_bytes: int, *, is_evicted: bool) -> None:
        del self._ranks[block]
        self._clean()


class LfuPolicy(RankedPolicy):
    """Least frequently used while stored; of equals the least recently used."""

    def _add(self, block: StorageKey, size_bytes: int) -> None:
        self._rank(block, (1, self._tick()))

    def _use(self, block: StorageKey) -> None:
        self._rank(block, (self._ranks[block][0] + 1, self._tick()))


class Lru2Policy(RankedPolicy):
    """LRU-2 (O'Neil et al., SIGMOD 1993): evicts the block whose last use but one is longest ago.

    Blocks used once come first, the least recently used of them before the others. The last use of blocks
    that are gone is remembered, so that one that comes back has two.
    """

    def __init__(self, capacity_bytes: int = 0) -> None:
        super().__init__(capacity_bytes)
        self._last: OrderedDict[StorageKey, int] = OrderedDict()  # of blocks that are gone

    def _add(self, block: StorageKey, size_bytes: int) -> None:
        self._rank(block, (self._last.pop(block, 0), self._tick()))

    def _use(self, block: StorageKey) -> None:
        self._rank(block, (self._ranks[block][1], self._tick()))

    def _drop(self, block: StorageKey, size_bytes: int, *, is_evicted: bool) -> None:
        if is_evicted:
            self._last[block] = self._ranks[block][1]
            limit = max(_MIN_HISTORIES, min(_HISTORIES_PER_BLOCK * len(self._sizes), _MANY_HISTORIES))
            while len(self._last) > limit:
                self._last.popitem(last=False)
        super()._drop(block, size_bytes, is_evicted=is_evicted)

    def _forget_ghost(self, block: StorageKey) -> None:
        self._last.pop(block, None)
