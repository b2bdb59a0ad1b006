"""Stores that benchmarks/data_plane.py compares with, each behind the same few calls.

An adapter needs its own packages only, and is imported only when it is asked for.
"""

import importlib
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Names = Any
"""A peer's own form of the keys of one request; made before the clock runs. Any: each peer has its own."""


class Peer(Protocol):
    """A store with its server running, for blocks of one size."""

    server_pids: Sequence[int]
    """Processes whose CPU time counts beside that of the caller."""

    def names(self, keys: Sequence[bytes]) -> Names:
        """Return keys of 32 bytes in the form that the other calls take."""

    def put(self, names: Names, payloads: Sequence[Bytes]) -> None:
        """Store new blocks in one request."""

    def fetch(self, names: Names, targets: Sequence[Bytes]) -> None:
        """Copy stored blocks into the caller's memory in one request."""

    def remove(self, names: Names) -> None:
        """Forget the blocks; not timed."""

    def close(self) -> None:
        """Stop server and client."""


class Adapter(NamedTuple):
    """Where a peer is made: its module, the packages it needs, and what it is in the table."""

    module: str
    packages: tuple[str, ...]
    what: str


ADAPTERS = {
    "redis": Adapter("peers.redis_client", ("redis",), "Redis or Valkey through redis-py, Unix socket"),
    "raw-redis": Adapter(
        "peers.raw_redis", (), "the same server through a raw socket, straight into buffers"
    ),
    "files": Adapter("peers.plain_files", (), "one file per block on tmpfs, pwrite and preadv"),
    "lmdb": Adapter("peers.lmdb_file", ("lmdb",), "LMDB on tmpfs inside the process, no sync"),
    "mooncake": Adapter("peers.mooncake_store", ("mooncake",), "Mooncake Store over TCP"),
    "lmcache": Adapter("peers.lmcache_server", ("lmcache",), "LMCache's server over shared memory"),
}


def missing(name: str) -> list[str]:
    """Return the packages a peer needs that are not installed."""
    return [package for package in ADAPTERS[name].packages if importlib.util.find_spec(package) is None]


def open_peer(name: str, folder: Path, block_bytes: int, num_blocks: int) -> Peer:
    """Start a peer that has room for ``num_blocks`` blocks."""
    peer: Peer = importlib.import_module(ADAPTERS[name].module).open_peer(folder, block_bytes, num_blocks)
    return peer
