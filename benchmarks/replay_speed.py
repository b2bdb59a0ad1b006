"""CPU seconds of ``kvstore replay``: reading a trace, the bound, LRU at every capacity, each policy at one.

Without ``--trace`` it replays conversations of its own making, which say nothing of real hit rates.
"""

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from kvstore.replay import (
    NamedPolicy,
    ReplayPlan,
    Trace,
    lru_curve,
    next_uses,
    policy_names,
    policy_of,
    read_trace,
    replay,
    replay_bound,
)

BLOCK_TOKENS = 512


class NoProgress:
    """Shows nothing."""

    def start(self, label: str, total: float) -> None:
        """Begin."""

    def show(self, done: float) -> None:
        """Go on."""


def conversations(requests: int, seed: int) -> Iterator[dict[str, object]]:
    """Yield requests in Mooncake's format: conversations under a few system prompts, each turn longer."""
    chance = random.Random(seed)
    prompts = [list(range(100 * at, 100 * at + chance.randint(1, 20))) for at in range(8)]
    running: list[list[int]] = []
    fresh = 1000
    for number in range(requests):
        if not running or chance.random() < 0.4:
            running.append(list(chance.choice(prompts)))
        at = min(int(chance.expovariate(0.02)), len(running) - 1)
        chain = running.pop(len(running) - 1 - at)
        length = 1 + int(chance.expovariate(0.08))
        chain = [*chain, *range(fresh, fresh + length)]
        fresh += length
        yield {
            "timestamp": number * 300,
            "input_length": len(chain) * BLOCK_TOKENS,
            "output_length": 100,
            "hash_ids": chain,
        }
        if chance.random() < 0.7:
            running.append(chain)


def timed(work: Callable[[], object]) -> float:
    """Return the seconds of this process that some work takes: it has one thread, and others do not count."""
    started_s = time.process_time()
    work()
    return time.process_time() - started_s


def works(
    path: str, trace: Trace, capacity: int, policies: list[NamedPolicy]
) -> dict[str, Callable[[], object]]:
    """Return what is timed, by name."""
    named: dict[str, Callable[[], object]] = {
        "read": lambda: read_trace(path),
        "lru, all capacities": lambda: lru_curve(trace),
        "bound": lambda: replay_bound(trace, capacity, next_uses(trace)),
    }
    for policy in policies:
        plan = ReplayPlan([policy], [capacity])
        named[policy.name] = lambda plan=plan: replay(trace, plan, NoProgress())  # type: ignore[misc]
    return named


def main() -> None:
    """Time each in rounds, one after the other, and print medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trace", help="a trace of your own")
    parser.add_argument(
        "--requests", type=int, default=5000, help="of the trace that is made (default: 5000)"
    )
    parser.add_argument("--capacity", type=int, default=10_000, help="in blocks (default: 10000)")
    parser.add_argument("--policies", help="some of the policies (default: all)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    args = parser.parse_args()
    names = (
        args.policies.split(",") if args.policies else [name for name in policy_names() if name != "bound"]
    )
    with tempfile.TemporaryDirectory() as folder:
        path = args.trace or str(Path(folder) / "trace.jsonl")
        if args.trace is None:
            lines = map(json.dumps, conversations(args.requests, seed=1))
            Path(path).write_text("\n".join(lines), encoding="utf-8")
        trace = read_trace(path)
        named = works(path, trace, args.capacity, [policy_of(name) for name in names])
        taken: dict[str, list[float]] = {name: [] for name in named}
        for _ in range(args.rounds):
            for name, work in named.items():
                taken[name].append(timed(work))
    print(f"{trace.requests} requests, {trace.block_accesses} block accesses, {args.capacity} blocks")
    for name, seconds in taken.items():
        per_access_us = 1e6 * statistics.median(seconds) / trace.block_accesses
        print(
            f"{name:20} {statistics.median(seconds):7.3f} s  ({min(seconds):.3f} to {max(seconds):.3f})"
            f"  {per_access_us:6.2f} us a block"
        )
    if args.json:
        medians = {name: round(statistics.median(seconds), 4) for name, seconds in taken.items()}
        print(json.dumps({"requests": trace.requests, "accesses": trace.block_accesses, "median_s": medians}))


if __name__ == "__main__":
    main()
