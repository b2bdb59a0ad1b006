"""SLRU and ARC: two LRU queues, one for blocks used once and one for those used again."""

from collections.abc import Iterator

from kvstore.policy.blockwise import BlockwisePolicy, Queue
from kvstore.policy.protocol import Offer
from kvstore.tier import StorageKey

_PROTECTED_RATIO = 0.8


class SlruPolicy(BlockwisePolicy):
    """Segmented LRU (Karedla et al., Computer 1994): a use on probation protects, for 80 % of the room."""

    def __init__(self, capacity_bytes: int = 0) -> None:
        super().__init__(capacity_bytes)
        self._probation = Queue()
        self._protected = Queue()

    def candidates(self, *, now_s: float, offer: Offer | None = None) -> Iterator[StorageKey]:
        """Yield those on probation, then the protected ones, each least recently used first."""
        yield from self._probation
        yield from self._protected

    def _add(self, block: StorageKey, size_bytes: int) -> None:
        self._probation.append(block, size_bytes)

    def _use(self, block: StorageKey) -> None:
        if not self._probation.discard(block):
            self._protected.move_to_end(block)
            return
        self._protected.append(block, self._sizes[block])
        while self._protected.used_bytes > _PROTECTED_RATIO * self._capacity_bytes:
            self._probation.append(*self._protected.pop())

    def _drop(self, block: StorageKey, size_bytes: int, *, is_evicted: bool) -> None:
        if not self._probation.discard(block):
            self._protected.discard(block)


class ArcPolicy(BlockwisePolicy):
    """ARC (Megiddo and Modha, FAST 2003): ghosts of both queues decide how much room each has."""

    def __init__(self, capacity_bytes: int = 0) -> None:
        super().__init__(capacity_bytes)
        self._recent, self._frequent = Queue(), Queue()
        self._recent_ghosts, self._frequent_ghosts = Queue(), Queue()
        self._target_bytes = 0.0  # of the recent ones: "p" of the paper
        self._adapted: StorageKey | None = None

    def offer(self, offer: Offer, *, now_s: float) -> None:
        """Give the queue more room whose ghosts come back."""
        for block in reversed(offer.blocks):
            if block not in self._sizes:
                self._adapt(block, offer.size_bytes)

    def _adapt(self, block: StorageKey, size_bytes: int) -> None:
        recent, frequent = self._recent_ghosts, self._frequent_ghosts
        if block in recent:
            step = size_bytes * max(1.0, frequent.used_bytes / recent.used_bytes)
            self._target_bytes = min(self._capacity_bytes, self._target_bytes + step)
        elif block in frequent:
            step = size_bytes * max(1.0, recent.used_bytes / frequent.used_bytes)
            self._target_bytes = max(0.0, self._target_bytes - step)

    def candidates(self, *, now_s: float, offer: Offer | None = None) -> Iterator[StorageKey]:
        """Yield from the queue that has more than its share, as if what is offered were filed."""
        recent, frequent = self._recent.items(), self._frequent.items()
        recent_bytes: float = self._recent.used_bytes
        comes_back = False
        if offer is not None and offer.blocks:
            *others, first = offer.blocks
            recent_bytes += offer.size_bytes * sum(not self._is_ghost(block) for block in others)
            comes_back = first in self._frequent_ghosts
            if recent_bytes >= self._capacity_bytes and not self._is_ghost(first):
                recent_bytes += offer.size_bytes
        while True:
            is_over = recent_bytes > self._target_bytes or (
                comes_back and recent_bytes == self._target_bytes > 0
            )
            found = next(recent if is_over else frequent, None) or next(frequent if is_over else recent, None)
            if found is None:
                return
            block, size_bytes = found
            recent_bytes -= size_bytes if block in self._recent else 0
            yield block

    def _is_ghost(self, block: StorageKey) -> bool:
        return block in self._recent_ghosts or block in self._frequent_ghosts

    def _add(self, block: StorageKey, size_bytes: int) -> None:
        if self._recent_ghosts.discard(block) or self._frequent_ghosts.discard(block):
            self._frequent.append(block, size_bytes)
        else:
            self._recent.append(block, size_bytes)
        self._bound_ghosts()

    def _use(self, block: StorageKey) -> None:
        if self._recent.discard(block):
            self._frequent.append(block, self._sizes[block])
        else:
            self._frequent.move_to_end(block)

    def _drop(self, block: StorageKey, size_bytes: int, *, is_evicted: bool) -> None:
        ghosts = self._recent_ghosts
        if not self._recent.discard(block):
            self._frequent.discard(block)
            ghosts = self._frequent_ghosts
        if is_evicted:
            ghosts.append(block, size_bytes)
            self._bound_ghosts()

    def _bound_ghosts(self) -> None:
        capacity_bytes = self._capacity_bytes
        self._recent_ghosts.trim(max(0, capacity_bytes - self._recent.used_bytes))
        stored_bytes = self._recent.used_bytes + self._frequent.used_bytes
        ghost_bytes = 2 * capacity_bytes - stored_bytes - self._recent_ghosts.used_bytes
        self._frequent_ghosts.trim(max(0, ghost_bytes))

    def _forget_ghost(self, block: StorageKey) -> None:
        if not self._recent_ghosts.discard(block):
            self._frequent_ghosts.discard(block)
