"""Calls to a RemoteTier for tests: blocks made from numbers, checked byte by byte when they are served."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from kvstore.tier import ReadStatus, WriteStatus
from kvstore_tiers.remote import RemoteTier
from kvstore_tiers.remote_session import KeyNames
from tests.tiers.blocks import header, payload, to_read, to_write

LENGTH = 100_000
NAMES = KeyNames("kvstore")


@asynccontextmanager
async def opened(url: str, **options: object) -> AsyncIterator[RemoteTier]:
    tier = RemoteTier(url, **{"timeout_s": 0.3, **options})  # type: ignore[arg-type]
    await tier.open()
    try:
        yield tier
    finally:
        await tier.close()


def within(seconds: float) -> float:
    return time.monotonic() + seconds


async def put(tier: RemoteTier, *numbers: int, length: int = LENGTH) -> list[WriteStatus]:
    return await tier.write([to_write(number, length) for number in numbers], deadline_s=within(10))


async def statuses(tier: RemoteTier, *numbers: int, seconds: float = 10) -> list[ReadStatus]:
    requests = [to_read(number, LENGTH) for number in numbers]
    outcomes = await tier.read(requests, deadline_s=within(seconds))
    for number, request, outcome in zip(numbers, requests, outcomes, strict=True):
        if outcome.status is ReadStatus.OK:
            assert bytes(request.buffer[:LENGTH]) == payload(number, LENGTH)
            assert outcome.header == header(number, payload(number, LENGTH))
    return [outcome.status for outcome in outcomes]


async def until_healed(tier: RemoteTier, number: int) -> list[ReadStatus]:
    give_up_s = within(20)
    while time.monotonic() < give_up_s:
        found = await statuses(tier, number)
        if found[0] in (ReadStatus.OK, ReadStatus.ABSENT):
            return found
        await asyncio.sleep(0.02)
    raise AssertionError("did not heal")


async def until(is_so: Callable[[], bool], *, seconds: float = 20) -> None:
    give_up_s = within(seconds)
    while not is_so():
        assert time.monotonic() < give_up_s, "it did not happen in time"
        await asyncio.sleep(0.01)
