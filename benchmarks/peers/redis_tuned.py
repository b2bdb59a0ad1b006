"""Valkey through redis-py at its best: hiredis for replies, larger reads, and an allocator that keeps memory.

hiredis packs commands too, but copies each payload for that, so what is sent is packed in Python. By default
glibc takes fresh memory for every large value and gives it back afterwards: a GET of 2 MiB then takes several
times as long. Otherwise as ``redis_client``.
"""

import ctypes
from pathlib import Path

import hiredis  # noqa: F401  # redis-py uses it if it is there, and says nothing if it is not
import redis
from redis.connection import PythonRespSerializer

from peers.redis_client import RedisClient

READ_BYTES = 1 << 20

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_KEPT_BYTES = 1 << 30


class TunedConnection(redis.UnixDomainSocketConnection):
    """Replies through hiredis, commands through Python; redis-py has no option for that."""

    def __init__(self, **options: object) -> None:
        super().__init__(**options)
        self._command_packer = PythonRespSerializer(self._buffer_cutoff, self.encoder.encode)


def open_peer(folder: Path, block_bytes: int, num_blocks: int) -> RedisClient:
    """Start it; the server takes the memory it needs."""
    libc = ctypes.CDLL(None)
    for option in (_TRIM_THRESHOLD, _MMAP_THRESHOLD):
        libc.mallopt(option, _KEPT_BYTES)
    return RedisClient(folder, block_bytes, TunedConnection, socket_read_size=READ_BYTES)
