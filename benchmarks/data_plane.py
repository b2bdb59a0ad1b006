"""Speed of the same-host data plane, client and server in processes of their own, beside memcpy.

Own rows (peer "kvstore"): put, fetch_into, view, and fetch_into with the checks off (only to know their
price), one block and a batch at a time; exists of 1000 keys, match of 6250 keys. Beside them in the same run:
``memcpy`` (numpy.copyto between two private buffers of the same shape), ``bare`` (a round trip over a Unix
socket between two Python processes, and the copy), and a chain of 100 000 tokens hashed. ``--peers`` adds
other stores, run in turn.

ratio_to_memcpy compares medians of the same run; cpu_s_per_gb is of client and server. Rows are taken in
rounds, one after the other, so that what disturbs the machine disturbs all.
"""

import argparse
import contextlib
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from bare_socket import BareSocket
from kvstore import KVLayout, Namespace
from peers import ADAPTERS, Bytes, Names, Peer, obstacle, open_peer
from peers.own_store import OwnStore

BLOCK_BYTES = [64 << 10, 512 << 10, 2 << 20, 8 << 20]
BATCH = 64
SET_BYTES = 128 << 20
"""Payload that one round moves: far more than the caches hold."""

MAX_BATCH_BYTES = 256 << 20
MAX_GROUPS = 512
CHAIN_TOKENS = 100_000
MATCH_KEYS = 6_250
EXISTS_KEYS = 1_000
SMALL_BLOCK_BYTES = 128

Row = dict[str, object]


@dataclass
class Figures:
    """Seconds of each call, and the CPU seconds of client and server over all of them."""

    peer: str
    op: str
    block_bytes: int
    batch: int
    seconds: list[float] = field(default_factory=list)
    cpu_s: float = 0.0

    @property
    def median_s(self) -> float:
        """The middle call."""
        return statistics.median(self.seconds)

    def row(self, memcpy: "Figures | None") -> Row:
        """Sum up."""
        num_bytes = self.block_bytes * self.batch
        ordered = sorted(self.seconds)
        return {
            "peer": self.peer,
            "op": self.op,
            "block_bytes": self.block_bytes,
            "batch": self.batch,
            "gb_per_s": round(num_bytes / self.median_s / 1e9, 3) if num_bytes and memcpy else None,
            "ratio_to_memcpy": round(memcpy.median_s / self.median_s, 3) if memcpy else None,
            "p50_us": round(1e6 * self.median_s, 1),
            "p99_us": round(1e6 * ordered[int(0.99 * len(ordered))], 1),
            "cpu_s_per_gb": round(self.cpu_s / (num_bytes * len(ordered)) * 1e9, 3)
            if num_bytes and memcpy
            else None,
        }


class Bench:
    """Collects figures by peer, op and shape."""

    def __init__(self) -> None:
        self._figures: dict[tuple[str, str, int, int], Figures] = {}
        self.is_warm = False

    def figures(self, peer: str, op: str, block_bytes: int, batch: int) -> Figures:
        """Return the figures of a row, which may be empty."""
        key = (peer, op, block_bytes, batch)
        return self._figures.setdefault(key, Figures(*key))

    def run(self, at: Figures, calls: Sequence[Callable[[], None]], pids: Sequence[int] = ()) -> None:
        """Time calls one after the other; those made while warming up do not count."""
        cpu_s, seconds, clock = cpu_seconds(pids), [], time.perf_counter
        for call in calls:
            started_s = clock()
            call()
            seconds.append(clock() - started_s)
        if self.is_warm:
            at.seconds += seconds
            at.cpu_s += cpu_seconds(pids) - cpu_s

    def rows(self) -> list[Row]:
        """Sum up every row that was measured."""
        found: list[Row] = []
        for at in self._figures.values():
            if at.seconds:
                memcpy = self._figures.get(("memcpy", "copy", at.block_bytes, at.batch))
                found.append(at.row(memcpy if memcpy and memcpy.seconds else None))
        return found


def cpu_seconds(pids: Sequence[int]) -> float:
    """CPU seconds that this process and the others have taken so far, all threads."""
    # The clock of another process: see clock_getcpuclockid in glibc.
    return time.process_time() + sum(time.clock_gettime((~pid << 3) | 2) for pid in pids)


@dataclass
class Shape:
    """Blocks of one size in groups of one request each, with payloads and places to fetch them into."""

    block_bytes: int
    batch: int
    groups: int
    keys: list[bytes]
    sources: list[list[Bytes]]
    targets: list[list[Bytes]]

    @classmethod
    def make(cls, block_bytes: int, batch: int) -> "Shape":
        """Make random payloads; every group has memory of its own."""
        groups = max(2, min(MAX_GROUPS, SET_BYTES // (block_bytes * batch)))
        count = groups * batch
        source = np.random.default_rng(block_bytes).integers(0, 256, (count, block_bytes), np.uint8)
        target = np.zeros_like(source)
        cut = [slice(start, start + batch) for start in range(0, count, batch)]
        keys = [os.urandom(32) for _ in range(count)]
        return cls(
            block_bytes, batch, groups, keys, [[*source[at]] for at in cut], [[*target[at]] for at in cut]
        )

    def names(self, peer: Peer) -> list[Names]:
        """The keys of each group, as the peer wants them."""
        return [peer.names(self.keys[at : at + self.batch]) for at in range(0, len(self.keys), self.batch)]

    def check(self) -> None:
        """Fail unless every payload arrived."""
        for source, target in zip(self.sources, self.targets, strict=True):
            for sent, got in zip(source, target, strict=True):
                assert np.array_equal(sent, got), "a fetched block has other bytes"
                got[:64] = 0


def measure_shape(bench: Bench, shape: Shape, peers: dict[str, Peer], bare: BareSocket, rounds: int) -> None:
    """Put and fetch blocks of one shape through every peer, in turn."""
    block_bytes, batch = shape.block_bytes, shape.batch
    named = {name: shape.names(peer) for name, peer in peers.items()}
    for number in range(rounds + 1):
        bench.is_warm = number > 0
        memcpy = [_each(copy_all, *pair) for pair in zip(shape.targets, shape.sources, strict=True)]
        bench.run(bench.figures("memcpy", "copy", block_bytes, batch), memcpy)
        shape.check()
        if batch == 1:
            bench.run(
                bench.figures("bare", "round_trip_and_copy", block_bytes, 1),
                [_each(_bare_fetch, bare, *pair) for pair in zip(shape.targets, shape.sources, strict=True)],
                [bare.pid],
            )
        turn = list(peers)[number % len(peers) :] + list(peers)[: number % len(peers)]
        for name in turn:
            measure_peer(bench, shape, name, peers[name], named[name], is_checked=number == 0)


def measure_peer(
    bench: Bench, shape: Shape, name: str, peer: Peer, names: Sequence[Names], *, is_checked: bool
) -> None:
    """One round of one peer: put everything, fetch everything, remove everything."""

    def figures(op: str) -> Figures:
        return bench.figures(name, op, shape.block_bytes, shape.batch)

    puts = [_each(peer.put, *pair) for pair in zip(names, shape.sources, strict=True)]
    bench.run(figures("put"), puts, peer.server_pids)
    fetches = [_each(peer.fetch, *pair) for pair in zip(names, shape.targets, strict=True)]
    bench.run(figures("fetch_into"), fetches, peer.server_pids)
    if is_checked:
        shape.check()
    if isinstance(peer, OwnStore):
        unchecked = [_each(peer.fetch_unchecked, *pair) for pair in zip(names, shape.targets, strict=True)]
        bench.run(figures("fetch_into_unchecked"), unchecked, peer.server_pids)
        bench.run(figures("view"), [_each(peer.view, at) for at in names], peer.server_pids)
    for at in names:
        peer.remove(at)


def measure_lookups(bench: Bench, peers: dict[str, Peer], rounds: int) -> None:
    """Exists and match of many keys that are stored, small blocks."""
    keys = [os.urandom(32) for _ in range(MATCH_KEYS)]
    payloads = [*np.zeros((MATCH_KEYS, SMALL_BLOCK_BYTES), np.uint8)]
    calls: list[tuple[Figures, Callable[[], None], Peer]] = []
    for name, peer in peers.items():
        step = MATCH_KEYS if isinstance(peer, OwnStore) else 250
        for at in range(0, MATCH_KEYS, step):
            peer.put(peer.names(keys[at : at + step]), payloads[at : at + step])
        for op, count in (("match", MATCH_KEYS), ("exists", EXISTS_KEYS)):
            ask = getattr(peer, op, None)
            if ask is not None:
                at = bench.figures(name, f"{op}_{count}", SMALL_BLOCK_BYTES, count)
                calls.append((at, _each(ask, peer.names(keys[:count])), peer))
    for number in range(rounds + 1):
        bench.is_warm = number > 0
        for at, call, peer in calls:
            bench.run(at, [call] * 20, peer.server_pids)


def measure_chain(bench: Bench, rounds: int) -> None:
    """Hash a long sequence of tokens into the keys of its blocks."""
    space = Namespace("chain", KVLayout.opaque(block_bytes=4096, block_tokens=16))
    tokens = np.random.default_rng(1).integers(0, 150_000, CHAIN_TOKENS).astype(np.uint32)
    listed = [int(token) for token in tokens]
    for number in range(rounds + 1):
        bench.is_warm = number > 0
        for op, given in (("chain_of_array", tokens), ("chain_of_list", listed)):
            at = bench.figures("kvstore", op, 0, CHAIN_TOKENS // 16)
            bench.run(at, [_each(space.chain, given)] * 3)


def copy_all(targets: Sequence[Bytes], sources: Sequence[Bytes]) -> None:
    """The plain copy."""
    for target, source in zip(targets, sources, strict=True):
        np.copyto(target, source)


def _bare_fetch(bare: BareSocket, targets: Sequence[Bytes], sources: Sequence[Bytes]) -> None:
    bare.round_trip(160, 120)
    np.copyto(targets[0], sources[0])


def _each(call, *args):  # type: ignore[no-untyped-def]
    return lambda: call(*args)


@contextlib.contextmanager
def opened(names: Sequence[str], block_bytes: int, num_blocks: int) -> Iterator[dict[str, Peer]]:
    """Start the own store and the peers, with room for so many blocks."""
    with contextlib.ExitStack() as stack:
        peers: dict[str, Peer] = {}
        for name in ("kvstore", *names):
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kv-bench-")))
            is_own = name == "kvstore"
            peer = (
                OwnStore(folder, block_bytes, num_blocks)
                if is_own
                else open_peer(name, folder, block_bytes, num_blocks)
            )
            peers[name] = peer
            stack.callback(peer.close)
        yield peers


def measure(args: argparse.Namespace, names: Sequence[str]) -> list[Row]:
    """Measure every row."""
    bench = Bench()
    bare = BareSocket()  # forked before any thread is started
    try:
        for block_bytes in args.block_bytes:
            batches = sorted({1, min(BATCH, MAX_BATCH_BYTES // block_bytes)})
            for batch in batches:
                shape = Shape.make(block_bytes, batch)
                with opened(names, block_bytes, len(shape.keys)) as peers:
                    measure_shape(bench, shape, peers, bare, args.rounds)
        with opened(names, SMALL_BLOCK_BYTES, MATCH_KEYS) as peers:
            measure_lookups(bench, peers, args.rounds)
        measure_chain(bench, args.rounds)
    finally:
        bare.close()
    return bench.rows()


def show(rows: Sequence[Row]) -> None:
    """Print a table."""
    for row in rows:
        speed = "      " if row["gb_per_s"] is None else f"{row['gb_per_s']:6.2f}"
        ratio = "     " if row["ratio_to_memcpy"] is None else f"{row['ratio_to_memcpy']:5.2f}"
        cpu = "     " if row["cpu_s_per_gb"] is None else f"{row['cpu_s_per_gb']:5.2f}"
        print(
            f"{row['peer']:10} {row['op']:22}{row['block_bytes']:>9} B x{row['batch']:<5}{speed} GB/s "
            f" {ratio} of memcpy  p50 {row['p50_us']:>9} us  p99 {row['p99_us']:>9} us  {cpu} CPU s/GB"
        )


def main() -> None:
    """Print a table, or with ``--json`` one object on the last line."""
    peers_help = "; ".join(f"{name}: {adapter.what}" for name, adapter in ADAPTERS.items())
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--peers", default="", help=f"comma separated. {peers_help}")
    parser.add_argument("--block-bytes", type=int, nargs="+", default=BLOCK_BYTES)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    names = [name for name in args.peers.split(",") if name]
    for name in names:
        reason = obstacle(name)
        if reason:
            parser.error(f"peer {name}: {reason}")
    rows = measure(args, names)
    show(rows)
    if args.json:
        print(json.dumps({"results": rows}))


if __name__ == "__main__":
    main()
