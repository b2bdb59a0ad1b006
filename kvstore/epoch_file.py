"""EpochFile: the epochs of models, kept across restarts beside the blocks they make unreachable."""

import json
import os
from collections.abc import Sequence
from pathlib import Path

from kvstore.checksum import checksum
from kvstore.errors import CorruptBlock, TierUnavailable

_MAGIC = "kvstore.epochs.1"
_MAX_BYTES = 1 << 20


class EpochFile:
    """Small files with the same content, one per disk, each replaced as a whole. Methods block."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = tuple(paths)

    def read(self) -> dict[str, int]:
        """Return the epoch of each model: the highest in any sound file; empty if there are no files.

        Raises:
            CorruptBlock: there are files, and none is sound: which blocks are out of date is then unknown.
        """
        epochs: dict[str, int] = {}
        failed: CorruptBlock | None = None
        num_sound = 0
        for path in self._paths:
            try:
                found = _read(path)
            except CorruptBlock as error:
                failed = error
                continue
            if found is not None:
                num_sound += 1
                epochs |= {model: max(epoch, epochs.get(model, 0)) for model, epoch in found.items()}
        if failed is not None and not num_sound:
            raise failed
        return epochs

    def write(self, epochs: dict[str, int]) -> None:
        """Replace the files durably.

        Raises:
            TierUnavailable: none can be written.
        """
        failed: OSError | None = None
        num_written = 0
        for path in self._paths:
            try:
                _replace(path, epochs)
            except OSError as error:
                failed = error
            else:
                num_written += 1
        if failed is not None and not num_written:
            raise TierUnavailable(
                f"{failed.filename or self._paths[0]}: the epochs cannot be kept: {failed.strerror}: "
                "make room, or let us write there"
            ) from failed


def _read(path: Path) -> dict[str, int] | None:
    try:
        data = path.read_bytes()
    except OSError:
        # No file, or a disk that cannot be read: none of its blocks is served either.
        return None
    try:
        head, _, body = data[:_MAX_BYTES].partition(b"\n")
        tree = json.loads(body)
        is_sound = head.decode() == f"{_MAGIC} {checksum(body):016x}"
        epochs = {str(model): int(epoch) for model, epoch in tree.items()}
    except (ValueError, AttributeError, TypeError, ArithmeticError, RecursionError) as error:
        raise CorruptBlock(f"{path}: is damaged: {error}") from error
    if not is_sound:
        raise CorruptBlock(f"{path}: is damaged: its checksum does not match")
    return epochs


def _replace(path: Path, epochs: dict[str, int]) -> None:
    body = json.dumps(epochs, sort_keys=True).encode()
    draft = path.with_suffix(".new")
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(f"{_MAGIC} {checksum(body):016x}\n".encode() + body)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
