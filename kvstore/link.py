"""One blocking connection to a server: greeting, arena, and one request at a time.

A connection whose last exchange did not end cleanly (timed out, interrupted, malformed) is in doubt and is
closed, never used again; the server then takes back everything it lent to it.
"""

import array
import contextlib
import os
import select
import socket
import struct
import time
from collections.abc import Callable
from pathlib import Path

from kvstore.arena_link import ArenaCache, MappedArena
from kvstore.errors import ProtocolMismatch, ServerUnavailable, TimedOut
from kvstore.keys import NamespaceDigest
from kvstore.messages import (
    Answer,
    Failed,
    Hello,
    HelloReader,
    Request,
    ReturnSlots,
    Welcome,
    decode_answer,
    encode_message,
)
from kvstore.stock import Stock
from kvstore.traced_calls import begin_call, note_answer
from kvstore.tracing import TraceContext, current
from kvstore.wire import LENDS_AHEAD, READS_DIRECTLY, TAKES_TRACES, Frame, FrameDecoder

Dial = Callable[[float], socket.socket]
"""Makes a connected stream socket before an instant of ``time.monotonic()``, or raises ServerUnavailable."""

_TELL_PATIENCE_S = 0.005
MAX_UNSENT_BYTES = 16 << 10
"""Beyond so much that a server has not read, it is told no more of what it need not hear."""

_AWAKE_S = 250e-6
"""How long an answer is waited for without going to sleep, if the one before it came as soon."""

_PEER = struct.Struct("3i")
_MAX_DESCRIPTORS = 3
_OFFERED = TAKES_TRACES | READS_DIRECTLY | LENDS_AHEAD
"""What this client understands beyond the version."""


def unix_dial(path: Path) -> Dial:
    """Return a Dial to the Unix socket at ``path``."""

    def dial(deadline_s: float) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.settimeout(_patience_s(deadline_s))
            sock.connect(os.fspath(path))
        except TimeoutError as error:
            sock.close()
            raise TimedOut(f"server at {path}: no connection in time") from error
        except OSError as error:
            sock.close()
            raise ServerUnavailable(f"server at {path}: {error.strerror or error}: is it running?") from error
        return sock

    return dial


class Link:
    """A greeted connection. Not thread-safe: one call uses it at a time."""

    def __init__(
        self, sock: socket.socket, welcome: Welcome, arena: MappedArena | None, offers: int = 0
    ) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._readable = _poll(sock, select.POLLIN)
        self._decoder = FrameDecoder()
        self._takes_traces = bool(offers & TAKES_TRACES)
        self.stock = Stock() if offers & LENDS_AHEAD else None
        self._unsent = b""
        self._next_id = 1
        self._is_clean = True
        self._answers_soon = False
        # In our own process the server needs the interpreter that waiting awake would take from it.
        self._may_stay_awake = _peer_pid(sock) != os.getpid()
        self.welcome = welcome
        self.arena = arena
        self.opened: set[NamespaceDigest] = set()
        self.place: object = None
        """What a pool counts the connection by, held for as long as there is one."""

    @classmethod
    def open(cls, dial: Dial, arenas: ArenaCache, deadline_s: float, *, is_read_only: bool = False) -> "Link":
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
    def is_usable(self) -> bool:
        """Whether the last exchange ended cleanly and the server has neither gone nor spoken unasked."""
        # Anything to be read would be the end of the stream, or an answer that nobody asked for.
        return self._is_clean and not self._decoder.pending_bytes and not self._readable.poll(0)

    @property
    def is_lost(self) -> bool:
        """Whether the server has ended the connection. Nothing is taken from the stream."""
        if not self._readable.poll(0):
            return False
        try:
            return self._sock.recv(1, socket.MSG_PEEK) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True

    @property
    def is_clean(self) -> bool:
        """Whether no exchange is half done."""
        return self._is_clean

    def ask(
        self, request: Request, deadline_s: float, meanwhile: Callable[[], object] | None = None
    ) -> Answer:
        """Send a request and return its answer; ``meanwhile`` is done before that is waited for.

        Raises:
            InvalidRequest: the request is too large; nothing was sent.
            ServerUnavailable: the server went away (TimedOut: no answer in time, or no time to send).
            ProtocolMismatch: the answer is malformed or belongs to another request.
        """
        span = begin_call(request) if self._takes_traces else None
        if span is None:
            return self._ask(request, deadline_s, meanwhile, None)
        with span:
            answer = self._ask(request, deadline_s, meanwhile, span.context)
            note_answer(span, answer)
            return answer

    def _ask(
        self,
        request: Request,
        deadline_s: float,
        meanwhile: Callable[[], object] | None,
        trace: TraceContext | None,
    ) -> Answer:
        request_id = self._next_id
        self._next_id += 1
        data = encode_message(request, request_id, trace=trace)
        if not self._is_clean:
            raise ServerUnavailable("client: the connection could not take a message")
        if time.monotonic() >= deadline_s:
            raise TimedOut(f"client: no time is left to send {type(request).__name__}")
        self._is_clean = False
        if self._unsent:
            data = self._take_unsent() + data
        try:
            self._send(data, deadline_s)
            if meanwhile is not None:
                meanwhile()
            frame = self._receive(deadline_s)
        except TimeoutError as error:
            raise TimedOut(f"server: no answer to {type(request).__name__} in time") from error
        except OSError as error:
            raise ServerUnavailable(f"server: connection lost: {error}") from error
        if frame.request_id != request_id:
            raise ProtocolMismatch(f"answer: for request {frame.request_id}, expected {request_id}")
        answer = decode_answer(frame)
        self._is_clean = True
        return answer

    def tell(self, message: Request) -> None:
        """Send a message that has no answer; a connection that cannot take it at once is in doubt."""
        if not self._is_clean:
            return
        self._is_clean = False
        try:
            data = self._take_unsent() + encode_message(message, self._next_id)
            self._send(data, time.monotonic() + _TELL_PATIENCE_S)
        except OSError:
            return
        self._next_id += 1
        self._is_clean = True

    @property
    def is_traced(self) -> bool:
        """Whether a request sent now would belong to a span."""
        return self._takes_traces and current() is not None

    def tell_if_heard(self, message: Request) -> bool:
        """As ``tell``, but wait for nothing: while the server is behind, it is kept for the next sending.

        Returns False if too much is kept still, or the connection is in doubt; then it is lost.
        """
        if len(self._unsent) > MAX_UNSENT_BYTES:
            self._send_kept()
        if not self._is_clean or len(self._unsent) > MAX_UNSENT_BYTES:
            return False
        self._unsent += encode_message(message, self._next_id)
        self._next_id += 1
        self._send_kept()
        return self._is_clean

    def _send_kept(self) -> None:
        """Send as much of what is kept as goes out at once."""
        if not self._is_clean:
            return
        self._is_clean = False
        sent = 0
        try:
            sent = self._sock.send(self._unsent)
        except BlockingIOError:
            pass
        except OSError:
            return
        # What did not go out, were it half of a message, goes before all that is sent later.
        self._unsent = self._unsent[sent:]
        self._is_clean = True

    def _take_unsent(self) -> bytes:
        unsent, self._unsent = self._unsent, b""
        return unsent

    def give_back_idle(self) -> None:
        """Give slots back that were lent ahead and lie unused."""
        stock = self.stock
        if stock is None or stock.idle_from_s > time.monotonic():
            return
        if len(self._unsent) > MAX_UNSENT_BYTES:
            self._send_kept()
        if len(self._unsent) <= MAX_UNSENT_BYTES:
            self.tell_if_heard(ReturnSlots(tuple(stock.take_idle())))

    def close(self) -> None:
        """Close the connection. Idempotent."""
        self._is_clean = False
        self._sock.close()

    def _send(self, data: bytes, deadline_s: float) -> None:
        try:
            sent = self._sock.send(data)
        except BlockingIOError:
            sent = 0
        if sent < len(data):
            self._send_rest(memoryview(data)[sent:], deadline_s)

    def _send_rest(self, rest: memoryview, deadline_s: float) -> None:
        writable = _poll(self._sock, select.POLLOUT)
        while rest:
            if not writable.poll(1e3 * _patience_s(deadline_s)):
                raise TimeoutError
            with contextlib.suppress(BlockingIOError):
                rest = rest[self._sock.send(rest) :]

    def _receive(self, deadline_s: float) -> Frame:
        decoder, sock = self._decoder, self._sock
        asked_s = time.monotonic()
        awake_until_s = min(asked_s + _AWAKE_S, deadline_s) if self._answers_soon else 0.0
        while True:
            self._wait(awake_until_s, deadline_s)
            try:
                count = sock.recv_into(decoder.space())
            except BlockingIOError:
                continue
            if not count:
                raise ServerUnavailable("server: it closed the connection")
            decoder.received(count)
            frame = decoder.next_frame()
            if frame is not None:
                self._answers_soon = self._may_stay_awake and time.monotonic() - asked_s < _AWAKE_S
                return frame

    def _wait(self, awake_until_s: float, deadline_s: float) -> None:
        """Return when there may be something to receive, or raise TimeoutError.

        Until ``awake_until_s`` by looking again and again: an idle virtual core takes tens of microseconds
        to wake. Who wants this core, the server above all, has it in between. An answer that is there is
        taken however late it is looked for: this process may not have run for a while.
        """
        poll = self._readable.poll
        while time.monotonic() < awake_until_s:
            if poll(0):
                return
            os.sched_yield()
        if not poll(1e3 * max(0.0, deadline_s - time.monotonic())):
            raise TimeoutError


def _peer_pid(sock: socket.socket) -> int:
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
    pid: int = _PEER.unpack(credentials)[0]
    return pid


def _poll(sock: socket.socket, events: int) -> "select.poll":
    poll = select.poll()
    poll.register(sock, events)
    return poll


def receive_greeting(sock: socket.socket, decoder: FrameDecoder, fds: "array.array[int]") -> Frame | None:
    """Receive once from a greeted server: bytes into ``decoder``, descriptors into ``fds``.

    Returns the frame once it is whole. Raises ServerUnavailable at the end of the stream, ProtocolMismatch
    for more descriptors than a server has, and what ``socket.recvmsg`` raises.
    """
    room = socket.CMSG_SPACE(_MAX_DESCRIPTORS * fds.itemsize)
    data, ancillary, flags, _ = sock.recvmsg(4096, room, socket.MSG_CMSG_CLOEXEC)
    for level, kind, payload in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])
    if not data:
        raise ServerUnavailable("server: it closed the connection at the greeting: is it full or stopping?")
    if flags & socket.MSG_CTRUNC or len(fds) > _MAX_DESCRIPTORS:
        raise ProtocolMismatch(f"greeting: more than {_MAX_DESCRIPTORS} descriptors came with it")
    decoder.feed(data)
    return decoder.next_frame()


def accept_greeting(
    frame: Frame, decoder: FrameDecoder, fds: "array.array[int]", arenas: ArenaCache
) -> tuple[Welcome, MappedArena | None, int]:
    """Check the answer to Hello and map the arena. Takes over the descriptors in ``fds``.

    Returns too what both sides understand beyond the version: flags of ``wire``.

    Raises:
        ServerUnavailable: the server refuses this client: it is full, stopping, or another user's.
        ProtocolMismatch: another message, bytes after it, or no arena where one was announced.
    """
    answer = decode_answer(frame)
    if isinstance(answer, Failed):
        raise answer.to_error()
    offers = frame.request_id
    if not isinstance(answer, Welcome) or offers & ~_OFFERED or decoder.pending_bytes:
        raise ProtocolMismatch(f"greeting: answered by {type(answer).__name__}")
    if not answer.arena_bytes:
        return answer, None, offers & ~LENDS_AHEAD
    has_table = bool(offers & READS_DIRECTLY)
    if len(fds) <= has_table:
        raise ProtocolMismatch("greeting: the arena's descriptor did not come with it")
    taken = list(fds)
    del fds[:]
    table_fd = taken.pop() if has_table else None
    arena = arenas.adopt(answer.instance, taken, answer.arena_bytes, table_fd=table_fd)
    return answer, arena, offers


def greeting(*, is_read_only: bool = False) -> bytes:
    """Return the first frame a client sends."""
    hello = HelloReader(os.getpid()) if is_read_only else Hello(os.getpid())
    return encode_message(hello, _OFFERED & ~LENDS_AHEAD if is_read_only else _OFFERED)


def close_all(fds: "array.array[int]") -> None:
    """Close descriptors that nobody took over."""
    while fds:
        os.close(fds.pop())


def greet(
    sock: socket.socket, arenas: ArenaCache, deadline_s: float, *, is_read_only: bool
) -> tuple[Welcome, MappedArena | None, int]:
    """Greet the server on a connected blocking socket, and map its arena; also: the flags it answers with.

    Raises:
        ServerUnavailable: nobody answers (TimedOut: not in time).
        ProtocolMismatch: the server speaks another version, or its arena is not one.
    """
    decoder, fds = FrameDecoder(), array.array("i")
    try:
        sock.settimeout(_patience_s(deadline_s))
        with contextlib.suppress(ConnectionError):  # a refusal may already lie in our receive buffer
            sock.sendall(greeting(is_read_only=is_read_only))
        while (frame := receive_greeting(sock, decoder, fds)) is None:
            sock.settimeout(_patience_s(deadline_s))
        return accept_greeting(frame, decoder, fds, arenas)
    except TimeoutError as error:
        raise TimedOut("server: it accepted the connection but did not answer the greeting") from error
    except OSError as error:
        raise ServerUnavailable(f"server: connection lost at the greeting: {error}") from error
    finally:
        close_all(fds)


def _patience_s(deadline_s: float) -> float:
    remaining_s = deadline_s - time.monotonic()
    if remaining_s <= 0:
        raise TimeoutError
    return remaining_s
