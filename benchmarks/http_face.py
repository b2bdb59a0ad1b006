"""Blocks over HTTP: a server in a process of its own, and one plain client that copies no more than it must.

GET, PUT, fetch and store at several block sizes beside memcpy in the same run, and the times of ``match``
alone and among slow clients that never finish their header.
"""

import argparse
import http.client
import json
import socket
import statistics
import struct
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from kvstore.drill.store_process import StoreProcess, StoreSettings
from kvstore.keys import Namespace, PrefixChain
from kvstore.layout import KVLayout

MIB = 1 << 20
BATCH = 16
BLOCK_TOKENS = 4


class HttpSettings(StoreSettings):
    """A store with an HTTP face on a free port."""

    def toml(self, socket_path: Path) -> str:
        """Return the configuration file."""
        return f'{super().toml(socket_path)}[http]\nlisten = "127.0.0.1:0"\n'


class Client:
    """One connection; answers go into a buffer that is made once."""

    def __init__(self, port: int, buffer_bytes: int) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        self._connection.connect()
        self._connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.buffer = memoryview(bytearray(buffer_bytes))

    def ask(self, method: str, path: str, body: object = None, *, kind: str = "application/json") -> int:
        """Send a request; returns how many bytes of its answer are in the buffer."""
        headers = {} if body is None else {"Content-Type": kind}
        self._connection.request(method, path, body=body, headers=headers)  # type: ignore[arg-type]
        answer = self._connection.getresponse()
        if answer.status not in (200, 201):
            raise SystemExit(f"{method} {path}: {answer.status} {answer.read()!r}")
        received = 0
        while count := answer.readinto(self.buffer[received:]):
            received += count
        return received

    def post(self, path: str, **fields: object) -> int:
        """Send JSON."""
        return self.ask("POST", path, json.dumps(fields).encode())


def timed(work: Callable[[int], object], count: int) -> list[float]:
    """Return the seconds of each call."""
    times: list[float] = []
    for index in range(count):
        begun = time.perf_counter()
        work(index)
        times.append(time.perf_counter() - begun)
    return times


def row(
    op: str, block_bytes: int, batch: int, times: list[float], memcpy_gb_per_s: float
) -> dict[str, object]:
    """Return one result."""
    gb_per_s = block_bytes * batch / statistics.median(times) / 1e9
    return {
        "op": op,
        "block_bytes": block_bytes,
        "batch": batch,
        "gb_per_s": round(gb_per_s, 3),
        "ratio_to_memcpy": round(gb_per_s / memcpy_gb_per_s, 3),
        "p50_us": round(statistics.median(times) * 1e6, 1),
        "p99_us": round(float(np.percentile(times, 99)) * 1e6, 1),
    }


def memcpy_speed(block_bytes: int) -> float:
    """Return GB/s of copying blocks that are out of cache."""
    count = max(4, 64 * MIB // block_bytes)
    source, target = np.ones((count, block_bytes), np.uint8), np.ones((count, block_bytes), np.uint8)
    times = timed(lambda index: np.copyto(target[index % count], source[index % count]), 4 * count)
    return block_bytes / statistics.median(times) / 1e9


def transfers(port: int, block_bytes: int, count: int) -> list[dict[str, object]]:
    """Measure blocks of one size."""
    space = Namespace(
        model=f"bench{block_bytes}",
        layout=KVLayout.opaque(block_bytes=block_bytes, block_tokens=BLOCK_TOKENS),
    )
    client = Client(port, BATCH * block_bytes + MIB)
    layout = {
        name: getattr(space.layout, name) for name in ("dtype", "num_layers", "block_tokens", "num_kv_heads")
    }
    layout |= {name: getattr(space.layout, name) for name in ("head_dim", "kv_planes", "order")}
    client.post("/v1/namespaces", model=space.model, layout=layout)
    chains = [
        space.chain(range(1000 * number, 1000 * number + BATCH * BLOCK_TOKENS)) for number in range(count)
    ]
    payload = np.random.default_rng(1).integers(0, 256, BATCH * block_bytes, np.uint8).tobytes()
    one, path = payload[:block_bytes], f"/v1/blocks/{space.digest.hex()}"

    def fields(chain: PrefixChain) -> dict[str, object]:
        return {"namespace": chain.namespace.hex(), "keys": [key.hex() for key in chain.keys]}

    def frame(chain: PrefixChain) -> bytes:
        head = json.dumps(fields(chain)).encode()
        return struct.pack("<I", len(head)) + head + payload

    frames = [frame(chain) for chain in chains]
    kind = "application/octet-stream"
    speed = memcpy_speed(block_bytes)
    store_s = timed(lambda n: client.ask("POST", "/v1/store", frames[n], kind=kind), count)
    fetch_s = timed(lambda n: client.post("/v1/fetch", **fields(chains[n])), count)
    get_s = timed(lambda n: client.ask("GET", f"{path}/{chains[n % count].keys[0].hex()}"), 10 * count)
    for chain in chains:
        client.post("/v1/admin/drop", **fields(chain))
    put_s = timed(lambda n: client.ask("PUT", f"{path}/{chains[n].keys[0].hex()}", one, kind=kind), count)
    return [
        row("get", block_bytes, 1, get_s, speed),
        row("put", block_bytes, 1, put_s, speed),
        row("fetch", block_bytes, BATCH, fetch_s, speed),
        row("store", block_bytes, BATCH, store_s, speed),
    ]


def matches(port: int, num_slow: int) -> dict[str, object]:
    """Time a small request alone and among slow clients."""
    space = Namespace(model="bench-match", layout=KVLayout.opaque(block_bytes=4096, block_tokens=4))
    client = Client(port, MIB)
    layout = {"dtype": "uint8", "num_layers": 1, "block_tokens": 4, "num_kv_heads": 1, "head_dim": 1024}
    client.post("/v1/namespaces", model=space.model, layout={**layout, "kv_planes": 1, "order": "opaque"})
    about = {"namespace": space.digest.hex(), "keys": [f"{number:064x}" for number in range(16)]}
    timed(lambda _: client.post("/v1/match", **about), 500)
    alone_s = timed(lambda _: client.post("/v1/match", **about), 5000)
    slow = [socket.create_connection(("127.0.0.1", port)) for _ in range(num_slow)]
    for sock in slow:
        sock.sendall(b"GET /healthz HTTP/1.1\r\nA: ")
    among_s: list[float] = []
    for number in range(5000):
        if number % 10 == 0:
            slow[number // 10 % num_slow].send(b"a")
        among_s += timed(lambda _: client.post("/v1/match", **about), 1)
    for sock in slow:
        sock.close()
    return {
        "op": "match",
        "slow_clients": num_slow,
        "p50_us": round(statistics.median(alone_s) * 1e6, 1),
        "p99_us": round(float(np.percentile(alone_s, 99)) * 1e6, 1),
        "p50_among_slow_us": round(statistics.median(among_s) * 1e6, 1),
        "p99_among_slow_us": round(float(np.percentile(among_s, 99)) * 1e6, 1),
    }


def main() -> None:
    """Run everything and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=20, help="batches of each size")
    parser.add_argument("--slow", type=int, default=500, help="slow clients")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with StoreProcess(folder, HttpSettings(dram_bytes=1024 * MIB)) as server:
            log = (folder / "store.log").read_text()
            port = int(log.split("http: listening on http://127.0.0.1:")[1].split()[0])
            results: list[dict[str, object]] = []
            for block_bytes, share in ((64 << 10, 4), (2 * MIB, 1)):
                results += transfers(port, block_bytes, share * arguments.count)
            results.append(matches(port, arguments.slow))
            server.terminate()
    print(json.dumps({"results": results}))


if __name__ == "__main__":
    main()
