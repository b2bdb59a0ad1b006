"""DramTier: slots in one shared arena, used in position by clients and by the other tiers."""

import asyncio
import logging
import resource
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import cast

import numpy as np
import numpy.typing as npt

from kvstore.errors import TierFull
from kvstore.ready_table import TableFormat, entries_at_first, table_bytes
from kvstore.tier import ALIGNMENT_BYTES, Medium, Slot
from kvstore_tiers.arena import Arena
from kvstore_tiers.ready_listing import ReadyListing
from kvstore_tiers.slots import SlotAllocator, padded

_log = logging.getLogger(__name__)

_STEP_PAGES = 256
"""Pages that ``overwrite_free`` looks at between other work: 1 MiB."""


class DramTier:
    """A SlotTier in host memory. ``writing`` and ``reading`` lend the slots themselves, without a copy.

    Staging. ``staging_bytes`` beside the capacity are out of reach for ``allocate`` and ``has_room``. A load
    from a slower tier may use them through ``allocate_staging`` when everything else is leased; the slot is
    then like any other (same ``free``), and the reserve is whole again as soon as no more than the capacity
    is in use. Until then ``used_bytes`` may exceed ``capacity_bytes``, by as much as is staged.

    Overwriting. ``overwrite`` zeroes slots, ``overwrite_free`` all that is in no slot, bit by bit between
    other work: what is allocated meanwhile is left alone.

    Listing. ``listing`` is a small table beside the arena that clients find READY blocks in without asking.

    Owner: one event loop's thread. The memoryviews may be used from any thread.
    """

    def __init__(
        self, *, capacity_bytes: int, staging_bytes: int = 0, is_locked: bool = False, name: str = "dram"
    ) -> None:
        assert staging_bytes >= 0, f"{name}: staging of {staging_bytes} bytes"
        self._name = name
        self._is_locked = is_locked
        self._staging_bytes = staging_bytes
        self._slots = SlotAllocator(capacity_bytes + staging_bytes, name=name)
        self._arena: Arena | None = None
        self._free_pages: npt.NDArray[np.bool_] | None = None
        self._overwriting = asyncio.Lock()
        self.listing = ReadyListing()
        """Which slots hold READY blocks, for clients to look at."""

    @property
    def name(self) -> str:
        """The tier's name in configuration, metrics and messages."""
        return self._name

    @property
    def medium(self) -> Medium:
        """Host memory."""
        return Medium.DRAM

    @property
    def capacity_bytes(self) -> int:
        """Bytes of all slots but the staging reserve."""
        return self._slots.capacity_bytes - self._staging_bytes

    @property
    def staging_bytes(self) -> int:
        """Bytes that only ``allocate_staging`` may use."""
        return self._staging_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes of allocated slots, padding included."""
        return self._slots.used_bytes

    @property
    def arena(self) -> Arena:
        """The memory; its ``fd`` is what clients are sent. Only between ``open`` and ``close``."""
        assert self._arena is not None, f"{self._name}: not open"
        return self._arena

    async def open(self) -> None:
        """Get the memory.

        Raises:
            TierUnavailable: it cannot be had: message with the amount, the limit and the remedy.
        """
        if self._arena is None:
            num_at_first = entries_at_first(self._slots.capacity_bytes)
            # A table that may grow is mapped as long as it may become.
            may_grow = resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY
            table = TableFormat.for_arena(self._slots.capacity_bytes, b"", may_grow=may_grow)
            self._arena = await asyncio.to_thread(
                Arena.create,
                self._slots.capacity_bytes,
                is_locked=self._is_locked,
                beside_bytes=table_bytes(num_at_first),
            )
            try:
                self.listing.open(replace(table, instance=self._arena.instance), num_at_first)
            except OSError as error:
                _log.warning("%s: clients cannot read without asking: %s", self._name, error.strerror)
            _log.info("%s: %d bytes are in huge pages", self._name, self._arena.huge_bytes)
            _log.info("%s: arena for CUDA: %s", self._name, await asyncio.to_thread(self._arena.pin))

    async def close(self) -> None:
        """Give the memory back; views that are still held stay valid until dropped. Idempotent."""
        arena, self._arena = self._arena, None
        self.listing.close()
        if arena is not None:
            arena.close()

    def has_room(self, length_bytes: int, count: int = 1) -> bool:
        """Return whether ``allocate`` would succeed."""
        wanted = padded(length_bytes) * count
        is_within = self._slots.used_bytes + wanted <= self.capacity_bytes
        return is_within and self._slots.has_room(length_bytes, count)

    def has_staging_room(self, length_bytes: int, count: int = 1) -> bool:
        """Return whether ``allocate_staging`` would succeed."""
        return self._slots.has_room(length_bytes, count)

    def allocate(self, length_bytes: int, count: int = 1) -> list[Slot]:
        """Take ``count`` slots outside the staging reserve.

        Raises:
            TierFull: fewer than ``count`` can be had; none is taken.
        """
        if not self.has_room(length_bytes, count):
            raise TierFull(
                f"{self._name}: no room for {count} slots of {padded(length_bytes)} bytes: {self.used_bytes} "
                f"of {self.capacity_bytes} bytes are in use, {self._staging_bytes} are kept for staging"
            )
        return self.allocate_staging(length_bytes, count)

    def allocate_staging(self, length_bytes: int, count: int = 1) -> list[Slot]:
        """Take ``count`` slots, from the staging reserve if need be.

        Raises:
            TierFull: fewer than ``count`` can be had; none is taken.
        """
        view = self.arena.view
        start = view.format.slots_offset
        offsets = self._slots.allocate(length_bytes, count)
        slots = cast("list[Slot]", [start + offset for offset in offsets])  # see Shelf.names
        view.advance_generations(slots)
        if self._free_pages is not None:
            for slot in slots:
                first = (slot - start) // ALIGNMENT_BYTES
                self._free_pages[first : first + padded(length_bytes) // ALIGNMENT_BYTES] = False
        return slots

    def free(self, slots: Sequence[Slot]) -> None:
        """Give slots back. A slot that is not allocated is our own mistake (AssertionError)."""
        view = self.arena.view
        start = view.format.slots_offset
        self._slots.free([slot - start for slot in slots])
        view.advance_generations(slots)

    def generation(self, slot: Slot) -> int:
        """Return the slot's generation."""
        return self.arena.view.generation(slot)

    def generations(self, slots: Sequence[Slot]) -> list[int]:
        """Return the generation of each of several slots."""
        return self.arena.view.generations(slots)

    def overwrite(self, slots: Sequence[Slot]) -> None:
        """Zero the bytes of slots that are allocated."""
        view = self.arena.view
        for slot in slots:
            size = self._slots.slot_bytes(slot - view.format.slots_offset)
            np.frombuffer(view.slot(slot, size), np.uint8)[:] = 0

    async def overwrite_free(self) -> None:
        """Zero all bytes that are in no slot now, and stay in none until their turn."""
        async with self._overwriting:
            view = self.arena.view
            num_pages = self._slots.capacity_bytes // ALIGNMENT_BYTES
            free = self._free_pages = np.ones(num_pages, np.bool_)
            for offset, size in self._slots.lent():
                free[offset // ALIGNMENT_BYTES : (offset + size) // ALIGNMENT_BYTES] = False
            try:
                for start in range(0, num_pages, _STEP_PAGES):
                    await asyncio.sleep(0)
                    if self._arena is None:
                        return
                    wanted = free[start : start + _STEP_PAGES]
                    offset, size = start * ALIGNMENT_BYTES, len(wanted) * ALIGNMENT_BYTES
                    step = np.frombuffer(view.slot(view.format.slots_offset + offset, size), np.uint8)
                    step.reshape(-1, ALIGNMENT_BYTES)[wanted] = 0
            finally:
                self._free_pages = None

    def check(self) -> list[str]:
        """Return one line per violated invariant of the slot bookkeeping."""
        return self._slots.check()

    @asynccontextmanager
    async def writing(self, slots: Sequence[Slot], length_bytes: int) -> AsyncIterator[list[memoryview]]:
        """Lend the slots for writing; each buffer has the whole slot's size, a multiple of 4096."""
        yield self._lend(slots, length_bytes)

    @asynccontextmanager
    async def reading(self, slots: Sequence[Slot], length_bytes: int) -> AsyncIterator[list[memoryview]]:
        """Lend the slots read-only; each buffer has the whole slot's size, a multiple of 4096."""
        yield [view.toreadonly() for view in self._lend(slots, length_bytes)]

    def _lend(self, slots: Sequence[Slot], length_bytes: int) -> list[memoryview]:
        view = self.arena.view
        start = view.format.slots_offset
        size = padded(length_bytes)
        for slot in slots:
            held = self._slots.slot_bytes(slot - start)
            assert size <= held, f"{self._name}: slot at {slot} has {held} bytes, {length_bytes} asked for"
        return [view.slot(slot, size) for slot in slots]
