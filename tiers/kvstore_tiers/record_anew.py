"""Writing an environment of records anew, so that nothing it once held lies in its free parts. Blocking.

LMDB leaves old bytes in pages that are free, and in the free parts of others. A copy that is filled record
by record has none; it takes the old file's place in one step, and the old one is overwritten before its name
goes.
"""

import os
import shutil
import stat
from pathlib import Path
from typing import Any

import lmdb

_MAX_DBS = 2
_BATCH_RECORDS = 64
_PIECE_BYTES = 1 << 20


def write_anew(env: "lmdb.Environment", draft: Path) -> None:
    """Copy all records into a new environment below ``draft``, on disk when this returns.

    Raises:
        lmdb.Error, OSError: it could not be written; what there is of it is removed.
    """
    if draft.is_dir() and not draft.is_symlink():
        shutil.rmtree(draft)
    draft.mkdir(mode=0o700)
    try:
        with lmdb.open(
            str(draft), map_size=env.info()["map_size"], mode=0o600, sync=False, max_dbs=_MAX_DBS
        ) as copy:
            with env.begin() as reading:
                for name in _names(reading, env):
                    _copy(reading, env.open_db(name, txn=reading, create=False), copy, name)
            copy.sync(True)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise


def _names(reading: "lmdb.Transaction", env: "lmdb.Environment") -> list[bytes]:
    with reading.cursor() as cursor:
        return [bytes(name) for name in cursor.iternext(values=False)]


def _copy(
    reading: "lmdb.Transaction",
    source: Any,  # Any: lmdb names no type for it
    copy: "lmdb.Environment",
    name: bytes,
) -> None:
    target = copy.open_db(name)
    with reading.cursor(db=source) as cursor:
        is_left = cursor.first()
        while is_left:
            with copy.begin(write=True) as writing:
                for _ in range(_BATCH_RECORDS):
                    writing.put(cursor.key(), cursor.value(), db=target, append=True)
                    is_left = cursor.next()
                    if not is_left:
                        break


def take_place(draft: Path, path: Path) -> None:
    """Put a file in another's place, and overwrite that. A crash leaves one of them whole. Raises OSError."""
    old = old_of(path)
    overwrite(old)
    os.link(path, old)
    draft.replace(path)
    _sync(path.parent)
    overwrite(old)


def old_of(path: Path) -> Path:
    """Return the name that a file has between its replacement and its end."""
    return path.with_suffix(".old")


def overwrite(path: Path) -> None:
    """Overwrite a file, if there is one, and remove it. Raises OSError."""
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return
    try:
        status = os.fstat(fd)
        if stat.S_ISREG(status.st_mode) and status.st_nlink == 1:
            for offset in range(0, status.st_size, _PIECE_BYTES):
                os.pwrite(fd, bytes(min(_PIECE_BYTES, status.st_size - offset)), offset)
            os.fsync(fd)
    finally:
        os.close(fd)
    path.unlink()
    _sync(path.parent)


def _sync(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
