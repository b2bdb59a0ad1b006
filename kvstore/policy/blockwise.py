"""BlockwisePolicy: what policies known from textbooks have in common: they order single blocks."""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import islice

from kvstore.policy.plain import PlainPolicy
from kvstore.policy.protocol import NO_HINT, Hint, Offer
from kvstore.tier import StorageKey

_CHUNK_BLOCKS = 32


class BlockwisePolicy(PlainPolicy):
    """Takes the blocks of a chain one by one, the last one first, so that parents are the more recent ones.

    ``_sizes`` has the stored blocks with their bytes. Hints are not heeded, and nothing is saved.
    """

    is_blockwise = True

    def __init__(self, capacity_bytes: int = 0) -> None:
        self._capacity_bytes = capacity_bytes
        self._sizes: dict[StorageKey, int] = {}

    def touch(self, blocks: Sequence[StorageKey], *, now_s: float, hint: Hint = NO_HINT) -> None:
        """Use the known ones, the last of the chain first."""
        for block in reversed(blocks):
            if block in self._sizes:
                self._use(block)

    def insert(
        self,
        blocks: Sequence[StorageKey],
        *,
        size_bytes: int,
        now_s: float,
        parent: StorageKey | None = None,
        hint: Hint = NO_HINT,
        is_use: bool = True,
    ) -> None:
        """File the new ones and use the known ones, the last of the chain first."""
        for block in reversed(blocks):
            if block in self._sizes:
                self._use(block)
            else:
                self._sizes[block] = size_bytes
                self._add(block, size_bytes)

    def adopt(
        self,
        blocks: Sequence[StorageKey],
        parents: Sequence[StorageKey | None],
        *,
        size_bytes: int,
        now_s: float,
    ) -> None:
        """File blocks one by one."""
        self.insert(blocks[::-1], size_bytes=size_bytes, now_s=now_s, is_use=False)

    def candidates(self, *, now_s: float, offer: Offer | None = None) -> Iterator[StorageKey]:
        """Yield blocks, least worth keeping first."""
        raise NotImplementedError

    def evict(self, block: StorageKey, *, now_s: float) -> None:
        """Take a block out, to be remembered as the policy sees fit."""
        size_bytes = self._sizes.pop(block, None)
        if size_bytes is not None:
            self._drop(block, size_bytes, is_evicted=True)

    def remove(self, block: StorageKey) -> None:
        """Forget a block and its ghost."""
        size_bytes = self._sizes.pop(block, None)
        if size_bytes is not None:
            self._drop(block, size_bytes, is_evicted=False)
        self._forget_ghost(block)

    def __contains__(self, block: object) -> bool:
        return block in self._sizes

    def __len__(self) -> int:
        return len(self._sizes)

    def _add(self, block: StorageKey, size_bytes: int) -> None:
        """File a new block."""
        raise NotImplementedError

    def _use(self, block: StorageKey) -> None:
        """Take note of a use of a known block."""
        raise NotImplementedError

    def _drop(self, block: StorageKey, size_bytes: int, *, is_evicted: bool) -> None:
        """Take a known block out; one that was evicted may become a ghost."""
        raise NotImplementedError

    def _forget_ghost(self, block: StorageKey) -> None:
        """Forget the ghost of a block, if there is one."""


class Queue:
    """Blocks in an order, with the sum of their bytes: first in, first out, or least recently used first."""

    def __init__(self) -> None:
        self._sizes: OrderedDict[StorageKey, int] = OrderedDict()
        self.used_bytes = 0

    def append(self, block: StorageKey, size_bytes: int) -> None:
        """Add a block that is not in it, as the last."""
        self._sizes[block] = size_bytes
        self.used_bytes += size_bytes

    def move_to_end(self, block: StorageKey) -> None:
        """Make a block of it the last."""
        self._sizes.move_to_end(block)

    def discard(self, block: StorageKey) -> bool:
        """Take a block out; False if it is not in it."""
        size_bytes = self._sizes.pop(block, None)
        if size_bytes is None:
            return False
        self.used_bytes -= size_bytes
        return True

    def pop(self) -> tuple[StorageKey, int]:
        """Take the first block out."""
        block, size_bytes = self._sizes.popitem(last=False)
        self.used_bytes -= size_bytes
        return block, size_bytes

    def trim(self, limit_bytes: float) -> None:
        """Take the first ones out until no more than ``limit_bytes`` are left."""
        while self.used_bytes > limit_bytes:
            self.pop()

    def lasting(self, passed: set[StorageKey]) -> Iterator[tuple[StorageKey, int]]:
        """Yield blocks and bytes in their order, while some of it are moved to the end or out.

        The caller adds to ``passed`` those that it leaves where they are.
        """
        chunk_blocks = _CHUNK_BLOCKS
        while True:
            num_yielded = 0
            for block, size_bytes in list(islice(self._sizes.items(), len(passed) + chunk_blocks)):
                if block not in passed:
                    num_yielded += 1
                    yield block, size_bytes
            if not num_yielded:
                return
            chunk_blocks *= 2

    def items(self) -> Iterator[tuple[StorageKey, int]]:
        """Yield blocks and bytes in their order; nothing may change meanwhile."""
        return iter(self._sizes.items())

    def __iter__(self) -> Iterator[StorageKey]:
        return iter(self._sizes)

    def __contains__(self, block: object) -> bool:
        return block in self._sizes

    def __len__(self) -> int:
        return len(self._sizes)
