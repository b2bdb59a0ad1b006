"""Valkey through redis-py made fast: hiredis, its parser and packer in C, and larger reads.

Each alone is several times as fast as the defaults for large blocks, both together a little faster still.
Otherwise as ``redis_client``.
"""

from pathlib import Path

import hiredis  # noqa: F401  # redis-py uses it if it is there, and says nothing if it is not
import redis

from peers.redis_client import RedisClient

READ_BYTES = 1 << 20


def open_peer(folder: Path, block_bytes: int, num_blocks: int) -> RedisClient:
    """Start it; the server takes the memory it needs."""
    return RedisClient(folder, block_bytes, redis.UnixDomainSocketConnection, socket_read_size=READ_BYTES)
