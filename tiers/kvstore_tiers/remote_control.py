"""ControlLine: questions about servers, asked with redis-py within one deadline. No block goes this way.

redis-py's timeouts bound one ``recv`` each, and nothing bounds its look-up of a name: with a socket_timeout
of 0.25 s it still waited after 20 s for a server that sent a byte every 0.2 s (redis-py 8.1). So a line
connects as the connections of the data path do, and gives redis-py a socket whose every operation ends by
the deadline, and which takes a bounded number of bytes. No retries, RESP2, no CLIENT SETINFO: a user needs
no rights beyond the questions.
"""

import socket
import ssl
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Union, cast

from redis.backoff import NoBackoff
from redis.connection import Connection
from redis.exceptions import RedisError, ResponseError
from redis.exceptions import TimeoutError as NoAnswer
from redis.retry import Retry

from kvstore_tiers.resp_address import AddressLookup, RespAddress
from kvstore_tiers.resp_stream import LoginRefused, RespFault, open_stream

Reply = Union[int, str, None, "list[Reply]"]
"""An answer; bulk strings and statuses are both text."""

_REPLY_MAX_BYTES = 8 << 20
"""All that a line takes; the map of a cluster with each slot elsewhere than its neighbours has 3 MiB."""


class Refused(RespFault):
    """The server answered with an error. ``code`` is its first word, ``NOPERM``."""

    def __init__(self, code: str, text: str) -> None:
        shown = "".join(letter for letter in text[:80] if letter.isprintable())
        super().__init__(str(LoginRefused(code)) if code == "NOAUTH" else f"the server answers {shown}")
        self.code = code


class ControlLine:
    """A line that is connected and logged in. One thread at a time."""

    def __init__(self, connection: "_BoundedConnection") -> None:
        self._connection = connection

    def ask(self, *words: str) -> Reply:
        """Ask one question. Blocks.

        Raises:
            Refused: the answer is an error; other questions may be asked.
            RespFault: no answer in time, or none that parses.
        """
        [reply] = self.ask_all([words])
        if isinstance(reply, Refused):
            raise reply
        return reply

    def ask_all(self, questions: Sequence[Sequence[str]]) -> "list[Reply | Refused]":
        """Ask several questions in one go. Blocks.

        Raises:
            Refused: the server answers nobody now, or not us (``LOADING``, ``NOAUTH``).
            RespFault: no answer in time, or one that does not parse.
        """
        with _faults_mapped():
            packed = self._connection.pack_commands(questions)  # type: ignore[no-untyped-call]  # redis-py has none
            self._connection.send_packed_command(packed)  # type: ignore[no-untyped-call]  # redis-py has none
        return [self._answer() for _ in questions]

    def _answer(self) -> "Reply | Refused":
        try:
            with _faults_mapped():
                return cast("Reply", self._connection.read_response())  # what RESP2 can say, decoded
        except Refused as refused:
            # redis-py closes its connection after answers that it takes for the server's, not the question's.
            if not self._connection.is_connected:
                raise
            return refused


@contextmanager
def control_line(
    address: RespAddress,
    *,
    deadline_s: float,
    clock: Callable[[], float],
    tls: ssl.SSLContext | None = None,
) -> Iterator[ControlLine]:
    """Connect and log in, and disconnect at the end. Blocks until the deadline at most.

    Raises:
        RespFault: no server, no answer in time, or it refused the login.
    """
    lookup = AddressLookup(address)

    def open_socket() -> "_BoundedSocket":
        stream = open_stream(address, lookup, deadline_s=deadline_s, clock=clock, tls=tls)
        return _BoundedSocket(stream, lambda: deadline_s - clock())

    connection = _BoundedConnection(address, open_socket)
    try:
        try:
            with _faults_mapped():
                connection.connect()  # type: ignore[no-untyped-call]  # redis-py has none
        except Refused as refused:
            raise LoginRefused(refused.code) from refused
        yield ControlLine(connection)
    finally:
        connection.disconnect()  # type: ignore[no-untyped-call]  # redis-py has none
        lookup.close()


class _BoundedSocket:
    """What redis-py uses of a socket, with a bound on the time and bytes of all operations together."""

    def __init__(self, stream: socket.socket, left_s: Callable[[], float]) -> None:
        self._stream = stream
        self._left_s = left_s
        self._left_bytes = _REPLY_MAX_BYTES

    def recv(self, size: int) -> bytes:
        """As ``socket.recv``."""
        self._bound()
        data = self._stream.recv(size)
        self._take(len(data))
        return data

    def recv_into(self, buffer: bytearray) -> int:
        """As ``socket.recv_into``."""
        self._bound()
        count = self._stream.recv_into(buffer)
        self._take(count)
        return count

    def sendall(self, data: bytes) -> None:
        """As ``socket.sendall``."""
        self._bound()
        self._stream.sendall(data)

    def shutdown(self, how: int) -> None:
        """As ``socket.shutdown``."""
        self._stream.shutdown(how)

    def close(self) -> None:
        """As ``socket.close``."""
        self._stream.close()

    def _bound(self) -> None:
        left_s = self._left_s()
        if left_s <= 0:
            raise TimeoutError
        self._stream.settimeout(left_s)

    def _take(self, count: int) -> None:
        self._left_bytes -= count
        if self._left_bytes < 0:
            raise RespFault(f"the server's answers are longer than {_REPLY_MAX_BYTES} bytes")


class _BoundedConnection(Connection):
    """redis-py's connection on a socket of ours."""

    def __init__(self, address: RespAddress, open_socket: Callable[[], _BoundedSocket]) -> None:
        super().__init__(  # type: ignore[no-untyped-call]  # redis-py has none
            host=address.host or address.path,
            port=address.port,
            db=address.db,
            username=address.user or None,
            password=address.password or None,
            socket_timeout=None,  # the socket's bound is tighter
            retry=Retry(NoBackoff(), 0),
            protocol=2,
            driver_info=None,
            decode_responses=True,
            encoding_errors="replace",
        )
        self._open_socket = open_socket

    # redis-py only sends to, receives from and closes what this returns.
    def _connect(self) -> _BoundedSocket:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self._open_socket()


@contextmanager
def _faults_mapped() -> Iterator[None]:
    try:
        yield
    except NoAnswer as error:
        raise RespFault("no answer in time", silent_s=0.0) from error
    except RedisError as error:
        if error.status_code is None and not isinstance(error, ResponseError):
            raise RespFault(f"the connection broke: {error}") from error
        code = error.status_code or str(error).split(" ", 1)[0]
        raise Refused(code, f"{error.status_code or ''} {error}".strip()) from error
    except (ValueError, RecursionError, MemoryError) as error:
        # What redis-py's parser makes of bytes that are no reply.
        raise RespFault("the server's answer does not parse") from error
