"""HttpSession: what one call over HTTP asks of the server, until its deadline."""

import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from kvstore import http_calls
from kvstore.client_state import ClientState
from kvstore.errors import NamespaceNotOpen, ServerUnavailable
from kvstore.http_link import HttpAnswer, HttpRequest
from kvstore.http_transport import HttpTransport
from kvstore.keys import Namespace, NamespaceDigest

T = TypeVar("T")


class HttpSession:
    """One call of a client. Everything it does blocks, until ``deadline_s`` at most."""

    def __init__(
        self, transport: HttpTransport, state: ClientState, deadline_s: float, *, is_control: bool
    ) -> None:
        self._transport = transport
        self._state = state
        self._deadline_s = deadline_s
        self._is_control = is_control

    def remaining_s(self) -> float:
        """Seconds until the call must be over; not negative."""
        return max(0.0, self._deadline_s - time.monotonic())

    def note_corrupt(self) -> None:
        """Count a block whose bytes were wrong."""
        self._state.note_corrupt()

    def ask(self, request: HttpRequest, take: Callable[[HttpAnswer], T]) -> T:
        """Send a request and return what ``take`` reads in its answer. Raises as ``HttpTransport.call``."""
        return self._transport.call(request, take, deadline_s=self._deadline_s, is_control=self._is_control)

    def ask_timed(
        self, method: str, path: str, values: Mapping[str, Any], take: Callable[[HttpAnswer], T]
    ) -> T:
        """The same for a JSON body, which is told how much time is left. Any: JSON."""
        return self.ask(HttpRequest.of_json(method, path, http_calls.timed(values, self.remaining_s())), take)

    def about(self, digest: NamespaceDigest, ask: Callable[[], T]) -> T:
        """Ask something of a namespace, once more if the server does not know it (any more).

        Raises:
            ServerUnavailable: it does not know it after it was told, either.
        """
        try:
            return ask()
        except NamespaceNotOpen:
            namespace = self._state.namespace(digest)
            self.open_namespace(namespace, is_public=self._state.is_public(digest))
        try:
            return ask()
        except NamespaceNotOpen as error:
            raise ServerUnavailable(
                "server: it forgot the namespace again: too many are in use there"
            ) from error

    def open_namespace(self, namespace: Namespace, *, is_public: bool) -> Namespace:
        """Tell the server of a namespace; returns it with the salt of the caller's tenant."""
        return self.ask(
            http_calls.open_request(namespace, is_public=is_public),
            lambda answer: http_calls.opened_namespace(namespace, answer),
        )
