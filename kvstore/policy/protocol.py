"""EvictionPolicy: an order over the blocks of one tier, least worth keeping first; no I/O, no clock."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

from kvstore.tier import StorageKey


class Hint(NamedTuple):
    """What a request says of its blocks' future. Every field is a claim that may be wrong.

    ``ends_session``: its conversation is over. ``is_one_off``: nobody asks for its new blocks again.
    ``next_use_s``: seconds until its blocks are expected to be used again. ``priority``: each step up makes a
    block worth twice as much; -4 to 4. ``output_tokens``: how long its answer is. ``saves_s_per_byte``:
    prefill time that a hit of its blocks saves, per byte: from measured prefill speed and depth.
    """

    ends_session: bool = False
    is_one_off: bool = False
    next_use_s: float | None = None
    priority: int = 0
    output_tokens: int | None = None
    saves_s_per_byte: float | None = None


NO_HINT = Hint()
"""The hint of a request that says nothing."""


class Offer(NamedTuple):
    """Blocks just computed that compete for room with those that are stored.

    ``blocks`` are new ones of one chain, in chain order, of ``size_bytes`` each. ``parent`` is the block
    before the first of them, None at the start of a chain. Without ``is_use`` they were not just computed:
    they come from another tier.
    """

    blocks: Sequence[StorageKey]
    size_bytes: int
    parent: StorageKey | None = None
    hint: Hint = NO_HINT
    is_use: bool = True


class EvictionPolicy(Protocol):
    """What the owner of a tier asks of a policy. It names candidates; the owner skips those it must keep.

    One request goes: ``touch`` what is stored of its chain, and ``offer`` the rest; if there is no room for
    it, walk ``candidates`` with that offer, and take what comes until the rest fits: a stored block is
    evicted, an offered one is refused; then ``evict``, ``insert`` and ``refuse`` tell what was done. An offer
    that comes to nothing needs no word: what a policy remembers of it is bounded.

    Of several tiers each has a policy. One below the first is told of every request too: ``touch`` of all
    that was found, wherever it is, and ``refuse`` of what is new, since it goes elsewhere first. So it knows
    how long a block was not used when that comes down to it, offered or inserted without ``is_use``.

    Above every policy the owner keeps two laws: a leased block is never a victim, and a block with a child in
    the same tier is no victim before that child.

    Instants are seconds of one monotonic clock, the caller's. Ghosts (blocks that are remembered but not
    stored) are bounded. The same calls give the same order.
    """

    def touch(self, blocks: Sequence[StorageKey], *, now_s: float, hint: Hint = NO_HINT) -> None:
        """Learn of a use of blocks of one chain, in chain order. Of those not stored a ghost may learn."""

    def note_hint(self, blocks: Sequence[StorageKey], *, now_s: float, hint: Hint) -> None:
        """Learn more of the future of blocks of one chain; it is no use of them. Unknown ones are ignored."""

    def offer(self, offer: Offer, *, now_s: float) -> None:
        """Learn of blocks that are about to be stored, or refused, as one request's."""

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
        """Learn of stored blocks of one chain, in chain order, of ``size_bytes`` each. A known one: touch.

        ``parent`` is the block before the first of them, None if that is not known or there is none. Without
        ``is_use`` they come from another tier or an earlier run, and a use, if there is one, is told apart.
        """

    def adopt(
        self,
        blocks: Sequence[StorageKey],
        parents: Sequence[StorageKey | None],
        *,
        size_bytes: int,
        now_s: float,
    ) -> None:
        """Learn of stored blocks of any chains that an earlier run left, the least recently used first.

        ``parents`` has the block before each, None if that is not stored. No block comes before itself.
        """

    def candidates(self, *, now_s: float, offer: Offer | None = None) -> Iterator[StorageKey]:
        """Yield stored blocks, least worth keeping first, and before each what of the offer is worth less.

        Of the offer the last block comes first. What is worth more than all that is stored is not yielded.
        No stored block becomes unknown by it, and it is stale once anything is changed.
        """

    def evict(self, block: StorageKey, *, now_s: float) -> None:
        """A block leaves to make room: it may be remembered as a ghost. An unknown one is ignored."""

    def refuse(self, offer: Offer, *, now_s: float) -> None:
        """Blocks were offered and not stored: they may be remembered as ghosts."""

    def remove(self, block: StorageKey) -> None:
        """Forget a block that was dropped, and its ghost. An unknown one is ignored."""

    def to_state(self) -> dict[str, object]:
        """Return what was learned of the traffic, ready for msgpack, bounded; blocks are not part of it."""

    def from_state(self, state: dict[str, object]) -> None:
        """Take over what an earlier policy of the same kind learned.

        Raises:
            ValueError: it is not what ``to_state`` returns; nothing was taken over.
        """

    def __contains__(self, block: object) -> bool: ...

    def __len__(self) -> int: ...
