"""HttpTransport: the connections one client has to a server over HTTP, and what its answers mean.

Each call has a connection of its own while it lasts. One whose last answer was not read to its end is closed.
"""

import os
import ssl
import threading
import time
from collections.abc import Callable, Mapping
from typing import TypeVar

from kvstore.client_state import ClientState
from kvstore.errors import (
    CorruptBlock,
    Forbidden,
    InvalidRequest,
    KVStoreError,
    NamespaceNotOpen,
    ProtocolMismatch,
    RejectedRequest,
    ServerUnavailable,
    TimedOut,
    Unauthorized,
)
from kvstore.http_calls import UnknownLease
from kvstore.http_link import HostLookup, HttpAnswer, HttpLink, HttpRequest, json_object, mapped_errors
from kvstore.server_address import HttpAddress

T = TypeVar("T")

MAX_LINKS = 16
"""Connections one client holds at most; further threads wait their turn, within their call's time."""

_ERROR_MAX_BYTES = 64 << 10
_MESSAGE_MAX = 500
_ERRORS: Mapping[str, type[KVStoreError]] = {
    "bad_request": RejectedRequest,
    "too_large": RejectedRequest,
    "unknown_lease": UnknownLease,
    "checksum_mismatch": CorruptBlock,
    "unauthorized": Unauthorized,
    "forbidden": Forbidden,
    "unknown_namespace": NamespaceNotOpen,
    "too_many_requests": ServerUnavailable,
    "internal": ServerUnavailable,
    "unavailable": ServerUnavailable,
    "conflict": InvalidRequest,
    "quota": ServerUnavailable,
    "no_room": ServerUnavailable,
    "timed_out": TimedOut,
    "request_timeout": TimedOut,
}


class HttpTransport:
    """Sends requests and gives their answers to whoever reads them. Safe in threads and across fork.

    ``api_key`` is sent with each request, and appears nowhere else.
    """

    def __init__(
        self, address: HttpAddress, state: ClientState, *, api_key: str | None, tls: ssl.SSLContext | None
    ) -> None:
        self._address = address
        self._state = state
        self._tls = tls
        self._headers = {"User-Agent": "kvstore"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._begin()

    def _begin(self) -> None:
        """Hold no connection, and belong to this process."""
        self._pid = os.getpid()
        self._lookup = HostLookup(self._address)
        self._idle: list[HttpLink] = []
        self._in_use: dict[int, HttpLink] = {}
        self._is_closed = False
        self._changed = threading.Condition()

    def call(
        self,
        request: HttpRequest,
        take: Callable[[HttpAnswer], T],
        *,
        deadline_s: float,
        is_control: bool = False,
    ) -> T:
        """Send a request and return what ``take`` makes of its good, or accepted, answer.

        Raises:
            ServerUnavailable, TimedOut, ProtocolMismatch: no answer, or none that can be read.
            Unauthorized, Forbidden, NamespaceNotOpen, RejectedRequest, UnknownLease, CorruptBlock: what the
                server says.
            InvalidRequest: the client is closed.
        """
        self._follow_fork()
        link = self._take_link(deadline_s, is_control=is_control)
        is_reusable = False
        try:
            try:
                was_connected = link.is_connected
                answer = link.ask(request, self._headers, deadline_s)
            except ServerUnavailable:
                if not link.has_connected and not link.is_abandoned:
                    self._state.note_not_connected()
                raise
            if not was_connected:
                self._state.note_linked()
            with mapped_errors(self._address):
                if answer.is_error and answer.status not in request.accepted_statuses:
                    error = error_of(answer.status, answer.rest(_ERROR_MAX_BYTES))
                    # A connection that damages what is sent is given up.
                    is_reusable = answer.finish() and not isinstance(error, RejectedRequest)
                    raise error
                value = take(answer)
                is_reusable = answer.finish()
                return value
        except ProtocolMismatch:
            if not link.is_abandoned:
                self._state.note_protocol_error()
            raise
        finally:
            self._give_back(link, is_reusable=is_reusable)

    def abandon(self, thread_id: int) -> None:
        """Make the call that a thread of this process has under way fail soon."""
        with self._changed:
            link = self._in_use.get(thread_id)
        if link is not None:
            link.abandon()

    def abandon_all(self) -> None:
        """Make every call of this process that is under way fail soon."""
        with self._changed:
            links = list(self._in_use.values())
        for link in links:
            link.abandon()

    def require_open(self) -> None:
        """Raise InvalidRequest if it is closed."""
        if self._is_closed:
            raise InvalidRequest("client: it is closed")

    def close(self) -> None:
        """Close every connection; one in use is closed when its call ends. Idempotent."""
        with self._changed:
            self._is_closed = True
            idle, self._idle = self._idle, []
            self._changed.notify_all()
        for link in idle:
            link.close()

    def _follow_fork(self) -> None:
        if self._pid != os.getpid():
            # The parent's connections are its own: a message of ours would garble its exchange.
            inherited, was_closed = [*self._idle, *self._in_use.values()], self._is_closed
            self._begin()
            self._is_closed = was_closed
            for link in inherited:
                link.disown()

    def _take_link(self, deadline_s: float, *, is_control: bool) -> HttpLink:
        with self._changed:
            while not self._is_closed and len(self._in_use) >= MAX_LINKS:
                if not self._changed.wait(max(0.0, deadline_s - time.monotonic())):
                    raise TimedOut(f"client: all {MAX_LINKS} connections are in use")
            if self._is_closed:
                raise InvalidRequest("client: it is closed")
            if self._idle:
                link = self._idle.pop()
            else:
                if not is_control:
                    self._state.check_may_connect()
                link = HttpLink(self._address, self._lookup, self._tls)
            self._in_use[threading.get_ident()] = link
            return link

    def _give_back(self, link: HttpLink, *, is_reusable: bool) -> None:
        with self._changed:
            self._in_use.pop(threading.get_ident(), None)
            self._changed.notify()
            if is_reusable and not link.is_abandoned and not self._is_closed:
                self._idle.append(link)
                return
        link.close()


def error_of(status: int, body: bytes) -> KVStoreError:
    """Return what an answer with an error's status says.

    An answer that is not the store's, a proxy's for example, is ServerUnavailable.
    """
    try:
        told = json_object(body)["error"]
        code, message = str(told["code"]), str(told["message"])[:_MESSAGE_MAX]
    except (ProtocolMismatch, KeyError, TypeError):
        return ServerUnavailable(f"server: answered {status}, and not in this product's form")
    kind = _ERRORS.get(code, ProtocolMismatch)
    return kind(message if kind is not ProtocolMismatch else f"server: {code}: {message}")
