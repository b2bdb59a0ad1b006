"""HttpFace: listens, lets connections in up to its cap, and serves the API on them."""

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable, Mapping

from aiohttp import web

from kvstore.accepting import Accepting
from kvstore.doors import Doors
from kvstore.errors import InvalidConfig
from kvstore.http.counters import HttpCounters
from kvstore.http.dispatch import Dispatcher
from kvstore.http.guard import READ_BYTES, Guard
from kvstore.http.limits import Limits
from kvstore.http.newcomers import Newcomers
from kvstore.http.openapi import openapi_document
from kvstore.http.protocol import MAX_HEADER_BYTES, Protocol
from kvstore.http.service import HttpService, name_answer
from kvstore.log_limit import LimitedWarning
from kvstore.manager import BlockManager
from kvstore.tier import SlotTier

logger = logging.getLogger(__name__)

_BACKLOG = 512
_HANDSHAKE_S = 10.0
_END_S = 1.0
_LATE_S = 2.0
_FULL_BODY = b'{"error": {"code": "unavailable", "message": "server: too many connections"}}'
_FULL = (
    b"HTTP/1.1 503 Service Unavailable\r\nServer: kvstore\r\nContent-Type: application/json\r\n"
    b"Retry-After: 1\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%b" % (len(_FULL_BODY), _FULL_BODY)
)


class HttpFace:
    """Serves one manager over HTTP on one event loop.

    ``listen`` takes the address before anything of the store is touched. Until ``start``, and again once
    ``stop`` was called, ``/healthz`` and ``/readyz`` are answered and everything else is refused with 503.
    The manager is opened between the two and closed after ``stop`` by whoever owns it.
    """

    def __init__(
        self,
        manager: BlockManager,
        top: SlotTier,
        host_port: tuple[str, int],
        *,
        limits: Limits | None = None,
        doors: Doors | None = None,
        lease_s: float = 30.0,
        server_stats: Callable[[], Mapping[str, object]] = dict,
    ) -> None:
        self._doors = doors or Doors()
        self._limits = limits or Limits()
        self._service = HttpService(
            manager=manager,
            top=top,
            tenancy=self._doors.tenancy,
            limits=self._limits,
            lease_s=lease_s,
            server_stats=server_stats,
            gate_stats=self._doors.gate.counters.as_dict,
            document=openapi_document(),
        )
        self._dispatcher = Dispatcher(self._service, self._doors.gate)
        self._host_port = host_port
        self._listener: socket.socket | None = None
        self._accepting: Accepting | None = None
        self._server: web.Server | None = None
        self._opening: dict[asyncio.Task[None], socket.socket] = {}
        self._guards: dict[object, Guard] = {}
        self._buffer = memoryview(bytearray(READ_BYTES))
        self._newcomers: Newcomers[Guard] = Newcomers(self._service.clock)
        self._num_requests = 0
        self._is_idle = asyncio.Event()
        self._is_idle.set()
        self._refusals = LimitedWarning(logger)
        self._handshakes = LimitedWarning(logger)

    @property
    def counters(self) -> HttpCounters:
        """What it has seen."""
        return self._service.counters

    @property
    def url(self) -> str:
        """Where it is reached; only while it listens."""
        assert self._listener is not None, "http: not listening"
        host, port = self._listener.getsockname()[:2]
        scheme = "http" if self._doors.tls is None else "https"
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"

    async def listen(self) -> None:
        """Take the address and let connections in.

        Raises:
            InvalidConfig: the address cannot be used.
        """
        self._listener = _listening_socket(*self._host_port)
        self._doors.start()
        self._server = web.Server(self._answer, handler_cancellation=True)
        self._accepting = Accepting(self._listener, self._receive, "http")
        logger.info("http: listening on %s", self.url)

    def start(self) -> None:
        """Answer requests, the manager being open."""
        self._service.is_open = True

    async def stop(self, *, drain_s: float = 5.0) -> None:
        """Refuse new requests, answer those under way for up to ``drain_s`` seconds, and end. Idempotent."""
        service = self._service
        service.is_draining = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(drain_s):
                await self._is_idle.wait()
        if self._accepting is not None:
            self._accepting.stop()
            self._accepting = None
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        self._doors.stop()
        await self._end_connections()
        service.callers.end()
        await service.late_work.close(patience_s=_LATE_S)
        service.pool.shutdown(wait=False, cancel_futures=True)

    async def _end_connections(self) -> None:
        for sock in self._opening.values():
            _hang_up(sock)
        if self._opening:
            await asyncio.wait(set(self._opening), timeout=_END_S)
        if self._server is not None:
            self._server.pre_shutdown()
            await self._server.shutdown(_END_S)
        for guard in list(self._guards.values()):
            guard.abort()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_END_S):
                await self._is_idle.wait()
        await asyncio.sleep(0)

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        guard = self._guards[request.protocol]
        guard.begin_request(request.content_length)
        self._num_requests += 1
        self._is_idle.clear()
        try:
            response = await self._dispatcher.answer(request, guard)
            if not response.prepared:
                name_answer(request, response)
            return response
        except ConnectionError:
            # What was sent of the answer is not whole: its end must not look like one.
            guard.abort()
            return web.Response()
        except asyncio.CancelledError:
            # What waits to be sent may be bytes of a slot whose lease is over.
            guard.abort()
            raise
        finally:
            guard.end_request()
            self._num_requests -= 1
            if not self._num_requests:
                self._is_idle.set()

    def _receive(self, sock: socket.socket) -> None:
        """Let a connection in, if there is room for it or can be made."""
        if self.counters.open_connections >= self._limits.max_connections and not self._make_way():
            self._refuse(sock)
        else:
            self._let_in(sock)

    def _let_in(self, sock: socket.socket) -> None:
        assert self._server is not None, "http: not listening"
        guard = Guard(
            Protocol(self._server, self.counters),
            self._limits,
            self.counters,
            buffer=self._buffer,
            on_admitted=self._newcomers.discard,
            on_end=self._note_end,
        )
        task = asyncio.create_task(self._open(sock, guard))
        self.counters.connections += 1
        self.counters.open_connections += 1
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
        self.counters.ended_newcomers += 1
        guard.abort()
        _hang_up(sock)  # one whose handshake is under way
        return True

    async def _open(self, sock: socket.socket, guard: Guard) -> None:
        """Give an accepted socket its protocol, after its TLS handshake where there is one."""
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: guard,
                sock,
                ssl=None if self._doors.tls is None else self._doors.tls(),
                ssl_handshake_timeout=None if self._doors.tls is None else _HANDSHAKE_S,
            )
        except OSError as error:
            if self._doors.tls is not None:
                self.counters.failed_handshakes += 1
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
            self.counters.open_connections -= 1

    def _refuse(self, sock: socket.socket) -> None:
        self.counters.refused_connections += 1
        self._refusals.warn(
            "http: %d connections are open, none more: raise max_connections of [http], and ulimit -n",
            self._limits.max_connections,
        )
        with contextlib.suppress(OSError):
            if self._doors.tls is None:
                sock.send(_FULL)
                sock.shutdown(socket.SHUT_WR)
                sock.recv(MAX_HEADER_BYTES)  # what lies unread at close makes the answer be thrown away
        sock.close()


def _hang_up(sock: socket.socket) -> None:
    """Let whoever waits for data see the end of the connection."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


def _listening_socket(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        sock.listen(_BACKLOG)
    except OSError as error:
        sock.close()
        raise InvalidConfig(
            f"[http] listen: {host} port {port} cannot be used: {error.strerror or error}: choose another, or"
            " stop the server that has it"
        ) from error
    return sock
