"""What encryption costs: the cipher beside memcpy, tiers with it beside tiers without, and the event loop.

cipher   sealing a payload into another buffer and opening it in place, with both checksums, on one thread
         and on two, beside np.copyto of as many bytes on one
ssd      SealedTier over SsdTier beside SsdTier, writes (durable) and reads (verified) of one batch
remote   SealedTier over RemoteTier beside RemoteTier, on a Redis-protocol server on this machine
loop     how late a coroutine wakes that sleeps 1 ms at a time, idle and while two threads seal and open

Medians of interleaved rounds; cpu_s_per_gb is of this process, all threads.
"""

import argparse
import asyncio
import contextlib
import json
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from kvstore.checksum import as_bytes_array, checksum
from kvstore.keys import BlockKey, NamespaceDigest
from kvstore.layout import Part
from kvstore.tenant import tenant_of
from kvstore.tier import (
    BlockHeader,
    BlockId,
    ReadRequest,
    ReadStatus,
    Tier,
    TierHealth,
    WriteRequest,
    WriteStatus,
)
from kvstore_tiers.remote import RemoteTier
from kvstore_tiers.sealed import SealedTier
from kvstore_tiers.sealing import DataKey, open_payload, seal_payload
from kvstore_tiers.ssd import SsdTier
from raw_media import Redis, aligned

BLOCK_BYTES = [64 << 10, 360 << 10, 2 << 20, 8 << 20]
SET_BYTES = 64 << 20
LAYOUT = b"l" * 32

Row = dict[str, object]
Step = Callable[[], Awaitable[None] | None]


class OneKey:
    """SealKeys with one key for all."""

    def __init__(self) -> None:
        self.key = DataKey.make(tenant_of(b""))

    def health(self) -> TierHealth:
        """Up."""
        return TierHealth(is_up=True)

    async def sealing_key(self, namespace: NamespaceDigest, *, deadline_s: float) -> DataKey | None:
        """Return the key."""
        return self.key

    async def opening_key(
        self, namespace: NamespaceDigest, key_id: bytes, *, deadline_s: float
    ) -> DataKey | None:
        """Return the key."""
        return self.key

    async def refresh(self) -> None:
        """Do nothing."""

    def is_known(self, key_id: bytes) -> bool:
        """Return whether it is that key's id."""
        return key_id == self.key.id

    def is_erased(self, namespace: NamespaceDigest) -> bool:
        """Return False."""
        return False

    def has_key(self, namespace: NamespaceDigest) -> bool:
        """Return True."""
        return True


def blocks(block_bytes: int, count: int) -> tuple[list[memoryview], list[BlockHeader]]:
    """Return random payloads in aligned buffers, and their headers."""
    noise = np.random.default_rng(1)
    buffers = [aligned(block_bytes) for _ in range(count)]
    headers: list[BlockHeader] = []
    for number, buffer in enumerate(buffers):
        np.copyto(as_bytes_array(buffer), noise.integers(0, 256, len(buffer), np.uint8))
        key = BlockKey(block_bytes.to_bytes(16) + number.to_bytes(16))
        block = BlockId(NamespaceDigest(b"n" * 32), Part(0, 1, 0, 1), key)
        payload_sum = checksum(buffer[:block_bytes])
        headers.append(BlockHeader(block, BlockKey(b"p" * 32), number, LAYOUT, block_bytes, payload_sum))
    return buffers, headers


async def timed(steps: dict[str, Step], rounds: int) -> dict[str, tuple[float, float]]:
    """Run the steps in turn; returns the median (seconds, CPU seconds) of each."""
    figures: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
    for number in range(rounds + 1):
        for name, step in list(steps.items())[:: 1 if number % 2 else -1]:
            cpu_s, started_s = time.process_time(), time.perf_counter()
            done = step()
            if done is not None:
                await done
            if number:
                figures[name].append((time.perf_counter() - started_s, time.process_time() - cpu_s))
    return {
        name: (statistics.median(s for s, _ in found), statistics.median(c for _, c in found))
        for name, found in figures.items()
    }


async def measure_cipher(block_bytes: int, rounds: int) -> list[Row]:
    """Seal and open a set of payloads that is larger than the caches."""
    count = max(8, SET_BYTES // block_bytes)
    sources, headers = blocks(block_bytes, count)
    targets = [aligned(block_bytes) for _ in range(count)]
    key = DataKey.make(tenant_of(b""))
    sealed: list[BlockHeader | None] = [None] * count

    def seal(index: int) -> None:
        sealed[index] = seal_payload(key, headers[index], sources[index], targets[index])

    def unseal(index: int) -> None:
        header = sealed[index]
        assert header is not None
        assert open_payload(key, header, targets[index]) is not None

    def each(work: Callable[[int], None]) -> Step:
        return lambda: [work(index) for index in range(count)] and None

    def copy(index: int) -> None:
        np.copyto(as_bytes_array(targets[index]), as_bytes_array(sources[index]))

    with ThreadPoolExecutor(2) as pool:
        steps: dict[str, Step] = {
            "copy": each(copy),
            "seal": each(seal),
            "open": each(unseal),
            "seal on two": lambda: list(pool.map(seal, range(count))) and None,
            "open on two": lambda: list(pool.map(unseal, range(count))) and None,
        }
        order = ["copy", "seal", "open", "seal on two", "open on two"]
        figures: dict[str, list[float]] = {name: [] for name in order}
        for number in range(rounds + 1):
            for name in order:
                started_s = time.perf_counter()
                steps[name]()
                if number:
                    figures[name].append(time.perf_counter() - started_s)
    speeds = {name: count * block_bytes / statistics.median(found) / 1e9 for name, found in figures.items()}
    return [
        {
            "part": "cipher",
            "op": name,
            "block_bytes": block_bytes,
            "gb_per_s": round(speed, 2),
            "ratio": round(speed / speeds["copy"], 2),
        }
        for name, speed in speeds.items()
    ]


async def measure_tiers(plain: Tier, sealed: Tier, block_bytes: int, batch: int, rounds: int) -> list[Row]:
    """Write and read one batch through a tier with encryption, and one without."""
    sources, headers = blocks(block_bytes, batch)
    targets = [aligned(block_bytes) for _ in range(batch)]
    writes = [WriteRequest(header, buffer) for header, buffer in zip(headers, sources, strict=True)]
    reads = [
        ReadRequest(header.block, LAYOUT, block_bytes, buffer)
        for header, buffer in zip(headers, targets, strict=True)
    ]

    def put(tier: Tier) -> Step:
        async def step() -> None:
            statuses = await tier.write(writes, deadline_s=time.monotonic() + 60)
            assert set(statuses) == {WriteStatus.OK}, statuses

        return step

    def fetch(tier: Tier) -> Step:
        async def step() -> None:
            outcomes = await tier.read(reads, deadline_s=time.monotonic() + 60)
            assert {outcome.status for outcome in outcomes} == {ReadStatus.OK}

        return step

    rows: list[Row] = []
    for op, make in (("put", put), ("fetch", fetch)):
        found = await timed({"plain": make(plain), "sealed": make(sealed)}, rounds)
        (plain_s, plain_cpu_s), (sealed_s, sealed_cpu_s) = found["plain"], found["sealed"]
        num_bytes = batch * block_bytes
        rows.append(
            {
                "part": sealed.name,
                "op": op,
                "block_bytes": block_bytes,
                "gb_per_s": round(num_bytes / sealed_s / 1e9, 2),
                "plain_gb_per_s": round(num_bytes / plain_s / 1e9, 2),
                "ratio": round(plain_s / sealed_s, 2),
                "cpu_s_per_gb": round(sealed_cpu_s / num_bytes * 1e9, 3),
                "plain_cpu_s_per_gb": round(plain_cpu_s / num_bytes * 1e9, 3),
            }
        )
    return rows


@contextlib.asynccontextmanager
async def opened(*tiers: Tier) -> "contextlib.AsyncIterator[None]":
    """Open tiers, and close them."""
    for tier in tiers:
        await tier.open()
    try:
        yield
    finally:
        for tier in tiers:
            await tier.close()


async def measure_ssd(folder: Path, block_bytes: int, batch: int, rounds: int) -> list[Row]:
    """The ssd tier with encryption beside one without, in folders of the same disk."""
    room = 3 * batch * (block_bytes + 4096)
    plain = SsdTier(folder / f"plain-{block_bytes}", capacity_bytes=room)
    inner = SsdTier(folder / f"sealed-{block_bytes}", capacity_bytes=room, is_sealed=True)
    sealed = SealedTier(inner, OneKey())
    async with opened(plain, sealed):
        return await measure_tiers(plain, sealed, block_bytes, batch, rounds)


async def measure_remote(redis: Redis, block_bytes: int, batch: int, rounds: int) -> list[Row]:
    """The remote tier with encryption beside one without, on the same server."""
    url = f"unix://{redis.path}"
    plain = RemoteTier(url, timeout_s=30, key_prefix="plain")
    sealed = SealedTier(RemoteTier(url, timeout_s=30, key_prefix="sealed"), OneKey())
    async with opened(plain, sealed):
        return await measure_tiers(plain, sealed, block_bytes, batch, rounds)


async def measure_loop(seconds: float) -> list[Row]:
    """How late the loop wakes, idle and under load."""
    block_bytes = 2 << 20
    sources, headers = blocks(block_bytes, 8)
    key = DataKey.make(tenant_of(b""))
    is_over = False

    def work(target: memoryview) -> None:
        turn = 0
        while not is_over:
            turn = (turn + 1) % len(sources)
            header = seal_payload(key, headers[turn], sources[turn], target)
            assert header is not None
            open_payload(key, header, target)

    async def lateness_us() -> tuple[float, float]:
        late: list[float] = []
        until_s = time.perf_counter() + seconds
        while time.perf_counter() < until_s:
            started_s = time.perf_counter()
            await asyncio.sleep(0.001)
            late.append(1e6 * (time.perf_counter() - started_s - 0.001))
        late.sort()
        return late[len(late) // 2], late[int(0.99 * len(late))]

    rows: list[Row] = []
    for op, num_threads in (("idle", 0), ("two threads seal and open", 2)):
        with ThreadPoolExecutor(2) as pool:
            is_over = False
            working = [pool.submit(work, aligned(block_bytes)) for _ in range(num_threads)]
            p50_us, p99_us = await lateness_us()
            is_over = True
            for one in working:
                one.result()
        rows.append({"part": "loop", "op": op, "late_p50_us": round(p50_us), "late_p99_us": round(p99_us)})
    return rows


def cells(
    parts: Sequence[str], folder: Path, redis: Redis | None, rounds: int
) -> Iterator[Awaitable[list[Row]]]:
    """Yield the measurements."""
    for block_bytes in BLOCK_BYTES:
        batch = max(4, (32 << 20) // block_bytes)
        if "cipher" in parts:
            yield measure_cipher(block_bytes, rounds)
        if "ssd" in parts:
            yield measure_ssd(folder, block_bytes, batch, rounds)
        if redis is not None:
            yield measure_remote(redis, block_bytes, batch, rounds)
    if "loop" in parts:
        yield measure_loop(3.0)


async def run(folder: Path, parts: Sequence[str], rounds: int) -> list[Row]:
    """Measure every cell."""
    rows: list[Row] = []
    with contextlib.ExitStack() as stack:
        redis: Redis | None = None
        if "remote" in parts:
            redis = Redis(Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kv-redis-"))))
            stack.callback(redis.close)
        for cell in cells(parts, folder, redis, rounds):
            for row in await cell:
                print(", ".join(f"{name} {value}" for name, value in row.items()))
                rows.append(row)
    return rows


def main() -> None:
    """Print a table, or with ``--json`` one object on the last line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--folder", type=Path, help="where the ssd tiers lie (default: temporary)")
    parser.add_argument("--parts", default="cipher,ssd,remote,loop")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kv-seal-", dir=args.folder) as folder:
        rows = asyncio.run(run(Path(folder), args.parts.split(","), args.rounds))
    if args.json:
        print(json.dumps({"results": rows}))


if __name__ == "__main__":
    main()
