"""What counting the hot branches of the prefix tree costs: a match, the loop's thread, and an answer.

CPU time, which others on the machine disturb little: of matches of one long chain by one manager with and
without them, in turn; of each part on its own, for prompts that share a system prompt; and of an answer when
the tree is full.
"""

import argparse
import asyncio
import json
import random
import statistics
import time

from kvstore.branches import MAX_BRANCHES, MAX_SAMPLES_PER_S, Branches
from kvstore.directory import Shelf
from kvstore.keys import Namespace, PrefixChain
from kvstore.layout import KVLayout
from kvstore.manager import BlockManager
from kvstore_tiers.dram import DramTier

SPACE = Namespace("m", KVLayout.opaque(block_bytes=4096, block_tokens=16))
SHELF = Shelf(SPACE.digest, SPACE.layout.whole, b"", 4096)
SYSTEM_BLOCKS = 100


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=6250, help="blocks of the chain (default: %(default)d)")
    parser.add_argument("--rounds", type=int, default=40, help="turns of each manager (default: %(default)d)")
    parser.add_argument("--json", action="store_true", help="end with one JSON object on stdout")
    args = parser.parse_args()
    found = {"match": asyncio.run(match_cost(args.blocks, args.rounds)), "sample": sample_cost(args.blocks)}
    for name, values in found.items():
        print(name, values)
    if args.json:
        print(json.dumps(found))


async def match_cost(num_blocks: int, rounds: int, calls: int = 100) -> dict[str, float]:
    """Time matches of stored blocks, in microseconds of CPU each; the ratio is the median of the rounds'.

    One manager with and without them: where two hold their keys in memory differs by more than is looked for.
    """
    # By this clock the store does nothing but match, whatever share of the machine it gets.
    watched = Branches(clock=time.process_time)
    manager = BlockManager(DramTier(capacity_bytes=2 * num_blocks * 4096), [], branches=watched)
    chain = SPACE.chain(range(num_blocks * 16))
    timed: list[list[float]] = [[], []]
    await manager.open()
    manager.open_namespace(SPACE)
    owner = manager.new_owner()
    lent = await manager.reserve(chain, owner=owner, timeout_s=60)
    slots = [block.slot for block in lent.slots]
    manager.putter.publish(chain, slots, owner=owner, checksums=[0] * len(slots))
    for at in range(rounds):
        for which in (0, 1) if at % 2 else (1, 0):
            manager._state.branches = watched if which else None  # see above
            start_s = time.process_time()
            for _ in range(calls):
                found = manager.match_at_once(chain)
            await asyncio.sleep(0)  # what was sampled is taken in, when its time has come
            timed[which].append((time.process_time() - start_s) / calls * 1e6)
            assert found is not None
            assert found.blocks == num_blocks
    await manager.close(drain_s=0)
    without, with_it = (statistics.median(times) for times in timed)
    mean = statistics.fmean(timed[1]) / statistics.fmean(timed[0])
    ratio = statistics.median(one / other for other, one in zip(*timed, strict=True))
    return {
        "without_us": round(without, 2),
        "with_us": round(with_it, 2),
        "ratio": round(ratio, 4),
        "ratio_of_means": round(mean, 4),
    }


def sample_cost(num_blocks: int, requests: int = 4000) -> dict[str, float]:
    """Time the parts on their own, in microseconds: a lookup passed over, one that is sampled, an answer."""
    chosen = random.Random(1)
    system = SPACE.chain(range(SYSTEM_BLOCKS * 16)).keys
    chains = [
        PrefixChain(
            SPACE.digest,
            (*system, *SPACE.chain([at] * (num_blocks - SYSTEM_BLOCKS) * 16).keys),
            16,
        )
        for at in range(20)
    ]
    passed = Branches(clock=time.monotonic, seed=1, max_samples_per_s=1)
    start_s = time.process_time()
    for _ in range(100_000):
        passed.note_match(SHELF, chains[0], num_blocks)
    passed_us = (time.process_time() - start_s) * 10
    sampled = Branches(clock=time.monotonic, seed=1, max_samples_per_s=1 << 40)
    noted_s = handled_s = 0.0
    for at in range(requests):
        chain = chains[min(int(chosen.paretovariate(1)) - 1, 19)]
        start_s = time.process_time()
        sampled.note_match(SHELF, chain, num_blocks)
        noted_s += time.process_time() - start_s
        if at % 16 == 15:
            start_s = time.process_time()
            sampled.settle()
            handled_s += time.process_time() - start_s
    for at in range(2 * MAX_BRANCHES):
        sampled.note_match(SHELF, SPACE.chain([at] * 64), 4)
        sampled.settle()
    answers = []
    for _ in range(20):
        start_s = time.process_time()
        ((_, tree),) = sampled.trees()
        sum(1 for _ in tree.told(sampled.minute, limit=20))
        answers.append((time.process_time() - start_s) * 1e6)
    per_sample_us = (noted_s + handled_s) / requests * 1e6
    return {
        "passed_over_us": round(passed_us, 3),
        "note_us": round(noted_s / requests * 1e6, 2),
        "handle_us": round(handled_s / requests * 1e6, 2),
        "most_of_a_core": round(per_sample_us * MAX_SAMPLES_PER_S / 1e6, 4),
        "answer_us": round(statistics.median(answers), 1),
        "branches": sampled.num_branches,
    }


if __name__ == "__main__":
    main()
