"""The server's Unix socket: made private, where nobody else listens."""

import asyncio
import contextlib
import fcntl
import os
import socket
import stat
from collections.abc import AsyncIterator
from pathlib import Path

from kvstore.errors import InvalidConfig

BACKLOG = 128
"""Clients that may wait to be accepted, and that may be greeting at once."""

_START_TRIES = 200
_START_PAUSE_S = 0.01


async def listening_socket(path: Path) -> socket.socket:
    """Return a listening socket at ``path``, private from its first moment. A missing folder is made.

    Raises:
        InvalidConfig: there is something else at the path, another server answers there, or the socket
            cannot be made.
    """
    _make_folder(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        async with _folder_lock(path.parent):
            _remove_stale(path)
            listener.bind(os.fspath(path))
            # Nobody can connect before listen(), so nobody connects before the mode is set.
            _make_private(path)
            listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise InvalidConfig(
            f"socket {path}: cannot be made: {error.strerror or error}: its folder must be writable"
        ) from error
    except BaseException:
        listener.close()
        raise
    listener.setblocking(False)
    return listener


@contextlib.asynccontextmanager
async def _folder_lock(folder: Path) -> AsyncIterator[None]:
    """Let one server at a time look for a stale socket in a folder and put its own there."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for _ in range(_START_TRIES):
            if _try_lock(fd):
                break
            await asyncio.sleep(_START_PAUSE_S)
        else:
            raise InvalidConfig(
                f"socket: {folder} is locked: another server has been starting there for long"
            )
        yield
    finally:
        os.close(fd)


def _make_folder(path: Path) -> None:
    """Make the socket's folder, for its user alone; the folder above must be there."""
    try:
        path.parent.mkdir(mode=0o700)
    except FileExistsError:
        return
    except OSError as error:
        if path.parent.is_dir():  # on a file system that is read-only, say
            return
        raise InvalidConfig(
            f"socket {path}: its folder cannot be made: {error.strerror or error}: make {path.parent} for the"
            " user of this server, or choose another path: socket in [server]"
        ) from error


def _make_private(path: Path) -> None:
    path.chmod(0o600)


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _remove_stale(path: Path) -> None:
    """Remove a socket file that nobody listens on; refuse anything else that is in the way."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise InvalidConfig(f"socket {path}: there is something else at that path: choose another")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(os.fspath(path))
        except ConnectionRefusedError:
            path.unlink()
            return
        except BlockingIOError:
            pass  # its backlog is full: somebody listens
    raise InvalidConfig(f"socket {path}: another server answers there: stop it, or choose another path")
