"""EpochFile: the epochs of models, kept across restarts beside the blocks they make unreachable."""

import json
import os
from pathlib import Path

from kvstore.checksum import checksum
from kvstore.errors import CorruptBlock, TierUnavailable

_MAGIC = "kvstore.epochs.1"
_MAX_BYTES = 1 << 20


class EpochFile:
    """A small file that is replaced as a whole. Methods block."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> dict[str, int]:
        """Return the epoch of each model; empty if there is no file.

        Raises:
            CorruptBlock: the file is damaged: which blocks are out of date is then unknown.
        """
        try:
            data = self._path.read_bytes()
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise CorruptBlock(f"{self._path}: cannot be read: {error.strerror}") from error
        try:
            head, _, body = data[:_MAX_BYTES].partition(b"\n")
            tree = json.loads(body)
            is_sound = head.decode() == f"{_MAGIC} {checksum(body):016x}"
            epochs = {str(model): int(epoch) for model, epoch in tree.items()}
        except (ValueError, AttributeError, TypeError) as error:
            raise CorruptBlock(f"{self._path}: is damaged: {error}") from error
        if not is_sound:
            raise CorruptBlock(f"{self._path}: is damaged: its checksum does not match")
        return epochs

    def write(self, epochs: dict[str, int]) -> None:
        """Replace the file durably.

        Raises:
            TierUnavailable: it cannot be written.
        """
        body = json.dumps(epochs, sort_keys=True).encode()
        draft = self._path.with_suffix(".new")
        try:
            fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            with os.fdopen(fd, "wb") as file:
                file.write(f"{_MAGIC} {checksum(body):016x}\n".encode() + body)
                file.flush()
                os.fsync(file.fileno())
            draft.replace(self._path)
            folder = os.open(self._path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
        except OSError as error:
            raise TierUnavailable(
                f"{self._path}: the epochs cannot be kept: {error.strerror}: make room, or let us write there"
            ) from error
