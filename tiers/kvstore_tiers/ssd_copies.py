"""Copies: the visible copies of one ssd folder by storage key, and the uses that are not on disk yet.

What an earlier run left stays in its stored form, found sound, until a copy is asked for: a start makes no
objects, and a copy that nobody uses takes no more memory than its record.
"""

import asyncio
from collections.abc import Iterator, KeysView, Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np

from kvstore.tier import BlockHeader, BlockId
from kvstore_tiers.ssd_record import Change, IndexRecord, headers_in, name_in, recency_in, unpack_sound
from kvstore_tiers.ssd_record_table import RecordTable


class Numbers:
    """Numbers that only grow, for recency and generations; tiers that are opened together share one."""

    def __init__(self) -> None:
        self._last = 0

    def take(self) -> int:
        """Return the next one."""
        self._last += 1
        return self._last

    def learn(self, used: int) -> None:
        """Start above a number that an earlier run used."""
        self._last = max(self._last, used)


@dataclass(eq=False, slots=True)
class Copy:
    """One copy. ``idle`` is set for a hidden copy that is still being read; a damaged one keeps its slot."""

    record: IndexRecord
    readers: int = 0
    is_damaged: bool = False
    idle: asyncio.Future[None] | None = None


class Copies:
    """What ``stored`` holds, least recently used first, and what comes and goes. One event loop's thread."""

    def __init__(self, stored: RecordTable | None = None) -> None:
        self._held: dict[bytes, Copy | bytes] = {}
        self._unrenewed: dict[bytes, None] = {}
        if stored is not None:
            self._held |= zip(map(name_in, stored.values), stored.values, strict=True)

    def __len__(self) -> int:
        return len(self._held)

    @property
    def names(self) -> KeysView[bytes]:
        """The storage keys."""
        return self._held.keys()

    @property
    def num_unrenewed(self) -> int:
        """How many copies were used since their record was stored."""
        return len(self._unrenewed)

    def clear(self) -> None:
        """Forget everything."""
        self._held, self._unrenewed = {}, {}

    def get(self, name: bytes) -> Copy | None:
        """Return the copy under a storage key."""
        held = self._held.get(name)
        if isinstance(held, bytes):
            held = self._held[name] = Copy(unpack_sound(held))
        return held

    def find(self, block: BlockId) -> Copy | None:
        """Return the copy of exactly this block."""
        copy = self.get(block.storage_key)
        return copy if copy is not None and copy.record.header.block == block else None

    def publish(self, record: IndexRecord) -> Copy | None:
        """Make a new copy visible, the most recently used; returns the one it replaces."""
        name = record.header.block.storage_key
        old = self.get(name)
        self._remove(name)
        self._held[name] = Copy(record)
        return old

    def hide(self, copy: Copy) -> bool:
        """Make a copy invisible; False if it was hidden or replaced before."""
        name = copy.record.header.block.storage_key
        if self._held.get(name) is not copy:
            return False
        self._remove(name)
        return True

    def note_use(self, copy: Copy, recency: int) -> None:
        """Make a visible copy the most recently used."""
        name = copy.record.header.block.storage_key
        if self._held.get(name) is copy:
            copy.record = copy.record._replace(recency=recency)
            del self._held[name]
            self._held[name] = copy
            self._unrenewed[name] = None

    def take_renewals(self, limit: int) -> list[Change]:
        """Return the changes that store up to so many uses; the caller sees to them."""
        changes: list[Change] = []
        for name in list(self._unrenewed)[:limit]:
            del self._unrenewed[name]
            copy = self.get(name)
            assert copy is not None, "a use of a copy that is not there"
            changes.append(Change.renew(copy.record))
        return changes

    def headers(self) -> "StoredHeaders":
        """Return the headers of all copies as they are now."""
        return StoredHeaders(list(self._held.values()))

    def records(self) -> list[IndexRecord]:
        """Return the records of all copies."""
        return [
            unpack_sound(held) if isinstance(held, bytes) else held.record for held in self._held.values()
        ]

    def recencies(self) -> list[int]:
        """Return the recency of every copy; it grows along the list."""
        return [
            recency_in(held) if isinstance(held, bytes) else held.record.recency
            for held in self._held.values()
        ]

    def _remove(self, name: bytes) -> None:
        self._held.pop(name, None)
        self._unrenewed.pop(name, None)


class StoredHeaders(Sequence[BlockHeader]):
    """Headers of copies, unpacked as they are asked for."""

    def __init__(self, held: Sequence[Copy | bytes]) -> None:
        self._held = held

    def __len__(self) -> int:
        return len(self._held)

    def __iter__(self) -> Iterator[BlockHeader]:
        stored = iter(headers_in(held for held in self._held if isinstance(held, bytes)))
        for held in self._held:
            yield next(stored) if isinstance(held, bytes) else held.record.header

    @overload
    def __getitem__(self, index: int) -> BlockHeader: ...

    @overload
    def __getitem__(self, index: slice) -> list[BlockHeader]: ...

    def __getitem__(self, index: int | slice) -> BlockHeader | list[BlockHeader]:
        if isinstance(index, slice):
            return list(StoredHeaders(self._held[index]))
        held = self._held[index]
        return unpack_sound(held).header if isinstance(held, bytes) else held.record.header


def headers_by_use(folders: Sequence[Copies]) -> StoredHeaders:
    """Return the headers of all copies of several folders, least recently used first."""
    if len(folders) == 1:
        return folders[0].headers()
    held = [held for copies in folders for held in copies._held.values()]
    recencies = np.array([recency for copies in folders for recency in copies.recencies()], dtype=np.uint64)
    return StoredHeaders([held[index] for index in np.argsort(recencies, kind="stable").tolist()])
