"""SlotAllocator: which bytes of a region are lent out as slots. Pure bookkeeping, no I/O.

Sizes. A slot is a multiple of 4096 bytes. Slots of one size are cut from extents, contiguous runs of slots of
that size; an extent whose slots are all free melts back into the free ranges, where it joins its neighbours
and may serve any other size. So a change of block size never needs more than the old blocks to go.

    region  |####|####|    |######|  free range  |##|##|  |  |##|   free range   |
             extent A (3)  extent B (1)           extent C (5 slots)

Choice. A new slot comes from the oldest extent of its size that has one, else from a free range: by size
class (power of two), classes above the wanted size first, since each of their ranges fits; only then the
wanted size's own class is walked. Allocation fails only when no slot of that size and no range that could
hold one is left. All steps are O(1) amortised but that last walk.

Owner. One event loop's thread; nothing is locked.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvstore.errors import TierFull
from kvstore.tier import ALIGNMENT_BYTES

_EXTENTS_WANTED = 64
_EXTENT_MAX_BYTES = 32 << 20

Offsets = npt.NDArray[np.int64]


def padded(length_bytes: int) -> int:
    """Return the slot size for a payload: rounded up to a multiple of 4096."""
    return -(-length_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


@dataclass(eq=False, slots=True)
class _Extent:
    """A run of ``num_slots`` slots; those from ``fresh`` on were never lent, ``returned`` were given back."""

    start: int
    slot_bytes: int
    num_slots: int
    fresh: int = 0
    used: int = 0
    returned: list[int] = field(default_factory=list)

    @property
    def stop(self) -> int:
        return self.start + self.slot_bytes * self.num_slots

    @property
    def free_slots(self) -> int:
        return self.num_slots - self.used

    def take(self, wanted: int) -> list[int]:
        """Lend up to so many slots, those given back last first."""
        again = self.returned[-wanted:][::-1]
        del self.returned[-wanted:]
        first = self.fresh
        self.fresh = min(self.num_slots, first + wanted - len(again))
        size, start = self.slot_bytes, self.start
        new = range(start + first * size, start + self.fresh * size, size)
        self.used += len(again) + len(new)
        return [*again, *new]


class _FreeRanges:
    """Disjoint, never adjacent byte ranges, filed by power-of-two size class."""

    def __init__(self) -> None:
        self.total_bytes = 0
        self._stop_of: dict[int, int] = {}
        self._start_of: dict[int, int] = {}
        self._classes: list[dict[int, None]] = [{} for _ in range(64)]

    def add(self, start: int, stop: int) -> None:
        """Add a range, joined with the ranges that touch it."""
        if start == stop:
            return
        before = self._start_of.get(start)
        if before is not None:
            self.remove(before)
            start = before
        after = self._stop_of.get(stop)
        if after is not None:
            self.remove(stop)
            stop = after
        self._stop_of[start] = stop
        self._start_of[stop] = start
        self._classes[(stop - start).bit_length()][start] = None
        self.total_bytes += stop - start

    def remove(self, start: int) -> None:
        """Remove the range that starts here."""
        stop = self._stop_of.pop(start)
        del self._start_of[stop]
        del self._classes[(stop - start).bit_length()][start]
        self.total_bytes -= stop - start

    def fitting(self, size_bytes: int) -> Iterator[tuple[int, int]]:
        """Yield the ranges of at least that size, those of greater classes first."""
        own = size_bytes.bit_length()
        for index in (*range(own + 1, 64), own):
            for start in self._classes[index]:
                stop = self._stop_of[start]
                if stop - start >= size_bytes:
                    yield start, stop


class SlotAllocator:
    """Hands out byte offsets in ``0..capacity_bytes`` for slots of several sizes at once."""

    def __init__(self, capacity_bytes: int, *, name: str = "slots") -> None:
        self._name = name
        self._capacity = capacity_bytes // ALIGNMENT_BYTES * ALIGNMENT_BYTES
        self._extent_bytes = min(self._capacity // _EXTENTS_WANTED, _EXTENT_MAX_BYTES)
        self._ranges = _FreeRanges()
        self._ranges.add(0, self._capacity)
        self._extent_of: dict[int, _Extent] = {}
        self._partial: dict[int, dict[_Extent, None]] = {}
        self._spare: dict[int, int] = {}
        self._used_bytes = 0

    @property
    def capacity_bytes(self) -> int:
        """Bytes of the region, a multiple of 4096."""
        return self._capacity

    @property
    def used_bytes(self) -> int:
        """Bytes of the slots lent out, padding included."""
        return self._used_bytes

    @property
    def free_bytes(self) -> int:
        """Bytes in no lent slot."""
        return self._capacity - self._used_bytes

    @property
    def used_slots(self) -> int:
        """Number of slots lent out."""
        return len(self._extent_of)

    def slot_bytes(self, offset: int) -> int:
        """Return the size of the lent slot at ``offset``."""
        extent = self._extent_of.get(offset)
        assert extent is not None, f"{self._name}: no slot is allocated at offset {offset}"
        return extent.slot_bytes

    def lent(self) -> Iterator[tuple[int, int]]:
        """Yield (offset, bytes) of every slot that is lent out."""
        for offset, extent in self._extent_of.items():
            yield offset, extent.slot_bytes

    def is_allocated(self, offset: int) -> bool:
        """Return whether a slot is lent out at exactly this offset."""
        return offset in self._extent_of

    def has_room(self, length_bytes: int, count: int = 1) -> bool:
        """Return whether ``allocate`` would succeed."""
        size = padded(length_bytes)
        missing = count - self._spare.get(size, 0)
        if missing <= 0:
            return True
        if missing * size > self._ranges.total_bytes:
            return False
        for start, stop in self._ranges.fitting(size):
            missing -= (stop - start) // size
            if missing <= 0:
                return True
        return False

    def allocate(self, length_bytes: int, count: int = 1) -> list[int]:
        """Take ``count`` slots of at least ``length_bytes`` each.

        Raises:
            TierFull: fewer than ``count`` can be had; none is taken.
        """
        assert length_bytes > 0, f"{self._name}: a slot of {length_bytes} bytes"
        size = padded(length_bytes)
        if not self.has_room(length_bytes, count):
            raise TierFull(
                f"{self._name}: no room for {count} slots of {size} bytes: "
                f"{self._used_bytes} of {self._capacity} bytes are in use"
            )
        taken: list[int] = []
        while len(taken) < count:
            taken += self._take(size, count - len(taken))
        return taken

    def free(self, offsets: Sequence[int]) -> None:
        """Give slots back; one that is not lent out is our own mistake (AssertionError)."""
        for offset in offsets:
            extent = self._extent_of.pop(offset, None)
            assert extent is not None, f"{self._name}: no slot is allocated at offset {offset}"
            self._used_bytes -= extent.slot_bytes
            extent.used -= 1
            extent.returned.append(offset)
            self._spare[extent.slot_bytes] += 1
            if extent.used:
                self._partial[extent.slot_bytes][extent] = None
            else:
                self._melt(extent)

    def restore(self, offsets: Offsets, lengths_bytes: Offsets) -> None:
        """Mark slots as lent out, given by where they begin and how long they are, both ``[slots]``.

        For a start from stored records: only on a fresh allocator. Slots that overlap or leave the region are
        our own mistake.
        """
        assert not self._extent_of, f"{self._name}: restore on an allocator in use"
        if not len(offsets):
            return
        sizes = -(-lengths_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        order = np.argsort(offsets, kind="stable")
        starts, sizes = offsets[order], sizes[order]
        ends = starts + sizes
        free_from = np.concatenate(([0], ends[:-1]))
        is_sound = (free_from <= starts) & (ends <= self._capacity) & (starts % ALIGNMENT_BYTES == 0)
        for index in np.flatnonzero(~is_sound)[:1]:
            raise AssertionError(
                f"{self._name}: slot at {starts[index]} of {sizes[index]} bytes overlaps or leaves the region"
            )
        is_apart = (starts[1:] != ends[:-1]) | (sizes[1:] != sizes[:-1])
        firsts = [0, *(np.flatnonzero(is_apart) + 1).tolist()]
        self._ranges = _FreeRanges()
        position = 0
        slots = starts.tolist()
        for first, stop in zip(firsts, [*firsts[1:], len(slots)], strict=True):
            self._ranges.add(position, slots[first])
            position = self._restore_run(slots[first:stop], int(sizes[first]))
        self._ranges.add(position, self._capacity)

    def _restore_run(self, slots: list[int], size: int) -> int:
        """Mark neighbours of one size as lent out; returns where they end."""
        most = max(1, -(-self._extent_bytes // size))
        for start in range(0, len(slots), most):
            part = slots[start : start + most]
            extent = _Extent(part[0], size, len(part), fresh=len(part), used=len(part))
            self._extent_of.update(dict.fromkeys(part, extent))
        self._spare.setdefault(size, 0)
        self._partial.setdefault(size, {})
        self._used_bytes += size * len(slots)
        return slots[-1] + size

    def check(self) -> list[str]:
        """Return one line per violated invariant (for tests and ``kvstore check``)."""
        problems = []
        extents = {*self._extent_of.values()}
        used = sum(extent.used * extent.slot_bytes for extent in extents)
        held = sum(extent.num_slots * extent.slot_bytes for extent in extents)
        if used != self._used_bytes:
            problems.append(f"{self._name}: {self._used_bytes} bytes counted as used, slots hold {used}")
        if held + self._ranges.total_bytes != self._capacity:
            problems.append(
                f"{self._name}: extents {held} + free {self._ranges.total_bytes} bytes are not "
                f"the capacity {self._capacity}"
            )
        return problems

    def _take(self, size: int, still_wanted: int) -> list[int]:
        """Take up to ``still_wanted`` slots of one extent, at least one."""
        partial = self._partial.setdefault(size, {})
        extent = next(iter(partial), None)
        if extent is None:
            extent = self._carve(size, still_wanted)
            partial[extent] = None
        offsets = extent.take(still_wanted)
        if not extent.free_slots:
            del partial[extent]
        self._spare[size] -= len(offsets)
        self._extent_of.update(dict.fromkeys(offsets, extent))
        self._used_bytes += size * len(offsets)
        return offsets

    def _carve(self, size: int, still_wanted: int) -> _Extent:
        start, stop = next(self._ranges.fitting(size))
        slots = min((stop - start) // size, max(still_wanted, self._extent_bytes // size))
        extent = _Extent(start, size, slots)
        self._ranges.remove(start)
        self._ranges.add(extent.stop, stop)
        self._spare[size] = self._spare.get(size, 0) + slots
        return extent

    def _melt(self, extent: _Extent) -> None:
        self._partial[extent.slot_bytes].pop(extent, None)
        self._spare[extent.slot_bytes] -= extent.num_slots
        self._ranges.add(extent.start, extent.stop)
