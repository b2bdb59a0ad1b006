"""The SlotTier law over its implementations."""

from collections.abc import AsyncIterator

import pytest

from kvstore_tiers.dram import DramTier
from tests.contract.slot_tier_law import SlotTierLaw


class TestDramTier(SlotTierLaw):
    @pytest.fixture
    async def slot_tier(self) -> AsyncIterator[DramTier]:
        tier = DramTier(capacity_bytes=16 * self.length_bytes)
        await tier.open()
        yield tier
        assert tier.check() == []
        await tier.close()
