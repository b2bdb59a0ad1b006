"""PolicyCache: one tier without bytes: a policy, a capacity, and requests one after the other."""

from collections.abc import Sequence
from typing import NamedTuple

from kvstore.policy.protocol import NO_HINT, EvictionPolicy, Hint, Offer
from kvstore.tier import StorageKey


class Served(NamedTuple):
    """What one request came to.

    The first ``hit_blocks`` of it were stored. ``written`` are the blocks that were stored, ``evicted`` those
    that left for them, in the order in which they left; ``refused`` ones were offered and not stored.
    """

    hit_blocks: int
    written: Sequence[StorageKey]
    evicted: Sequence[StorageKey]
    refused: Sequence[StorageKey]


class PolicyCache:
    """Drives a policy as a block manager with one tier and one client would, without payloads.

    At arrival the hit is the leading run of stored blocks; then the others are offered.

    Policies known from textbooks order single blocks (``is_blockwise``): each block is offered by itself,
    the last one first (``is_head_first``: the first one first), and stored blocks behind a gap count as
    stored. The law of children before parents is left to the policy here, so that such a policy does what its
    literature says; a block manager keeps it above every policy.
    """

    def __init__(self, policy: EvictionPolicy, capacity_bytes: int) -> None:
        self.policy = policy
        self.capacity_bytes = capacity_bytes
        self.used_bytes = 0
        self._sizes: dict[StorageKey, int] = {}
        self._is_blockwise = bool(getattr(policy, "is_blockwise", False))
        self._is_head_first = bool(getattr(policy, "is_head_first", False))

    def __contains__(self, block: StorageKey) -> bool:
        return block in self._sizes

    def __len__(self) -> int:
        return len(self._sizes)

    def leading(self, blocks: Sequence[StorageKey]) -> int:
        """Count the leading blocks that are stored; it is no use."""
        sizes = self._sizes
        for index, block in enumerate(blocks):
            if block not in sizes:
                return index
        return len(blocks)

    def serve(
        self, blocks: Sequence[StorageKey], *, size_bytes: int = 1, now_s: float, hint: Hint = NO_HINT
    ) -> Served:
        """Serve a request for a chain whose blocks have ``size_bytes`` each."""
        hit_blocks = self.leading(blocks)
        if self._is_blockwise:
            return self._serve_singly(blocks, hit_blocks, size_bytes, now_s, hint)
        stored = blocks[:hit_blocks]
        if hit_blocks:
            self.policy.touch(stored, now_s=now_s, hint=hint)
        missing = [block for block in blocks[hit_blocks:] if block not in self._sizes]
        if not missing:
            return Served(hit_blocks, (), (), ())
        parent = blocks[hit_blocks - 1] if hit_blocks else None
        return Served(hit_blocks, *self._store(Offer(missing, size_bytes, parent, hint), now_s))

    def store(
        self,
        blocks: Sequence[StorageKey],
        *,
        size_bytes: int = 1,
        now_s: float,
        parent: StorageKey | None = None,
        hint: Hint = NO_HINT,
    ) -> Served:
        """Offer blocks of one chain without a look-up, as a tier above does that writes them down."""
        known = [block for block in blocks if block in self._sizes]
        missing = [block for block in blocks if block not in self._sizes]
        if known:
            self.policy.touch(known, now_s=now_s, hint=hint)
        if not missing:
            return Served(0, (), (), ())
        return Served(0, *self._store(Offer(missing, size_bytes, parent, hint, is_use=False), now_s))

    def pass_by(self, offer: Offer, *, now_s: float) -> None:
        """Tell of new blocks that a tier above takes, or refuses."""
        missing = [block for block in offer.blocks if block not in self._sizes]
        if missing:
            offer = offer._replace(blocks=missing)
            self.policy.offer(offer, now_s=now_s)
            self.policy.refuse(offer, now_s=now_s)

    def touch(self, blocks: Sequence[StorageKey], *, now_s: float, hint: Hint = NO_HINT) -> None:
        """Tell of a use that a tier above has served."""
        self.policy.touch(blocks, now_s=now_s, hint=hint)

    def drop(self, blocks: Sequence[StorageKey]) -> None:
        """Forget blocks, for whatever reason but space."""
        for block in blocks:
            self.used_bytes -= self._sizes.pop(block, 0)
            self.policy.remove(block)

    def _serve_singly(
        self, blocks: Sequence[StorageKey], hit_blocks: int, size_bytes: int, now_s: float, hint: Hint
    ) -> Served:
        written: list[StorageKey] = []
        evicted: list[StorageKey] = []
        refused: list[StorageKey] = []
        order = range(len(blocks)) if self._is_head_first else range(len(blocks) - 1, -1, -1)
        for index in order:
            block = blocks[index]
            if block in self._sizes:
                self.policy.touch((block,), now_s=now_s, hint=hint)
                continue
            parent = blocks[index - 1] if index else None
            came, went, stayed = self._store(Offer((block,), size_bytes, parent, hint), now_s)
            written += came
            evicted += went
            refused += stayed
        return Served(hit_blocks, written, evicted, refused)

    def _store(
        self, offer: Offer, now_s: float
    ) -> tuple[Sequence[StorageKey], list[StorageKey], list[StorageKey]]:
        """Store what the policy finds worth it of an offer; returns what came, left, was refused."""
        if offer.is_use:
            self.policy.offer(offer, now_s=now_s)
        size_bytes = offer.size_bytes
        wanted = list(offer.blocks)
        needed_bytes = len(wanted) * size_bytes + self.used_bytes - self.capacity_bytes
        evicted: list[StorageKey] = []
        refused: list[StorageKey] = []
        if needed_bytes > 0:
            sizes, is_wanted = self._sizes, set(wanted)
            for block in self.policy.candidates(now_s=now_s, offer=offer):
                if block in is_wanted:
                    refused.append(block)
                    needed_bytes -= size_bytes
                else:
                    evicted.append(block)
                    needed_bytes -= sizes[block]
                if needed_bytes <= 0:
                    break
            self._evict(evicted, now_s)
            while needed_bytes > 0 and len(refused) < len(wanted):  # more than fits into an empty tier
                refused.append(wanted[-1 - len(refused)])
                needed_bytes -= size_bytes
            if refused:
                # From the first that was refused on: nothing is stored behind a gap.
                del wanted[len(wanted) - len(refused) :]
                refused.reverse()
        if wanted:
            self.policy.insert(
                wanted,
                size_bytes=size_bytes,
                now_s=now_s,
                parent=offer.parent,
                hint=offer.hint,
                is_use=offer.is_use,
            )
            self._sizes.update(dict.fromkeys(wanted, size_bytes))
            self.used_bytes += len(wanted) * size_bytes
        if refused:
            parent = wanted[-1] if wanted else offer.parent
            self.policy.refuse(offer._replace(blocks=refused, parent=parent), now_s=now_s)
        return wanted, evicted, refused

    def _evict(self, blocks: Sequence[StorageKey], now_s: float) -> None:
        for block in blocks:
            self.policy.evict(block, now_s=now_s)
            self.used_bytes -= self._sizes.pop(block)
