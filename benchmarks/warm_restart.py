"""Time until a store knows the blocks of its ssd again: open the tier, scan it, file what it holds.

Writes an index of ``--blocks`` records over a sparse slab, then opens a store on it in the same process.
"""

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from pathlib import Path

from kvstore.keys import Namespace
from kvstore.layout import KVLayout
from kvstore.manager import BlockManager
from kvstore.tier import BlockHeader, BlockId
from kvstore_tiers.dram import DramTier
from kvstore_tiers.ssd import SsdTier
from kvstore_tiers.ssd_index import SsdIndex
from kvstore_tiers.ssd_record import Change, IndexRecord

BLOCK_BYTES = 4096
SPACE = Namespace(model="restart", layout=KVLayout.opaque(block_bytes=BLOCK_BYTES, block_tokens=1))
CHAIN_BLOCKS = 100
_COMMIT_RECORDS = 10_000


def records(blocks: int) -> list[IndexRecord]:
    """Return records of chains of 100 blocks, each with its slot, in the order that uses of chains leave."""
    made: list[IndexRecord] = []
    for first in range(0, blocks, CHAIN_BLOCKS):
        chain = SPACE.chain(range(first, first + CHAIN_BLOCKS))
        parents = [SPACE.digest, *chain.keys]
        for depth, key in enumerate(chain.keys):
            header = BlockHeader(
                BlockId(SPACE.digest, SPACE.layout.whole, key),
                parents[depth],
                depth,
                SPACE.layout.fingerprint,
                BLOCK_BYTES,
                first,
            )
            number = len(made)
            # A chain is used tail first.
            recency = first + CHAIN_BLOCKS - depth
            made.append(IndexRecord(header, BLOCK_BYTES * number, BLOCK_BYTES, number + 1, recency))
    return made


async def restart(folder: Path, capacity_bytes: int) -> tuple[float, float]:
    """Open a store on the folder and close it; returns (wall seconds, CPU seconds) until it serves."""
    manager = BlockManager(DramTier(capacity_bytes=1 << 20), [SsdTier(folder, capacity_bytes=capacity_bytes)])
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    await manager.open()
    took = time.perf_counter() - wall_s, time.process_time() - cpu_s
    await manager.close()
    return took


async def measure(blocks: int, rounds: int) -> list[tuple[float, float]]:
    """Return the times of several restarts over the same folder."""
    # Index space grows with capacity: records of such small slots need that of larger ones.
    capacity_bytes = blocks * BLOCK_BYTES * 16
    with tempfile.TemporaryDirectory(prefix="kvstore-restart-") as name:
        folder = Path(name) / "ssd"
        first = SsdTier(folder, capacity_bytes=capacity_bytes)
        await first.open()
        await first.close()
        index = SsdIndex.open(folder / "index", capacity_bytes=capacity_bytes)
        made = records(blocks)
        for start in range(0, blocks, _COMMIT_RECORDS):
            index.commit([Change.store(record) for record in made[start : start + _COMMIT_RECORDS]])
        index.close()
        return [await restart(folder, capacity_bytes) for _ in range(rounds)]


def main() -> None:
    """Print the medians, or with ``--json`` one object on the last line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    times = asyncio.run(measure(args.blocks, args.rounds))
    wall_s, cpu_s = (round(statistics.median(column), 3) for column in zip(*times, strict=True))
    print(f"{args.blocks} blocks known again after {wall_s} s ({cpu_s} CPU s), median of {args.rounds}")
    if args.json:
        print(json.dumps({"blocks": args.blocks, "wall_s": wall_s, "cpu_s": cpu_s, "times": times}))


if __name__ == "__main__":
    main()
