"""PolicyFile: what the policies of a store learned, kept beside its blocks; read with doubt."""

import os
from pathlib import Path

import msgpack

from kvstore.checksum import checksum
from kvstore.errors import CorruptBlock

Learned = dict[str, tuple[str, dict[str, object]]]
"""By tier: the name of its policy, and that policy's state."""

_MAGIC = "kvstore.policies.1"
_MAX_BYTES = 16 << 20
_MAX_TIERS = 16
_MAX_KEYS = 64
_MAX_ITEMS = 1 << 16
_MAX_STR_BYTES = 256


class PolicyFile:
    """One small file that is replaced as a whole. Methods block."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __str__(self) -> str:
        return str(self._path)

    def read(self) -> Learned:
        """Return what was written last; nothing if there is no file.

        Raises:
            CorruptBlock: the file is not sound, or another version's.
            OSError: it cannot be read.
        """
        try:
            fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except FileNotFoundError:
            return {}
        with os.fdopen(fd, "rb") as file:
            data = file.read(_MAX_BYTES + 1)
        if len(data) > _MAX_BYTES:
            raise CorruptBlock(f"it has more than {_MAX_BYTES} bytes")
        head, _, body = data.partition(b"\n")
        magic, _, digits = head.partition(b" ")
        if magic != _MAGIC.encode():
            raise CorruptBlock(f"it does not begin with {_MAGIC}: another version wrote it, or it is damaged")
        if digits != f"{checksum(body):016x}".encode():
            raise CorruptBlock("its checksum does not match")
        return _learned(_unpacked(body))

    def write(self, learned: Learned) -> None:
        """Replace the file durably.

        Raises:
            OSError: it cannot be written, or it would be too large.
        """
        body: bytes = msgpack.packb(learned)  # pyright: ignore[reportAssignmentType]
        head = f"{_MAGIC} {checksum(body):016x}\n".encode()
        if len(head) + len(body) > _MAX_BYTES:
            raise OSError(f"{len(body)} bytes of statistics are more than {_MAX_BYTES}")
        draft = self._path.with_name(f"{self._path.name}.new")
        fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        with os.fdopen(fd, "wb") as file:
            file.write(head + body)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(self._path)
        folder = os.open(self._path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def _unpacked(body: bytes) -> object:
    try:
        return msgpack.unpackb(
            body,
            max_map_len=_MAX_KEYS,
            max_array_len=_MAX_ITEMS,
            max_str_len=_MAX_STR_BYTES,
            max_bin_len=0,
            max_ext_len=0,
        )
    except (ValueError, TypeError, OverflowError, msgpack.exceptions.UnpackException) as error:
        raise CorruptBlock(f"its content is damaged: {error}") from error


def _learned(tree: object) -> Learned:
    if not isinstance(tree, dict) or len(tree) > _MAX_TIERS:
        raise CorruptBlock("it does not hold tiers")
    learned: Learned = {}
    for tier, saved in tree.items():
        if not isinstance(saved, list) or len(saved) != 2:
            raise CorruptBlock("a tier has no policy and state")
        name, state = saved
        if not isinstance(tier, str) or not isinstance(name, str) or not isinstance(state, dict):
            raise CorruptBlock("a tier has no policy and state")
        learned[tier] = (name, state)
    return learned
