"""The ghost behind ``kvstore size``: what it costs a match, in memory and in the background; how exact it is.

``--trace`` names a file of requests in JSON, a line each, with ``hash_ids``: a prefix chain of block names.
"""

import argparse
import asyncio
import hashlib
import json
import random
import statistics
import time
import tracemalloc
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

from kvstore.directory import Shelf
from kvstore.keys import BlockKey, Namespace, PrefixChain
from kvstore.layout import KVLayout
from kvstore.manager import BlockManager
from kvstore.size_curve import MAX_SAMPLED_BLOCKS, SizeCurve
from kvstore_tiers.dram import DramTier

BLOCK_BYTES = 4096
SPACE = Namespace("m", KVLayout.opaque(block_bytes=BLOCK_BYTES, block_tokens=16))
SHELF = Shelf(SPACE.digest, SPACE.layout.whole, b"", BLOCK_BYTES)
CHAIN_BLOCKS = 25
SIZES_BLOCKS = (1000, 5000, 10_000, 30_000, 50_000)
UNPACED = 1 << 60


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trace", type=Path, metavar="FILE", help="requests to compare with exact hit rates")
    parser.add_argument("--seeds", type=int, default=10, help="samples of the trace (default: %(default)d)")
    parser.add_argument("--json", action="store_true", help="end with one JSON object on stdout")
    args = parser.parse_args()
    found = {"match": asyncio.run(match_cost()), "background": background_cost(), "memory": memory()}
    if args.trace is not None:
        found["errors"] = errors(args.trace, args.seeds)
    for name, values in found.items():
        print(name, values)
    if args.json:
        print(json.dumps(found))


def new_curve(seed: int, limit_blocks: int = 200_000, *, max_samples_per_s: int = UNPACED) -> SizeCurve:
    """Return a ghost that is not slowed down, unless that is wanted."""
    chosen = random.Random(seed)
    return SizeCurve(
        multipliers=[chosen.getrandbits(64) | 1 for _ in range(4)],
        limit_bytes=limit_blocks * BLOCK_BYTES,
        clock=time.monotonic,
        max_samples_per_s=max_samples_per_s,
    )


def chain_of(names: Sequence[object]) -> PrefixChain:
    """Return a chain of blocks of these names."""
    keys = tuple([BlockKey(hashlib.sha256(str(name).encode()).digest()) for name in names])
    return PrefixChain(SPACE.digest, keys, 16)


def filled(seed: int) -> SizeCurve:
    """Return a ghost that has seen so many blocks that it samples few."""
    curve = new_curve(seed)
    for number in range(8000):
        curve.note_put(SHELF, chain_of(range(CHAIN_BLOCKS * number, CHAIN_BLOCKS * (number + 1))))
        curve.settle()
    return curve


async def match_cost(rounds: int = 15, calls: int = 4000) -> dict[str, float]:
    """Time matches of a manager with and without a ghost, in turn, in nanoseconds each."""
    managers = [
        BlockManager(DramTier(capacity_bytes=1 << 20), [], new_size_curve=make)
        for make in (None, lambda _: new_curve(1))
    ]
    chain = SPACE.chain(range(CHAIN_BLOCKS * 16))
    timed: list[list[float]] = [[], []]
    for manager in managers:
        await manager.open()
        manager.open_namespace(SPACE)
    for _ in range(rounds):
        for manager, times in zip(managers, timed, strict=True):
            await asyncio.sleep(0.3)  # the queue is empty again
            start_s = time.perf_counter()
            for _ in range(calls):
                manager.match_at_once(chain)
            times.append((time.perf_counter() - start_s) / calls * 1e9)
    for manager in managers:
        await manager.close(drain_s=0)
    without, with_it = (statistics.median(times) for times in timed)
    return {"without_ns": round(without), "with_ns": round(with_it), "added_ns": round(with_it - without)}


def background_cost(requests: int = 4000) -> dict[str, float]:
    """Time what the task does for each match of blocks that are hardly sampled, in nanoseconds."""
    curve = filled(1)
    chains = [chain_of(range(CHAIN_BLOCKS * at, CHAIN_BLOCKS * (at + 1))) for at in range(requests)]
    samples = curve.curve().samples
    start_s = time.perf_counter()
    for chain in chains:
        curve.note_match(SHELF, chain, num_hits=0)
    noted_s = time.perf_counter()
    curve.settle()
    spent_s = time.perf_counter() - noted_s
    return {
        "sample_ratio": round(curve.sample_ratio, 4),
        "note_ns": round((noted_s - start_s) / requests * 1e9),
        "handle_ns": round(spent_s / requests * 1e9),
        "samples_per_match": round((curve.curve().samples - samples) / requests, 2),
    }


def memory() -> dict[str, float]:
    """Measure the memory of a full ghost, in bytes."""
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    curve = filled(1)
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return {"sampled_blocks": curve.num_sampled, "most": MAX_SAMPLED_BLOCKS, "bytes": after - before}


def errors(trace: Path, num_seeds: int) -> dict[str, object]:
    """Return by how much samples of a trace miss its exact hit rates."""
    requests = [json.loads(line)["hash_ids"] for line in trace.read_text(encoding="utf-8").splitlines()]
    chains = [chain_of(names) for names in requests]
    exact = {size: exact_ratio(requests, size) for size in SIZES_BLOCKS}
    missed: list[float] = []
    for seed in range(num_seeds):
        curve = new_curve(seed)
        for chain in chains:
            curve.note_match(SHELF, chain, num_hits=0)
            curve.note_put(SHELF, chain)
            curve.settle()
        told = curve.curve()
        missed += [told.hit_ratio(size * BLOCK_BYTES) - exact[size] for size in SIZES_BLOCKS]
    return {
        "exact": {size: round(ratio, 4) for size, ratio in exact.items()},
        "mean": round(statistics.fmean(missed), 4),
        "mean_absolute": round(statistics.fmean(map(abs, missed)), 4),
        "largest": round(max(map(abs, missed)), 4),
        "within_0.02": round(sum(abs(error) <= 0.02 for error in missed) / len(missed), 3),
        "sample_ratio": round(curve.sample_ratio, 4),
    }


def exact_ratio(requests: Sequence[Sequence[int]], capacity_blocks: int) -> float:
    """Return the hit rate of least recently used eviction, blocks touched tail first."""
    cache: OrderedDict[int, None] = OrderedDict()
    hits = lookups = 0
    for names in requests:
        lookups += len(names)
        hits += next((at for at, name in enumerate(names) if name not in cache), len(names))
        for name in reversed(names):
            cache[name] = None
            cache.move_to_end(name)
        while len(cache) > capacity_blocks:
            cache.popitem(last=False)
    return hits / lookups


if __name__ == "__main__":
    main()
