"""BlockEvents: what a connector has put into the store and what has left it, for vLLM's stream of events.

A block is told as stored once every rank has stored its part. The store drops blocks without telling its
engines; so a block that was told is told as removed when a lookup or a load finds it gone.
"""

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from kvstore.keys import BlockKey
from kvstore.miss import MissReason

GONE = frozenset(
    reason.value
    for reason in (
        MissReason.NEVER_SEEN,
        MissReason.EVICTED,
        MissReason.DROPPED,
        MissReason.CORRUPT,
        MissReason.NOT_ADMITTED,
        MissReason.OTHER_EPOCH,
        MissReason.ERASED,
    )
)
"""Reasons of a miss that mean 'it is not there', rather than 'not known'."""

_MAX_BLOCKS = 1 << 16


@dataclass(frozen=True, slots=True)
class StoredBlocks:
    """Blocks of one request that follow one another: vLLM's hashes, the one before them, their tokens."""

    hashes: tuple[bytes, ...]
    parent: bytes | None
    tokens: tuple[int, ...]
    group: int
    lora_id: int | None = None
    lora_name: str | None = None
    session: str | None = None


@dataclass(frozen=True, slots=True)
class RemovedBlocks:
    """Blocks of one group that are not stored any more."""

    hashes: tuple[bytes, ...]
    group: int


class BlockEvents:
    """The events of one engine. All methods are called from the scheduler's thread."""

    def __init__(self, *, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._planned: OrderedDict[BlockKey, tuple[StoredBlocks, int]] = OrderedDict()
        self._told: OrderedDict[BlockKey, tuple[bytes, int]] = OrderedDict()
        self._events: list[StoredBlocks | RemovedBlocks] = []

    def note_planned(self, key: BlockKey, block: StoredBlocks) -> None:
        """A block is being stored; ``block`` is of one hash."""
        self._planned[key] = block, 0
        if len(self._planned) > _MAX_BLOCKS:
            self._planned.popitem(last=False)

    def note_stored(self, num_parts: Mapping[BlockKey, int]) -> None:
        """So many ranks have stored their part of each block."""
        for key, parts in num_parts.items():
            planned = self._planned.get(key)
            if planned is None:
                continue
            block, before = planned
            if before + parts < self._num_ranks:
                self._planned[key] = block, before + parts
                continue
            del self._planned[key]
            self._told[key] = block.hashes[0], block.group
            if len(self._told) > _MAX_BLOCKS:
                self._told.popitem(last=False)
            self._add(block)

    def note_gone(self, keys: Iterable[BlockKey]) -> None:
        """Blocks were not in the store; those that were told to be are told to be gone."""
        for key in keys:
            told = self._told.pop(key, None)
            if told is not None:
                self._events.append(RemovedBlocks((told[0],), told[1]))

    def take(self) -> list[StoredBlocks | RemovedBlocks]:
        """Return the events since the last time."""
        events, self._events = self._events, []
        return events

    def _add(self, block: StoredBlocks) -> None:
        """Add a block to the event before it, if it follows on that one's last."""
        last = self._events[-1] if self._events else None
        if isinstance(last, StoredBlocks) and last.hashes[-1] == block.parent:
            joined = replace(last, hashes=last.hashes + block.hashes, tokens=last.tokens + block.tokens)
            if replace(joined, hashes=block.hashes, parent=block.parent, tokens=block.tokens) == block:
                self._events[-1] = joined
                return
        self._events.append(block)
