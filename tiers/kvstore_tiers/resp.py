"""RespConnection: one blocking connection to a Redis-protocol server, for values of megabytes.

Payloads go out with ``sendmsg`` from where they lie, and come in with ``recv_into`` where they belong.
Replies are parsed by length. Whatever does not parse raises RespFault, after which the connection must be
closed: a stream that may be out of step is never read again.

Time. Every wait is bounded by ``timeout_s`` without a byte moving, and by the deadline of the call. The
socket does not block; where nothing moves, ``poll`` waits. A timeout set on the socket would cost two more
system calls for each ``recv_into`` (measured: benchmarks/remote_client.py).
Thread safety: one thread at a time.
"""

import enum
import math
import select
import socket
import ssl
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from kvstore.checksum import RunningChecksum
from kvstore.layout import MAX_BLOCK_BYTES
from kvstore.tier import SEALED_HEADER_BYTES
from kvstore_tiers.resp_address import AddressLookup, RespAddress
from kvstore_tiers.resp_stream import LoginRefused, RespFault, open_stream

Piece = bytes | bytearray | memoryview
"""Bytes to send."""

_LINE_BUFFER_BYTES = 1024
_SUMMED_BYTES = 256 << 10
"""Bytes received before they are summed: they are still in the core's own cache then (docs/remote.md)."""

_WAKE_BYTES = 128 << 10
"""Bytes that are worth waking a thread for, where more are to come (docs/remote.md)."""

_MAX_DEPTH = 2
_ITEM_BYTES = 16
_SKIP_BYTES = 64 << 10
_SKIP_MAX_BYTES = 2 * MAX_BLOCK_BYTES + SEALED_HEADER_BYTES


@dataclass(frozen=True, slots=True)
class ErrorReply:
    """An error that the server answered; the stream is in step."""

    text: str

    @property
    def code(self) -> str:
        """First word: ``OOM``, ``LOADING``."""
        return self.text.split(" ", 1)[0]

    @property
    def fault(self) -> str:
        """What is wrong with the server, a clause for people."""
        return str(self.as_fault())

    def as_fault(self) -> RespFault:
        """Return what it says of a server that should have served."""
        if self.code == "NOAUTH":
            return LoginRefused(self.code)
        return RespFault(f"the server answers {self.code}")


class BulkStatus(enum.Enum):
    """What came back for a value that was read in place."""

    COMPLETE = "complete"
    ABSENT = "absent"
    WRONG_LENGTH = "wrong_length"


@dataclass(frozen=True, slots=True)
class BulkReply:
    """A value read in place; ``length_bytes`` is its length, whatever was expected."""

    status: BulkStatus
    length_bytes: int = 0


RespReply: TypeAlias = "int | str | bytes | ErrorReply | list[RespReply] | None"
"""A reply of any kind: statuses are text, values bytes."""


class _Allowance:
    """Bytes that one reply may still take."""

    def __init__(self, num_bytes: int) -> None:
        self._left_bytes = num_bytes

    def take(self, num_bytes: int) -> None:
        """Take some. Raises RespFault if there are fewer left."""
        self._left_bytes -= num_bytes
        if num_bytes < 0 or self._left_bytes < 0:
            raise RespFault("a reply is longer than what was asked for")


def command(*words: bytes) -> bytes:
    """Return a command in the wire form."""
    return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%s\r\n" % (len(word), word) for word in words)


class RespConnection:
    """A connected, logged-in socket."""

    def __init__(
        self,
        stream: socket.socket,
        *,
        timeout_s: float,
        clock: Callable[[], float],
    ) -> None:
        self._socket = stream
        self._timeout_s = timeout_s
        self._clock = clock
        self._buffer = bytearray(_LINE_BUFFER_BYTES)
        self._start = 0
        self._stop = 0
        self._heard_s = clock()
        stream.settimeout(0)
        self._is_tls = isinstance(stream, ssl.SSLSocket)
        self._may_wake_late = not self._is_tls and stream.family in (socket.AF_INET, socket.AF_INET6)
        self._wake_bytes = 1
        self._poll_in = select.poll()
        self._poll_in.register(stream, select.POLLIN)
        self._poll_out = select.poll()
        self._poll_out.register(stream, select.POLLOUT)

    @classmethod
    def connect(
        cls,
        address: RespAddress,
        lookup: AddressLookup,
        *,
        timeout_s: float,
        deadline_s: float,
        clock: Callable[[], float],
        tls: ssl.SSLContext | None = None,
    ) -> "RespConnection":
        """Connect and log in.

        Raises:
            RespFault: no server, no answer in time, or it refused the login.
        """
        until_s = min(deadline_s, clock() + timeout_s)
        stream = open_stream(address, lookup, deadline_s=until_s, clock=clock, tls=tls)
        connection = cls(stream, timeout_s=timeout_s, clock=clock)
        try:
            connection._enter(address, deadline_s)
        except RespFault:
            connection.close()
            raise
        return connection

    def send(self, pieces: Sequence[Piece], *, deadline_s: float) -> None:
        """Send pieces one after the other, without joining them.

        Raises:
            RespFault: the connection broke, or time ran out.
        """
        left = [view for piece in pieces if (view := memoryview(piece).cast("B"))]
        self._heard_s = self._clock()
        try:
            while left:
                try:
                    sent = self._socket.send(left[0]) if self._is_tls else self._socket.sendmsg(left)
                except (BlockingIOError, ssl.SSLWantWriteError):
                    self._wait(self._poll_out, deadline_s)
                    continue
                except ssl.SSLWantReadError:
                    self._wait(self._poll_in, deadline_s)
                    continue
                self._heard_s = self._clock()
                while left and sent >= len(left[0]):
                    sent -= len(left.pop(0))
                if sent:
                    left[0] = left[0][sent:]
        except OSError as error:
            raise self._fault(error) from error

    def read_simple(self, *, deadline_s: float) -> int | str | ErrorReply | None:
        """Read a reply that is a status, a number, a null or an error.

        Raises:
            RespFault: anything else, a broken connection, or no time left.
        """
        kind, text = self._line(deadline_s)
        if kind == b"+":
            return text
        if kind == b":":
            return _number(text)
        if kind == b"-":
            return ErrorReply(text)
        if kind == b"_" or (kind == b"$" and text == "-1"):
            return None
        raise RespFault(f"unexpected reply of type {kind!r}")

    def read_bulk_into(
        self,
        targets: Sequence[memoryview],
        *,
        deadline_s: float,
        total: RunningChecksum | None = None,
    ) -> BulkReply | ErrorReply:
        """Read a value into the targets, which it must fill exactly.

        A value of another length is read over, so that the stream stays in step; the targets then hold its
        first bytes, as far as they go. ``total`` sums up what goes into the last target, as it comes.

        Raises:
            RespFault: no value and no error, a broken connection, or no time left.
        """
        kind, text = self._line(deadline_s)
        if kind == b"-":
            return ErrorReply(text)
        if kind == b"_" or (kind == b"$" and text == "-1"):
            return BulkReply(BulkStatus.ABSENT)
        length = _number(text)
        if kind != b"$" or not 0 <= length <= _SKIP_MAX_BYTES:
            raise RespFault(f"unexpected reply of type {kind!r} and length {length}")
        left = length
        for target in targets:
            taken = min(left, len(target))
            self._read_exactly(target[:taken], deadline_s, total if target is targets[-1] else None)
            left -= taken
        self._skip(left, deadline_s)
        end = bytearray(2)
        self._read_exactly(memoryview(end), deadline_s)
        if end != b"\r\n":
            raise RespFault("a value does not end where its length says")
        is_complete = length == sum(len(target) for target in targets)
        return BulkReply(BulkStatus.COMPLETE if is_complete else BulkStatus.WRONG_LENGTH, length)

    def read_reply(self, *, max_bytes: int, deadline_s: float) -> "RespReply":
        """Read a reply of any kind, whose values have ``max_bytes`` together at most.

        Raises:
            RespFault: it is longer, or nested deeper than arrays in an array; a broken connection, no time.
        """
        return self._reply(_Allowance(max_bytes), 0, deadline_s)

    def _reply(self, allowance: "_Allowance", depth: int, deadline_s: float) -> "RespReply":
        kind, text = self._line(deadline_s)
        if kind == b"+":
            return text
        if kind == b":":
            return _number(text)
        if kind == b"-":
            return ErrorReply(text)
        if kind == b"_" or (kind in (b"$", b"*") and text == "-1"):
            return None
        if kind not in (b"$", b"*"):
            raise RespFault(f"unexpected reply of type {kind!r}")
        length = _number(text)
        if kind == b"*":
            if depth > _MAX_DEPTH:
                raise RespFault("a reply is nested too deeply")
            allowance.take(length * _ITEM_BYTES)
            return [self._reply(allowance, depth + 1, deadline_s) for _ in range(length)]
        allowance.take(length)
        data = bytearray(length + 2)
        self._read_exactly(memoryview(data), deadline_s)
        if data[-2:] != b"\r\n":
            raise RespFault("a value does not end where its length says")
        return bytes(memoryview(data)[:-2])

    def read_fence(self, token: bytes, *, deadline_s: float) -> None:
        """Read the reply to ``PING token``, which proves that the replies before it were ours.

        A server that does not let the user send PING proves it less well, by an error in that place.

        Raises:
            RespFault: it is another reply: the stream is out of step. Or a broken connection, no time left.
        """
        target = bytearray(len(token))
        reply = self.read_bulk_into([memoryview(target)], deadline_s=deadline_s)
        if isinstance(reply, BulkReply) and (reply.status is not BulkStatus.COMPLETE or target != token):
            raise RespFault("the replies are out of step")

    def is_quiet(self) -> bool:
        """Return whether it is open and nothing came beyond the replies that were read."""
        if self._start != self._stop:
            return False
        try:
            # Bytes or the end of the stream: neither may come unasked.
            self._socket.recv(1)
        except (BlockingIOError, ssl.SSLWantReadError):
            return True
        except OSError:
            return False
        return False

    def close(self) -> None:
        """Close the socket. Idempotent."""
        self._socket.close()

    def _enter(self, address: RespAddress, deadline_s: float) -> None:
        words = []
        if address.user or address.password:
            user = [address.user.encode()] if address.user else []
            words.append(command(b"AUTH", *user, address.password.encode()))
        if address.db:
            words.append(command(b"SELECT", b"%d" % address.db))
        for word in words:
            self.send([word], deadline_s=deadline_s)
            reply = self.read_simple(deadline_s=deadline_s)
            if isinstance(reply, ErrorReply):
                raise LoginRefused(reply.code)

    def _line(self, deadline_s: float) -> tuple[bytes, str]:
        """Read a line; returns its first byte and the text after it."""
        searched = self._start
        while (end := self._buffer.find(b"\r\n", searched, self._stop)) < 0:
            searched = max(self._start, self._stop - 1)
            if self._start:
                self._buffer[: self._stop - self._start] = self._buffer[self._start : self._stop]
                searched -= self._start
                self._start, self._stop = 0, self._stop - self._start
            if self._stop == len(self._buffer):
                raise RespFault("a reply line is too long")
            self._stop += self._receive(memoryview(self._buffer)[self._stop :], deadline_s, wake_bytes=1)
        line = bytes(self._buffer[self._start : end])
        self._start = end + 2
        return line[:1], line[1:].decode("utf-8", "replace")

    def _read_exactly(
        self, target: memoryview, deadline_s: float, total: RunningChecksum | None = None
    ) -> None:
        done = min(len(target), self._stop - self._start)
        target[:done] = self._buffer[self._start : self._start + done]
        self._start += done
        if total is None:
            while done < len(target):
                done += self._receive(target[done:], deadline_s)
            return
        total.add(target[:done])
        while done < len(target):
            count = self._receive(target[done : done + _SUMMED_BYTES], deadline_s)
            total.add(target[done : done + count])
            done += count

    def _skip(self, length_bytes: int, deadline_s: float) -> None:
        scratch = memoryview(bytearray(min(length_bytes, _SKIP_BYTES)))
        while length_bytes:
            taken = min(length_bytes, len(scratch))
            self._read_exactly(scratch[:taken], deadline_s)
            length_bytes -= taken

    def _receive(self, target: memoryview, deadline_s: float, *, wake_bytes: int = _WAKE_BYTES) -> int:
        try:
            while True:
                try:
                    count = self._socket.recv_into(target)
                    break
                except (BlockingIOError, ssl.SSLWantReadError):
                    self._wait_for_bytes(min(len(target), wake_bytes), deadline_s)
                except ssl.SSLWantWriteError:
                    self._wait(self._poll_out, deadline_s)
        except OSError as error:
            raise self._fault(error) from error
        if not count:
            raise RespFault("the server closed the connection")
        self._heard_s = self._clock()
        if self._heard_s >= deadline_s:
            raise RespFault("no time left", silent_s=0.0)
        return count

    def _wait_for_bytes(self, count: int, deadline_s: float) -> None:
        """Wait until so many bytes are there, or fewer if no more come. Raises TimeoutError if none came."""
        self._wake_at(count)
        try:
            self._wait(self._poll_in, deadline_s)
        except TimeoutError:
            if self._wake_bytes == 1:
                raise
            self._wake_at(1)
            if not self._poll_in.poll(0):
                raise

    def _wake_at(self, count: int) -> None:
        """Have ``poll`` return when so many bytes are there (TCP only; other sockets wake at the first)."""
        if count == self._wake_bytes or not self._may_wake_late:
            return
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, count)
        except OSError:
            self._may_wake_late = False
        else:
            self._wake_bytes = count

    def _wait(self, poll: select.poll, deadline_s: float) -> None:
        """Wait until something moves. Raises TimeoutError."""
        now_s = self._clock()
        left_s = min(deadline_s - now_s, self._heard_s + self._timeout_s - now_s)
        if left_s <= 0 or not poll.poll(math.ceil(1000 * left_s)):
            raise TimeoutError

    def _fault(self, error: OSError) -> RespFault:
        if isinstance(error, TimeoutError):
            return RespFault("no answer in time", silent_s=self._clock() - self._heard_s)
        return RespFault(f"the connection broke: {error.strerror or error}")


def _number(text: str) -> int:
    digits = text.removeprefix("-")
    if not digits.isascii() or not digits.isdigit() or len(digits) > 18:
        raise RespFault("a reply has no number where one belongs")
    return int(text)
