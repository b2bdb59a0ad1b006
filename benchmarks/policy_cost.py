"""What an eviction policy costs: time per block on a full cache, and memory per stored block.

Chains of 24 blocks; half of the requests continue one of the last thousand conversations. Prints one line per
policy: microseconds of processor time per block of a request, all included, amortised over requests on a
cache that is full, and bytes per stored block that the policy itself keeps (block names are the directory's,
and not counted).
"""

import argparse
import gc
import random
import time
import tracemalloc

from kvstore.policy import POLICIES, PolicyCache, policy_named
from kvstore.tier import StorageKey

BLOCK_BYTES = 4096
CHAIN_BLOCKS = 24
RECENT = 1000


class Traffic:
    """An endless chat: requests as (instant, blocks)."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._number = 0
        self._now_s = 0.0
        self._recent: list[list[StorageKey]] = []

    def request(self) -> tuple[float, list[StorageKey]]:
        """Return the next request."""
        rng, recent = self._rng, self._recent
        self._now_s += 0.01
        chain: list[StorageKey] = []
        if recent and rng.random() < 0.5:
            index = rng.randrange(len(recent))
            chain = recent[index][:-1]
            recent[index] = recent[-1]
            recent.pop()
        for _ in range(CHAIN_BLOCKS - len(chain) % CHAIN_BLOCKS):
            self._number += 1
            chain.append(StorageKey(self._number.to_bytes(8, "little") * 4))
        if len(recent) < RECENT:
            recent.append(chain)
        return self._now_s, chain


def fill(name: str, num_blocks: int) -> tuple[PolicyCache, Traffic]:
    """Return a cache of so many blocks that is full."""
    capacity_bytes = num_blocks * BLOCK_BYTES
    cache = PolicyCache(policy_named(name)(capacity_bytes), capacity_bytes)
    traffic = Traffic(1)
    while len(cache) < num_blocks:
        now_s, blocks = traffic.request()
        cache.serve(blocks, size_bytes=BLOCK_BYTES, now_s=now_s)
    return cache, traffic


def cost_us(name: str, num_blocks: int, num_requests: int) -> float:
    """Return microseconds per block of requests to a full cache."""
    cache, traffic = fill(name, num_blocks)
    requests = [traffic.request() for _ in range(num_requests)]
    gc.collect()
    gc.freeze()
    started_s = time.process_time()
    for now_s, blocks in requests:
        cache.serve(blocks, size_bytes=BLOCK_BYTES, now_s=now_s)
    took_s = time.process_time() - started_s
    gc.unfreeze()
    return took_s / sum(len(blocks) for _, blocks in requests) * 1e6


def bytes_per_block(name: str, num_blocks: int) -> float:
    """Return the bytes that a full policy keeps per block, its names aside."""
    names = [StorageKey(number.to_bytes(8, "little") * 4) for number in range(2 * num_blocks)]
    gc.collect()
    tracemalloc.start()
    policy = policy_named(name)(num_blocks * BLOCK_BYTES)
    for start in range(0, 2 * num_blocks, CHAIN_BLOCKS):
        blocks, now_s = names[start : start + CHAIN_BLOCKS], start / 1000
        if start >= num_blocks:
            leaving = names[start - num_blocks : start - num_blocks + len(blocks)]
            for block in reversed(leaving):
                policy.evict(block, now_s=now_s)
        policy.insert(blocks, size_bytes=BLOCK_BYTES, now_s=now_s)
    gc.collect()
    kept_bytes = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return kept_bytes / len(policy)


def main() -> None:
    """Print both figures for each policy."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=1_000_000)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--policies", default=",".join(POLICIES))
    args = parser.parse_args()
    for name in args.policies.split(","):
        per_block_us = cost_us(name, args.blocks, args.requests)
        kept_bytes = bytes_per_block(name, args.blocks)
        print(
            f"{name:10} {per_block_us:8.2f} us per block {kept_bytes:6.0f} bytes per block of {args.blocks}"
        )


if __name__ == "__main__":
    main()
