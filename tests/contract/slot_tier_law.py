"""What every SlotTier keeps to. A test module subclasses it and provides the fixture ``slot_tier``.

``slot_tier`` is open, has room for 8 slots of ``length_bytes``, and is closed by its fixture.
"""

import pytest

from kvstore.errors import TierFull
from kvstore.tier import SlotTier


class SlotTierLaw:
    length_bytes = 65536

    async def test_what_is_written_is_read(self, slot_tier: SlotTier) -> None:
        slots = slot_tier.allocate(self.length_bytes, 2)
        async with slot_tier.writing(slots, self.length_bytes) as buffers:
            for number, buffer in enumerate(buffers):
                buffer[: self.length_bytes] = bytes([number + 1]) * self.length_bytes
        async with slot_tier.reading(slots, self.length_bytes) as buffers:
            found = [bytes(buffer[: self.length_bytes]) for buffer in buffers]
        assert found == [bytes([number + 1]) * self.length_bytes for number in range(2)]

    async def test_buffers_lent_for_reading_are_read_only(self, slot_tier: SlotTier) -> None:
        slots = slot_tier.allocate(self.length_bytes)
        async with slot_tier.reading(slots, self.length_bytes) as (buffer,):
            assert buffer.readonly

    async def test_allocation_is_all_or_nothing(self, slot_tier: SlotTier) -> None:
        used = slot_tier.used_bytes
        count = slot_tier.capacity_bytes // self.length_bytes + 1
        assert not slot_tier.has_room(self.length_bytes, count)
        with pytest.raises(TierFull):
            slot_tier.allocate(self.length_bytes, count)
        assert slot_tier.used_bytes == used

    async def test_a_generation_grows_with_each_allocation_and_each_free(self, slot_tier: SlotTier) -> None:
        (slot,) = slot_tier.allocate(self.length_bytes)
        while_used = slot_tier.generation(slot)
        slot_tier.free([slot])
        assert slot_tier.generation(slot) > while_used

    async def test_slots_are_distinct_and_counted(self, slot_tier: SlotTier) -> None:
        slots = slot_tier.allocate(self.length_bytes, 8)
        assert len(set(slots)) == 8
        assert slot_tier.used_bytes >= 8 * self.length_bytes
        slot_tier.free(slots)
        assert slot_tier.used_bytes == 0

    async def test_freeing_twice_is_a_mistake_of_our_own(self, slot_tier: SlotTier) -> None:
        slots = slot_tier.allocate(self.length_bytes)
        slot_tier.free(slots)
        with pytest.raises(AssertionError):
            slot_tier.free(slots)
