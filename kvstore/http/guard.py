"""Guard: stands between a connection and aiohttp's protocol, and drops clients that are too slow.

aiohttp bounds neither the time that a request's header takes nor that for which an answer lies unread. Bodies
are timed where they are read.
"""

import asyncio
import fcntl
import socket
import struct
import termios
from collections.abc import Callable
from typing import cast

from kvstore.garbage import unlink_transport
from kvstore.http.counters import HttpCounters
from kvstore.http.limits import Limits

READ_BYTES = 256 << 10
"""Most bytes that are read of a connection at a time."""

_HEAD_READ_BYTES = 16 << 10
_INT = struct.Struct("@i")
_TCP_CLOSE = 7
"""State of a connection that was reset: netinet/tcp.h."""


class Guard(asyncio.BufferedProtocol):
    """One connection. ``inner`` is the protocol that it passes everything to.

    ``buffer``, of READ_BYTES, may be shared by all connections of a loop: it is filled and emptied in one go.
    Large pieces are read only of a body whose length is known: all else is parsed, a piece at a time, while
    others wait (a body of tiny chunks: 44 us per KiB).

    What was granted in an answer that the client did not read is taken back: see ``undo_if_unread``. That an
    answer was read is known when more comes from the client, or when it ends the connection in order and its
    machine has taken all that was sent. It is taken for read, too, when this side ends the connection.

    Idle: no request is under way; the connection ends after ``idle_s``, the first one after ``header_s``.
    With the first byte of a request its header has ``header_s``, until ``begin_request`` is called. Whenever
    what was written does not leave for ``stall_s``, the connection is aborted.
    """

    def __init__(
        self,
        inner: asyncio.Protocol,
        limits: Limits,
        counters: HttpCounters,
        *,
        buffer: memoryview,
        on_admitted: Callable[["Guard"], None],
        on_end: Callable[["Guard"], None],
    ) -> None:
        self.inner = inner
        self._limits = limits
        self._counters = counters
        self._buffer = buffer
        self._read_bytes = _HEAD_READ_BYTES
        self._on_admitted = on_admitted
        self._on_end = on_end
        self._transport: asyncio.Transport | None = None
        self._waiting: asyncio.TimerHandle | None = None
        self._stalled: asyncio.TimerHandle | None = None
        self._is_idle = False
        self._has_ended = False
        self._is_unread = False
        self._undo: list[Callable[[], None]] = []
        self.is_made = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin to wait for the first request."""
        self.is_made = True
        self._transport = cast("asyncio.Transport", transport)  # what TCP and TLS connections have
        # A write is over once all of it left: then nothing refers to an arena slot any more.
        self._transport.set_write_buffer_limits(high=1, low=0)
        self._wait(self._limits.header_s)
        self.inner.connection_made(transport)

    def get_buffer(self, sizehint: int) -> memoryview:
        """Say where the next bytes go."""
        return self._buffer[: self._read_bytes]

    def buffer_updated(self, nbytes: int) -> None:
        """Pass data on; the first bytes of a request start its time."""
        self._undo.clear()
        if self._is_idle:
            self._is_idle = False
            self._wait(self._limits.header_s)
        self.inner.data_received(bytes(self._buffer[:nbytes]))

    def eof_received(self) -> bool | None:
        """Pass it on."""
        self._has_ended = True
        self._is_unread = bool(self._undo) and not self._has_taken_all()
        return self.inner.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        """End the timers, take back what was not read of, and pass it on."""
        unlink_transport(self._transport)
        self._transport = None
        if exc is not None or self._stalled is not None or self._is_unread:
            for undo in self._undo:
                undo()
        self._undo.clear()
        for timer in (self._waiting, self._stalled):
            if timer is not None:
                timer.cancel()
        self._waiting = self._stalled = None
        self.inner.connection_lost(exc)
        self._on_end(self)

    def pause_writing(self) -> None:
        """What was written does not leave: give it some time."""
        self._stalled = asyncio.get_running_loop().call_later(self._limits.stall_s, self._drop)
        self.inner.pause_writing()

    def resume_writing(self) -> None:
        """What was written has left."""
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None
        self.inner.resume_writing()

    def begin_request(self, body_bytes: int | None) -> None:
        """Note that a request's header is complete, and how long its body is, if that is known."""
        self._is_idle = False
        if body_bytes:
            self._read_bytes = READ_BYTES
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None

    def end_request(self) -> None:
        """Note that a request is answered: the connection is idle."""
        self._is_idle = True
        self._read_bytes = _HEAD_READ_BYTES
        if self._transport is not None:
            self._wait(self._limits.idle_s)

    def abort(self) -> None:
        """End the connection at once; what was not sent is not sent."""
        if self._transport is not None:
            self._transport.abort()

    def note_admitted(self) -> None:
        """Note that a request came on it whose sender may send it."""
        self._on_admitted(self)

    def undo_if_unread(self, undo: Callable[[], None]) -> None:
        """Call ``undo`` if the connection ends before the client has read what was sent until now."""
        if self._transport is None or self._has_ended:
            undo()
        else:
            self._undo.append(undo)

    def _has_taken_all(self) -> bool:
        """Whether the client's machine has acknowledged all that was sent, and reset nothing."""
        assert self._transport is not None, "asked while the connection stands"
        sock = self._transport.get_extra_info("socket")
        (state,) = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)
        left_bytes = bytearray(_INT.size)
        fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, left_bytes)
        return state != _TCP_CLOSE and _INT.unpack(left_bytes) == (0,)

    def _wait(self, limit_s: float) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
        self._waiting = asyncio.get_running_loop().call_later(limit_s, self._drop)

    def _drop(self) -> None:
        if not self._is_idle:
            self._counters.slow_clients += 1
        self.abort()
