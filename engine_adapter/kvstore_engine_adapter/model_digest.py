"""ModelFiles: the digest of a model's files, every byte of them, remembered between starts.

Two models whose digests are equal share KV blocks, so nothing is sampled. A digest is remembered by what the
file system says of the file: path, device, inode, size, and both times. Whoever changes a file's content
changes its ctime, which no program can set. A file that was changed less than two seconds before it was
hashed could change again within the same tick of the file system's clock: its digest is not remembered.
"""

import hashlib
import json
import logging
import os
import stat
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Self

from kvstore.checksum import checksum
from kvstore.errors import UnsupportedModel

logger = logging.getLogger(__name__)

_CHUNK_BYTES = 4 << 20
_PROGRESS_S = 5.0
_SETTLED_S = 2.0
_MAX_RECORD_BYTES = 16 << 10
_MAGIC = "kvstore.digest.1"


@dataclass(frozen=True, slots=True)
class FileIdentity:
    """What the file system says of a file; another content has another one."""

    path: str
    device: int
    inode: int
    size_bytes: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, path: Path) -> Self:
        """Return the identity that the file has now.

        Raises:
            UnsupportedModel: there is no such file, or it cannot be looked at.
        """
        absolute = path.absolute()
        try:
            found = absolute.stat()
        except OSError as error:
            raise UnsupportedModel(f"{path}: cannot be read: {error.strerror}") from error
        return cls(
            str(absolute), found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
        )


class ModelFiles:
    """The files of one model as they are at the moment of construction. Blocking.

    ``cache_folder`` is where digests are remembered (None: nowhere). One that cannot be used costs time only.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        *,
        cache_folder: Path | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall_clock_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self._identities = [FileIdentity.of(path) for path in paths]
        self._folder = None if cache_folder is None else cache_folder / "digests"
        self._clock = clock
        self._wall_clock_ns = wall_clock_ns
        self._total_bytes = sum(identity.size_bytes for identity in self._identities)
        self._hashed_bytes = 0
        self._next_line_s = clock() + _PROGRESS_S

    def digest(self) -> str:
        """Return ``sha256:`` and the digest: of one file its SHA-256; of several that of names and digests.

        To be called after the model has been loaded: what was loaded is then what was hashed.

        Raises:
            UnsupportedModel: a file cannot be read, or is not the one of the construction any more.
        """
        digests = [self._file_digest(identity) for identity in self._identities]
        for identity in self._identities:
            if FileIdentity.of(Path(identity.path)) != identity:
                raise UnsupportedModel(f"{identity.path}: it changed while it was loaded: start again")
        if len(digests) == 1:
            return f"sha256:{digests[0]}"
        named = [[Path(at.path).name, one] for at, one in zip(self._identities, digests, strict=True)]
        return f"sha256:{hashlib.sha256(json.dumps(named).encode()).hexdigest()}"

    def _file_digest(self, identity: FileIdentity) -> str:
        known = _remembered(self._folder, identity)
        if known is not None:
            self._hashed_bytes += identity.size_bytes
            return known
        is_settled = self._wall_clock_ns() - identity.ctime_ns > _SETTLED_S * 1e9
        try:
            digest = self._hash(identity)
        except OSError as error:
            raise UnsupportedModel(f"{identity.path}: cannot be read: {error.strerror}") from error
        if is_settled and self._folder is not None and FileIdentity.of(Path(identity.path)) == identity:
            _remember(self._folder, identity, digest)
        return digest

    def _hash(self, identity: FileIdentity) -> str:
        sha, chunk = hashlib.sha256(), memoryview(bytearray(_CHUNK_BYTES))
        with open(identity.path, "rb", buffering=0) as file:  # noqa: PTH123  # Path.open has no readinto's type
            while read_bytes := file.readinto(chunk):
                sha.update(chunk[:read_bytes])
                self._hashed_bytes += read_bytes
                self._tell_progress()
        return sha.hexdigest()

    def _tell_progress(self) -> None:
        now_s = self._clock()
        if now_s >= self._next_line_s:
            self._next_line_s = now_s + _PROGRESS_S
            logger.info(
                "model: hashing its files: %.1f of %.1f GB", self._hashed_bytes / 1e9, self._total_bytes / 1e9
            )


def _record_path(folder: Path, identity: FileIdentity) -> Path:
    return folder / hashlib.sha256(os.fsencode(identity.path)).hexdigest()[:32]


def _remembered(folder: Path | None, identity: FileIdentity) -> str | None:
    """Return the digest of exactly this file, None if there is no whole record of our own that says so."""
    if folder is None:
        return None
    try:
        fd = os.open(_record_path(folder, identity), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        with os.fdopen(fd, "rb") as file:
            found = os.fstat(fd)
            data = file.read(_MAX_RECORD_BYTES)
    except OSError:
        return None
    is_ours = found.st_uid == os.geteuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    head, _, body = data.partition(b"\n")
    if not is_ours or head != _head(body):
        return None
    try:
        record = json.loads(body)
    except ValueError:
        return None
    is_same = isinstance(record, list) and record[:-1] == list(astuple(identity))
    return str(record[-1]) if is_same else None


def _remember(folder: Path, identity: FileIdentity, digest: str) -> None:
    body = json.dumps([*astuple(identity), digest]).encode()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".new-", dir=folder) as work:
            draft = Path(work) / "record"
            draft.write_bytes(_head(body) + b"\n" + body)
            draft.chmod(0o600)
            draft.replace(_record_path(folder, identity))
    except OSError as error:
        logger.info("model: its digest is not remembered in %s: %s", folder, error.strerror or error)


def _head(body: bytes) -> bytes:
    return f"{_MAGIC} {checksum(body):016x}".encode()
