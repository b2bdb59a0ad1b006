"""The file of a keyring: made private, changed whole or not at all, never overwritten by a new one."""

import contextlib
import fcntl
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

from kvstore.auth import (
    KEYRING_MAX_BYTES,
    SECRET_MIN_BYTES,
    KeyRecord,
    Keyring,
    Scope,
    key_digest,
    require_name,
)
from kvstore.errors import InvalidConfig

_KEY_PREFIX = "kvs_"
_KEY_RANDOM_BYTES = 32
_HEAD = """\
# API keys of a kvstore server. 'secret' decides what every tenant's blocks are called: it is the same on all
# nodes, and with another one nothing stored for tenants is found. Of keys only digests are kept.
"""


def create_keyring(path: Path) -> None:
    """Make a keyring file, mode 0600, with a new secret and no keys. Blocks.

    Raises:
        InvalidConfig: there is something at the path, or the file cannot be made.
    """
    text = f"{_HEAD}secret {secrets.token_hex(SECRET_MIN_BYTES)}\n"
    _create(path, text.encode(), why="a new secret would put all that tenants stored out of reach")


def write_salt(path: Path, tenant: str, out: Path) -> None:
    """Write a tenant's salt to a new file, mode 0600, for engines that use the Unix socket. Blocks.

    Raises:
        InvalidConfig: no key of the keyring file is the tenant's, there is something at ``out``, or a file
            cannot be read or made.
    """
    keyring = read_keyring(path)
    if tenant not in {record.tenant for record in keyring.records}:
        raise InvalidConfig(f"{path}: no key is of this tenant: see kvstore keys list, or add one")
    _create(out, keyring.salt(tenant), why="name a file that is not there")


def _create(path: Path, data: bytes, *, why: str) -> None:
    try:
        with _draft(path, data, mode=0o600) as draft:
            # Unlike a rename, a link replaces nothing.
            os.link(draft, path)
        _sync_folder(path.parent)
    except FileExistsError:
        raise InvalidConfig(f"{path}: exists: {why}") from None
    except OSError as error:
        raise InvalidConfig(f"{path}: cannot be made: {error.strerror}") from error


def add_key(path: Path, name: str, *, tenant: str, scopes: frozenset[Scope]) -> str:
    """Add a key to a keyring file and return its text, which nothing keeps. Blocks.

    Raises:
        InvalidConfig: the name is taken, a name is malformed, or the file cannot be read or written.
    """
    key = _KEY_PREFIX + secrets.token_urlsafe(_KEY_RANDOM_BYTES)
    record = KeyRecord(require_name(name, "name"), require_name(tenant, "tenant"), scopes, key_digest(key))
    with _changing(path) as (text, replace):
        taken = any(record.name == known.name for known in _parsed(text, path).records)
        if taken:
            raise InvalidConfig(f"{path}: there is a key {name}: take another name, or remove it first")
        break_line = "" if text.endswith("\n") else "\n"
        replace(f"{text}{break_line}{_line(record)}\n")
    return key


def remove_key(path: Path, name: str) -> None:
    """Remove a key from a keyring file. Blocks.

    Raises:
        InvalidConfig: there is no such key, or the file cannot be read or written.
    """
    with _changing(path) as (text, replace):
        lines = text.splitlines(keepends=True)
        kept = [line for line in lines if line.partition("#")[0].split()[:2] != ["key", name]]
        if len(kept) == len(lines):
            raise InvalidConfig(f"{path}: there is no key of this name: see kvstore keys list")
        replace("".join(kept))


def read_keyring(path: Path) -> Keyring:
    """Read a keyring file. Blocks.

    Raises:
        InvalidConfig: the file cannot be read, or is no keyring.
    """
    return _parsed(_text(path), path)


class _Replace:
    """Replaces the file that is being changed, if the new text is a keyring."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __call__(self, text: str) -> None:
        _parsed(text, self._path)
        known = self._path.stat()
        with _draft(self._path, text.encode(), mode=known.st_mode & 0o666) as draft:
            made = draft.stat()
            if (made.st_uid, made.st_gid) != (known.st_uid, known.st_gid):
                # The server may run as another user than whoever edits its keys.
                os.chown(draft, known.st_uid, known.st_gid)
            draft.replace(self._path)
        _sync_folder(self._path.parent)


@contextlib.contextmanager
def _changing(path: Path) -> Iterator[tuple[str, _Replace]]:
    """Give a file's text and what replaces it; one process at a time does so in a folder."""
    target = Path(os.path.realpath(path))
    try:
        folder = os.open(target.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise InvalidConfig(f"{path}: cannot be changed: {error.strerror}") from error
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield _text(target), _Replace(target)
    except OSError as error:
        raise InvalidConfig(f"{path}: cannot be changed: {error.strerror}") from error
    finally:
        os.close(folder)


@contextlib.contextmanager
def _draft(path: Path, data: bytes, *, mode: int) -> Iterator[Path]:
    """Write data durably to a file beside ``path`` that is gone afterwards, unless it was renamed."""
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}.new")
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(data)
            os.fchmod(fd, mode)
            file.flush()
            os.fsync(fd)
        yield draft
    finally:
        draft.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(KEYRING_MAX_BYTES + 1)
    except OSError as error:
        raise InvalidConfig(
            f"{path}: cannot be read: {error.strerror}: make it with kvstore keys init"
        ) from error
    if len(data) > KEYRING_MAX_BYTES:
        raise InvalidConfig(f"{path}: larger than {KEYRING_MAX_BYTES} bytes: not a keyring")
    try:
        return data.decode()
    except UnicodeDecodeError:
        # Its text would show the bytes.
        raise InvalidConfig(f"{path}: is not UTF-8 text: not a keyring") from None


def _parsed(text: str, path: Path) -> Keyring:
    return Keyring.parse(text, source=str(path))


def _line(record: KeyRecord) -> str:
    scopes = ",".join(scope.value for scope in Scope if scope in record.scopes)
    return f"key {record.name} {record.tenant} {scopes} {record.digest.hex()}"
