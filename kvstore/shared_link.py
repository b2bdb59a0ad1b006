"""One blocking connection that threads share, for what is held from one call to the next.

Leases and reserved slots belong to the connection they were given on. So a blocking client has one connection
for all of them, beside those that its other calls use one at a time. Several requests may be under way on it,
each answered by its id. There is no thread of its own: of those who wait for answers one reads, for all.

A request whose caller gave up stays registered until its answer comes; what that lends is given back then. A
connection that breaks the protocol, or stays silent while a request waits, is closed. A child process that
inherits one uses it for nothing: its stream is the parent's.
"""

import contextlib
import os
import select
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from kvstore.arena_link import ArenaCache, MappedArena
from kvstore.errors import KVStoreError, ProtocolMismatch, ServerUnavailable, TimedOut
from kvstore.keys import NamespaceDigest
from kvstore.lending import giving_back
from kvstore.link import Dial, greet
from kvstore.messages import Answer, Request, Welcome, decode_answer, encode_message
from kvstore.traced_calls import begin_call, note_answer
from kvstore.tracing import TraceContext
from kvstore.wire import TAKES_TRACES, FrameDecoder

_RECEIVE_BYTES = 256 << 10
_MAX_UNSENT_BYTES = 4 << 20
_LOOK_S = 0.02
"""How often who reads looks whether others have left something unsent."""

_SILENCE_S = 1.0
"""A connection from which nothing came for this long while a request waited is taken for dead."""


@dataclass(slots=True)
class _Waiting:
    """A request under way. ``is_abandoned``: nobody takes its answer any more."""

    sent_s: float
    answer: Answer | None = None
    is_abandoned: bool = False


class SharedLink:
    """A greeted connection. Thread-safe."""

    def __init__(
        self, sock: socket.socket, welcome: Welcome, arena: MappedArena | None, offers: int = 0
    ) -> None:
        sock.setblocking(False)
        self._takes_traces = bool(offers & TAKES_TRACES)
        self.welcome = welcome
        self.arena = arena
        self.opened: set[NamespaceDigest] = set()
        self._pid = os.getpid()
        self._sock = sock
        self._decoder = FrameDecoder()
        self._changed = threading.Condition()
        self._waiting: dict[int, _Waiting] = {}
        self._unsent = bytearray()
        self._next_id = 1
        self._heard_s = time.monotonic()
        self._is_being_read = False
        self._is_taking_in = False
        self._failure: KVStoreError | None = None

    @classmethod
    def open(
        cls, dial: Dial, arenas: ArenaCache, deadline_s: float, *, is_read_only: bool = False
    ) -> "SharedLink":
        """Connect and greet; with ``is_read_only`` as a client that never writes.

        Raises:
            ServerUnavailable: nobody answers (TimedOut: not in time).
            ProtocolMismatch: the server speaks another version, or its arena is not one.
        """
        sock = dial(deadline_s)
        try:
            return cls(sock, *greet(sock, arenas, deadline_s, is_read_only=is_read_only))
        except BaseException:
            sock.close()
            raise

    @property
    def is_lost(self) -> bool:
        """Whether the connection has ended, or is another process's. One system call."""
        if self._failure is not None or os.getpid() != self._pid:
            return True
        try:
            return self._sock.recv(1, socket.MSG_PEEK) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True

    def ask(self, request: Request, deadline_s: float) -> Answer:
        """Send a request and return its answer.

        Raises:
            InvalidRequest: the request is too large; nothing was sent.
            ServerUnavailable: the connection has ended (TimedOut: no answer in time).
            ProtocolMismatch: the server broke the protocol.
        """
        if os.getpid() != self._pid:
            raise ServerUnavailable("client: the connection is the parent process's")
        span = begin_call(request) if self._takes_traces else None
        if span is None:
            return self._ask(request, deadline_s, None)
        with span:
            answer = self._ask(request, deadline_s, span.context)
            note_answer(span, answer)
            return answer

    def _ask(self, request: Request, deadline_s: float, trace: TraceContext | None) -> Answer:
        waiting = self._register(request, deadline_s, trace)
        try:
            self._wait_until(lambda: waiting.answer is not None, deadline_s)
        except BaseException:
            with self._changed:
                self._abandon(waiting)
            raise
        with self._changed:
            if waiting.answer is not None:
                return waiting.answer
            self._abandon(waiting)
            raise self._give_up(type(request).__name__)

    def tell(self, message: Request) -> None:
        """Send a message that has no answer, now or as soon as the server reads."""
        if os.getpid() != self._pid:
            return
        with self._changed:
            if self._failure is None:
                self._unsent += encode_message(message, self._next_id)
                self._next_id += 1
                self._send()

    def close(self) -> None:
        """Close the connection. Idempotent."""
        if os.getpid() != self._pid:
            self._sock.close()
            return
        with self._changed:
            self._fail(ServerUnavailable("client: the connection was closed"))

    def _register(self, request: Request, deadline_s: float, trace: TraceContext | None) -> _Waiting:
        limit = self.welcome.max_in_flight
        self._wait_until(lambda: len(self._waiting) < limit, deadline_s)
        with self._changed:
            if self._failure is not None:
                raise ServerUnavailable("server: connection lost") from self._failure
            if len(self._waiting) >= limit:
                raise TimedOut("client: too many requests are under way")
            self._unsent += encode_message(request, self._next_id, trace=trace)
            waiting = self._waiting[self._next_id] = _Waiting(time.monotonic())
            self._next_id += 1
            self._send()
        return waiting

    def _wait_until(self, is_done: Callable[[], bool], deadline_s: float) -> None:
        """Return when it is done, the connection has ended, or time is up; read if nobody else does."""

        def is_over() -> bool:
            return is_done() or self._failure is not None or time.monotonic() >= deadline_s

        with self._changed:
            while not is_over() and self._is_being_read:
                self._changed.wait(max(0.0, deadline_s - time.monotonic()))
            if is_over():
                return
            self._is_being_read = True
        try:
            while not is_over():
                self._read_once(deadline_s)
        except BaseException:
            if self._is_taking_in:
                # What was received may be lost with the interrupt: the stream could be out of step.
                with self._changed:
                    self._fail(ServerUnavailable("client: interrupted while it received an answer"))
            raise
        finally:
            with self._changed:
                self._is_being_read = False
                if self._failure is not None:
                    self._sock.close()
                self._changed.notify_all()

    def _read_once(self, deadline_s: float) -> None:
        """Wait until the socket is ready, send what is unsent, and take in what has come."""
        poll = select.poll()
        poll.register(self._sock, select.POLLIN | (select.POLLOUT if self._unsent else 0))
        poll.poll(min(_LOOK_S, max(0.0, deadline_s - time.monotonic())) * 1000)
        self._is_taking_in = True
        try:
            data = self._sock.recv(_RECEIVE_BYTES)
        except BlockingIOError:
            data = None
        except OSError as error:
            with self._changed:
                self._fail(ServerUnavailable(f"server: connection lost: {error}"))
            data = None
        with self._changed:
            self._send()
            if data:
                self._take_in(data)
            elif data is not None:
                self._fail(ServerUnavailable("server: it closed the connection"))
        self._is_taking_in = False

    def _take_in(self, data: bytes) -> None:
        self._heard_s = time.monotonic()
        self._decoder.feed(data)
        try:
            while (frame := self._decoder.next_frame()) is not None:
                waiting = self._waiting.pop(frame.request_id, None)
                if waiting is None:
                    raise ProtocolMismatch(f"answer: for request {frame.request_id}, which is not under way")
                self._settle(waiting, decode_answer(frame))
        except ProtocolMismatch as error:
            self._fail(error)
        self._changed.notify_all()

    def _settle(self, waiting: _Waiting, answer: Answer) -> None:
        waiting.answer = answer
        if waiting.is_abandoned:
            self._give_back(answer)

    def _abandon(self, waiting: _Waiting) -> None:
        waiting.is_abandoned = True
        if waiting.answer is not None:
            self._give_back(waiting.answer)

    def _give_back(self, answer: Answer) -> None:
        message = giving_back(answer)
        if message is not None and self._failure is None:
            self._unsent += encode_message(message, self._next_id)
            self._next_id += 1
            self._send()

    def _give_up(self, what: str) -> KVStoreError:
        """Return why there is no answer; a connection that has been silent for long is closed."""
        if isinstance(self._failure, ProtocolMismatch):
            return self._failure
        if self._failure is not None:
            return ServerUnavailable(f"server: connection lost: {self._failure}")
        oldest = next(iter(self._waiting.values()), None)
        if oldest is not None and time.monotonic() - max(oldest.sent_s, self._heard_s) > _SILENCE_S:
            self._fail(TimedOut("server: silent for too long"))
        return TimedOut(f"server: no answer to {what} in time")

    def _send(self) -> None:
        """Send as much as goes out at once; the rest follows when somebody waits for an answer."""
        try:
            while self._unsent:
                del self._unsent[: self._sock.send(self._unsent)]
        except BlockingIOError:
            if len(self._unsent) > _MAX_UNSENT_BYTES:
                self._fail(TimedOut("server: it reads nothing"))
        except OSError as error:
            self._fail(ServerUnavailable(f"server: connection lost: {error}"))

    def _fail(self, error: KVStoreError) -> None:
        if self._failure is None:
            self._failure = error
        self._waiting.clear()
        self._unsent.clear()
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)  # wakes who reads, and then closes it
        if not self._is_being_read:
            self._sock.close()
        self._changed.notify_all()
