"""Mooncake Store over TCP: its master, a process that lends memory, and a client without memory of its own.

Payloads go straight from and into registered buffers. The store verifies no checksum.
"""

import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvstore.drill.redis_server import free_port
from kvstore.drill.store_process import guarded
from peers import Bytes

# Read when the package is loaded: without it every call of it is a line on stderr.
os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
from mooncake.store import MooncakeDistributedStore  # type: ignore[import-not-found]  # optional

_START_S = 30.0
_END_S = 10.0
_SEGMENT_ALIGN_BYTES = 16 << 20
_MAX_BLOCKS = 250


class MooncakeStore:
    """One master, one segment, one client."""

    def __init__(self, folder: Path, block_bytes: int, num_blocks: int) -> None:
        self._processes: list[subprocess.Popen[str]] = []
        self._store: Any = None  # the package has no types
        self._registered: dict[int, Bytes] = {}
        try:
            self._start(folder, 2 * num_blocks * max(block_bytes, 4096))
        except BaseException:
            self.close()
            raise
        self.server_pids = [process.pid for process in self._processes]

    def names(self, keys: Sequence[bytes]) -> list[str]:
        """The keys as text."""
        return [key.hex() for key in keys]

    def put(self, names: Sequence[str], payloads: Sequence[Bytes]) -> None:
        """One batch_put_from, or several, for thousands of blocks in one fail over TCP."""
        pointers, sizes = self._places(payloads)
        for start in range(0, len(names), _MAX_BLOCKS):
            some = slice(start, start + _MAX_BLOCKS)
            statuses = self._store.batch_put_from(names[some], pointers[some], sizes[some])
            assert not any(statuses), statuses

    def fetch(self, names: Sequence[str], targets: Sequence[Bytes]) -> None:
        """One batch_get_into."""
        pointers, sizes = self._places(targets)
        got = self._store.batch_get_into(names, pointers, sizes)
        assert got == sizes, got

    def exists(self, names: Sequence[str]) -> None:
        """One batch_is_exist."""
        assert set(self._store.batch_is_exist(names)) == {1}

    def match(self, names: Sequence[str]) -> None:
        """There is nothing for leading blocks: as ``exists``."""
        self.exists(names)

    def remove(self, names: Sequence[str]) -> None:
        """Delete them, leases or not."""
        statuses = self._store.batch_remove(names, True)
        assert not any(statuses), statuses

    def close(self) -> None:
        """Stop the client, the segment and the master."""
        if self._store is not None:
            for pointer in self._registered:
                self._store.unregister_buffer(pointer)
            self._store.close()
        for process in reversed(self._processes):
            process.terminate()
            try:
                process.communicate(timeout=_END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()

    def _start(self, folder: Path, room_bytes: int) -> None:
        port, metrics_port = free_port(), free_port()
        master = f"127.0.0.1:{port}"
        words = [str(_binary()), f"--rpc_port={port}", f"--metrics_port={metrics_port}"]
        self._spawn([*words, "--rpc_address=127.0.0.1", f"--log_dir={folder}"])
        segment_bytes = -(-room_bytes // _SEGMENT_ALIGN_BYTES) * _SEGMENT_ALIGN_BYTES + (64 << 20)
        script = Path(__file__).with_name("mooncake_segment.py")
        give_up_s = time.monotonic() + _START_S
        while True:
            segment = self._spawn([sys.executable, str(script), master, str(segment_bytes)])
            assert segment.stdout is not None
            if segment.stdout.readline() == "ready\n":
                break
            self._processes.remove(segment)
            segment.communicate()
            if time.monotonic() >= give_up_s:
                raise RuntimeError(f"mooncake: no segment joins the master at {master}")
            time.sleep(0.2)
        self._store = MooncakeDistributedStore()
        status = self._store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 64 << 20, "tcp", "", master)
        if status != 0:
            raise RuntimeError(f"mooncake: the client cannot join {master}: status {status}")

    def _spawn(self, words: Sequence[str]) -> "subprocess.Popen[str]":
        pipe, null = subprocess.PIPE, subprocess.DEVNULL
        process = subprocess.Popen(guarded(words), stdin=pipe, stdout=pipe, stderr=null, text=True)
        self._processes.append(process)
        return process

    def _places(self, payloads: Sequence[Bytes]) -> tuple[list[int], list[int]]:
        """Addresses and sizes; whole arrays are registered when they are first seen, in the warm-up."""
        for payload in payloads:
            whole = payload if payload.base is None else payload.base
            pointer = whole.ctypes.data
            if pointer not in self._registered:
                assert self._store.register_buffer(pointer, whole.nbytes) == 0
                self._registered[pointer] = whole
        return [payload.ctypes.data for payload in payloads], [payload.nbytes for payload in payloads]


def _binary() -> Path:
    spec = importlib.util.find_spec("mooncake")
    assert spec is not None
    assert spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0]) / "mooncake_master"


def open_peer(folder: Path, block_bytes: int, num_blocks: int) -> MooncakeStore:
    """Start its processes."""
    return MooncakeStore(folder, block_bytes, num_blocks)
