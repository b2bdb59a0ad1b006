"""The remote tier's own connection beside redis-py and a raw socket: GB/s and CPU seconds per GB.

Each way moves the same blocks to and from the same server over one connection. ``raw`` sends made-up commands
and receives into a buffer without looking; ``own`` is the tier's connection, requests a few ahead of the
replies as in the tier, without verification; ``redis-py`` is its GET and SET one by one (pipelines are
slower). ``tier`` is all of RemoteTier, with its threads and connections, header and checksum. Medians of
interleaved runs; the CPU time is this process's.
"""

import argparse
import asyncio
import json
import socket
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import redis as redis_py
from redis.backoff import NoBackoff
from redis.retry import Retry

from kvstore.checksum import checksum
from kvstore.drill.redis_server import RedisServer
from kvstore.keys import BlockKey, NamespaceDigest
from kvstore.layout import Part
from kvstore.tier import BlockHeader, BlockId, ReadRequest, ReadStatus, WriteRequest, WriteStatus
from kvstore_tiers.remote import RemoteTier
from kvstore_tiers.resp import BulkReply, BulkStatus, RespConnection, command
from kvstore_tiers.resp_address import AddressLookup, RespAddress

AHEAD = 4
"""Requests sent ahead of the replies, as in the tier."""

Way = Callable[[], None]


class Bench:
    """Blocks of one size, and every way to move them."""

    def __init__(self, server: RedisServer, block_bytes: int, num_blocks: int) -> None:
        self.block_bytes = block_bytes
        self.count = num_blocks
        data = np.random.default_rng(1).integers(0, 256, (num_blocks, block_bytes), np.uint8)
        self.sources = [memoryview(row) for row in data]
        self.targets = [memoryview(bytearray(block_bytes)) for _ in range(num_blocks)]
        self.keys = [f"bench:{block_bytes}:{number}".encode() for number in range(num_blocks)]
        self.raw = socket.create_connection(("127.0.0.1", server.port))
        self.raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        address = RespAddress.parse(server.url)
        self.own = RespConnection.connect(
            address,
            AddressLookup(address),
            timeout_s=10,
            deadline_s=time.monotonic() + 10,
            clock=time.monotonic,
        )
        self.client = redis_py.Redis(
            port=server.port, socket_timeout=10, retry=Retry(NoBackoff(), 0), decode_responses=False
        )
        self.tier = RemoteTier(server.url, timeout_s=10, key_prefix=f"tier-{block_bytes}")
        self.loop = asyncio.new_event_loop()
        self.loop.run_until_complete(self.tier.open())
        self.headers = [self._header(number) for number in range(num_blocks)]

    def ways(self) -> dict[tuple[str, str], Way]:
        """Return every way by operation and name, SET before GET."""
        return {
            ("SET", "raw"): self._raw_set,
            ("SET", "own"): self._own_set,
            ("SET", "redis-py"): self._client_set,
            ("SET", "tier"): lambda: self.loop.run_until_complete(self._tier_set()),
            ("GET", "raw"): self._raw_get,
            ("GET", "own"): self._own_get,
            ("GET", "redis-py"): self._client_get,
            ("GET", "tier"): lambda: self.loop.run_until_complete(self._tier_get()),
        }

    def close(self) -> None:
        """Close every connection."""
        self.raw.close()
        self.own.close()
        self.client.close()
        self.loop.run_until_complete(self.tier.close())
        self.loop.close()

    def _pipeline(self, ask: Callable[[int], None], take: Callable[[int], None]) -> None:
        for number in range(self.count + AHEAD):
            if number < self.count:
                ask(number)
            if number >= AHEAD:
                take(number - AHEAD)

    def _raw_set(self) -> None:
        def ask(number: int) -> None:
            self.raw.sendall(self._set_head(number))
            self.raw.sendall(self.sources[number])
            self.raw.sendall(b"\r\n")

        self._pipeline(ask, lambda number: self._raw_exactly(memoryview(bytearray(5))))

    def _raw_get(self) -> None:
        head = memoryview(bytearray(len(b"$%d\r\n" % self.block_bytes)))
        end = memoryview(bytearray(2))

        def take(number: int) -> None:
            for part in (head, self.targets[number], end):
                self._raw_exactly(part)

        self._pipeline(lambda number: self.raw.sendall(command(b"GET", self.keys[number])), take)

    def _raw_exactly(self, target: memoryview) -> None:
        while target:
            target = target[self.raw.recv_into(target) :]

    def _own_set(self) -> None:
        deadline_s = time.monotonic() + 60

        def take(number: int) -> None:
            assert self.own.read_simple(deadline_s=deadline_s) == "OK"

        self._pipeline(
            lambda number: self.own.send(
                [self._set_head(number), self.sources[number], b"\r\n"], deadline_s=deadline_s
            ),
            take,
        )

    def _own_get(self) -> None:
        deadline_s = time.monotonic() + 60

        def take(number: int) -> None:
            reply = self.own.read_bulk_into([self.targets[number]], deadline_s=deadline_s)
            assert isinstance(reply, BulkReply)
            assert reply.status is BulkStatus.COMPLETE

        self._pipeline(
            lambda number: self.own.send([command(b"GET", self.keys[number])], deadline_s=deadline_s), take
        )

    def _client_set(self) -> None:
        for key, source in zip(self.keys, self.sources, strict=True):
            self.client.set(key, source)

    def _client_get(self) -> None:
        for key, target in zip(self.keys, self.targets, strict=True):
            # A store needs the bytes in its arena, so the copy belongs to it.
            np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(self.client.get(key), np.uint8))

    async def _tier_set(self) -> None:
        requests = [WriteRequest(*pair) for pair in zip(self.headers, self.sources, strict=True)]
        found = await self.tier.write(requests, deadline_s=time.monotonic() + 60)
        assert set(found) == {WriteStatus.OK}

    async def _tier_get(self) -> None:
        requests = [
            ReadRequest(header.block, header.layout, self.block_bytes, target)
            for header, target in zip(self.headers, self.targets, strict=True)
        ]
        found = await self.tier.read(requests, deadline_s=time.monotonic() + 60)
        assert {outcome.status for outcome in found} == {ReadStatus.OK}

    def _set_head(self, number: int) -> bytes:
        key = self.keys[number]
        return b"*3\r\n$3\r\nSET\r\n$%d\r\n%s\r\n$%d\r\n" % (len(key), key, self.block_bytes)

    def _header(self, number: int) -> BlockHeader:
        block = BlockId(NamespaceDigest(bytes(32)), Part(0, 1, 0, 1), BlockKey(number.to_bytes(32, "big")))
        return BlockHeader(
            block, BlockKey(bytes(32)), number, bytes(32), self.block_bytes, checksum(self.sources[number])
        )


def measure(bench: Bench, rounds: int) -> list[dict[str, object]]:
    """Run every way in turn; returns a row for each."""
    seconds: dict[tuple[str, str], list[float]] = {way: [] for way in bench.ways()}
    cpu_s: dict[tuple[str, str], list[float]] = {way: [] for way in bench.ways()}
    for number in range(rounds + 1):
        for way, move in bench.ways().items():
            started_s, started_cpu_s = time.perf_counter(), time.process_time()
            move()
            if number:
                seconds[way].append(time.perf_counter() - started_s)
                cpu_s[way].append(time.process_time() - started_cpu_s)
    giga = bench.block_bytes * bench.count / 1e9
    raw = {op: giga / statistics.median(seconds[op, "raw"]) for op in ("SET", "GET")}
    return [
        {
            "op": op,
            "way": way,
            "block_bytes": bench.block_bytes,
            "gb_per_s": round(giga / statistics.median(seconds[op, way]), 2),
            "ratio_to_raw": round(giga / statistics.median(seconds[op, way]) / raw[op], 2),
            "cpu_s_per_gb": round(statistics.median(cpu_s[op, way]) / giga, 3),
        }
        for op, way in seconds
    ]


def main() -> None:
    """Print a table, or with ``--json`` one object on the last line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--block-bytes", type=int, nargs="*", default=[360 << 10, 2 << 20])
    parser.add_argument("--megabytes", type=int, default=64, help="moved in each run of each way")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    rows: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as folder:
        server = RedisServer(Path(folder)).start()
        try:
            for block_bytes in args.block_bytes:
                bench = Bench(server, block_bytes, max(8, (args.megabytes << 20) // block_bytes))
                rows += measure(bench, args.rounds)
                bench.close()
        finally:
            server.stop()
    for row in rows:
        print(
            f"{row['block_bytes']:>9} {row['op']} {row['way']:<9} {row['gb_per_s']:6} GB/s"
            f" {row['ratio_to_raw']:5} of raw {row['cpu_s_per_gb']:7} CPU s/GB"
        )
    if args.json:
        print(json.dumps({"results": rows}))


if __name__ == "__main__":
    main()
