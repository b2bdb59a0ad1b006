"""SsdTier over a DiskIO that fails or shortens its N-th call, reads too, for every N of a run."""

import errno
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kvstore.errors import TierUnavailable
from kvstore.tier import ReadStatus, WriteStatus
from kvstore_tiers.disk_io import OsDiskIO
from kvstore_tiers.ssd import SsdTier
from tests.tiers.blocks import payload, to_read, to_write

LENGTH = 20_000
NUMBERS = range(4)


class FaultyIO(OsDiskIO):
    """The real one; call number ``fail_at`` goes to ``fault`` with the real call and its arguments."""

    def __init__(self, fail_at: int, fault: Callable[..., object]) -> None:
        self.num_calls = 0
        self._fail_at = fail_at
        self._fault = fault

    def __getattribute__(self, name: str) -> object:
        found = object.__getattribute__(self, name)
        if name.startswith("_") or not callable(found):
            return found

        def call(*arguments: object) -> object:
            self.num_calls += 1
            return self._fault(found, *arguments) if self.num_calls == self._fail_at else found(*arguments)

        return call


def refuse(_call: Callable[..., object], *_arguments: object) -> object:
    raise OSError(errno.EIO, "Input/output error")


def shorten(call: Callable[..., object], *arguments: object) -> object:
    """Move only the first 4096 bytes of a read or write; anything else is done as asked."""
    if len(arguments) == 3 and isinstance(arguments[1], list):
        fd, (buffer, *_), offset = arguments
        return call(fd, [buffer[:4096]], offset)
    return call(*arguments)


def soon() -> float:
    return time.monotonic() + 30


async def use(tier: SsdTier) -> set[int]:
    """Write, read, replace one block; returns the blocks that are durable."""
    written = await tier.write([to_write(number, LENGTH) for number in NUMBERS], deadline_s=soon())
    durable = {number for number, status in zip(NUMBERS, written, strict=True) if status is WriteStatus.OK}
    await look(tier)
    await tier.write([to_write(0, LENGTH)], deadline_s=soon())
    return durable


async def look(tier: SsdTier) -> set[int]:
    """Read every block: right bytes or none; returns those that were there."""
    requests = [to_read(number, LENGTH) for number in NUMBERS]
    outcomes = await tier.read(requests, deadline_s=soon())
    found = set()
    for number, request, outcome in zip(NUMBERS, requests, outcomes, strict=True):
        if outcome.status is ReadStatus.OK:
            assert bytes(request.buffer[:LENGTH]) == payload(number, LENGTH)
            found.add(number)
    return found


async def fails_at(folder: Path, fail_at: int, fault: Callable[..., object]) -> int:
    """Run with one fault, look again without; returns how many calls there were."""
    io = FaultyIO(fail_at, fault)
    tier = SsdTier(folder, capacity_bytes=1 << 20, io=io)
    durable: set[int] = set()
    try:
        await tier.open()
    except TierUnavailable as error:
        refused = str(error)
        assert str(folder) in refused  # most calls do not fail the open
    else:
        durable = await use(tier)
        assert tier.check() == []
        await tier.close()
    (folder / "dirty").unlink(missing_ok=True)
    again = SsdTier(folder, capacity_bytes=1 << 20)
    await again.open()
    assert durable <= await look(again)
    assert again.used_bytes == len(again.copies) * 20_480
    await again.close()
    return io.num_calls


@pytest.mark.parametrize("fault", [refuse, shorten])
async def test_whichever_call_fails_or_is_cut_short_bytes_are_right_and_durable_blocks_stay(
    tmp_path: Path, fault: Callable[..., object]
) -> None:
    fail_at = 1
    while await fails_at(tmp_path / str(fail_at), fail_at, fault) >= fail_at:
        fail_at += 1
    assert fail_at > 20
