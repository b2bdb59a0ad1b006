"""What metrics and events cost: two stores, one that tells nothing, one that is scraped and publishes.

The second store is scraped every second and publishes its events to a subscriber that reads them. Put and
fetch_into of the same blocks alternate between the two, in changing order. Printed are medians of each, and
the median over rounds of the ratio telling to silent: of wall time, and of CPU time of client and server
together, which a busy machine disturbs less.
"""

import argparse
import json
import statistics
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import numpy as np
import zmq

from kvstore import KVLayout, KVStore, Namespace, PrefixChain
from kvstore.client_state import Timeouts
from kvstore.drill.redis_server import free_port
from kvstore.drill.store_process import StoreProcess, StoreSettings

MIB = 1 << 20
PATIENT = Timeouts(match_s=30, fetch_s=30, put_s=30, control_s=30)
_TICKS_PER_S = 100


def cpu_s(pid: int) -> float:
    """Return the CPU seconds that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rsplit(") ", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S


def keep_reading(endpoint: str, metrics_url: str, is_over: threading.Event) -> None:
    """Read every event, and the metrics once a second."""
    context = zmq.Context()
    sock = context.socket(zmq.SUB)
    sock.connect(endpoint)
    sock.setsockopt(zmq.SUBSCRIBE, b"")
    next_s = 0.0
    while not is_over.is_set():
        if sock.poll(100):
            sock.recv_multipart()
        if time.monotonic() >= next_s:
            next_s = time.monotonic() + 1.0
            with urllib.request.urlopen(metrics_url, timeout=30) as answer:
                answer.read()
    sock.close()
    context.term()


class Side:
    """One store and a client of it. ``is_telling``: scraped, and publishing."""

    def __init__(self, folder: Path, *, is_telling: bool, dram_bytes: int) -> None:
        folder.mkdir()
        port, endpoint = free_port(), f"tcp://127.0.0.1:{free_port()}"
        settings = StoreSettings(dram_bytes=dram_bytes, http_port=port if is_telling else 0)
        self.store = StoreProcess(folder, settings)
        self.store.start(more=("--events", endpoint) if is_telling else ())
        self.client = KVStore.connect(self.store.socket_path, timeouts=PATIENT)
        self._is_over = threading.Event()
        where = (endpoint, f"http://127.0.0.1:{port}/metrics", self._is_over)
        self._reader = threading.Thread(target=keep_reading, args=where) if is_telling else None
        if self._reader is not None:
            self._reader.start()

    def close(self) -> None:
        """End it."""
        self._is_over.set()
        if self._reader is not None:
            self._reader.join()
        self.client.close()
        self.store.kill()

    def timed(self, work: Callable[[], None]) -> tuple[float, float]:
        """Return wall seconds, and CPU seconds of this thread and the server, that work takes."""
        began = time.perf_counter(), time.thread_time() + cpu_s(self.store.process.pid)
        work()
        time.sleep(0.1)  # what is told afterwards counts too
        return (
            time.perf_counter() - began[0] - 0.1,
            time.thread_time() + cpu_s(self.store.process.pid) - began[1],
        )


def measure(block_bytes: int, batch: int, *, rounds: int, set_bytes: int) -> list[dict[str, object]]:
    """Measure one size of blocks."""
    space = Namespace("telemetry", KVLayout.opaque(block_bytes=block_bytes, block_tokens=16))
    num_chains = max(1, set_bytes // (block_bytes * batch))
    chains = [space.chain([number] * 16 * batch) for number in range(num_chains)]
    payload = np.random.default_rng(1).integers(0, 256, block_bytes * batch, np.uint8)
    into = np.empty_like(payload)
    found: dict[tuple[str, bool], list[tuple[float, float]]] = {}
    with tempfile.TemporaryDirectory() as name:
        sides = {
            is_telling: Side(Path(name) / str(is_telling), is_telling=is_telling, dram_bytes=2 * set_bytes)
            for is_telling in (False, True)
        }
        try:
            for side in sides.values():
                side.client.open_namespace(space)
            for number in range(rounds + 1):
                for is_telling in (False, True) if number % 2 else (True, False):
                    client = sides[is_telling].client
                    for op, work in (
                        ("put", lambda client=client: _put(client, chains, payload)),
                        ("fetch_into", lambda client=client: _fetch(client, chains, into)),
                    ):
                        taken = sides[is_telling].timed(work)
                        if number:
                            found.setdefault((op, is_telling), []).append(taken)
                    for chain in chains:
                        client.drop(chain)
        finally:
            for side in sides.values():
                side.close()
    return [_row(op, block_bytes, batch, found[op, False], found[op, True]) for op in ("put", "fetch_into")]


def _put(client: KVStore, chains: list[PrefixChain], payload: np.ndarray) -> None:
    for chain in chains:
        client.put(chain, payload)


def _fetch(client: KVStore, chains: list[PrefixChain], into: np.ndarray) -> None:
    for chain in chains:
        client.fetch_into(chain, into)


def _row(
    op: str,
    block_bytes: int,
    batch: int,
    silent: list[tuple[float, float]],
    telling: list[tuple[float, float]],
) -> dict[str, object]:
    def ratio(place: int) -> float:
        pairs = zip(silent, telling, strict=True)
        return round(statistics.median(told[place] / max(quiet[place], 1e-9) for quiet, told in pairs), 3)

    return {
        "op": op,
        "block_bytes": block_bytes,
        "batch": batch,
        "silent_s": round(statistics.median(wall for wall, _ in silent), 4),
        "telling_s": round(statistics.median(wall for wall, _ in telling), 4),
        "wall_ratio": ratio(0),
        "cpu_ratio": ratio(1),
        "cpu_sum_ratio": round(sum(cpu for _, cpu in telling) / sum(cpu for _, cpu in silent), 3),
    }


def main() -> None:
    """Print a table, or with ``--json`` one object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--block-bytes", type=int, nargs="+", default=[64 << 10, 512 << 10, 2 * MIB])
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--set-bytes", type=int, default=256 * MIB, help="payload of one round")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    rows = [
        row
        for size in args.block_bytes
        for row in measure(size, args.batch, rounds=args.rounds, set_bytes=args.set_bytes)
    ]
    if args.json:
        print(json.dumps({"results": rows}))
        return
    for row in rows:
        print(
            f"{row['op']:11}{row['block_bytes']:>8} B x{row['batch']}  silent {row['silent_s']:.3f} s"
            f"  telling {row['telling_s']:.3f} s  ratio {row['wall_ratio']:.3f} of wall time,"
            f" {row['cpu_ratio']:.3f} of CPU time (all rounds {row['cpu_sum_ratio']:.3f})"
        )


if __name__ == "__main__":
    main()
