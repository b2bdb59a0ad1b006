"""Valkey through redis-py: its defaults, with timeouts, over a Unix socket.

Large blocks go one SET or GET at a time, which is faster there than a pipeline or MGET (measured:
benchmarks/remote_client.py); small ones as one MSET or MGET.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import redis

from peers import Bytes
from peers.valkey_server import ValkeyServer

_TIMEOUT_S = 10.0
_SMALL_BYTES = 16 << 10


class RedisClient:
    """One server and one blocking client."""

    def __init__(self, folder: Path, block_bytes: int) -> None:
        self._is_small = block_bytes < _SMALL_BYTES
        self._server = ValkeyServer(folder)
        self.server_pids = [self._server.pid]
        self._client = redis.Redis(
            unix_socket_path=str(self._server.socket_path),
            socket_timeout=_TIMEOUT_S,
            socket_connect_timeout=_TIMEOUT_S,
        )

    def names(self, keys: Sequence[bytes]) -> list[bytes]:
        """The keys as they are."""
        return list(keys)

    def put(self, names: Sequence[bytes], payloads: Sequence[Bytes]) -> None:
        """SET each, or MSET."""
        if self._is_small:
            self._client.mset(dict(zip(names, (at.tobytes() for at in payloads), strict=True)))
            return
        for name, payload in zip(names, payloads, strict=True):
            assert self._client.set(name, payload.data)

    def fetch(self, names: Sequence[bytes], targets: Sequence[Bytes]) -> None:
        """GET each, or MGET, and copy the value."""
        values = self._client.mget(names) if self._is_small else map(self._client.get, names)
        for value, target in zip(values, targets, strict=True):
            assert isinstance(value, bytes), "redis: no such block"
            np.copyto(target, np.frombuffer(value, np.uint8))

    def exists(self, names: Sequence[bytes]) -> None:
        """Count those that are stored; not which."""
        assert self._client.exists(*names) == len(names)

    def match(self, names: Sequence[bytes]) -> None:
        """There is nothing for leading blocks: count, as ``exists``."""
        self.exists(names)

    def remove(self, names: Sequence[bytes]) -> None:
        """Delete them."""
        self._client.delete(*names)

    def close(self) -> None:
        """Stop client and server."""
        self._client.close()
        self._server.close()


def open_peer(folder: Path, block_bytes: int, num_blocks: int) -> RedisClient:
    """Start it; the server takes the memory it needs."""
    return RedisClient(folder, block_bytes)
