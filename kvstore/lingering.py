"""Lingering: a connection that this side has ended, until its client has ended it too, or died."""

import asyncio
import contextlib
import socket
from collections.abc import Callable

_READ_BYTES = 64 << 10


class Lingering:
    """The other end of a connection that is over for us. ``on_gone`` is called once, when that end is gone.

    The client sees the end of the stream; what it goes on sending is thrown away. One that is frozen does not
    see it, and may go on with what it was about when it wakes up: writing into slots, say. So these are not
    given to others before its end of the socket is closed, by itself or since its process has died.
    """

    def __init__(self, sock: socket.socket, on_gone: Callable[[], None]) -> None:
        self._sock = sock
        self._on_gone = on_gone

    @classmethod
    def begin(cls, transport: asyncio.Transport, on_gone: Callable[[], None]) -> "Lingering":
        """End a connection and watch its other end. Raises OSError: it could not be watched."""
        sock = socket.socket(fileno=transport.get_extra_info("socket").dup().detach())
        lingering = cls(sock, on_gone)
        sock.setblocking(False)
        transport.abort()
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_WR)
        asyncio.get_running_loop().add_reader(sock.fileno(), lingering._read)
        return lingering

    def end(self) -> None:
        """Watch no more. Idempotent."""
        if self._sock.fileno() >= 0:
            asyncio.get_running_loop().remove_reader(self._sock.fileno())
            self._sock.close()
            self._on_gone()

    def _read(self) -> None:
        try:
            is_over = not self._sock.recv(_READ_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            is_over = True
        if is_over:
            self.end()
