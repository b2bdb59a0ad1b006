"""The SlotTier law over VramTier: pages the host can address, and pages it cannot."""

from collections.abc import AsyncIterator

import numpy as np
import pytest

from kvstore_tiers.vram import VramTier
from tests.contract.slot_tier_law import SlotTierLaw


class ArrayPages:
    """Page memory in an array; ``is_addressable`` says whether it lends views."""

    def __init__(self, num_pages: int, page_bytes: int, *, is_addressable: bool) -> None:
        self.array = np.zeros((num_pages, page_bytes), dtype=np.uint8)
        self.page_bytes = page_bytes
        self._is_addressable = is_addressable

    def host_views(self, slots):
        return [self.array[slot].data for slot in slots] if self._is_addressable else None

    def new_buffers(self, count):
        return [row.data for row in np.empty((count, self.page_bytes), dtype=np.uint8)]

    def gather(self, slots, buffers):
        for slot, buffer in zip(slots, buffers, strict=True):
            np.copyto(np.frombuffer(buffer, dtype=np.uint8), self.array[slot])

    def scatter(self, slots, buffers):
        for slot, buffer in zip(slots, buffers, strict=True):
            np.copyto(self.array[slot], np.frombuffer(buffer, dtype=np.uint8))


class TestVramTierInHostMemory(SlotTierLaw):
    @pytest.fixture
    async def slot_tier(self) -> AsyncIterator[VramTier]:
        tier = VramTier(ArrayPages(8, self.length_bytes, is_addressable=True), 8)
        await tier.open()
        yield tier
        await tier.close()


class TestVramTierBehindStaging(SlotTierLaw):
    @pytest.fixture
    async def slot_tier(self) -> AsyncIterator[VramTier]:
        tier = VramTier(ArrayPages(8, self.length_bytes, is_addressable=False), 8, staging_slots=3)
        await tier.open()
        yield tier
        await tier.close()
