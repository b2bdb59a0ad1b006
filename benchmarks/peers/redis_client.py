"""Valkey through redis-py: its defaults, with timeouts, over a Unix socket.

Without hiredis it reads and writes the protocol in Python, which is how pip installs it; that is measured
whether or not hiredis is there. Large blocks go one SET or GET at a time, which is faster there than a
pipeline or MGET (measured: benchmarks/remote_client.py); small ones as one MSET or MGET.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import redis
from redis._parsers import _RESP2Parser
from redis.connection import PythonRespSerializer

from peers import Bytes
from peers.valkey_server import ValkeyServer

_TIMEOUT_S = 10.0
_SMALL_BYTES = 16 << 10


class PlainConnection(redis.UnixDomainSocketConnection):
    """A connection as it is where hiredis is not installed; redis-py has no option for that."""

    def __init__(self, **options: object) -> None:
        super().__init__(parser_class=_RESP2Parser, **options)
        self._command_packer = PythonRespSerializer(self._buffer_cutoff, self.encoder.encode)


class RedisClient:
    """One server and one blocking client."""

    def __init__(
        self,
        folder: Path,
        block_bytes: int,
        connection: type[redis.UnixDomainSocketConnection],
        **options: object,
    ) -> None:
        self._is_small = block_bytes < _SMALL_BYTES
        self._server = ValkeyServer(folder)
        self.server_pids = [self._server.pid]
        pool = redis.ConnectionPool(
            connection_class=connection,
            path=str(self._server.socket_path),
            socket_timeout=_TIMEOUT_S,
            socket_connect_timeout=_TIMEOUT_S,
            **options,
        )
        self._client = redis.Redis(connection_pool=pool)

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
        self._client.connection_pool.disconnect()
        self._server.close()


def open_peer(folder: Path, block_bytes: int, num_blocks: int) -> RedisClient:
    """Start it; the server takes the memory it needs."""
    return RedisClient(folder, block_bytes, PlainConnection)
