"""One file a block in the temporary folder: no server, no checks, no sync; reads find the page cache."""

import os
from collections.abc import Sequence
from pathlib import Path

from peers import Bytes


class PlainFiles:
    """A folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.server_pids: list[int] = []

    def names(self, keys: Sequence[bytes]) -> list[str]:
        """A path for each key."""
        return [str(self._folder / key.hex()) for key in keys]

    def put(self, names: Sequence[str], payloads: Sequence[Bytes]) -> None:
        """Write each file."""
        for name, payload in zip(names, payloads, strict=True):
            fd = os.open(name, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
            try:
                assert os.write(fd, payload.data) == len(payload)
            finally:
                os.close(fd)

    def fetch(self, names: Sequence[str], targets: Sequence[Bytes]) -> None:
        """Read each file into the caller's memory."""
        for name, target in zip(names, targets, strict=True):
            fd = os.open(name, os.O_RDONLY)
            try:
                assert os.readv(fd, [target.data]) == len(target)
            finally:
                os.close(fd)

    def exists(self, names: Sequence[str]) -> None:
        """Look for each file."""
        assert all(map(os.path.exists, names))

    def match(self, names: Sequence[str]) -> None:
        """Look for each file, up to the first that is absent."""
        self.exists(names)

    def remove(self, names: Sequence[str]) -> None:
        """Unlink them."""
        for name in names:
            Path(name).unlink()

    def close(self) -> None:
        """Nothing runs."""


def open_peer(folder: Path, block_bytes: int, num_blocks: int) -> PlainFiles:
    """Use the folder."""
    return PlainFiles(folder)
