"""How long ``match`` waits while a full store works: for large puts, changes of policy, Python's collector.

A store in a process of its own, full of small blocks, and a client that matches 8 blocks at fixed instants. A
wait counts from the instant at which the answer was wanted, so that a long one counts for all that it kept.
Beside it another process works the store as the phase says: puts of 10 000 blocks in one reserve and one
commit, puts of 64 blocks, or one change of the policy after another.
"""

import argparse
import contextlib
import itertools
import json
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from multiprocessing.synchronize import Event
from pathlib import Path

import numpy as np

from kvstore import KVLayout, KVStore, Namespace, PrefixChain, Timeouts
from kvstore.arena_link import ArenaCache
from kvstore.drill.store_process import StoreProcess, StoreSettings
from kvstore.link import Link, unix_dial
from kvstore.messages import ChainRef, ChangePolicy, Commit, Lent, OpenNamespace, Reserve, WrittenSlot

SPACE = Namespace("tail", KVLayout.opaque(block_bytes=4096, block_tokens=1))
PATIENT = Timeouts(match_s=60, fetch_s=60, put_s=60, control_s=120)
PHASES = ("large puts", "small puts", "policy")
LARGE_BLOCKS = 10_000
SMALL_BLOCKS = 64
INTERVAL_S = 0.002
PAUSE_S = {"large puts": 0.1, "small puts": 0.002, "policy": 0.5}
POLICIES = ("lru", "gittins")
_WAIT_S = 60.0


def new_chain(number: int, blocks: int) -> PrefixChain:
    """Return a chain that no other number has a block of."""
    return SPACE.chain(np.arange(blocks, dtype=np.uint32) + np.uint32(number * 1_000_003 % (1 << 31)))


def put(link: Link, number: int, blocks: int) -> None:
    """Store a chain in one reserve and one commit; the bytes of its blocks are whatever the slots hold."""
    about = ChainRef(new_chain(number, blocks), None)
    lent = link.ask(Reserve(about, int(_WAIT_S * 1e6), None), time.monotonic() + _WAIT_S)
    if isinstance(lent, Lent) and lent.slots:
        written = tuple(WrittenSlot(*slot, 0) for slot in lent.slots)
        link.ask(Commit(about, written), time.monotonic() + _WAIT_S)


def open_link(path: Path) -> Link:
    """Return a bare connection that has opened the namespace."""
    link = Link.open(unix_dial(path), ArenaCache(), time.monotonic() + _WAIT_S)
    link.ask(OpenNamespace(SPACE), time.monotonic() + _WAIT_S)
    return link


def work(path: Path, phase: str, first: int, has_begun: Event, is_over: Event) -> None:
    """Work the store until it is over."""
    link = open_link(path)
    has_begun.set()
    for number in itertools.count(first):
        if is_over.is_set():
            return
        time.sleep(PAUSE_S[phase])
        if phase == "policy":
            link.ask(ChangePolicy(POLICIES[number % 2]), time.monotonic() + _WAIT_S)
        else:
            put(link, number, LARGE_BLOCKS if phase == "large puts" else SMALL_BLOCKS)


@contextlib.contextmanager
def working(path: Path, phase: str | None, first: int) -> Iterator[None]:
    """Have another process work the store beside the block."""
    if phase is None:
        yield
        return
    context = multiprocessing.get_context("spawn")
    has_begun, is_over = context.Event(), context.Event()
    process = context.Process(target=work, args=(path, phase, first, has_begun, is_over), daemon=True)
    process.start()
    has_begun.wait(_WAIT_S)
    try:
        yield
    finally:
        is_over.set()
        process.join(_WAIT_S)


def waits(client: KVStore, chain: PrefixChain, seconds: float) -> list[float]:
    """Match at fixed instants; returns for each how much later than wanted its answer came."""
    found: list[float] = []
    wanted_s = time.monotonic()
    until_s = wanted_s + seconds
    while wanted_s < until_s:
        wanted_s += INTERVAL_S
        time.sleep(max(0.0, wanted_s - time.monotonic()))
        client.match(chain)
        late_s = time.monotonic() - wanted_s
        found.append(late_s)
        # What would have been asked meanwhile waited too.
        found += [late_s - INTERVAL_S * missed for missed in range(1, int(late_s / INTERVAL_S) + 1)]
        wanted_s += INTERVAL_S * int(late_s / INTERVAL_S)
    return found


def figures(found: list[float]) -> dict[str, float]:
    """Return what a phase comes to, in milliseconds."""
    return {
        "p50_ms": statistics.median(found) * 1e3,
        "p99_ms": float(np.percentile(found, 99)) * 1e3,
        "max_ms": max(found) * 1e3,
    }


def measure(path: Path, phases: list[str], seconds: float, rounds: int) -> list[dict[str, object]]:
    """Measure each phase between two times alone; medians over the rounds, and the longest wait of all."""
    taken: dict[str | None, list[dict[str, float]]] = {}
    numbers = itertools.count(1_000_000, 1_000_000)
    with KVStore.connect(path, timeouts=PATIENT) as client:
        client.open_namespace(SPACE)
        chain = new_chain(0, 8)
        for _ in range(rounds):
            for phase in (None, *phases):
                with working(path, phase, next(numbers)):
                    taken.setdefault(phase, []).append(figures(waits(client, chain, seconds)))
    return [
        {
            "beside": phase or "alone",
            "p50_ms": round(statistics.median(at["p50_ms"] for at in some), 3),
            "p99_ms": round(statistics.median(at["p99_ms"] for at in some), 3),
            "max_ms": round(max(at["max_ms"] for at in some), 3),
        }
        for phase, some in taken.items()
    ]


def main() -> None:
    """Run everything and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=60_000, help="in the full store")
    parser.add_argument("--seconds", type=float, default=4.0, help="of each measurement")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=PHASES, action="append")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        settings = StoreSettings(dram_bytes=arguments.blocks * SPACE.layout.block_bytes)
        with StoreProcess(Path(name), settings) as store:
            link = open_link(store.socket_path)
            for number in range(arguments.blocks // 1000 + 1):
                put(link, number, 1000)
            link.close()
            phases = arguments.only or list(PHASES)
            rows = measure(store.socket_path, phases, arguments.seconds, arguments.rounds)
    for row in rows:
        print("".join(f"{value!s:>12s}" for value in row.values()), file=sys.stderr)
    print(json.dumps({"blocks": arguments.blocks, "results": rows}))


if __name__ == "__main__":
    main()
