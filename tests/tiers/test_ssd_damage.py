"""SsdTier over an index with a damaged page, whichever it is: no wrong byte, and it is written to again."""

import asyncio
import logging
import shutil
import time
from pathlib import Path

import pytest

from kvstore.drill.store_process import wait_until
from kvstore.tier import ReadStatus, WriteStatus
from kvstore_tiers.ssd import SsdTier
from tests.tiers.blocks import block_id, payload, to_read, to_write

LENGTH = 8192
CAPACITY = 4 << 20
PAGE = 4096
NUMBERS = range(90)
NUMBER_AT, KIND_AT = 3, 10
"""Where LMDB keeps a page's own number (one of its bytes), and what kind of page it is."""


def soon() -> float:
    return time.monotonic() + 30


def opened(folder: Path) -> SsdTier:
    return SsdTier(folder, capacity_bytes=CAPACITY)


async def fill(folder: Path) -> None:
    """Leave an index of many pages, some of them free, as a kill leaves it."""
    tier = opened(folder)
    await tier.open()
    for start in range(0, len(NUMBERS), 10):
        await tier.write([to_write(number, LENGTH) for number in NUMBERS[start:][:10]], deadline_s=soon())
    await tier.drop([block_id(number) for number in NUMBERS[::3]])
    await tier.close()
    (folder / "dirty").touch()


def used_pages(file: Path) -> list[int]:
    data = file.read_bytes()
    pages = [data[at : at + PAGE] for at in range(0, len(data), PAGE)]
    return [number for number, page in enumerate(pages) if any(page)]


def spoil(file: Path, page: int, place: int) -> None:
    with file.open("r+b") as stream:
        stream.seek(page * PAGE + place)
        (old,) = stream.read(1)
        stream.seek(page * PAGE + place)
        stream.write(bytes([old ^ 3]))


async def use(tier: SsdTier) -> dict[int, WriteStatus]:
    """Write and drop for a while; returns how the write of each block ended."""
    ended: dict[int, WriteStatus] = {}
    for number in range(100, 130):
        (ended[number],) = await tier.write([to_write(number, LENGTH)], deadline_s=soon())
        await tier.drop([block_id(number - 100)])
        await asyncio.to_thread(wait_until, lambda: tier.health().is_up, 20)
    return ended


async def look(tier: SsdTier) -> None:
    requests = [to_read(number, LENGTH) for number in range(130)]
    outcomes = await tier.read(requests, deadline_s=soon())
    for number, request, outcome in zip(range(130), requests, outcomes, strict=True):
        if outcome.status is ReadStatus.OK:
            assert bytes(request.buffer[:LENGTH]) == payload(number, LENGTH)


@pytest.mark.parametrize(
    ("place", "told"), [(NUMBER_AT, "written anew"), (KIND_AT, "starting empty")], ids=["number", "kind"]
)
async def test_whichever_page_of_the_index_is_damaged_the_tier_opens_and_writes_again(
    tmp_path: Path, place: int, told: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    await fill(tmp_path / "base")
    pages = used_pages(tmp_path / "base" / "index" / "data.mdb")
    assert len(pages) > 5
    for page in pages:
        folder = tmp_path / str(page)
        shutil.copytree(tmp_path / "base", folder)
        spoil(folder / "index" / "data.mdb", page, place)
        tier = opened(folder)
        await tier.open()
        ended = await use(tier)
        await look(tier)
        assert [*ended.values()].count(WriteStatus.OK) >= len(ended) - 1, f"page {page}"
        assert ended[129] is WriteStatus.OK
        assert tier.check() == []
        await tier.close()
        again = opened(folder)
        await again.open()
        acknowledged = [number for number, status in ended.items() if status is WriteStatus.OK]
        missing = [number for number in acknowledged if not again.holds(block_id(number).storage_key)]
        assert missing == [], f"page {page}"
        await again.close()
        shutil.rmtree(folder)
    assert told in caplog.text
