"""Spans of requests over HTTP: one for each that was admitted, named after its method and route."""

import contextlib
from collections.abc import Iterator

from aiohttp import web

from kvstore import tracing
from kvstore.tracing import TRACE_HEADER, Attribute, Span, SpanKind, TraceContext

_FAILED = 500
_METHODS = frozenset({"CONNECT", "DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT", "TRACE"})
_OTHER = "_OTHER"
"""What OpenTelemetry's conventions call any other method: a client may send any word."""

_ASKED_AGAIN_AND_AGAIN = frozenset({"/metrics", "/health", "/healthz", "/stats"})
"""Routes that machines ask for all the time: no trace begins with them, an engine's or the store's."""


class ServedRequest:
    """The span of one request while it is answered, if it has one."""

    def __init__(self, span: Span | None) -> None:
        self._span = span

    def note_status(self, status: int, error: str = "") -> None:
        """Say what it was answered with; ``error`` is the code of an error."""
        if self._span is None:
            return
        self._span.set(Attribute.HTTP_STATUS, status)
        self._span.has_outcome = True
        if status >= _FAILED:
            self._span.note_error(error or str(status))


@contextlib.contextmanager
def served_request(request: web.BaseRequest, route: str) -> Iterator[ServedRequest]:
    """Answer a request inside the block in a span of its own, below that which its ``traceparent`` names.

    ``route`` is empty where there is none.
    """
    parent = TraceContext.of_header(request.headers.get(TRACE_HEADER))
    if parent is None and route in _ASKED_AGAIN_AND_AGAIN:
        yield ServedRequest(None)
        return
    method = request.method if request.method in _METHODS else _OTHER
    attributes: dict[Attribute, tracing.Value] = {Attribute.HTTP_METHOD: method}
    if route:
        attributes[Attribute.HTTP_ROUTE] = route
    name = f"{'HTTP' if method == _OTHER else method} {route}".rstrip()
    span = tracing.begin_served(name, SpanKind.SERVER, attributes, parent=parent)
    with span or contextlib.nullcontext():
        yield ServedRequest(span)
