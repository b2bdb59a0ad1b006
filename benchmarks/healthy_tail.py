"""What a healthy client notices of hostile ones: the times of its ``match``, alone and among them.

A store in a process of its own, one healthy client that matches 8 blocks and pauses for 1 ms, as engines do,
over the Unix socket or over HTTP, and another process that sends spoilt frames or spoilt HTTP requests, at a
stated rate and as fast as it can, or 500 connections that trickle headers; for comparison whole ones at the
same rate, and a process that computes and sends nothing: all of them share the machine's cores, so what one
of these costs is no fault of the server. Each is measured between two measurements alone: ``p99_ratio`` is to
their mean. ``server_cpu`` and ``hostile_cpu`` are cores in use.
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvstore import KVLayout, KVStore, Namespace, Timeouts
from kvstore.drill.store_process import StoreProcess, StoreSettings

SPACE = Namespace("healthy", KVLayout.opaque(block_bytes=4096, block_tokens=4))
PATIENT = Timeouts(match_s=30, fetch_s=30, put_s=30, control_s=30)
PAUSE_S = 0.001
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class HttpSettings(StoreSettings):
    """A store with an HTTP face on a free port."""

    def toml(self, socket_path: Path) -> str:
        """Return the configuration file."""
        return f'{super().toml(socket_path)}[http]\nlisten = "127.0.0.1:0"\n'


@dataclass(frozen=True)
class Phase:
    """What goes on beside the healthy client. ``rate`` 0: as much as goes."""

    name: str
    kind: str = ""
    rate: float = 0.0


def phases(frames_per_s: float, requests_per_s: float, num_slow: int) -> list[Phase]:
    """Return what is measured, each between two measurements alone."""
    return [
        Phase(f"{frames_per_s:g} spoilt frames/s", "frames", frames_per_s),
        Phase(f"{frames_per_s:g} whole frames/s", "whole_frames", frames_per_s),
        Phase("a process that only computes", "nothing"),
        Phase("spoilt frames, flat out", "frames"),
        Phase(f"{requests_per_s:g} spoilt HTTP requests/s", "http", requests_per_s),
        Phase(f"{requests_per_s:g} whole HTTP requests/s", "whole_http", requests_per_s),
        Phase("spoilt HTTP requests, flat out", "http"),
        Phase(f"{num_slow} slow HTTP connections", "slow", num_slow),
    ]


def cpu_s(pid: int) -> float:
    """Return the CPU seconds of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


@contextmanager
def hostile(phase: Phase, addresses: dict[str, str], seconds: float) -> Iterator[dict[str, float]]:
    """Run a hostile process beside the block; what it says of itself is in the dictionary afterwards."""
    script = Path(__file__).with_name("hostile_client.py")
    address = addresses["http" if "http" in phase.kind else "socket"]
    command = [sys.executable, str(script), phase.kind, address, str(phase.rate), str(seconds)]
    said: dict[str, float] = {}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdout.readline()
        process.stdin.write("\n")
        process.stdin.flush()
        yield said
        said.update(json.loads(process.stdout.readline()))


@contextmanager
def slow_connections(address: str, count: int) -> Iterator[Callable[[], None]]:
    """Hold connections whose headers trickle; gives a function that sends one byte on the next of them."""
    host, _, port = address.rpartition(":")
    with ExitStack() as stack:
        socks = [stack.enter_context(socket.create_connection((host, int(port)))) for _ in range(count)]
        for sock in socks:
            sock.sendall(b"GET /healthz HTTP/1.1\r\nA: ")
        turn = 0

        def trickle() -> None:
            nonlocal turn
            turn += 1
            socks[turn % count].send(b"a")

        yield trickle


def timed_matches(match: Callable[[], None], seconds: float, between: Callable[[], None]) -> list[float]:
    """Match over and over, and return what each took."""
    times: list[float] = []
    until_s = time.monotonic() + seconds
    while time.monotonic() < until_s:
        time.sleep(PAUSE_S)
        between()
        began_s = time.perf_counter()
        match()
        times.append(time.perf_counter() - began_s)
    return times


class Bench:
    """One running store and the healthy client of it."""

    def __init__(
        self, store: StoreProcess, client: KVStore, addresses: dict[str, str], seconds: float
    ) -> None:
        self._store = store
        self._addresses = addresses
        self._seconds = seconds
        space = client.open_namespace(SPACE)
        chain = space.chain(range(32))
        client.put(chain, np.zeros((8, 4096), np.uint8))
        self._match = lambda: self._check(client.match(chain).blocks)

    @staticmethod
    def _check(blocks: int) -> None:
        if blocks != 8:
            raise SystemExit(f"the healthy client matched {blocks} of 8 blocks")

    def measure(self, phase: Phase | None) -> dict[str, float]:
        """Measure alone (None), or beside what a phase says."""
        said: dict[str, float] = {}
        before_s = cpu_s(self._store.process.pid)
        if phase is None:
            times = timed_matches(self._match, self._seconds, lambda: None)
        elif phase.kind == "slow":
            with slow_connections(self._addresses["http"], int(phase.rate)) as trickle:
                times = timed_matches(self._match, self._seconds, trickle)
        else:
            with hostile(phase, self._addresses, self._seconds) as said:
                times = timed_matches(self._match, self._seconds, lambda: None)
        server = (cpu_s(self._store.process.pid) - before_s) / self._seconds
        found = {"p50_us": statistics.median(times) * 1e6, "p99_us": float(np.percentile(times, 99)) * 1e6}
        found |= {"server_cpu": server}
        if said:
            found |= {
                "sent_per_s": said["sent"] / self._seconds,
                "connections_per_s": said["connections"] / self._seconds,
                "hostile_cpu": said["cpu_s"] / self._seconds,
            }
        return found


def run(bench: Bench, wanted: list[Phase], rounds: int) -> list[dict[str, object]]:
    """Measure every phase in every round, and return the medians of each."""
    found: dict[str, list[dict[str, float]]] = {phase.name: [] for phase in wanted}
    alone: list[dict[str, float]] = []
    bench.measure(None)  # the first calls are slower
    for _ in range(rounds):
        alone.append(bench.measure(None))
        for phase in wanted:
            here = bench.measure(phase)
            alone.append(bench.measure(None))
            neighbours_us = (alone[-1]["p99_us"] + alone[-2]["p99_us"]) / 2
            found[phase.name].append({**here, "p99_ratio": here["p99_us"] / neighbours_us})
    rows = [("alone", alone), *found.items()]
    return [
        {"beside": name, **{key: round(statistics.median(at[key] for at in some), 2) for key in some[0]}}
        for name, some in rows
    ]


def show(client: str, rows: list[dict[str, object]]) -> None:
    """Print a table to stderr."""
    names = ("p50_us", "p99_us", "p99_ratio", "server_cpu", "hostile_cpu", "sent_per_s", "connections_per_s")
    print(f"{client + ' client':34s}" + "".join(f"{name:>19s}" for name in names), file=sys.stderr)
    for row in rows:
        cells = "".join(f"{row.get(name, '')!s:>19s}" for name in names)
        print(f"{row['beside']:34s}" + cells, file=sys.stderr, flush=True)


def main() -> None:
    """Run everything and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each measurement")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--frames-per-s", type=float, default=1000.0)
    parser.add_argument("--requests-per-s", type=float, default=300.0)
    parser.add_argument("--slow", type=int, default=500, help="slow connections")
    parser.add_argument("--client", choices=["socket", "http"], action="append", help="the healthy client")
    parser.add_argument("--only", help="phases whose name holds this text")
    arguments = parser.parse_args()
    wanted = [
        phase
        for phase in phases(arguments.frames_per_s, arguments.requests_per_s, arguments.slow)
        if arguments.only is None or arguments.only in phase.name
    ]
    results: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with StoreProcess(folder, HttpSettings(dram_bytes=64 << 20)) as store:
            url = (folder / "store.log").read_text().split("http: listening on ")[1].split()[0]
            addresses = {"socket": str(store.socket_path), "http": url.removeprefix("http://")}
            for kind in arguments.client or ["socket", "http"]:
                address = url if kind == "http" else store.socket_path
                with KVStore.connect(address, timeouts=PATIENT) as client:
                    rows = run(Bench(store, client, addresses, arguments.seconds), wanted, arguments.rounds)
                show(kind, rows)
                results += [{"client": kind, **row} for row in rows]
            store.terminate()
    print(json.dumps({"results": results}))


if __name__ == "__main__":
    main()
