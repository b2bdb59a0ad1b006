"""VramTier's staging: bounded, waited for, never reused while a copy runs."""

import asyncio
import contextlib
import random
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


async def waiting_writer(tier, slots):
    """A task that holds staging for these slots until it is cancelled, once it gets it."""
    is_in = asyncio.Event()

    async def write():
        async with tier.writing(slots, PAGE_BYTES):
            is_in.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(write())
    await asyncio.sleep(0)
    return task, is_in


async def test_staging_given_to_a_caller_that_is_cancelled_in_that_tick_goes_to_the_next():
    tier = await open_tier(ArrayPages(8, PAGE_BYTES, is_addressable=False))
    slots = tier.allocate(PAGE_BYTES, 6)
    async with tier.writing(slots[:2], PAGE_BYTES):
        first, _ = await waiting_writer(tier, slots[2:4])
        second, is_in = await waiting_writer(tier, slots[4:6])
    first.cancel()

    async with asyncio.timeout(5):
        await is_in.wait()
    second.cancel()
    await asyncio.gather(first, second, return_exceptions=True)
    assert len(tier._buffers) == 2


@pytest.mark.parametrize("seed", range(40))
async def test_whoever_is_cancelled_and_whenever_nobody_else_waits_for_ever(seed):
    choose = random.Random(seed)
    tier = await open_tier(ArrayPages(8, PAGE_BYTES, is_addressable=False))
    slots = tier.allocate(PAGE_BYTES, 2)

    async def write():
        async with tier.writing(slots[: choose.choice([1, 1, 2])], PAGE_BYTES):
            for _ in range(choose.randrange(3)):
                await asyncio.sleep(0)
            raise ZeroDivisionError  # no copy: its thread would decide when things happen

    for _ in range(50):
        tasks = []
        for _ in range(8):
            tasks.append(asyncio.create_task(write()))
            if choose.random() < 0.5:
                await asyncio.sleep(0)
            for task in choose.sample(tasks, len(tasks) // 3):
                task.cancel()
        done, pending = await asyncio.wait(tasks, timeout=5)
        assert not pending
        assert len(tier._buffers) == 2
        await asyncio.gather(*done, return_exceptions=True)


async def test_one_that_wants_few_is_served_when_the_one_before_it_that_wanted_many_leaves():
    tier = await open_tier(ArrayPages(8, PAGE_BYTES, is_addressable=False))
    slots = tier.allocate(PAGE_BYTES, 4)
    async with tier.writing(slots[:1], PAGE_BYTES):
        many, _ = await waiting_writer(tier, slots[1:3])
        few, is_in = await waiting_writer(tier, slots[3:])
        await asyncio.sleep(0)
        assert not is_in.is_set()
        many.cancel()
        async with asyncio.timeout(5):
            await is_in.wait()
    few.cancel()
    await asyncio.gather(many, few, return_exceptions=True)


async def test_closing_ends_the_wait_for_staging():
    tier = await open_tier(ArrayPages(8, PAGE_BYTES, is_addressable=False))
    slots = tier.allocate(PAGE_BYTES, 4)
    async with tier.writing(slots[:2], PAGE_BYTES):
        waiting, _ = await waiting_writer(tier, slots[2:])
        await tier.close()
        with pytest.raises(InvalidRequest, match="closed"):
            await waiting


async def test_a_block_longer_than_a_page_is_refused():
    tier = await open_tier(ArrayPages(8, PAGE_BYTES, is_addressable=True))
    assert not tier.has_room(PAGE_BYTES + 1)
    with pytest.raises(TierFull, match="do not fit a page"):
        tier.allocate(PAGE_BYTES + 1)


def test_a_tier_without_slots_is_refused():
    with pytest.raises(InvalidRequest):
        VramTier(ArrayPages(1, PAGE_BYTES, is_addressable=True), 0)
