"""One connection of an asyncio client: many requests under way, each answered by its id.

A request whose caller gave up stays registered until its answer comes; what an answer lends that nobody takes
is given back at once, also when the caller is cancelled in the very tick in which it arrives. A connection
that stays silent while requests wait, or that breaks the protocol, is closed.
"""

import array
import asyncio
import contextlib
import os
import socket
import time
from pathlib import Path
from typing import NamedTuple

from kvstore.arena_link import ArenaCache, MappedArena
from kvstore.errors import ProtocolMismatch, ServerUnavailable, TimedOut
from kvstore.keys import NamespaceDigest
from kvstore.lending import giving_back
from kvstore.link import MAX_UNSENT_BYTES, accept_greeting, close_all, greeting, receive_greeting
from kvstore.messages import Answer, Request, ReturnSlots, Welcome, decode_answer, encode_message
from kvstore.stock import Stock
from kvstore.traced_calls import begin_call, note_answer
from kvstore.tracing import TraceContext, current
from kvstore.wire import LENDS_AHEAD, TAKES_TRACES, Frame, FrameDecoder

_SILENCE_S = 1.0
"""A connection from which nothing came for this long while a request waited is taken for dead."""


class _Waiting(NamedTuple):
    answer: "asyncio.Future[Answer]"
    sent_s: float


class AsyncLink(asyncio.BufferedProtocol):
    """A greeted connection on one event loop."""

    def __init__(
        self, sock: socket.socket, welcome: Welcome, arena: MappedArena | None, offers: int = 0
    ) -> None:
        self._sock = sock
        self._takes_traces = bool(offers & TAKES_TRACES)
        self.stock = Stock() if offers & LENDS_AHEAD else None
        self.welcome = welcome
        self.arena = arena
        self.opened: set[NamespaceDigest] = set()
        self._decoder = FrameDecoder()
        self._waiting: dict[int, _Waiting] = {}
        self._next_id = 1
        self._heard_s = time.monotonic()
        self._transport: asyncio.Transport | None = None
        self._room = asyncio.Semaphore(welcome.max_in_flight)
        self._closed = asyncio.Event()

    @classmethod
    async def open(cls, path: Path, arenas: ArenaCache, *, is_read_only: bool = False) -> "AsyncLink":
        """Connect and greet, with ``is_read_only`` as a client that never writes. The caller bounds the time.

        Raises:
            ServerUnavailable: nobody answers.
            ProtocolMismatch: the server speaks another version, or its arena is not one.
        """
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            loop = asyncio.get_running_loop()
            await loop.sock_connect(sock, os.fspath(path))
            link = cls(sock, *await _greet(sock, arenas, is_read_only=is_read_only))
            await loop.create_unix_connection(lambda: link, sock=sock)
        except OSError as error:
            sock.close()
            raise ServerUnavailable(f"server at {path}: {error.strerror or error}: is it running?") from error
        except BaseException:
            sock.close()
            raise
        return link

    @property
    def is_open(self) -> bool:
        """Whether requests can be sent: also the end of the stream that the loop has not seen yet counts."""
        if self._transport is None or self._transport.is_closing():
            return False
        try:
            return self._sock.recv(1, socket.MSG_PEEK) != b""
        except BlockingIOError:
            return True
        except OSError:
            return False

    @property
    def is_lost(self) -> bool:
        """Whether the connection has ended, as far as the loop knows. May be asked on any thread."""
        return self._closed.is_set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def get_buffer(self, sizehint: int) -> memoryview:
        """Say where the next bytes from the server go."""
        return self._decoder.space()

    def buffer_updated(self, nbytes: int) -> None:
        """Take bytes from the server."""
        self._heard_s = time.monotonic()
        self._decoder.received(nbytes)
        try:
            while self._transport is not None and (frame := self._decoder.next_frame()) is not None:
                self._settle(frame)
        except ProtocolMismatch as error:
            self._fail(error)

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail everything that waits."""
        self._transport = None
        self._closed.set()
        for waiting in self._waiting.values():
            if not waiting.answer.done():
                waiting.answer.set_exception(ServerUnavailable("server: connection lost"))
            self._room.release()
        self._waiting.clear()

    async def ask(self, request: Request, deadline_s: float) -> Answer:
        """Send a request and return its answer.

        Raises:
            InvalidRequest: the request is too large; nothing was sent.
            ServerUnavailable: the server went away (TimedOut: no answer in time).
            ProtocolMismatch: the server broke the protocol.
        """
        span = begin_call(request) if self._takes_traces else None
        if span is None:
            return await self._ask(request, deadline_s, None)
        with span:
            answer = await self._ask(request, deadline_s, span.context)
            note_answer(span, answer)
            return answer

    async def _ask(self, request: Request, deadline_s: float, trace: TraceContext | None) -> Answer:
        loop = asyncio.get_running_loop()
        request_id = self._next_id
        self._next_id += 1
        data = encode_message(request, request_id, trace=trace)
        await self._take_room(deadline_s)
        transport = self._transport
        if transport is None or transport.is_closing():
            self._room.release()
            raise ServerUnavailable("server: connection lost")
        answer: asyncio.Future[Answer] = loop.create_future()
        answer.add_done_callback(_retrieve)
        self._waiting[request_id] = _Waiting(answer, time.monotonic())
        timer = loop.call_later(max(0.0, deadline_s - time.monotonic()), self._expire, answer)
        transport.write(data)
        try:
            return await answer
        except asyncio.CancelledError:
            if answer.done() and not answer.cancelled() and answer.exception() is None:
                self._give_back(answer.result())
            raise
        finally:
            timer.cancel()
            answer.cancel()

    def tell(self, message: Request) -> None:
        """Send a message that has no answer."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(encode_message(message, self._next_id))
            self._next_id += 1

    @property
    def is_traced(self) -> bool:
        """Whether a request sent now would belong to a span."""
        return self._takes_traces and current() is not None

    def tell_if_heard(self, message: Request) -> bool:
        """As ``tell``, but leave it if the server is far behind with reading; returns whether it is sent."""
        transport = self._transport
        if transport is None or transport.is_closing():
            return False
        if transport.get_write_buffer_size() > MAX_UNSENT_BYTES:
            return False
        self.tell(message)
        return True

    def give_back_idle(self) -> None:
        """Give slots back that were lent ahead and lie unused."""
        stock = self.stock
        if stock is not None and stock.idle_from_s <= time.monotonic():
            self.tell(ReturnSlots(tuple(stock.take_idle())))

    def abort(self) -> None:
        """End the connection soon. Idempotent."""
        if self._transport is not None:
            self._transport.abort()

    async def close(self) -> None:
        """Close the connection; returns when it is closed. Idempotent."""
        if self._transport is not None:
            self._transport.abort()
            await self._closed.wait()

    async def _take_room(self, deadline_s: float) -> None:
        if not self._room.locked():
            await self._room.acquire()
            return
        try:
            async with asyncio.timeout(max(0.0, deadline_s - time.monotonic())):
                await self._room.acquire()
        except TimeoutError as error:
            raise TimedOut("client: too many requests are under way") from error

    def _expire(self, answer: "asyncio.Future[Answer]") -> None:
        if answer.done():
            return
        answer.set_exception(TimedOut("server: no answer in time"))
        oldest = next(iter(self._waiting.values()), None)
        now_s = time.monotonic()
        if oldest is not None and now_s - max(oldest.sent_s, self._heard_s) > _SILENCE_S:
            self._fail(TimedOut("server: silent for too long"))

    def _settle(self, frame: Frame) -> None:
        waiting = self._waiting.pop(frame.request_id, None)
        if waiting is None:
            raise ProtocolMismatch(f"answer: for request {frame.request_id}, which is not under way")
        self._room.release()
        try:
            answer = decode_answer(frame)
        except ProtocolMismatch as error:
            if not waiting.answer.done():
                waiting.answer.set_exception(error)
            raise
        if not waiting.answer.done():
            waiting.answer.set_result(answer)
        else:
            self._give_back(answer)

    def _give_back(self, answer: Answer) -> None:
        """End what an answer lent that nobody takes any more."""
        message = giving_back(answer)
        if message is not None:
            self.tell(message)

    def _fail(self, error: ServerUnavailable | ProtocolMismatch) -> None:
        for waiting in self._waiting.values():
            if not waiting.answer.done():
                waiting.answer.set_exception(error)
        self.abort()


def _retrieve(answer: "asyncio.Future[Answer]") -> None:
    # An error that nobody waits for any more is no mistake: the caller was cancelled.
    if not answer.cancelled():
        answer.exception()


async def _greet(
    sock: socket.socket, arenas: ArenaCache, *, is_read_only: bool
) -> tuple[Welcome, MappedArena | None, int]:
    loop = asyncio.get_running_loop()
    decoder, fds = FrameDecoder(), array.array("i")
    try:
        with contextlib.suppress(ConnectionError):  # a refusal may already lie in our receive buffer
            await loop.sock_sendall(sock, greeting(is_read_only=is_read_only))
        while True:
            await _readable(sock)
            try:
                frame = receive_greeting(sock, decoder, fds)
            except BlockingIOError:
                continue
            if frame is not None:
                return accept_greeting(frame, decoder, fds, arenas)
    finally:
        close_all(fds)


async def _readable(sock: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()

    def wake() -> None:
        if not ready.done():
            ready.set_result(None)

    loop.add_reader(sock, wake)
    try:
        await ready
    finally:
        loop.remove_reader(sock)
