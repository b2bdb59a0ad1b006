"""VramTier's staging: bounded, waited for, never reused while a copy runs."""

import asyncio
import contextlib
import threading

import pytest

from kvstore.errors import InvalidRequest, TierFull
from kvstore_tiers.vram import VramTier
from tests.contract.test_vram_slot_tier import ArrayPages

PAGE_BYTES = 4096


class SlowPages(ArrayPages):
    """Pages whose copies wait for a signal."""

    def __init__(self) -> None:
        super().__init__(8, PAGE_BYTES, is_addressable=False)
        self.started, self.may_go = threading.Event(), threading.Event()

    def scatter(self, slots, buffers):
        self.started.set()
        assert self.may_go.wait(10)
        super().scatter(slots, buffers)


async def open_tier(pages, staging_slots=2):
    tier = VramTier(pages, 8, staging_slots=staging_slots)
    await tier.open()
    return tier


async def test_a_caller_waits_while_staging_is_short():
    tier = await open_tier(ArrayPages(8, PAGE_BYTES, is_addressable=False))
    slots = tier.allocate(PAGE_BYTES, 4)
    async with tier.writing(slots[:2], PAGE_BYTES):
        second = asyncio.create_task(tier.writing(slots[2:], PAGE_BYTES).__aenter__())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not second.done()
    assert len(await second) == 2


async def test_more_slots_than_staging_are_served_in_one_call():
    pages = ArrayPages(8, PAGE_BYTES, is_addressable=False)
    tier = await open_tier(pages)
    slots = tier.allocate(PAGE_BYTES, 5)
    async with tier.writing(slots, PAGE_BYTES) as buffers:
        for number, buffer in enumerate(buffers):
            buffer[:] = bytes([number + 1]) * PAGE_BYTES
    assert [int(pages.array[slot][0]) for slot in slots] == [1, 2, 3, 4, 5]


async def test_a_cancelled_writer_leaves_only_when_its_copy_has_ended():
    pages = SlowPages()
    tier = await open_tier(pages)
    slots = tier.allocate(PAGE_BYTES, 1)

    async def write() -> None:
        async with tier.writing(slots, PAGE_BYTES) as (buffer,):
            buffer[:] = b"x" * PAGE_BYTES

    task = asyncio.create_task(write())
    await asyncio.to_thread(pages.started.wait, 10)
    task.cancel()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not task.done()
    pages.may_go.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert pages.array[slots[0]][0] == ord("x")


async def test_a_failed_writer_leaves_the_pages_alone_and_gives_its_staging_back():
    pages = ArrayPages(8, PAGE_BYTES, is_addressable=False)
    tier = await open_tier(pages)
    slots = tier.allocate(PAGE_BYTES, 2)
    with contextlib.suppress(ZeroDivisionError):
        async with tier.writing(slots, PAGE_BYTES) as buffers:
            buffers[0][:] = b"x" * PAGE_BYTES
            raise ZeroDivisionError
    assert not pages.array.any()
    async with asyncio.timeout(5), tier.reading(slots, PAGE_BYTES) as buffers:
        assert len(buffers) == 2


async def test_a_block_longer_than_a_page_is_refused():
    tier = await open_tier(ArrayPages(8, PAGE_BYTES, is_addressable=True))
    assert not tier.has_room(PAGE_BYTES + 1)
    with pytest.raises(TierFull, match="do not fit a page"):
        tier.allocate(PAGE_BYTES + 1)


def test_a_tier_without_slots_is_refused():
    with pytest.raises(InvalidRequest):
        VramTier(ArrayPages(1, PAGE_BYTES, is_addressable=True), 0)
