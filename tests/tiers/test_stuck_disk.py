"""A disk operation that never ends: close and the end of the process do not wait for it for ever."""

import asyncio
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from kvstore.keys import Namespace
from kvstore.layout import KVLayout
from kvstore.manager import BlockManager
from kvstore.tier import ReadStatus, WriteStatus
from kvstore_tiers.dram import DramTier
from kvstore_tiers.ssd import SsdTier
from tests.tiers.blocks import to_read, to_write
from tests.tiers.faulty_io import StuckIO

LENGTH = 8192
ROOT = Path(__file__).parents[2]


def soon() -> float:
    return time.monotonic() + 30


@pytest.mark.parametrize("call", ["preadv", "pwritev", "fdatasync"])
async def test_close_leaves_a_stuck_operation_to_itself(
    tmp_path: Path, call: str, caplog: pytest.LogCaptureFixture
) -> None:
    io = StuckIO()
    tier = SsdTier(tmp_path / "a", capacity_bytes=1 << 20, close_timeout_s=0.2, io=io)
    await tier.open()
    await tier.write([to_write(1, LENGTH)], deadline_s=soon())
    io.sticking = call
    working = asyncio.create_task(
        tier.read([to_read(1, LENGTH)], deadline_s=soon())
        if call == "preadv"
        else tier.write([to_write(2, LENGTH)], deadline_s=soon())
    )
    await asyncio.to_thread(io.is_stuck.wait, 10)

    async with asyncio.timeout(5):
        await tier.close()
        (ended,) = await working

    assert getattr(ended, "status", ended) in {
        ReadStatus.TIMED_OUT,
        WriteStatus.TIMED_OUT,
        WriteStatus.UNAVAILABLE,
    }
    assert "left to itself" in caplog.text
    io.is_moving.set()


async def test_a_manager_over_a_stuck_disk_closes_in_bounded_time(tmp_path: Path) -> None:
    io = StuckIO()
    disk = SsdTier(tmp_path / "a", capacity_bytes=1 << 20, close_timeout_s=0.2, io=io)
    dram = DramTier(capacity_bytes=1 << 20)
    manager = BlockManager(dram, [disk])
    await manager.open()
    space = Namespace(model="m", layout=KVLayout.opaque(block_bytes=LENGTH, block_tokens=4))
    manager.open_namespace(space)
    owner = manager.new_owner()
    io.sticking = "pwritev"
    chain = space.chain(range(8))
    reserved = await manager.reserve(chain, owner=owner)
    slots = [slot.slot for slot in reserved.slots]
    manager.commit(chain, slots, owner=owner)
    manager.return_slots(slots, owner=owner)
    await asyncio.to_thread(io.is_stuck.wait, 10)

    async with asyncio.timeout(10):
        await manager.close(drain_s=0.1)

    io.is_moving.set()


async def test_after_an_abandoned_close_the_next_start_finds_what_was_durable(tmp_path: Path) -> None:
    io = StuckIO()
    tier = SsdTier(tmp_path / "a", capacity_bytes=1 << 20, close_timeout_s=0.1, io=io)
    await tier.open()
    await tier.write([to_write(1, LENGTH)], deadline_s=soon())
    io.sticking = "pwritev"
    working = asyncio.create_task(tier.write([to_write(2, LENGTH)], deadline_s=soon()))
    await asyncio.to_thread(io.is_stuck.wait, 10)
    await tier.close()
    await working
    io.is_moving.set()
    assert (tmp_path / "a" / "dirty").exists()


def test_a_process_with_a_stuck_disk_ends() -> None:
    script = """
    import asyncio, sys, tempfile, time
    from pathlib import Path
    from kvstore_tiers.ssd import SsdTier
    from tests.tiers.blocks import to_write
    from tests.tiers.faulty_io import StuckIO
    async def main(folder):
        io = StuckIO()
        tier = SsdTier(folder, capacity_bytes=1 << 20, close_timeout_s=0.1, io=io)
        await tier.open()
        io.sticking = "pwritev"
        asyncio.ensure_future(tier.write([to_write(1, 8192)], deadline_s=time.monotonic() + 30))
        await asyncio.to_thread(io.is_stuck.wait, 10)
        await tier.close()
        print("closed")
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(main(Path(folder) / "a"))
    """
    started_s = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.stdout == "closed\n", done.stderr
    assert done.returncode == 0
    assert time.monotonic() - started_s < 40, "the stuck operation would have taken 60 s"
