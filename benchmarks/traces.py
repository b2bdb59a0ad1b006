"""What traces cost: stores with a client each, which trace nothing, or a share of the requests.

Each client is a process of its own. A request is what an engine asks of a store for one prompt: match, put
and fetch_into of 16 blocks of 64 KiB. Those of traced clients begin a trace each, which is sampled or not,
and spans of client and store go to a collector in this process. Rounds of the same requests alternate between
them, in changing order. Printed are medians of the time of a request, the median over rounds of its ratio to
that without traces, and the ratio of CPU time of client and store together.
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np

from kvstore import KVLayout, KVStore, Namespace
from kvstore.client_state import Timeouts
from kvstore.config import trace_settings
from kvstore.drill.store_process import StoreProcess, StoreSettings
from kvstore.trace_start import tracing

MIB = 1 << 20
BLOCK_BYTES, BATCH, CHAINS = 64 << 10, 16, 64
PATIENT = Timeouts(match_s=30, fetch_s=30, put_s=30, control_s=30)
_TICKS_PER_S = 100


class Collector(BaseHTTPRequestHandler):
    """Takes everything."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        """Take a batch of spans."""
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Type", "application/x-protobuf")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Say nothing."""


def cpu_s(pid: int) -> float:
    """Return the CPU seconds that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rsplit(") ", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S


def serve_calls(address: str) -> None:
    """Be a client: for each line make a request about each chain, and tell the seconds of one."""
    space = Namespace("traces", KVLayout.opaque(block_bytes=BLOCK_BYTES, block_tokens=16))
    chains = [space.chain([number] * 16 * BATCH) for number in range(CHAINS)]
    payload = np.random.default_rng(1).integers(0, 256, BLOCK_BYTES * BATCH, np.uint8)
    into = np.empty_like(payload)
    with (
        tracing(trace_settings(), service="client") as counts,
        KVStore.connect(address, timeouts=PATIENT) as store,
    ):
        store.open_namespace(space)
        begin = contextlib.nullcontext
        if counts is not None:
            # Only a client that traces loads it.
            from opentelemetry import trace

            tracer = trace.get_tracer("benchmark")

            def begin():
                return tracer.start_as_current_span("call")

        for _ in sys.stdin:
            began_s = time.perf_counter()
            for chain in chains:
                with begin():
                    store.match(chain)
                    store.put(chain, payload)
                    store.fetch_into(chain, into)
            took_s = (time.perf_counter() - began_s) / CHAINS
            for chain in chains:
                store.drop(chain)
            print(took_s, flush=True)


class Side:
    """One store and one client, both sampling the same share of traces; None: they trace nothing."""

    def __init__(self, folder: Path, endpoint: str, ratio: str | None) -> None:
        folder.mkdir()
        environ = {
            "OTEL_EXPORTER_OTLP_ENDPOINT": endpoint,
            "OTEL_TRACES_SAMPLER": "parentbased_traceidratio",
            "OTEL_TRACES_SAMPLER_ARG": ratio or "",
        }
        more = {} if ratio is None else environ
        self.store = StoreProcess(folder, StoreSettings(dram_bytes=2 * BLOCK_BYTES * BATCH * CHAINS))
        self.store.start(environ=more)
        self.client = subprocess.Popen(
            [sys.executable, __file__, "--client", f"unix:{self.store.socket_path}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **more},
        )

    def round(self) -> tuple[float, float]:
        """Return wall seconds of a request, and CPU seconds that one took of client and store."""
        pids = (self.client.pid, self.store.process.pid)
        before_s = sum(map(cpu_s, pids))
        self.client.stdin.write("\n")
        self.client.stdin.flush()
        wall_s = float(self.client.stdout.readline())
        return wall_s, (sum(map(cpu_s, pids)) - before_s) / CHAINS

    def close(self) -> None:
        """End it."""
        self.client.stdin.close()
        self.client.wait(30)
        self.store.kill()


def measure(rounds: int, shares: list[str]) -> list[dict[str, object]]:
    """Return one row for each share."""
    found: dict[str, list[tuple[float, float]]] = {}
    server = ThreadingHTTPServer(("127.0.0.1", 0), Collector)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    with tempfile.TemporaryDirectory() as name:
        sides = {
            share: Side(Path(name) / share, endpoint, share if float(share) else None)
            for share in ("0", *shares)
        }
        try:
            for number in range(rounds + 1):
                order = list(sides) if number % 2 else list(sides)[::-1]
                for share in order:
                    taken = sides[share].round()
                    if number:
                        found.setdefault(share, []).append(taken)
        finally:
            for side in sides.values():
                side.close()
            server.shutdown()
    return [_row(share, found["0"], found[share]) for share in ("0", *shares)]


def _row(share: str, off: list[tuple[float, float]], on: list[tuple[float, float]]) -> dict[str, object]:
    wall = statistics.median(a[0] / b[0] for a, b in zip(on, off, strict=True))
    return {
        "sampled": share,
        "request_us": round(1e6 * statistics.median(wall_s for wall_s, _ in on), 1),
        "wall_ratio": round(wall, 3),
        "cpu_ratio": round(sum(cpu for _, cpu in on) / max(sum(cpu for _, cpu in off), 1e-9), 3),
    }


def main() -> None:
    """Print a table, or with ``--json`` one object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument(
        "--shares", nargs="+", default=["0.01"], help="shares of the requests that are traced"
    )
    parser.add_argument("--client", metavar="ADDRESS", help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if args.client:
        serve_calls(args.client)
        return
    rows = measure(args.rounds, args.shares)
    if args.json:
        print(json.dumps({"results": rows}))
        return
    for row in rows:
        print(
            f"traced {row['sampled']:>5}: {row['request_us']:>8} us a request,"
            f" {row['wall_ratio']:.3f} of the time without, {row['cpu_ratio']:.3f} of the CPU time"
        )


if __name__ == "__main__":
    main()
