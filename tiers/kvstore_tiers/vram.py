"""VramTier: an engine's page slots as the top tier of a manager."""

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Protocol

import numpy as np

from kvstore.errors import InvalidRequest, TierFull
from kvstore.outlasting import outlast
from kvstore.tier import Medium, Slot

DEFAULT_STAGING_SLOTS = 64
"""Host buffers for pages that the host cannot address: two load batches of the manager."""


class PageMemory(Protocol):
    """KV pages that an engine lends to the tier; a page is one block, a slot is its number.

    Bytes are those of the block's layout in C order. ``gather`` and ``scatter`` are called in a thread, for
    pages nobody else touches; they must release the GIL while they copy.
    """

    @property
    def page_bytes(self) -> int:
        """Bytes of one page: the layout's ``block_bytes``."""

    def host_views(self, slots: Sequence[Slot]) -> list[memoryview] | None:
        """Return the pages themselves as writable flat bytes, or None if the host cannot address them."""

    def new_buffers(self, count: int) -> list[memoryview]:
        """Make host buffers of ``page_bytes`` each; those that lie one after another may be copied as one."""

    def gather(self, slots: Sequence[Slot], buffers: Sequence[memoryview]) -> None:
        """Copy pages into host buffers of ``page_bytes`` each; done when it returns."""

    def scatter(self, slots: Sequence[Slot], buffers: Sequence[memoryview]) -> None:
        """Copy host buffers of ``page_bytes`` each into pages; done when it returns."""


class VramTier:
    """Slots ``0..num_slots`` of an engine's page memory. A SlotTier; one event loop's thread.

    Pages that the host can address are lent in position. For others, host buffers are lent: a fixed number,
    so callers wait, first come first served, while they are short; a call for more than there are waits for
    all of them and gets the rest made for it. A copy between pages and buffers runs in the loop's executor
    and is never abandoned: a caller that is cancelled meanwhile leaves only when the copy has ended.
    """

    def __init__(
        self,
        memory: PageMemory,
        num_slots: int,
        *,
        name: str = "vram",
        staging_slots: int = DEFAULT_STAGING_SLOTS,
    ) -> None:
        if num_slots < 1 or staging_slots < 1:
            raise InvalidRequest(
                f"{name}: {num_slots} slots, {staging_slots} staging slots: at least 1 of each"
            )
        self._memory = memory
        self._num_slots = num_slots
        self._name = name
        self._staging_slots = staging_slots
        self._free = deque(Slot(number) for number in range(num_slots))
        self._generations = [0] * num_slots
        self._is_allocated = bytearray(num_slots)
        self._buffers: list[memoryview] = []
        self._waiting: deque[tuple[int, asyncio.Future[list[memoryview]]]] = deque()

    @property
    def name(self) -> str:
        """``vram``, unless told otherwise."""
        return self._name

    @property
    def medium(self) -> Medium:
        """VRAM, also where the engine computes on the CPU: the engine reads these slots in place."""
        return Medium.VRAM

    @property
    def capacity_bytes(self) -> int:
        """Bytes of all slots."""
        return self._num_slots * self._memory.page_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes of allocated slots."""
        return (self._num_slots - len(self._free)) * self._memory.page_bytes

    async def open(self) -> None:
        """Make the staging buffers, if the pages need them. The pages are the engine's own."""
        if not self._buffers and self._memory.host_views([Slot(0)]) is None:
            # Taken from the end: neighbours in memory go together.
            self._buffers = self._memory.new_buffers(self._staging_slots)[::-1]

    async def close(self) -> None:
        """Let go of the staging buffers; whoever waits for some gets InvalidRequest. Idempotent."""
        self._buffers = []
        while self._waiting:
            _, granted = self._waiting.popleft()
            if not granted.done():
                granted.set_exception(InvalidRequest(f"{self._name}: closed"))

    def has_room(self, length_bytes: int, count: int = 1) -> bool:
        """Return whether ``allocate`` would succeed."""
        return length_bytes <= self._memory.page_bytes and count <= len(self._free)

    def allocate(self, length_bytes: int, count: int = 1) -> list[Slot]:
        """Take ``count`` slots.

        Raises:
            TierFull: fewer are free, or a page is shorter than ``length_bytes``; none is taken.
        """
        if length_bytes > self._memory.page_bytes:
            raise TierFull(
                f"{self._name}: {length_bytes} bytes do not fit a page of {self._memory.page_bytes}"
            )
        if count > len(self._free):
            raise TierFull(f"{self._name}: {count} slots wanted, {len(self._free)} of {self._num_slots} free")
        slots = [self._free.popleft() for _ in range(count)]
        for slot in slots:
            self._is_allocated[slot] = 1
            self._generations[slot] += 1
        return slots

    def has_staging_room(self, length_bytes: int, count: int = 1) -> bool:
        """Return whether ``allocate`` would succeed: an engine keeps no pages for loads."""
        return self.has_room(length_bytes, count)

    def allocate_staging(self, length_bytes: int, count: int = 1) -> list[Slot]:
        """Take ``count`` slots, as ``allocate`` does.

        Raises:
            TierFull: fewer are free, or a page is shorter than ``length_bytes``; none is taken.
        """
        return self.allocate(length_bytes, count)

    def free(self, slots: Sequence[Slot]) -> None:
        """Give slots back. A slot that is not allocated is our own mistake (AssertionError)."""
        for slot in slots:
            assert self._is_allocated[slot], f"{self._name}: slot {slot} was freed twice"
            self._is_allocated[slot] = 0
            self._generations[slot] += 1
            self._free.append(slot)

    def generation(self, slot: Slot) -> int:
        """Return the slot's generation."""
        return self._generations[slot]

    def generations(self, slots: Sequence[Slot]) -> list[int]:
        """Return the generation of each of several slots."""
        return [self._generations[slot] for slot in slots]

    @contextlib.asynccontextmanager
    async def writing(self, slots: Sequence[Slot], length_bytes: int) -> AsyncIterator[list[memoryview]]:
        """Lend a writable host buffer per slot; on leaving, their bytes are in the slots.

        After an error inside the block the slots hold anything.
        """
        views = self._memory.host_views(slots)
        if views is not None:
            yield [view[:length_bytes] for view in views]
            return
        async with self._staging(len(slots)) as buffers:
            yield [buffer[:length_bytes] for buffer in buffers]
            await _to_the_end(lambda: self._memory.scatter(slots, buffers))

    @contextlib.asynccontextmanager
    async def reading(self, slots: Sequence[Slot], length_bytes: int) -> AsyncIterator[list[memoryview]]:
        """Lend a read-only host buffer per slot that holds the slot's bytes."""
        views = self._memory.host_views(slots)
        if views is not None:
            yield [view[:length_bytes].toreadonly() for view in views]
            return
        async with self._staging(len(slots)) as buffers:
            await _to_the_end(lambda: self._memory.gather(slots, buffers))
            yield [buffer[:length_bytes].toreadonly() for buffer in buffers]

    @contextlib.asynccontextmanager
    async def _staging(self, count: int) -> AsyncIterator[list[memoryview]]:
        wanted = min(count, self._staging_slots)
        taken = await self._take_buffers(wanted)
        try:
            yield taken + [self._plain_buffer() for _ in range(count - wanted)]
        finally:
            self._give_back(taken)

    async def _take_buffers(self, wanted: int) -> list[memoryview]:
        granted: asyncio.Future[list[memoryview]] = asyncio.get_running_loop().create_future()
        self._waiting.append((wanted, granted))
        self._grant()
        try:
            return await granted
        except asyncio.CancelledError:
            if granted.done() and not granted.cancelled() and granted.exception() is None:
                self._give_back(granted.result())
            else:
                granted.cancel()
                self._grant()  # it may have stood before one that wants fewer
            raise

    def _give_back(self, buffers: list[memoryview]) -> None:
        self._buffers += buffers[::-1]
        self._grant()

    def _grant(self) -> None:
        """Hand free buffers to those who wait, in their order. Without an await: no wake-up can be lost."""
        while self._waiting:
            wanted, granted = self._waiting[0]
            if granted.done():
                self._waiting.popleft()
            elif len(self._buffers) >= wanted:
                self._waiting.popleft()
                granted.set_result([self._buffers.pop() for _ in range(wanted)])
            else:
                return

    def _plain_buffer(self) -> memoryview:
        return np.empty(self._memory.page_bytes, dtype=np.uint8).data


async def _to_the_end(copy: Callable[[], None]) -> None:
    """Run a copy in the loop's executor; if cancelled, wait for its end first: its buffers are in use."""
    await outlast(asyncio.get_running_loop().run_in_executor(None, copy))
