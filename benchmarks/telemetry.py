"""What events and metrics cost: a store that publishes its events by turns, and is scraped in the end.

The work of a slice is the same for each:

room  as data_plane.py does: 128 MiB of new blocks are put into a store with room, and fetched; then they are
      dropped, so that a change is told for each block that comes and for each that goes
full  128 MiB of new blocks are put into a full store, where they evict old ones, and the last are fetched

It is measured in two ways. ``share`` adds up what telling takes, timed where it is done: noting changes,
telling them in the event loop's thread, and all of ZeroMQ's own threads. Printed is the CPU time of that by
the CPU time that server and client have used (``cpu``), and the time that it keeps the event loop by the
wall time of all calls (``wall``): they wait for no more than that, as part of it falls into their copies. It
leaves out what telling does to others, such as what it takes of the core's caches, and that a subscriber
needs a core.

``ratio`` leaves out nothing and is less sharp: in ``telling`` slices events are published to a process that
reads them, and kept for replays; in ``control`` slices they are not, nor in the silent ones before and behind
each of those. It is one store, since two equal ones may differ by 4 %: they lie elsewhere in memory. Printed
are medians of the ratios of slices to each of their two silent neighbours: of the wall time of all puts and
of all fetches, and of the CPU time of server and client together over all that the slice does, the rest of
telling included. The ratio of ``control`` is what the machine can tell apart.

All have intervals of 95 % (bootstrap over slices). What a scrape costs is measured apart, and told as a share
of the 15 seconds from one to the next.
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
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import zmq

from kvstore import KVLayout, KVStore, Namespace, PrefixChain
from kvstore.client_state import Timeouts
from kvstore.drill.redis_server import free_port
from kvstore.drill.store_process import StoreSettings, guarded
from measure.switched_store import SwitchedStore, Told

MIB = 1 << 20
PATIENT = Timeouts(match_s=30, fetch_s=30, put_s=30, control_s=30)
CASES = ("room", "full")
WHATS = ("put", "fetch_into", "cpu")
SHARES = ("wall", "cpu")
_SCRAPES = 20
_SCRAPE_EVERY_S = 15.0
_SLICE_S = 0.3
_LONG_SLICE_S = 1.0
_TIMED_SHARE = 0.25
"""Of the time of a shape, what its shares are measured in."""

_DRAM_BYTES = {"room": 384 * MIB, "full": 256 * MIB}
_PASS_BYTES = 128 * MIB
"""What is put at a time: what a round of data_plane.py puts."""

_FETCHED_BYTES = 64 * MIB
"""Of those, what is fetched again from a full store."""

_RESAMPLES = 2000


def cpu_s(pid: int, *, named: str = "") -> float:
    """Return the CPU seconds that threads of a process have used, of all or of those so named."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    used_ns = [
        int((task / "schedstat").read_text(encoding="ascii").split()[0])
        for task in tasks
        if not named or (task / "comm").read_text(encoding="utf-8").startswith(named)
    ]
    return sum(used_ns) / 1e9


def keep_reading(endpoint: str) -> None:
    """Read every event, until the process is ended."""
    sock = zmq.Context().socket(zmq.SUB)
    sock.connect(endpoint)
    sock.setsockopt(zmq.SUBSCRIBE, b"")
    while True:
        sock.recv_multipart()


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

    @property
    def calls(self) -> int:
        """Puts of a pass."""
        return max(1, _PASS_BYTES // self.call_bytes)


@dataclass(slots=True)
class Slice:
    """Seconds that a slice took: each kind of call, all CPU time, and telling, if it is timed."""

    put: float = 0.0
    fetch_into: float = 0.0
    drop: float = 0.0
    cpu: float = 0.0
    telling: float = 0.0
    telling_cpu: float = 0.0

    @property
    def calls(self) -> float:
        """Wall time of all calls."""
        return self.put + self.fetch_into + self.drop


class Rig:
    """The store, a client of it, and the process that reads its events."""

    def __init__(self, folder: Path, shape: Shape, *, is_timed: bool) -> None:
        port, endpoint = free_port(), f"tcp://127.0.0.1:{free_port()}"
        self._shape = shape
        self._space = Namespace("telemetry", KVLayout.opaque(block_bytes=shape.block_bytes, block_tokens=16))
        self._payload = np.random.default_rng(1).integers(0, 256, shape.call_bytes, np.uint8)
        self._into = np.empty_like(self._payload)
        self._num_chains = 0
        self._metrics_url = f"http://127.0.0.1:{port}/metrics"
        settings = StoreSettings(dram_bytes=_DRAM_BYTES[shape.case], policy="lru", http_port=port)
        self._store = SwitchedStore(folder, settings, is_timed=is_timed)
        self._store.start(more=("--events", endpoint, "--events-replay", f"tcp://127.0.0.1:{free_port()}"))
        self._client = KVStore.connect(self._store.socket_path, timeouts=PATIENT)
        self._client.open_namespace(self._space)
        self._reader = subprocess.Popen(guarded([sys.executable, __file__, "--read", endpoint]))

    def close(self) -> None:
        """End it."""
        self._reader.kill()
        self._reader.wait()
        self._client.close()
        self._store.kill()

    def silent(self, passes: int) -> Slice:
        """Do the work of a slice and tell nothing; returns the seconds it took."""
        chains = self._new_chains(passes)
        before_s, taken = self._cpu_s(), Slice()
        self._work(chains, taken)
        taken.cpu = self._cpu_s() - before_s
        return taken

    def telling(self, passes: int) -> Slice:
        """Do the work of a slice and tell all that changes; returns the seconds it took."""
        chains = self._new_chains(passes)
        before, threads_before_s = self._store.begin_to_tell(), self._zmq_cpu_s()
        before_s, taken = self._cpu_s(), Slice()
        self._work(chains, taken)
        after = self._store.end_to_tell()
        taken.cpu = self._cpu_s() - before_s
        self._check(before, after, num_put=sum(len(chain) for put in chains for chain in put))
        noting_s = after.noting_s - before.noting_s
        taken.telling = noting_s + after.telling_s - before.telling_s
        taken.telling_cpu = noting_s + after.telling_cpu_s - before.telling_cpu_s
        taken.telling_cpu += self._zmq_cpu_s() - threads_before_s
        return taken

    def scrape_cpu_s(self) -> float:
        """Return the CPU seconds of the server for one scrape."""
        before_s = cpu_s(self._store.process.pid)
        for _ in range(_SCRAPES):
            with urllib.request.urlopen(self._metrics_url, timeout=30) as answer:
                answer.read()
        return (cpu_s(self._store.process.pid) - before_s) / _SCRAPES

    def _check(self, before: Told, after: Told, *, num_put: int) -> None:
        told = after.blocks - before.blocks
        assert after.lost_blocks == 0, f"{after.lost_blocks} changes were lost"
        assert told == 2 * num_put or self._shape.case == "full", (
            f"{num_put} blocks came and went, {told} told"
        )
        assert told > num_put, f"{num_put} blocks came into a full store, {told} changes told"

    def _cpu_s(self) -> float:
        return cpu_s(self._store.process.pid) + time.process_time()

    def _zmq_cpu_s(self) -> float:
        return cpu_s(self._store.process.pid, named="ZMQbg")

    def _new_chains(self, passes: int) -> list[list[PrefixChain]]:
        return [self._new_pass() for _ in range(passes)]

    def _new_pass(self) -> list[PrefixChain]:
        start, num_tokens = self._num_chains, 16 * self._shape.batch
        self._num_chains += self._shape.calls
        return [self._space.chain([number] * num_tokens) for number in range(start, self._num_chains)]

    def _work(self, chains: list[list[PrefixChain]], taken: Slice) -> None:
        for put in chains:
            began_s = time.perf_counter()
            self._put(put)
            put_s = time.perf_counter()
            if self._shape.case == "room":
                self._fetch(put)
            else:
                self._fetch(put[-max(1, _FETCHED_BYTES // self._shape.call_bytes) :])
            fetched_s = time.perf_counter()
            if self._shape.case == "room":
                self._drop(put)
            taken.put += put_s - began_s
            taken.fetch_into += fetched_s - put_s
            taken.drop += time.perf_counter() - fetched_s

    def _put(self, chains: list[PrefixChain]) -> None:
        for chain in chains:
            stored = self._client.put(chain, self._payload).stored
            assert stored == len(chain), f"{stored} of {len(chain)} stored"

    def _fetch(self, chains: list[PrefixChain]) -> None:
        for chain in chains:
            blocks = self._client.fetch_into(chain, self._into).blocks
            assert blocks == len(chain), f"{blocks} of {len(chain)} there"

    def _drop(self, chains: list[PrefixChain]) -> None:
        for chain in chains:
            dropped = self._client.drop(chain)
            assert dropped == len(chain), f"{dropped} of {len(chain)} dropped"


@contextlib.contextmanager
def rig(shape: Shape, *, is_timed: bool, slice_s: float) -> Iterator[tuple[Rig, int]]:
    """Start a store that is warm; yields it, and how many passes a slice of that length has."""
    with tempfile.TemporaryDirectory() as name:
        running = Rig(Path(name), shape, is_timed=is_timed)
        try:
            running.silent(2)
            for _ in range(2):
                warm = running.telling(2)
            yield running, max(1, round(2 * slice_s / warm.calls))
        finally:
            running.close()


Ratios = dict[tuple[str, str], list[tuple[float, ...]]]
"""Of each slice, by what is told (put, fetch_into, cpu, wall) and of which (telling, control, share)."""


@dataclass(slots=True)
class Measured:
    """What came of one shape, slice by slice."""

    ratios: Ratios = field(default_factory=lambda: defaultdict(list))
    scrape_cpu_s: float = 0.0


def measure(shape: Shape, *, seconds: float, seed: int) -> Measured:
    """Measure one shape for so long."""
    measured, draw = Measured(), random.Random(seed)
    with rig(shape, is_timed=False, slice_s=_SLICE_S) as (store, passes):
        until_s = time.monotonic() + (1 - _TIMED_SHARE) * seconds
        turns: dict[str, Callable[[int], Slice]] = {"telling": store.telling, "control": store.silent}
        before = store.silent(passes)
        while time.monotonic() < until_s:
            for side in draw.sample(tuple(turns), 2):
                taken, behind = turns[side](passes), store.silent(passes)
                for what in WHATS:
                    own_s, beside = getattr(taken, what), (getattr(before, what), getattr(behind, what))
                    measured.ratios[what, side].append(tuple(own_s / silent_s for silent_s in beside))
                before = behind
        measured.scrape_cpu_s = store.scrape_cpu_s()
    with rig(shape, is_timed=True, slice_s=_LONG_SLICE_S) as (store, passes):
        until_s = time.monotonic() + _TIMED_SHARE * seconds
        while time.monotonic() < until_s:
            taken = store.telling(passes)
            measured.ratios["wall", "share"].append((taken.telling / taken.calls,))
            measured.ratios["cpu", "share"].append((taken.telling_cpu / taken.cpu,))
    return measured


@dataclass(frozen=True, slots=True)
class Row:
    """One figure of one shape: its median over slices, the interval of that, and the control's."""

    case: str
    block_bytes: int
    batch: int
    kind: str
    what: str
    slices: int
    median: float
    interval: tuple[float, float]
    control: float | None = None
    control_interval: tuple[float, float] | None = None

    def __str__(self) -> str:
        shape = f"{self.case} {self.block_bytes:>8} B x{self.batch:<3} {self.kind} {self.what:11}"
        figure = "{:.2%} ({:.2%} to {:.2%})" if self.kind == "share" else "{:.4f} ({:.4f} to {:.4f})"
        text = f"{shape}{figure.format(self.median, *self.interval)}"
        if self.control is not None and self.control_interval is not None:
            text += f", control {figure.format(self.control, *self.control_interval)}"
        return f"{text}, {self.slices} slices"


def middle(ratios: list[tuple[float, ...]]) -> tuple[float, tuple[float, float]]:
    """Return the median, and its interval of 95 %: slices are drawn, with all ratios of each."""
    values = np.array(ratios)
    picks = np.random.default_rng(2).integers(0, len(values), (_RESAMPLES, len(values)))
    low, high = np.percentile(np.median(values[picks], axis=(1, 2)), (2.5, 97.5))
    return round(float(np.median(values)), 5), (round(float(low), 5), round(float(high), 5))


def rows(shape: Shape, ratios: Ratios) -> list[Row]:
    """Return the figures of one shape."""
    about = (shape.case, shape.block_bytes, shape.batch)
    told = [
        Row(*about, "share", what, len(ratios[what, "share"]), *middle(ratios[what, "share"]))
        for what in SHARES
    ]
    for what in WHATS:
        telling = ratios[what, "telling"]
        told.append(
            Row(*about, "ratio", what, len(telling), *middle(telling), *middle(ratios[what, "control"]))
        )
    return told


def main() -> None:
    """Print a table, or with ``--json`` one object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--block-bytes", type=int, nargs="+", default=[512 << 10, 2 * MIB])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 64], help="blocks of a call")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=CASES)
    parser.add_argument("--seconds", type=float, default=100.0, help="time for each size, batch and case")
    parser.add_argument("--seed", type=int, default=1, help="of the order of slices")
    parser.add_argument("--read", metavar="ENDPOINT", help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if args.read:
        keep_reading(args.read)
    told: list[Row] = []
    scrapes_s: list[float] = []
    for shape in itertools.starmap(Shape, itertools.product(args.cases, args.block_bytes, args.batch)):
        measured = measure(shape, seconds=args.seconds, seed=args.seed)
        scrapes_s.append(measured.scrape_cpu_s)
        told += rows(shape, measured.ratios)
    if args.json:
        print(json.dumps({"results": [asdict(row) for row in told], "scrapes_s": scrapes_s}))
        return
    for row in told:
        print(row)
    scrape_s = max(scrapes_s)
    print(f"one scrape: {1000 * scrape_s:.1f} ms of CPU time, {scrape_s / _SCRAPE_EVERY_S:.2%} of a core")


if __name__ == "__main__":
    main()
