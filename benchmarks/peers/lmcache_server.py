"""LMCache's server over shared memory, unchecked: ``lmcache server`` and a worker, in processes of their own.

A block is one chunk of 16 tokens, and a request one range of a token sequence, as in this store. The worker
is LMCache's own client for engines that copy for themselves (``engine_driven``, which its vLLM connector
takes on the CPU). That is the fastest of its ways here: slower are letting the server copy
(``lmcache_driven``), gRPC instead of its message queue, and copies by two threads. Payloads are copied as
they lie, without gathering an engine's layers first. Logs and metrics are off.
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvstore.drill.redis_server import free_port
from kvstore.drill.store_process import guarded
from peers import LMCACHE_PYTHON, Bytes

CHUNK_TOKENS = 16
_END_S = 20.0
_ROOM = 1.5
"""Of what is stored: the server evicts from 0.8 on."""

_ROOM_BYTES = 256 << 20
_QUIET = {"LMCACHE_LOG_LEVEL": "ERROR", "LMCACHE_TRACK_USAGE": "false", "LMCACHE_DISABLE_BANNER": "1"}
_SHARED = Path("/dev/shm")
_SERVER = "from lmcache.cli.main import main; main()"


class LMCacheServer:
    """One server and one worker."""

    def __init__(self, folder: Path, block_bytes: int, num_blocks: int) -> None:
        if block_bytes % CHUNK_TOKENS:
            raise ValueError(f"lmcache: {block_bytes} bytes are no multiple of {CHUNK_TOKENS} tokens")
        self._folder = folder
        self._python = os.environ.get(LMCACHE_PYTHON, sys.executable)
        self._processes: list[subprocess.Popen[str]] = []
        port = free_port()
        self._shared = f"kvbench{os.getpid()}x{port}"
        try:
            self._serve(port, _ROOM * num_blocks * block_bytes + _ROOM_BYTES)
            words = [str(Path(__file__).with_name("lmcache_worker.py")), f"tcp://127.0.0.1:{port}"]
            self._worker = self._spawn([*words, str(block_bytes), str(num_blocks), str(CHUNK_TOKENS)])
            self._read("start")
        except BaseException:
            self.close()
            raise
        self.server_pids = [process.pid for process in self._processes]

    def names(self, keys: Sequence[bytes]) -> int:
        """A number for the sequence of tokens that stands for the keys, 16 tokens for each."""
        tokens = np.frombuffer(b"".join(keys), np.uint16).tolist()
        number: int = self._tell("name", tokens)
        return number

    def timed(self, op: str, names: Sequence[int]) -> list[float]:
        """Put, fetch or match, one after the other; returns the seconds of each."""
        seconds: list[float] = self._tell(op, list(names))
        return seconds

    def put(self, names: int, payloads: Sequence[Bytes]) -> None:
        """Store the worker's own payloads, not those given."""
        self.timed("put", [names])

    def fetch(self, names: int, targets: Sequence[Bytes]) -> None:
        """Copy stored blocks into the worker's own memory, not the one given."""
        self.timed("fetch", [names])

    def match(self, names: int) -> None:
        """Count the leading blocks that are stored."""
        self.timed("match", [names])

    def cool(self, num_bytes: int) -> None:
        """Let the worker's payloads leave the caches."""
        self._tell("cool", num_bytes)

    def check(self) -> None:
        """Fail unless every payload arrived."""
        assert self._tell("check"), "a fetched block has other bytes"

    def remove(self, names: int) -> None:
        """Forget all blocks."""
        self._tell("clear")

    def close(self) -> None:
        """Stop the worker and the server."""
        for process in reversed(self._processes):
            # The worker ends with its input, the server by the signal.
            if process is self._processes[0]:
                process.terminate()
            try:
                process.communicate(timeout=_END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()
        # The server has removed it, unless it was killed.
        (_SHARED / f"lmcache_l1_pool_{self._shared}").unlink(missing_ok=True)

    def _serve(self, port: int, room_bytes: float) -> None:
        words = ["-c", _SERVER, "server", "--host", "127.0.0.1", "--port", str(port)]
        words += ["--http-port", str(free_port()), "--disable-observability"]
        words += ["--chunk-size", str(CHUNK_TOKENS), "--supported-transfer-mode", "engine_driven"]
        words += ["--shm-name", self._shared, "--no-l1-use-lazy", "--eviction-policy", "LRU"]
        self._spawn([*words, "--l1-size-gb", f"{room_bytes / (1 << 30):.3f}"])

    def _spawn(self, words: Sequence[str]) -> "subprocess.Popen[str]":
        pipe = subprocess.PIPE
        with (self._folder / f"log{len(self._processes)}").open("w") as log:
            process = subprocess.Popen(
                guarded([self._python, *words]),
                stdin=pipe,
                stdout=log if not self._processes else pipe,
                stderr=log,
                text=True,
                env={**os.environ, **_QUIET},
            )
        self._processes.append(process)
        return process

    def _tell(self, *words: object) -> Any:  # Any: see lmcache_worker
        assert self._worker.stdin is not None
        self._worker.stdin.write(json.dumps(words) + "\n")
        self._worker.stdin.flush()
        return self._read(str(words[0]))

    def _read(self, what: str) -> Any:  # Any: see lmcache_worker
        assert self._worker.stdout is not None
        line = self._worker.stdout.readline()
        if not line:
            logs = "\n".join(path.read_text()[-2000:] for path in sorted(self._folder.glob("log*")))
            raise RuntimeError(f"lmcache: the worker ended in {what}: {logs}")
        return json.loads(line)


def open_peer(folder: Path, block_bytes: int, num_blocks: int) -> LMCacheServer:
    """Start it."""
    return LMCacheServer(folder, block_bytes, num_blocks)
