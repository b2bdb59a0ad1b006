"""LMDB inside the process, in the temporary folder: a writable map and no sync, the fastest it offers."""

from collections.abc import Sequence
from pathlib import Path

import lmdb
import numpy as np

from peers import Bytes


class LmdbFile:
    """One environment; a request is one transaction."""

    def __init__(self, folder: Path, block_bytes: int, num_blocks: int) -> None:
        room = 4 * num_blocks * (block_bytes + 8192) + (64 << 20)
        self._env = lmdb.open(
            str(folder / "lmdb"), map_size=room, sync=False, metasync=False, writemap=True, map_async=True
        )
        self.server_pids: list[int] = []

    def names(self, keys: Sequence[bytes]) -> list[bytes]:
        """The keys as they are."""
        return list(keys)

    def put(self, names: Sequence[bytes], payloads: Sequence[Bytes]) -> None:
        """Write all in one transaction."""
        with self._env.begin(write=True) as transaction:
            for name, payload in zip(names, payloads, strict=True):
                assert transaction.put(name, payload.data)

    def fetch(self, names: Sequence[bytes], targets: Sequence[Bytes]) -> None:
        """Copy from the map."""
        with self._env.begin(buffers=True) as transaction:
            for name, target in zip(names, targets, strict=True):
                value = transaction.get(name)
                assert value is not None, "lmdb: no such block"
                np.copyto(target, np.frombuffer(value, np.uint8))

    def exists(self, names: Sequence[bytes]) -> None:
        """Look for each key, without its value."""
        with self._env.begin() as transaction, transaction.cursor() as cursor:
            assert all(map(cursor.set_key, names))

    def match(self, names: Sequence[bytes]) -> None:
        """Look for each key, up to the first that is absent."""
        self.exists(names)

    def remove(self, names: Sequence[bytes]) -> None:
        """Delete them."""
        with self._env.begin(write=True) as transaction:
            for name in names:
                transaction.delete(name)

    def close(self) -> None:
        """Unmap it."""
        self._env.close()


def open_peer(folder: Path, block_bytes: int, num_blocks: int) -> LmdbFile:
    """Make the environment with room to spare."""
    return LmdbFile(folder, block_bytes, num_blocks)
