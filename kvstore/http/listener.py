"""Listener: takes an address, lets connections in up to a cap, and gives each a guarded protocol."""

import asyncio
import contextlib
import logging
import socket
import ssl
import time
from collections.abc import Callable

from kvstore.accepting import Accepting
from kvstore.errors import InvalidConfig
from kvstore.http.counters import HttpCounters
from kvstore.http.guard import READ_BYTES, Guard
from kvstore.http.limits import Limits
from kvstore.http.newcomers import Newcomers
from kvstore.http.protocol import MAX_HEADER_BYTES
from kvstore.log_limit import LimitedWarning

logger = logging.getLogger(__name__)

_BACKLOG = 512
_HANDSHAKE_S = 10.0
_END_S = 1.0


class Listener:
    """One address, on one event loop.

    ``protocol`` makes what a connection's bytes go to, ``tls`` the context of the next one (None: plain).
    Beyond ``limits.max_connections`` one that has shown nothing yet makes way (see Newcomers); without such a
    one the new connection gets ``full``, a whole HTTP answer, if it is plain. ``remedy`` is what raises the
    number. What cannot be used is said of ``what``.
    """

    def __init__(
        self,
        protocol: Callable[[], asyncio.Protocol],
        *,
        limits: Limits,
        counters: HttpCounters,
        tls: Callable[[], ssl.SSLContext] | None,
        full: bytes,
        what: str,
        remedy: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._protocol = protocol
        self._limits = limits
        self._counters = counters
        self._tls = tls
        self._full = full
        self._what = what
        self._remedy = remedy
        self._socket: socket.socket | None = None
        self._accepting: Accepting | None = None
        self._buffer = memoryview(bytearray(READ_BYTES))
        self._opening: dict[asyncio.Task[None], socket.socket] = {}
        self._guards: dict[object, Guard] = {}
        self._newcomers: Newcomers[Guard] = Newcomers(clock)
        self._refusals = LimitedWarning(logger)
        self._handshakes = LimitedWarning(logger)

    @property
    def url(self) -> str:
        """Where it is reached; only while it listens."""
        assert self._socket is not None, "http: not listening"
        host, port = self._socket.getsockname()[:2]
        scheme = "http" if self._tls is None else "https"
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"

    def listen(self, host: str, port: int) -> None:
        """Take the address and let connections in.

        Raises:
            InvalidConfig: the address cannot be used.
        """
        self._socket = self._bound(host, port)
        self._accepting = Accepting(self._socket, self._receive, "http")
        logger.info("http: listening on %s", self.url)

    def guard_of(self, protocol: object) -> Guard:
        """Return the guard of a connection by its protocol; tell it of requests and who may send them."""
        return self._guards[protocol]

    async def stop(self) -> None:
        """Let no more connections in, and end those whose handshake is not over. Idempotent."""
        if self._accepting is not None:
            self._accepting.stop()
            self._accepting = None
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        for sock in self._opening.values():
            _hang_up(sock)
        if self._opening:
            await asyncio.wait(set(self._opening), timeout=_END_S)

    def abort_all(self) -> None:
        """End every connection at once."""
        for guard in list(self._guards.values()):
            guard.abort()

    def _bound(self, host: str, port: int) -> socket.socket:
        sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
        try:
            sock.setblocking(False)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind((host, port))
            sock.listen(_BACKLOG)
        except OSError as error:
            sock.close()
            raise InvalidConfig(
                f"{self._what}: {host} port {port} cannot be used: {error.strerror or error}: choose another,"
                " or stop the server that has it"
            ) from error
        return sock

    def _receive(self, sock: socket.socket) -> None:
        """Let a connection in, if there is room for it or can be made."""
        if self._counters.open_connections >= self._limits.max_connections and not self._make_way():
            self._refuse(sock)
        else:
            self._let_in(sock)

    def _let_in(self, sock: socket.socket) -> None:
        guard = Guard(
            self._protocol(),
            self._limits,
            self._counters,
            buffer=self._buffer,
            on_admitted=self._newcomers.discard,
            on_end=self._note_end,
        )
        task = asyncio.create_task(self._open(sock, guard))
        self._counters.connections += 1
        self._counters.open_connections += 1
        self._guards[guard.inner] = guard
        self._newcomers.add(guard, sock)
        self._opening[task] = sock
        task.add_done_callback(self._opening.pop)

    def _make_way(self) -> bool:
        """End a connection that has shown nothing yet; False if there is none."""
        taken = self._newcomers.take()
        if taken is None:
            return False
        guard, sock = taken
        self._counters.ended_newcomers += 1
        guard.abort()
        _hang_up(sock)  # one whose handshake is under way
        return True

    async def _open(self, sock: socket.socket, guard: Guard) -> None:
        """Give an accepted socket its protocol, after its TLS handshake where there is one."""
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: guard,
                sock,
                ssl=None if self._tls is None else self._tls(),
                ssl_handshake_timeout=None if self._tls is None else _HANDSHAKE_S,
            )
        except OSError as error:
            if self._tls is not None:
                self._counters.failed_handshakes += 1
                self._handshakes.warn("http: a TLS handshake failed: %s", error)
            sock.close()
        except MemoryError as error:
            self._refusals.warn("http: cannot serve a connection: %s", error or "out of memory")
            _hang_up(sock)  # where asyncio has made something of it already, that closes it
        finally:
            if not guard.is_made:
                self._note_end(guard)

    def _note_end(self, guard: Guard) -> None:
        self._newcomers.discard(guard)
        if self._guards.pop(guard.inner, None) is not None:
            self._counters.open_connections -= 1

    def _refuse(self, sock: socket.socket) -> None:
        self._counters.refused_connections += 1
        self._refusals.warn(
            "http: %d connections are open, none more: raise %s",
            self._limits.max_connections,
            self._remedy,
        )
        with contextlib.suppress(OSError):
            if self._tls is None:
                sock.send(self._full)
                sock.shutdown(socket.SHUT_WR)
                sock.recv(MAX_HEADER_BYTES)  # what lies unread at close makes the answer be thrown away
        sock.close()


def _hang_up(sock: socket.socket) -> None:
    """Let whoever waits for data see the end of the connection."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


def full_answer(body: bytes) -> bytes:
    """Return the whole answer of a server that takes no more connections."""
    return (
        b"HTTP/1.1 503 Service Unavailable\r\nServer: kvstore\r\nContent-Type: application/json\r\n"
        b"Retry-After: 1\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
    )
