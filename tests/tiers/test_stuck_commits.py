"""Commits that wait behind one that never ends: they end, and so does close, when the tier gives it up."""

import asyncio
from pathlib import Path

import pytest

from kvstore.tier import WriteStatus
from kvstore_tiers.jobs import Abandoned, Jobs
from kvstore_tiers.ssd import SsdTier
from tests.tiers.blocks import to_write
from tests.tiers.test_stuck_disk import LENGTH, StuckIO, soon


async def test_close_ends_also_what_waits_behind_a_stuck_commit(tmp_path: Path) -> None:
    io = StuckIO()
    tier = SsdTier(tmp_path / "a", capacity_bytes=1 << 20, close_timeout_s=0.2, io=io)
    await tier.open()
    io.sticking = "fdatasync"
    first = asyncio.create_task(tier.write([to_write(1, LENGTH)], deadline_s=soon()))
    await asyncio.to_thread(io.is_stuck.wait, 10)
    waiting = [
        asyncio.create_task(tier.write([to_write(number, LENGTH)], deadline_s=soon()))
        for number in range(2, 5)
    ]
    await asyncio.sleep(0.1)  # most often enough for their payloads: then they wait for the commit

    async with asyncio.timeout(10):
        await tier.close()
        ended = await asyncio.gather(first, *waiting)

    assert {status for (status,) in ended} <= {WriteStatus.UNAVAILABLE, WriteStatus.TIMED_OUT}
    io.is_moving.set()


async def test_nothing_is_begun_once_the_work_was_abandoned() -> None:
    jobs = Jobs("test", 1)
    jobs.start()
    jobs.abandon()

    with pytest.raises(Abandoned):
        await jobs.run(lambda: None)
    with pytest.raises(Abandoned):
        await jobs.run_within([lambda: None], 1.0)

    await jobs.close()
