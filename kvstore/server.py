"""StoreServer: lets clients reach a BlockManager over a Unix socket, or over a connected socket pair."""

import asyncio
import contextlib
import logging
import os
import socket
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from kvstore.accepting import Accepting
from kvstore.access_log import AccessLog
from kvstore.arena_view import open_read_only
from kvstore.errors import InvalidRequest, OtherVersion, ProtocolMismatch, ServerUnavailable
from kvstore.late_work import LateWork
from kvstore.log_limit import LimitedWarning
from kvstore.loop_delay import measure_loop_delay
from kvstore.manager import BlockManager
from kvstore.messages import (
    INSTANCE_BYTES,
    Failed,
    Hello,
    HelloReader,
    Welcome,
    decode_request,
    encode_message,
)
from kvstore.record_store import RecordStore
from kvstore.server_address import parse_address
from kvstore.server_counters import ServerCounters
from kvstore.server_socket import BACKLOG, listening_socket
from kvstore.serving import MAX_IN_FLIGHT, Connection
from kvstore.wire import LENDS_AHEAD, READS_DIRECTLY, TAKES_TRACES, FrameDecoder, encode_frame

logger = logging.getLogger(__name__)

_GREETING_TIMEOUT_S = 2.0
_IDLE_S = 10.0
"""How long a connection must have been silent, holding nothing, to make way when there is no room."""

_MIN_MAKING_WAY = 8
"""As many connections, or a quarter of all that may be, may have made way and still hold what is theirs."""

_LATE_S = 2.0
_BEAT_S = 0.1
_PEER = struct.Struct("3i")
_FOR_READERS = TAKES_TRACES | READS_DIRECTLY


class SharedListing(Protocol):
    """The table of READY blocks that clients look at."""

    fd: int

    def beat(self) -> None:
        """Say that the server lives."""

    def retire(self) -> None:
        """Have nobody use it any more."""


class StoreServer:
    """Serves one manager on one event loop.

    ``listen`` takes the socket before anything of the store is touched; until ``start``, whoever connects is
    told at once that the store is starting. The manager and the records are opened between the two and closed
    after ``stop`` by whoever owns them.
    """

    def __init__(
        self,
        manager: BlockManager,
        *,
        records: RecordStore | None = None,
        socket_path: str | os.PathLike[str] | None = None,
        max_connections: int = 256,
        stay_awake: Callable[[float], None] | None = None,
        access_log: AccessLog | None = None,
    ) -> None:
        self._access_log = access_log
        self._manager = manager
        self._records = records or RecordStore(None)
        self._arena_fd: int | None = None
        self._reading_fd: int | None = None
        self._listing: SharedListing | None = None
        self._table_fd: int | None = None
        self._socket_path = socket_path
        self._max_connections = max_connections
        self._stay_awake = stay_awake
        self._instance = os.urandom(INSTANCE_BYTES)
        self._listener: socket.socket | None = None
        self._bound: tuple[Path, os.stat_result] | None = None
        self._accepting: Accepting | None = None
        self._greetings: set[asyncio.Task[None]] = set()
        self._silent: dict[asyncio.Task[None], None] = {}  # of those, who has not greeted yet; oldest first
        self._connections: set[Connection] = set()
        self._making_way: set[Connection] = set()
        self._is_started = False
        self._is_stopping = False
        self._minding: list[asyncio.Task[None]] = []
        self._late_work = LateWork()
        self._malformed = LimitedWarning(logger)
        self._refusals = LimitedWarning(logger)
        self.counters = ServerCounters()
        self.http_url: str | None = None
        """Where the same store is reached over HTTP, if it is."""
        self.num_ended_over_http: Callable[[], int] = int
        """Connections over HTTP that have ended since the start; none where there is no HTTP."""

    async def listen(self) -> None:
        """Listen on the socket, made with mode 0600, its folder with 0700. A stale socket file is replaced.

        Raises:
            InvalidConfig: the path is too long, is no socket, its folder cannot be used, or another server
                answers there.
        """
        if self._socket_path is None:
            return
        path = parse_address(self._socket_path)
        self._listener = await listening_socket(path)
        self._bound = (path, path.stat())
        self._accepting = Accepting(self._listener, self.serve_socket, "server")
        logger.info("server: listening on %s", path)

    def start(self, arena_fd: int | None, *, listing: SharedListing | None = None) -> None:
        """Let clients in, the manager being open.

        ``arena_fd`` is the top tier's memfd (None: clients can neither fetch nor put); it stays the caller's.
        Clients that may write are sent it, and all of them one for reading only; and one of the ``listing``
        of what is READY there, if they know how to read it.
        """
        self._arena_fd = arena_fd
        self._reading_fd = None if arena_fd is None else open_read_only(arena_fd)
        self._minding = [
            asyncio.create_task(measure_loop_delay(self.counters.loop_delay), name="server-loop-delay")
        ]
        if listing is not None and listing.fd >= 0:
            self._listing, self._table_fd = listing, open_read_only(listing.fd)
            self._minding.append(asyncio.create_task(_beat_forever(listing), name="server-beat"))
        self._is_started = True

    def serve_socket(self, sock: socket.socket) -> None:
        """Serve a connected socket, one end of a pair. Takes it over; call it on the loop's thread."""
        sock.setblocking(False)
        if len(self._silent) >= BACKLOG:
            # Whoever means it has sent its greeting with the connection: the one silent for longest goes.
            oldest = next(iter(self._silent))
            del self._silent[oldest]
            oldest.cancel()
            self.counters.silent_greetings += 1
        task = asyncio.create_task(self._greet(sock))
        self._greetings.add(task)
        self._silent[task] = None
        task.add_done_callback(self._forget_greeting)

    def num_ended_connections(self) -> int:
        """Connections that have ended since the start, over HTTP too."""
        return self.counters.connections - self.counters.open_connections + self.num_ended_over_http()

    def store_stats(self) -> dict[str, object]:
        """Return what the manager counts."""
        return self._manager.stats()

    @property
    def num_connections(self) -> int:
        """Clients connected now."""
        return len(self._connections)

    async def stop(self, *, drain_s: float = 5.0) -> None:
        """Stop listening, answer the requests under way for up to ``drain_s`` seconds, and disconnect."""
        self._is_stopping = True
        self._retire()
        if self._accepting is not None:
            self._accepting.stop()
            self._accepting = None
        self._unlisten()
        for task in self._greetings:
            task.cancel()
        draining = [asyncio.create_task(connection.drain()) for connection in self._connections]
        if draining:
            _, late = await asyncio.wait(draining, timeout=drain_s)
            for waiting in late:
                waiting.cancel()
        await asyncio.gather(*self._greetings, *draining, return_exceptions=True)
        for connection in list(self._connections):
            connection.close()
        await asyncio.sleep(0)
        for connection in [*self._connections, *self._making_way]:
            connection.abort()
        await asyncio.sleep(0)
        await self._late_work.close(patience_s=_LATE_S)
        fds, self._reading_fd, self._table_fd = (self._reading_fd, self._table_fd), None, None
        for fd in fds:
            if fd is not None:
                os.close(fd)

    def _retire(self) -> None:
        """Have no client read what is listed any more, and nobody look after the server."""
        for task in self._minding:
            task.cancel()
        if self._listing is not None:
            self._listing.retire()

    def _unlisten(self) -> None:
        bound, self._bound = self._bound, None
        if bound is not None:
            path, made = bound
            with contextlib.suppress(OSError):
                found = path.lstat()
                if (found.st_dev, found.st_ino) == (made.st_dev, made.st_ino):
                    path.unlink()
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    def _forget_greeting(self, task: "asyncio.Task[None]") -> None:
        self._greetings.discard(task)
        self._silent.pop(task, None)

    async def _greet(self, sock: socket.socket) -> None:
        """Check who connects, exchange greetings, and hand the socket to a Connection."""
        try:
            async with asyncio.timeout(_GREETING_TIMEOUT_S):
                refusal = self._refusal(sock)
                if refusal is not None:
                    self._refuse(sock, refusal)
                    return
                decoder = FrameDecoder()
                hello, offered = await self._read_hello(sock, decoder)
                self._note_greeted()
                is_reader = isinstance(hello, HelloReader)
                taken = offered & (_FOR_READERS if is_reader else _FOR_READERS | LENDS_AHEAD)
                self._send_welcome(sock, taken, is_reader=is_reader)
        except ProtocolMismatch as error:
            self.counters.protocol_errors += 1
            self._malformed.warn("server: closed a connection at its greeting: %s", error)
            self._refuse(sock, error)
            return
        except (OSError, TimeoutError, ServerUnavailable):
            self.counters.refused_connections += 1
            sock.close()
            return
        except BaseException:  # out of memory, or cancelled
            sock.close()
            raise
        await self._hand_over(sock, decoder)

    def _note_greeted(self) -> None:
        task = asyncio.current_task()
        assert task is not None, "a greeting is a task"
        self._silent.pop(task, None)

    async def _hand_over(self, sock: socket.socket, decoder: FrameDecoder) -> None:
        connection = Connection(
            self._manager,
            self._records,
            decoder,
            counters=self.counters,
            malformed=self._malformed,
            late_work=self._late_work,
            on_end=self._forget_connection,
            stay_awake=self._stay_awake,
            access_log=self._access_log,
        )
        self._connections.add(connection)
        self.counters.connections += 1
        self.counters.open_connections = len(self._connections)
        try:
            await asyncio.get_running_loop().connect_accepted_socket(lambda: connection, sock)
        except OSError:
            self._forget_connection(connection)
            sock.close()

    def _forget_connection(self, connection: Connection) -> None:
        self._connections.discard(connection)
        self._making_way.discard(connection)
        self.counters.open_connections = len(self._connections)

    def _refusal(self, sock: socket.socket) -> ServerUnavailable | None:
        _, uid, _ = _PEER.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
        if uid != os.geteuid():
            return ServerUnavailable(f"server: it belongs to user {os.geteuid()}, not to user {uid}")
        if len(self._connections) >= self._max_connections and not self._end_idle_connection():
            return ServerUnavailable(
                f"server: {self._max_connections} clients are connected, none more: raise max_connections"
            )
        if self._is_stopping:
            return ServerUnavailable("server: stopping")
        return None if self._is_started else ServerUnavailable("server: starting: its tiers are being opened")

    def _end_idle_connection(self) -> bool:
        """Make room for a client: end the connection that has been idle, holding nothing, for longest.

        Slots that were lent to it ahead do not count; they stay its own until it is gone. While many such are
        on their way only who holds nothing at all goes.
        """
        may_hold = len(self._making_way) < max(_MIN_MAKING_WAY, self._max_connections // 4)
        silent = [connection for connection in self._connections if connection.silent_s > _IDLE_S]
        silent.sort(key=lambda connection: connection.silent_s, reverse=True)
        idle = next(
            (one for one in silent if (may_hold or not one.holds_anything) and one.idle_s > _IDLE_S), None
        )
        if idle is None:
            return False
        self.counters.idle_ended += 1
        self._forget_connection(idle)
        self._making_way.add(idle)
        idle.cut()
        return True

    def _refuse(self, sock: socket.socket, error: ServerUnavailable | ProtocolMismatch) -> None:
        if isinstance(error, ServerUnavailable):
            self.counters.refused_connections += 1
            self._refusals.warn("%s", error)
            error_to_send = error
        else:
            error_to_send = ServerUnavailable(str(error))
        frame = encode_message(Failed.of(error_to_send), 0)
        if isinstance(error, OtherVersion):
            # `Failed` is the same in all versions, so that the peer can say what is wrong.
            values = Failed.of(error_to_send).to_wire()
            frame = encode_frame(Failed.KIND, 0, values, version=error.version)
        with contextlib.suppress(OSError):
            sock.send(frame)
        sock.close()

    async def _read_hello(self, sock: socket.socket, decoder: FrameDecoder) -> tuple[Hello, int]:
        loop = asyncio.get_running_loop()
        while (frame := decoder.next_frame()) is None:
            data = await loop.sock_recv(sock, 4096)
            if not data:
                raise ServerUnavailable("client: gone before its greeting")
            decoder.feed(data)
        try:
            request = decode_request(frame)
        except InvalidRequest as error:
            raise ProtocolMismatch(f"{error}, before the greeting") from error
        if not isinstance(request, Hello):
            raise ProtocolMismatch(f"message: {type(request).__name__} before the greeting")
        return request, frame.request_id

    def _send_welcome(self, sock: socket.socket, offered: int, *, is_reader: bool) -> None:
        greeting_id = offered & ~READS_DIRECTLY
        if self._arena_fd is None or self._reading_fd is None:
            sock.send(encode_message(Welcome(self._instance, 0, MAX_IN_FLIGHT), greeting_id))
            return
        arena_bytes = os.fstat(self._arena_fd).st_size
        fds = [self._reading_fd] if is_reader else [self._reading_fd, self._arena_fd]
        if offered & READS_DIRECTLY and self._table_fd is not None:
            greeting_id |= READS_DIRECTLY
            fds.append(self._table_fd)
        frame = encode_message(Welcome(self._instance, arena_bytes, MAX_IN_FLIGHT), greeting_id)
        # The buffer of a fresh socket holds far more than this frame, so it goes out whole.
        socket.send_fds(sock, [frame], fds)


async def _beat_forever(listing: SharedListing) -> None:
    """Keep clients sure that what is listed holds: a server that hangs may not have heard what ended."""
    while True:
        listing.beat()
        await asyncio.sleep(_BEAT_S)
