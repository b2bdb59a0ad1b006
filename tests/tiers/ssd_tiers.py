"""Opened ssd tiers for tests: put and read blocks made from numbers, every byte compared."""

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from kvstore.tier import ReadStatus, WriteStatus
from kvstore_tiers.ssd import SsdTier
from tests.tiers.blocks import payload, to_read, to_write

LENGTH = 40_000
SLOT = 40_960
CAPACITY = 4 << 20
ROOT = Path(__file__).parents[2]


def soon() -> float:
    return time.monotonic() + 30


@asynccontextmanager
async def opened(folder: Path, *, capacity_bytes: int = CAPACITY) -> AsyncIterator[SsdTier]:
    tier = SsdTier(folder, capacity_bytes=capacity_bytes)
    await tier.open()
    try:
        yield tier
        assert tier.check() == []
    finally:
        await tier.close()


async def put(tier: SsdTier, *numbers: int, length: int = LENGTH) -> list[WriteStatus]:
    return await tier.write([to_write(number, length) for number in numbers], deadline_s=soon())


async def statuses(tier: SsdTier, *numbers: int, length: int = LENGTH) -> list[ReadStatus]:
    requests = [to_read(number, length) for number in numbers]
    outcomes = await tier.read(requests, deadline_s=soon())
    for number, request, outcome in zip(numbers, requests, outcomes, strict=True):
        if outcome.status is ReadStatus.OK:
            assert bytes(request.buffer[:length]) == payload(number, length)
    return [outcome.status for outcome in outcomes]


def disk_bytes(folder: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())
