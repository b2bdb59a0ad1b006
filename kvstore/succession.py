"""Succession: one policy takes over the blocks of a tier from another, a slice at a time."""

from collections.abc import Iterator, Sequence
from itertools import islice

from kvstore.policy import NO_HINT, EvictionPolicy, Hint, Offer
from kvstore.tier import StorageKey


class Succession:
    """Two policies that share the blocks of one tier: each block is known to exactly one of them.

    Blocks leave the ``predecessor`` in the order in which it would evict them, so that those which the
    ``successor`` has were worth least, and are candidates first. What comes new is the predecessor's, to
    leave it in its turn, until as many were taken as there were; from then on it is the successor's, so that
    this ends however much comes. A policy by itself, so that a tier has one between any two slices.
    """

    is_blockwise = False

    def __init__(self, predecessor: EvictionPolicy, successor: EvictionPolicy) -> None:
        self.predecessor = predecessor
        self.successor = successor
        self._num_left = len(predecessor)

    def take(self, count: int, *, now_s: float) -> list[StorageKey]:
        """Take up to ``count`` blocks from the predecessor; none once it names no more, nor gets new ones.

        The caller has the successor adopt them before anything else.
        """
        blocks = list(dict.fromkeys(islice(self.predecessor.candidates(now_s=now_s), count)))
        for block in blocks:
            self.predecessor.remove(block)
        self._num_left = self._num_left - len(blocks) if blocks else 0
        return blocks

    @property
    def _receiver(self) -> EvictionPolicy:
        """The one that what comes new is offered to."""
        return self.predecessor if self._num_left > 0 else self.successor

    @property
    def may_refuse(self) -> bool:
        """Whether what is offered may be worth less than what is stored."""
        return bool(getattr(self._receiver, "may_refuse", False))

    def touch(self, blocks: Sequence[StorageKey], *, now_s: float, hint: Hint = NO_HINT) -> None:
        """Tell both: what one does not know it ignores."""
        self.predecessor.touch(blocks, now_s=now_s, hint=hint)
        self.successor.touch(blocks, now_s=now_s, hint=hint)

    def note_hint(self, blocks: Sequence[StorageKey], *, now_s: float, hint: Hint) -> None:
        """Tell both."""
        self.predecessor.note_hint(blocks, now_s=now_s, hint=hint)
        self.successor.note_hint(blocks, now_s=now_s, hint=hint)

    def offer(self, offer: Offer, *, now_s: float) -> None:
        """Tell the one that is to have them."""
        self._receiver.offer(offer, now_s=now_s)

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
        """Have each block inserted where it is known already, and new ones where they are to be."""
        other = self.successor if self._receiver is self.predecessor else self.predecessor
        known = [block for block in blocks if block in other]
        if known and is_use:
            other.touch(known, now_s=now_s, hint=hint)
        rest = [block for block in blocks if block not in other] if known else blocks
        if rest:
            self._receiver.insert(
                rest, size_bytes=size_bytes, now_s=now_s, parent=parent, hint=hint, is_use=is_use
            )

    def adopt(
        self,
        blocks: Sequence[StorageKey],
        parents: Sequence[StorageKey | None],
        *,
        size_bytes: int,
        now_s: float,
    ) -> None:
        """Give the successor blocks that neither has."""
        self.successor.adopt(blocks, parents, size_bytes=size_bytes, now_s=now_s)

    def candidates(self, *, now_s: float, offer: Offer | None = None) -> Iterator[StorageKey]:
        """Yield what the successor has, then what the predecessor still has, and an offer beside its like."""
        for policy in (self.successor, self.predecessor):
            yield from policy.candidates(now_s=now_s, offer=offer if policy is self._receiver else None)

    def evict(self, block: StorageKey, *, now_s: float) -> None:
        """Tell both."""
        self.predecessor.evict(block, now_s=now_s)
        self.successor.evict(block, now_s=now_s)

    def refuse(self, offer: Offer, *, now_s: float) -> None:
        """Tell the one that it was offered to."""
        self._receiver.refuse(offer, now_s=now_s)

    def remove(self, block: StorageKey) -> None:
        """Tell both."""
        self.predecessor.remove(block)
        self.successor.remove(block)

    def to_state(self) -> dict[str, object]:
        """Return what the successor has learned."""
        return self.successor.to_state()

    def from_state(self, state: dict[str, object]) -> None:
        """Have the successor learn.

        Raises:
            ValueError: it is not what ``to_state`` returns; nothing was taken over.
        """
        self.successor.from_state(state)

    def __contains__(self, block: object) -> bool:
        return block in self.successor or block in self.predecessor

    def __len__(self) -> int:
        return len(self.successor) + len(self.predecessor)
