"""HttpLink: one blocking HTTP/1.1 connection to a server, every wait of it bounded by the call's deadline.

The standard library speaks HTTP; this module gives it sockets whose every read and write ends by an instant.
Nothing is followed that a server names: no redirect, and no proxy of the environment.
"""

import contextlib
import http.client
import json
import math
import os
import secrets
import socket
import ssl
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, TypeAlias

from kvstore import tracing
from kvstore.errors import InvalidConfig, ProtocolMismatch, ServerUnavailable, TimedOut
from kvstore.server_address import HttpAddress
from kvstore.tracing import TRACE_HEADER, Attribute, SpanKind

Piece: TypeAlias = "bytes | memoryview"
"""A piece of a request's body, sent in place."""

REQUEST_HEADER = "KVStore-Request"
"""A name for each request, sent back with its answer: one that lies behind another answer is not taken for
it."""

MAX_JSON_BYTES = 8 << 20
"""Longest answer in JSON that is read."""

_OK = 300
_SKIP_BYTES = 64 << 10
_Place: TypeAlias = tuple[int, tuple[Any, ...]]  # Any: what an address holds depends on its family


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """What is asked: method, path, and a body of pieces. Asking again must do no harm.

    ``accepted_statuses`` are those of errors whose answers the caller reads itself.
    """

    method: str
    path: str
    body: Sequence[Piece] = ()
    headers: Mapping[str, str] = field(default_factory=dict)
    accepted_statuses: frozenset[int] = frozenset()

    @classmethod
    def of_json(cls, method: str, path: str, value: Mapping[str, Any]) -> Self:
        """Return a request with a JSON body. Any: JSON."""
        return cls(method, path, (json.dumps(value).encode(),), {"Content-Type": "application/json"})


class HttpAnswer:
    """The head of an answer, and its body as far as it was not read yet."""

    def __init__(self, response: http.client.HTTPResponse) -> None:
        self._response = response

    @property
    def status(self) -> int:
        """The status code."""
        return self._response.status

    @property
    def is_error(self) -> bool:
        """Whether the status is an error's, or another that no request is answered with."""
        return self.status >= _OK

    @property
    def length_bytes(self) -> int | None:
        """Bytes of the body that are still to come; None if the server did not say."""
        return self._response.length

    def header(self, name: str) -> str | None:
        """Return a header's value, None if there is none."""
        return self._response.headers.get(name)

    def read_into(self, target: memoryview) -> None:
        """Fill ``target`` from the body.

        Raises:
            ProtocolMismatch: the body is shorter.
            ServerUnavailable: the connection ended before the body did.
        """
        done = 0
        while done < len(target):
            count = self._response.readinto(target[done:])
            if not count:
                self._require_whole()
                raise ProtocolMismatch(f"http: an answer ended {len(target) - done} bytes too early")
            done += count

    def exactly(self, length_bytes: int) -> bytes:
        """Return the next bytes of the body. Raises as ``read_into``."""
        data = bytearray(length_bytes)
        self.read_into(memoryview(data))
        return bytes(data)

    def rest(self, max_bytes: int = MAX_JSON_BYTES) -> bytes:
        """Return all that is left of the body.

        Raises:
            ProtocolMismatch: it is longer.
            ServerUnavailable: the connection ended before the body did.
        """
        data = self._response.read(max_bytes + 1)
        if len(data) > max_bytes:
            raise ProtocolMismatch(f"http: an answer of more than {max_bytes} bytes")
        self._require_whole()
        return data

    def _require_whole(self) -> None:
        """Tell a server that died from one that lied: what was announced and did not come was cut off."""
        if self._response.length:
            raise ServerUnavailable(
                f"server: it closed the connection {self._response.length} bytes too early"
            )

    def json(self) -> dict[str, Any]:  # Any: JSON
        """Return the object that the rest of the body holds.

        Raises:
            ProtocolMismatch: it holds none, or is too long.
            ServerUnavailable: the connection ended before the body did.
        """
        return json_object(self.rest())

    def finish(self) -> bool:
        """Read what is left, if it is little; returns whether the connection may be used again."""
        left = self._response.length
        if left is not None and 0 < left <= _SKIP_BYTES:
            self._response.read()
        return self._response.isclosed() and not self._response.will_close


class HttpLink:
    """A connection. One call uses it at a time; ``abandon`` may be called from another thread.

    ``has_connected`` says whether it ever reached the server, ``is_abandoned`` that it is of no more use.
    """

    def __init__(self, address: HttpAddress, lookup: "HostLookup", tls: ssl.SSLContext | None) -> None:
        self._address = address
        self._lookup = lookup
        self._tls = tls
        self._connection = http.client.HTTPConnection(address.host, address.port)
        self._connection.auto_open = 0  # only ``_connect`` makes sockets, those that keep the time
        self._socket: _TimedSocket | _TimedTlsSocket | None = None
        self.is_abandoned = False
        self.has_connected = False

    @property
    def is_connected(self) -> bool:
        """Whether it has a connection, which may have gone stale."""
        return self._socket is not None

    def ask(self, request: HttpRequest, headers: Mapping[str, str], deadline_s: float) -> HttpAnswer:
        """Send a request and return the head of its answer, whose body must be read before the next one.

        A connection that the server closed while it was idle is replaced once.

        Raises:
            ServerUnavailable: the server cannot be reached, or its certificate is not accepted.
            TimedOut: there was no answer in time.
            ProtocolMismatch: what came is no HTTP.
        """
        span = tracing.begin(
            request.method,
            SpanKind.CLIENT,
            {
                Attribute.HTTP_METHOD: request.method,
                Attribute.SERVER_ADDRESS: self._address.host,
                Attribute.SERVER_PORT: self._address.port,
            },
        )
        if span is None:
            return self._ask_anew(request, headers, deadline_s)
        with span:
            traced = {**headers, TRACE_HEADER: span.context.header()}
            answer = self._ask_anew(request, traced, deadline_s)
            span.set(Attribute.HTTP_STATUS, answer.status)
            if answer.is_error:
                span.note_error(str(answer.status))
            return answer

    def _ask_anew(self, request: HttpRequest, headers: Mapping[str, str], deadline_s: float) -> HttpAnswer:
        was_used = self.is_connected
        try:
            return self._ask(request, headers, deadline_s)
        except TimedOut:
            raise
        except ServerUnavailable:
            if not was_used or self.is_abandoned:
                raise
        return self._ask(request, headers, deadline_s)

    def close(self) -> None:
        """Close the connection; the next request makes a new one. Idempotent."""
        self._socket = None
        self._connection.close()

    def disown(self) -> None:
        """Let go of the connection in a forked child: it stays the parent's.

        A thread of the parent may have held the lock of its reader, for ever here: only the descriptor is
        touched.
        """
        sock, self._socket = self._socket, None
        if sock is not None:
            with contextlib.suppress(OSError):
                os.close(sock.detach())

    def abandon(self) -> None:
        """Make a call under way in another thread fail soon."""
        self.is_abandoned = True
        sock = self._socket
        if sock is not None:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def set_deadline(self, deadline_s: float) -> None:
        """Bound what is read and written from here on."""
        if self._socket is not None:
            self._socket.deadline_s = deadline_s

    def _ask(self, request: HttpRequest, headers: Mapping[str, str], deadline_s: float) -> HttpAnswer:
        with mapped_errors(self._address):
            try:
                self._connect(deadline_s)
                self.set_deadline(deadline_s)
                name = secrets.token_hex(8)
                self._send(request, {**headers, REQUEST_HEADER: name})
                answer = HttpAnswer(self._connection.getresponse())
                # What is refused before it is read as a request, by a proxy too, comes back without a name.
                if answer.header(REQUEST_HEADER) not in (name, None if answer.is_error else name):
                    raise ProtocolMismatch("http: the answer to another request")
                return answer
            except BaseException:
                self.close()
                raise

    def _connect(self, deadline_s: float) -> None:
        if self.is_abandoned:
            raise ConnectionAbortedError("given up")
        if self._socket is not None:
            return
        places = self._lookup.places(deadline_s)
        failure: OSError = TimeoutError()
        for index, (family, where) in enumerate(places):
            plain = _TimedSocket(family, socket.SOCK_STREAM)
            plain.deadline_s = deadline_s
            try:
                # An address that swallows everything leaves the others their share of the time.
                plain.settimeout(_patience_s(deadline_s) / (len(places) - index))
                plain.connect(where)
                plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._socket = plain if self._tls is None else self._encrypted(self._tls, plain, deadline_s)
            except OSError as error:
                plain.close()
                failure = error
            else:
                self._connection.sock = self._socket
                self.has_connected = True
                return
        self._lookup.forget()
        raise failure

    def _encrypted(self, tls: ssl.SSLContext, plain: "_TimedSocket", deadline_s: float) -> "_TimedTlsSocket":
        plain.settimeout(_patience_s(deadline_s))
        encrypted = tls.wrap_socket(plain, server_hostname=self._address.host)
        assert isinstance(encrypted, _TimedTlsSocket), "the context makes another kind of socket"
        return encrypted

    def _send(self, request: HttpRequest, headers: Mapping[str, str]) -> None:
        connection = self._connection
        connection.putrequest(request.method, request.path, skip_accept_encoding=True)
        for name, value in {**headers, **request.headers}.items():
            connection.putheader(name, value)
        if request.body or request.method in ("POST", "PUT"):
            connection.putheader("Content-Length", str(sum(map(len, request.body))))
        try:
            connection.endheaders()
            for piece in request.body:
                connection.send(piece)
        except (BrokenPipeError, ConnectionResetError):
            # The server may have answered, and closed, before it had all of the body: the answer says why.
            if not request.body:
                raise


class HostLookup:
    """Addresses of a host. The resolver cannot be given a time, so it runs on a thread of its own."""

    def __init__(self, address: HttpAddress) -> None:
        self._address = address
        self._lock = threading.Lock()
        self._found: Future[list[_Place]] | None = None

    def places(self, deadline_s: float) -> list[_Place]:
        """Return family and address of each place to try.

        Raises:
            OSError: the host is unknown (TimeoutError: not resolved in time).
        """
        with self._lock:
            found = self._found
            if found is None:
                found = self._found = Future()
                threading.Thread(
                    target=self._resolve, args=(found,), name="kvstore-resolve", daemon=True
                ).start()
        try:
            return found.result(_patience_s(deadline_s))
        except OSError:
            if found.done():
                self.forget()
            raise

    def forget(self) -> None:
        """Resolve anew at the next connection."""
        with self._lock:
            if self._found is not None and self._found.done():
                self._found = None

    def _resolve(self, found: Future[list[_Place]]) -> None:
        try:
            places = socket.getaddrinfo(self._address.host, self._address.port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            found.set_exception(error if isinstance(error, OSError) else OSError(f"no host name: {error}"))
        else:
            found.set_result([(family, where) for family, _, _, _, where in places])


def client_context(folder: Path | None) -> ssl.SSLContext:
    """Return what encrypts connections: the server's certificate is checked, its name too. Blocks on files.

    ``folder`` holds PEM files: ``ca.crt``, the authorities trusted (absent: the system's), and ``tls.crt``
    and ``tls.key``, shown to a server that asks for a certificate.

    Raises:
        InvalidConfig: a file cannot be read, or is no certificate or key, or the folder has none of them.
    """
    authorities, certificate = (None, None) if folder is None else (folder / "ca.crt", folder / "tls.crt")
    try:
        has_authorities = authorities is not None and authorities.is_file()
        context = ssl.create_default_context(cafile=authorities if has_authorities else None)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.sslsocket_class = _TimedTlsSocket
        if certificate is not None and folder is not None:
            if certificate.is_file():
                context.load_cert_chain(certificate, folder / "tls.key")
            elif not has_authorities:
                raise InvalidConfig(f"tls_folder {folder}: there is neither ca.crt nor tls.crt")
    except OSError as error:  # ssl.SSLError is one
        raise InvalidConfig(f"tls_folder {folder}: cannot be used: {error.strerror or error}") from error
    return context


@contextlib.contextmanager
def mapped_errors(address: HttpAddress) -> Iterator[None]:
    """Turn what sockets and HTTP raise into the errors of this product."""
    try:
        yield
    except TimeoutError as error:
        raise TimedOut(f"server at {address}: no answer in time") from error
    except ssl.SSLCertVerificationError as error:
        raise ServerUnavailable(
            f"server at {address}: its certificate is not accepted: {error.verify_message}: name"
            " the authority that signed it"
        ) from error
    except (http.client.RemoteDisconnected, http.client.IncompleteRead) as error:
        raise ServerUnavailable(f"server at {address}: it closed the connection") from error
    except http.client.HTTPException as error:
        raise ProtocolMismatch(
            f"server at {address}: what it sent is no HTTP: {type(error).__name__}"
        ) from error
    except OSError as error:
        raise ServerUnavailable(f"server at {address}: {error.strerror or error}: is it running?") from error


def json_object(data: bytes) -> dict[str, Any]:  # Any: JSON
    """Return the JSON object in ``data``. Raises ProtocolMismatch if it is none."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ProtocolMismatch("http: an answer is not JSON") from error
    if not isinstance(value, dict):
        raise ProtocolMismatch("http: an answer is no JSON object")
    return value


class _TimedSocket(socket.socket):
    """A socket whose every operation ends by ``deadline_s``."""

    deadline_s = math.inf

    def recv_into(self, *args: Any, **kwargs: Any) -> int:  # Any: passed on
        self.settimeout(_patience_s(self.deadline_s))
        return super().recv_into(*args, **kwargs)

    def sendall(self, *args: Any, **kwargs: Any) -> None:  # Any: passed on
        self.settimeout(_patience_s(self.deadline_s))
        super().sendall(*args, **kwargs)


class _TimedTlsSocket(ssl.SSLSocket):
    """The same, encrypted."""

    deadline_s = math.inf

    def recv_into(self, *args: Any, **kwargs: Any) -> int:  # Any: passed on
        self.settimeout(_patience_s(self.deadline_s))
        return super().recv_into(*args, **kwargs)

    def send(self, *args: Any, **kwargs: Any) -> int:  # Any: passed on
        # sendall of an encrypted socket is made of these.
        self.settimeout(_patience_s(self.deadline_s))
        return super().send(*args, **kwargs)


def _patience_s(deadline_s: float) -> float:
    left_s = deadline_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError("no time left")
    return min(left_s, threading.TIMEOUT_MAX)
