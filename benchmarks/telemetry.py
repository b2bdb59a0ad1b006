"""What metrics and events cost: stores that tell nothing, and one that is scraped and publishes.

Three stores take turns: ``silent`` and ``control`` tell nothing, ``telling`` publishes its events to a
process that reads them, and is scraped. There are two cases:

full  a tenth of a second of put of new blocks, which evict old ones; then the last of them are fetched
room  as data_plane.py does: up to 128 MiB of new blocks are put into a store with room, and fetched; then
      they are dropped, which is timed apart

Between its turns a store is stopped (SIGSTOP), so that what it does by the clock counts as if it worked all
the time. The order within each round is drawn. Printed are medians over all rounds, and ratios to ``silent``
with intervals of 95 % (bootstrap over rounds): of the wall time of each call, and of the CPU time of server
and client together, over all that a round does. The ratio of ``control`` is what the machine can tell apart.

The scrapes come every 45 seconds, for once per 15 seconds of work, as the chart has Prometheus do. What one
costs the server is measured apart, in the end.
"""

import argparse
import contextlib
import itertools
import json
import random
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import zmq

from kvstore import KVLayout, KVStore, Namespace, PrefixChain
from kvstore.client_state import Timeouts
from kvstore.drill.redis_server import free_port
from kvstore.drill.store_process import StoreProcess, StoreSettings, guarded

MIB = 1 << 20
PATIENT = Timeouts(match_s=30, fetch_s=30, put_s=30, control_s=30)
SIDES = ("silent", "control", "telling")
CASES = ("full", "room")
_SCRAPE_S = 45.0
_SCRAPES = 20
_WARM_ROUNDS = 6
_TURN_S = 0.1
_STEP_BYTES = 64 * MIB
_DRAM_BYTES = {"full": 256 * MIB, "room": 512 * MIB}
_ROOM_BYTES = 128 * MIB
"""What a turn puts at most where nothing is to leave for it: what a round of data_plane.py puts."""

_RESAMPLES = 2000


def cpu_s(pid: int) -> float:
    """Return the CPU seconds that all threads of a process have used; schedstat counts nanoseconds."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text(encoding="ascii").split()[0]) for task in tasks) / 1e9


def keep_reading(endpoint: str, metrics_url: str) -> None:
    """Read every event, and now and then the metrics, until the process is ended."""
    sock = zmq.Context().socket(zmq.SUB)
    sock.connect(endpoint)
    sock.setsockopt(zmq.SUBSCRIBE, b"")
    next_s = 0.0
    while True:
        if sock.poll(100):
            sock.recv_multipart()
        if time.monotonic() >= next_s:
            next_s = time.monotonic() + _SCRAPE_S
            with urllib.request.urlopen(metrics_url, timeout=30) as answer:
                answer.read()


@dataclass(frozen=True, slots=True)
class Shape:
    """What is measured at a time: a case, and how many blocks of what size a call has."""

    case: str
    block_bytes: int
    batch: int

    @property
    def call_bytes(self) -> int:
        """Payload of a call."""
        return self.block_bytes * self.batch


class Side:
    """One store and a client of it."""

    def __init__(self, folder: Path, space: Namespace, *, dram_bytes: int, is_telling: bool) -> None:
        folder.mkdir()
        port, endpoint = free_port(), f"tcp://127.0.0.1:{free_port()}"
        self._metrics_url = f"http://127.0.0.1:{port}/metrics"
        settings = StoreSettings(dram_bytes=dram_bytes, policy="lru", http_port=port if is_telling else 0)
        self._store = StoreProcess(folder, settings)
        self._store.start(more=("--events", endpoint) if is_telling else ())
        self._client = KVStore.connect(self._store.socket_path, timeouts=PATIENT)
        self._client.open_namespace(space)
        self._reader: subprocess.Popen[bytes] | None = None
        if is_telling:
            words = [sys.executable, __file__, "--read", endpoint, self._metrics_url]
            self._reader = subprocess.Popen(guarded(words))

        self._store.pause()

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """Let the server run inside the block."""
        self._store.resume()
        try:
            yield
        finally:
            self._store.pause()

    def close(self) -> None:
        """End it."""
        if self._reader is not None:
            self._reader.kill()
            self._reader.wait()
        self._client.close()
        self._store.kill()

    def server_cpu_s(self) -> float:
        """Return the CPU seconds of the server."""
        return cpu_s(self._store.process.pid)

    def scrape_cpu_s(self) -> float:
        """Return the CPU seconds of the server for one scrape."""
        before_s = self.server_cpu_s()
        for _ in range(_SCRAPES):
            with urllib.request.urlopen(self._metrics_url, timeout=30) as answer:
                answer.read()
        return (self.server_cpu_s() - before_s) / _SCRAPES

    def put(self, chains: list[PrefixChain], payload: np.ndarray) -> None:
        """Store new blocks."""
        for chain in chains:
            stored = self._client.put(chain, payload).stored
            assert stored == len(chain), f"{stored} of {len(chain)} stored"

    def fetch(self, chains: list[PrefixChain], into: np.ndarray) -> None:
        """Fetch them again."""
        for chain in chains:
            blocks = self._client.fetch_into(chain, into).blocks
            assert blocks == len(chain), f"{blocks} of {len(chain)} there"

    def drop(self, chains: list[PrefixChain]) -> None:
        """Have them forgotten."""
        for chain in chains:
            dropped = self._client.drop(chain)
            assert dropped == len(chain), f"{dropped} of {len(chain)} dropped"


@dataclass(frozen=True, slots=True)
class Turn:
    """The work of a turn: chains to put, how many of the last are fetched, and how often."""

    put_chains: int
    fetch_chains: int
    fetches: int

    def lasting(self, put_s: float, fetch_s: float, *, max_chains: int | None) -> "Turn":
        """Return a turn of the length wanted, by the seconds that this one takes."""
        put_chains = self.put_chains * max(1, round(_TURN_S / put_s))
        if max_chains is not None:
            put_chains = max(self.fetch_chains, min(put_chains, max_chains))
        return Turn(put_chains, self.fetch_chains, max(1, round(_TURN_S / fetch_s)))


Samples = dict[tuple[str, str], list[float]]
"""Seconds of each round, by what (put, fetch_into, drop, cpu) and side."""


def measure(shape: Shape, *, seconds: float, seed: int) -> Samples:
    """Measure one shape for so long."""
    space = Namespace("telemetry", KVLayout.opaque(block_bytes=shape.block_bytes, block_tokens=16))
    payload = np.random.default_rng(1).integers(0, 256, shape.call_bytes, np.uint8)
    into = np.empty_like(payload)
    step = max(1, _STEP_BYTES // shape.call_bytes)
    max_chains = _ROOM_BYTES // shape.call_bytes if shape.case == "room" else None
    turn = Turn(step, step, 1)
    draw, samples = random.Random(seed), defaultdict[tuple[str, str], list[float]](list)
    with tempfile.TemporaryDirectory() as name:
        sides = {
            side: Side(
                Path(name) / side,
                space,
                dram_bytes=_DRAM_BYTES[shape.case],
                is_telling=side == "telling",
            )
            for side in SIDES
        }
        try:
            number = num_chains = 0
            until_s = time.monotonic() + seconds
            while time.monotonic() < until_s or number < _WARM_ROUNDS + 4:
                chains = [space.chain([num_chains + at] * 16 * shape.batch) for at in range(turn.put_chains)]
                num_chains += len(chains)
                taken = _round(sides, _works(shape, turn, chains, payload, into), draw)
                number += 1
                if number == _WARM_ROUNDS:
                    turn = turn.lasting(
                        taken["put", "silent"], taken["fetch_into", "silent"], max_chains=max_chains
                    )
                if number > _WARM_ROUNDS + 1:
                    for what, value in taken.items():
                        samples[what].append(value)
            with sides["telling"].turn():
                samples["scrape", "telling"].append(sides["telling"].scrape_cpu_s())
        finally:
            for side in sides.values():
                side.close()
    return samples


Work = tuple[str, Callable[[Side], None]]
"""What a round does with each side, and what that is called."""


def _works(
    shape: Shape, turn: Turn, chains: list[PrefixChain], payload: np.ndarray, into: np.ndarray
) -> list[Work]:
    fetched = chains[-turn.fetch_chains :] * turn.fetches
    works: list[Work] = [
        ("put", lambda side: side.put(chains, payload)),
        ("fetch_into", lambda side: side.fetch(fetched, into)),
    ]
    if shape.case == "room":
        works.append(("drop", lambda side: side.drop(chains)))
    return works


def _round(sides: dict[str, Side], works: list[Work], draw: random.Random) -> dict[tuple[str, str], float]:
    taken: dict[tuple[str, str], float] = {}
    before = {name: side.server_cpu_s() for name, side in sides.items()}
    spent = dict.fromkeys(sides, 0.0)
    for what, work in works:
        for name in draw.sample(SIDES, len(SIDES)):
            with sides[name].turn():
                cpu_began_s, began_s = time.thread_time(), time.perf_counter()
                work(sides[name])
                taken[what, name] = time.perf_counter() - began_s
                spent[name] += time.thread_time() - cpu_began_s
    for name, side in sides.items():
        taken["cpu", name] = spent[name] + side.server_cpu_s() - before[name]
    return taken


@dataclass(frozen=True, slots=True)
class Row:
    """What came of one shape: medians by side, and ratios to ``silent`` with their intervals."""

    case: str
    what: str
    block_bytes: int
    batch: int
    rounds: int
    median_ms: dict[str, float]
    ratio: dict[str, float]
    interval: dict[str, tuple[float, float]]

    def __str__(self) -> str:
        ratios = [
            f"{side} {self.ratio[side]:.3f} ({low:.3f} to {high:.3f})"
            for side, (low, high) in self.interval.items()
        ]
        return (
            f"{self.case} {self.what:11}{self.block_bytes:>8} B x{self.batch:<3}"
            f" silent {self.median_ms['silent']:.2f} ms, {self.rounds} rounds; ratios: {', '.join(ratios)}"
        )


def row(what: str, shape: Shape, samples: Samples) -> Row:
    """Compare the sides: medians of wall time, sums of CPU time."""
    values = {side: np.array(samples[what, side]) for side in SIDES}
    rounds = len(values["silent"])
    picks = np.random.default_rng(2).integers(0, rounds, (_RESAMPLES, rounds))

    def middle(of: np.ndarray) -> np.ndarray:
        return np.asarray(of.sum(axis=-1) if what == "cpu" else np.median(of, axis=-1))

    ratio, interval = {}, {}
    for side in SIDES[1:]:
        ratio[side] = round(float(middle(values[side]) / middle(values["silent"])), 4)
        drawn = middle(values[side][picks]) / middle(values["silent"][picks])
        low, high = np.percentile(drawn, (2.5, 97.5))
        interval[side] = (round(float(low), 4), round(float(high), 4))
    median_ms = {side: round(float(np.median(values[side])) * 1000, 3) for side in SIDES}
    return Row(shape.case, what, shape.block_bytes, shape.batch, rounds, median_ms, ratio, interval)


def main() -> None:
    """Print a table, or with ``--json`` one object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--block-bytes", type=int, nargs="+", default=[64 << 10, 512 << 10, 2 * MIB])
    parser.add_argument("--batch", type=int, nargs="+", default=[16], help="blocks of a call")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=CASES)
    parser.add_argument("--seconds", type=float, default=50.0, help="time for each size, batch and case")
    parser.add_argument("--seed", type=int, default=1, help="of the order of turns")
    parser.add_argument("--read", nargs=2, metavar=("ENDPOINT", "URL"), help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if args.read:
        keep_reading(*args.read)
    rows: list[Row] = []
    scrapes_s: list[float] = []
    for shape in itertools.starmap(Shape, itertools.product(args.cases, args.block_bytes, args.batch)):
        samples = measure(shape, seconds=args.seconds, seed=args.seed)
        scrapes_s += samples["scrape", "telling"]
        measured = [what for what in ("put", "fetch_into", "drop", "cpu") if (what, "silent") in samples]
        rows += [row(what, shape, samples) for what in measured]
    if args.json:
        print(json.dumps({"results": [asdict(one) for one in rows], "scrapes_s": scrapes_s}))
        return
    for one in rows:
        print(one)
    print(f"one scrape: {1000 * max(scrapes_s):.1f} ms of the server's CPU time")


if __name__ == "__main__":
    main()
