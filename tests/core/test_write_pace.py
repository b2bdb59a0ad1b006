"""WritePace: background writes that are put off, for so long at most, and never for those who wait."""

import asyncio
import dataclasses

import pytest

from kvstore.checksum import checksum
from kvstore.pacing import WritePace
from tests.core.gated_tier import GatedTier
from tests.core.manager_harness import BLOCK_BYTES, SPACE, payload, running

CHAIN = SPACE.chain(range(20))
AGES_S = 3600.0


class SummingGatedTier(GatedTier):
    """A tier that sums what it writes."""

    sums_payloads = True

    async def write(self, requests, *, deadline_s):
        self.was_summed = [request.is_summed for request in requests]
        summed = [
            dataclasses.replace(
                request, header=request.header._replace(checksum=checksum(request.buffer[:BLOCK_BYTES]))
            )
            for request in requests
        ]
        return await super().write(summed, deadline_s=deadline_s)


@pytest.fixture
def pace():
    return WritePace(patience_s=AGES_S)


async def passed(is_true):
    """Wait until something is true."""
    while not is_true():  # noqa: ASYNC110  nothing tells
        await asyncio.sleep(0.001)


async def test_writes_that_are_put_off_begin_when_they_may(pace):
    ssd = SummingGatedTier("ssd")
    async with running(ssd, write_pace=pace) as store:
        pace.put_off()
        for length in (1, 3, 5):
            await store.put(CHAIN[:length])
        for _ in range(20):
            await asyncio.sleep(0)
        assert not ssd.stored

        pace.resume()
        await passed(lambda: len(ssd.stored) == 5)
        assert len(ssd.was_summed) == 5


async def test_what_waits_for_too_long_is_written_whatever_goes_on():
    pace = WritePace(patience_s=0.01)
    ssd = GatedTier("ssd")
    async with running(ssd, write_pace=pace, write_batch_blocks=2) as store:
        pace.put_off()
        await store.put(CHAIN)
        await passed(lambda: len(ssd.stored) == 5)


async def test_a_flush_waits_for_nobody(pace):
    ssd = GatedTier("ssd")
    async with running(ssd, write_pace=pace, write_batch_blocks=2) as store:
        pace.put_off()
        await store.put(CHAIN)
        assert await store.manager.flush(timeout_s=60)
        assert len(ssd.stored) == 5


async def test_blocks_whose_slots_are_wanted_are_not_put_off(pace):
    ssd = GatedTier("ssd")
    async with running(ssd, blocks=5, write_pace=pace) as store:
        pace.put_off()
        await store.put(CHAIN)
        assert await store.put(SPACE.chain(range(100, 120)), timeout_s=60)


async def test_a_queue_that_fills_up_is_written_rather_than_blocks_be_dropped(pace):
    ssd = GatedTier("ssd")
    async with running(ssd, blocks=40, write_pace=pace, write_queue_blocks=8, write_batch_blocks=2) as store:
        pace.put_off()
        for first in range(0, 2000, 100):
            await store.put(SPACE.chain(range(first, first + 4)))
            await passed(lambda: store.manager._mover.queue_lengths()["ssd"] <= 4)
        await passed(lambda: len(ssd.stored) > 12)
        assert not store.manager.stats()["write_drops_blocks"]


async def test_closing_writes_what_was_put_off(pace):
    ssd = GatedTier("ssd")
    async with running(ssd, write_pace=pace) as store:
        pace.put_off()
        await store.put(CHAIN)
    assert len(ssd.stored) == 5


async def unsummed_put(store, chain):
    """Put blocks as an engine does, whose pages nobody has summed."""
    slots = await store.manager.reserve_unnamed(len(chain), BLOCK_BYTES, owner=store.owner)
    async with store.dram.writing(slots, BLOCK_BYTES) as buffers:
        for buffer, key in zip(buffers, chain.keys, strict=True):
            buffer[:BLOCK_BYTES] = payload(key).data
    store.manager.commit(chain, slots, owner=store.owner)
    store.manager.return_slots(slots, owner=store.owner)


async def test_a_tier_that_sums_itself_gets_unsummed_payloads_only_if_nobody_knows_the_sum():
    tier = SummingGatedTier("ssd")
    async with running(tier) as store:
        await unsummed_put(store, CHAIN)
        await store.manager.flush(timeout_s=60)
        assert tier.was_summed == [False] * 5
        await store.put(SPACE.chain(range(100, 108)))
        await store.manager.flush(timeout_s=60)
        assert tier.was_summed == [True] * 2


async def test_other_tiers_get_sums_of_what_nobody_has_summed():
    ssd = GatedTier("ssd")
    async with running(ssd) as store:
        await unsummed_put(store, CHAIN)
        await store.manager.flush(timeout_s=60)
        sums = [header.checksum for header, _ in ssd.stored.values()]
        assert sums == [checksum(payload(key)) for key in CHAIN.keys]
