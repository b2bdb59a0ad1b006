"""Put and fetch of each tier beside its raw medium: GB/s, p99 and CPU, medians of interleaved rounds.

dram     copy with checksum into and out of arena slots, beside np.copyto (memcpy) of the same memory
ssd      SsdTier.write (durable, 128 MiB in four calls at a time) and .read (verified), beside O_DIRECT
         writes with fdatasync and reads, one system call per block, by as many threads
remote   RemoteTier.write and .read (verified), beside SET and GET over as many plain sockets to the server

p99_ms is of one call with ``batch_blocks`` blocks; cpu_s_per_gb is of this process, all threads.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from kvstore.checksum import as_bytes_array, checksum, copy_with_checksum
from kvstore.keys import BlockKey, NamespaceDigest
from kvstore.layout import Part
from kvstore.tier import BlockHeader, BlockId, ReadRequest, ReadStatus, WriteRequest, WriteStatus
from kvstore_tiers.dram import DramTier
from kvstore_tiers.remote import RemoteTier
from kvstore_tiers.ssd import SsdTier
from raw_media import RawFile, RawRedis, Redis, aligned

BLOCK_BYTES = [64 << 10, 360 << 10, 2 << 20, 8 << 20]
BATCH_BYTES = 32 << 20
SSD_BATCH_BYTES = 128 << 20
DRAM_SET_BYTES = 64 << 20
DRAM_CALL_BYTES = 2 << 20
DRAM_ROUNDS = 8
"""Calls of under a millisecond: more of them, so that a median is of calls that nothing interrupted."""

WARM_UP_ROUNDS = 4
"""Rounds that are not counted: the first write to a part of a preallocated file costs the file system more,
and the slots of an ssd tier are all written only after four (it has room for three batches)."""

IO_THREADS = 4
LAYOUT = b"l" * 32

Step = Callable[[], Awaitable[None] | None]


@dataclass
class Figures:
    """Seconds and CPU seconds of each call."""

    seconds: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)

    async def time(self, step: Step) -> None:
        """Run and time one call."""
        cpu_s, started_s = time.process_time(), time.perf_counter()
        done = step()
        if done is not None:
            await done
        self.seconds.append(time.perf_counter() - started_s)
        self.cpu_s.append(time.process_time() - cpu_s)


async def compare(
    tier: str, block_bytes: int, batch: int, rounds: int, steps: Sequence[tuple[str, Step, Step]]
) -> list[dict[str, object]]:
    """Run (op, tier step, raw step) in turn; returns one result per op."""
    figures: dict[str, tuple[Figures, Figures]] = {op: (Figures(), Figures()) for op, _, _ in steps}
    for number in range(rounds + WARM_UP_ROUNDS):
        for op, step, raw_step in steps:
            own, raw = (Figures(), Figures()) if number < WARM_UP_ROUNDS else figures[op]
            for one, call in ((own, step), (raw, raw_step))[:: 1 if number % 2 else -1]:
                await one.time(call)
    return [result(tier, op, block_bytes, batch, own, raw) for op, (own, raw) in figures.items()]


def result(tier: str, op: str, block_bytes: int, batch: int, own: Figures, raw: Figures) -> dict[str, object]:
    """Sum up one cell of the table."""
    num_bytes = block_bytes * batch
    speed, raw_speed = (num_bytes / statistics.median(f.seconds) / 1e9 for f in (own, raw))
    ordered = sorted(own.seconds)
    return {
        "tier": tier,
        "op": op,
        "block_bytes": block_bytes,
        "batch_blocks": batch,
        "gb_per_s": round(speed, 3),
        "raw_gb_per_s": round(raw_speed, 3),
        "ratio": round(speed / raw_speed, 3),
        "p99_ms": round(1e3 * ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))], 3),
        "cpu_s_per_gb": round(statistics.median(own.cpu_s) / num_bytes * 1e9, 3),
    }


def headers(buffers: Sequence[memoryview], block_bytes: int) -> list[BlockHeader]:
    """Name buffers as blocks of one namespace."""
    ids = [
        BlockId(
            NamespaceDigest(b"n" * 32), Part(0, 1, 0, 1), BlockKey(block_bytes.to_bytes(16) + i.to_bytes(16))
        )
        for i in range(len(buffers))
    ]
    return [
        BlockHeader(block, BlockKey(b"p" * 32), i, LAYOUT, block_bytes, checksum(buffers[i][:block_bytes]))
        for i, block in enumerate(ids)
    ]


async def measure_dram(block_bytes: int, rounds: int) -> list[dict[str, object]]:
    """Copies into and out of slots, verified, a few at a time from a set that is larger than the caches."""
    num_blocks = max(8, DRAM_SET_BYTES // block_bytes)
    batch = max(1, DRAM_CALL_BYTES // block_bytes)
    tier = DramTier(capacity_bytes=num_blocks * (block_bytes + 4096) + (1 << 20))
    await tier.open()
    slots = tier.allocate(block_bytes, num_blocks)
    source = np.random.default_rng(1).integers(0, 256, (num_blocks, block_bytes), np.uint8)
    target = source.copy()
    sums = [checksum(block) for block in source]
    turn = itertools.cycle(range(0, num_blocks - batch + 1, batch))

    async def put() -> None:
        start = next(turn)
        async with tier.writing(slots[start : start + batch], block_bytes) as buffers:
            for buffer, block in zip(buffers, source[start : start + batch], strict=True):
                copy_with_checksum(as_bytes_array(buffer)[:block_bytes], block)

    async def fetch() -> None:
        start = next(turn)
        async with tier.reading(slots[start : start + batch], block_bytes) as buffers:
            found = [
                copy_with_checksum(block, as_bytes_array(buffer)[:block_bytes])
                for buffer, block in zip(buffers, target[start : start + batch], strict=True)
            ]
        assert found == sums[start : start + batch]

    def raw_put() -> None:
        start = next(turn)
        for slot, block in zip(views[start : start + batch], source[start : start + batch], strict=True):
            np.copyto(slot, block)

    def raw_fetch() -> None:
        start = next(turn)
        for slot, block in zip(views[start : start + batch], target[start : start + batch], strict=True):
            np.copyto(block, slot)

    async with tier.writing(slots, block_bytes) as buffers:
        views = [as_bytes_array(buffer)[:block_bytes] for buffer in buffers]
    for slot, block in zip(views, source, strict=True):
        np.copyto(slot, block)
    steps: list[tuple[str, Step, Step]] = [("put", put, raw_put), ("fetch", fetch, raw_fetch)]
    try:
        return await compare("dram", block_bytes, batch, DRAM_ROUNDS * rounds, steps)
    finally:
        await tier.close()


async def measure_tier(
    tier: SsdTier | RemoteTier,
    block_bytes: int,
    batch: int,
    rounds: int,
    raw: tuple[Callable[[Sequence[memoryview]], None], Callable[[Sequence[memoryview]], None]],
) -> list[dict[str, object]]:
    """Writes and reads of one batch through a tier, beside the raw ones."""
    sources = [aligned(block_bytes) for _ in range(batch)]
    targets = [aligned(block_bytes) for _ in range(batch)]
    named = headers(sources, block_bytes)
    writes = [WriteRequest(header, buffer) for header, buffer in zip(named, sources, strict=True)]
    reads = [
        ReadRequest(header.block, LAYOUT, block_bytes, buffer)
        for header, buffer in zip(named, targets, strict=True)
    ]

    async def put() -> None:
        deadline_s = time.monotonic() + 60
        parts = [writes[start::calls] for start in range(calls)]
        written = await asyncio.gather(*(tier.write(part, deadline_s=deadline_s) for part in parts))
        assert {status for statuses in written for status in statuses} == {WriteStatus.OK}, written

    async def fetch() -> None:
        outcomes = await tier.read(reads, deadline_s=time.monotonic() + 60)
        assert {outcome.status for outcome in outcomes} == {ReadStatus.OK}

    calls = 4 if isinstance(tier, SsdTier) else 1
    steps: list[tuple[str, Step, Step]] = [
        ("put", put, lambda: raw[0](sources)),
        ("fetch", fetch, lambda: raw[1](targets)),
    ]
    return await compare(tier.name, block_bytes, batch, rounds, steps)


async def measure_ssd(folder: Path, block_bytes: int, batch: int, rounds: int) -> list[dict[str, object]]:
    """The ssd tier beside a file under O_DIRECT in the same folder."""
    room = 3 * batch * block_bytes
    tier = SsdTier(folder / f"ssd-{block_bytes}", capacity_bytes=room, io_threads=IO_THREADS)
    await tier.open()
    raw = RawFile(folder / f"raw-{block_bytes}", batch * block_bytes, threads=IO_THREADS)
    try:
        return await measure_tier(tier, block_bytes, batch, rounds, (raw.write, raw.read))
    finally:
        raw.close()
        await tier.close()


async def measure_remote(redis: Redis, block_bytes: int, batch: int, rounds: int) -> list[dict[str, object]]:
    """The remote tier beside plain sockets to the same server."""
    tier = RemoteTier(f"unix://{redis.path}", timeout_s=30, num_connections=IO_THREADS)
    await tier.open()
    raw = RawRedis(redis.path, IO_THREADS)
    writers = max(1, IO_THREADS // 2)
    try:
        return await measure_tier(
            tier,
            block_bytes,
            batch,
            rounds,
            (
                lambda buffers: raw.write(buffers, connections=writers),
                lambda buffers: raw.read(buffers, connections=IO_THREADS),
            ),
        )
    finally:
        raw.close()
        await tier.close()


async def run(folder: Path, tiers: Sequence[str], rounds: int) -> list[dict[str, object]]:
    """Measure every cell."""
    results: list[dict[str, object]] = []
    with contextlib.ExitStack() as opened:
        redis: Redis | None = None
        if "remote" in tiers:
            redis = Redis(Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="kv-redis-"))))
            opened.callback(redis.close)
        for block_bytes in BLOCK_BYTES:
            batch = max(4, BATCH_BYTES // block_bytes)
            found: list[dict[str, object]] = []
            if "dram" in tiers:
                found += await measure_dram(block_bytes, rounds)
            if "ssd" in tiers:
                ssd_batch = SSD_BATCH_BYTES // block_bytes
                found += await measure_ssd(folder, block_bytes, ssd_batch, max(3, rounds // 2))
            if redis is not None:
                found += await measure_remote(redis, block_bytes, batch, rounds)
            for row in found:
                print(
                    "{tier:7}{op:6}{block_bytes:>9} B x{batch_blocks:<4}{gb_per_s:7.2f} GB/s, raw "
                    "{raw_gb_per_s:6.2f}, ratio {ratio:5.2f}, p99 {p99_ms:8.2f} ms, "
                    "{cpu_s_per_gb:5.2f} CPU s/GB".format(**row)
                )
            results += found
    return results


def main() -> None:
    """Print a table, or with ``--json`` one object on the last line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--folder", type=Path, help="where the ssd tier and the raw file lie (default: temporary)"
    )
    parser.add_argument("--tiers", default="dram,ssd,remote")
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kv-tiers-", dir=args.folder) as folder:
        results = asyncio.run(run(Path(folder), args.tiers.split(","), args.rounds))
    if args.json:
        print(json.dumps({"results": results}))


if __name__ == "__main__":
    main()
