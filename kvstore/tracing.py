"""Tracing: spans of OpenTelemetry where a process has its API loaded, and a request is sampled; else nothing.

Nothing of OpenTelemetry is imported here: whoever traces has loaded it, and set where spans go
(``kvstore.trace_export`` for the commands). A process that has not pays a look into a dictionary. What is
sampled is decided where a trace begins and followed from there on. Spans say how many blocks and bytes, never
which.
"""

import enum
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import Context, Token, copy_context
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self, TypeAlias

CONTEXT_BYTES = 25
"""Size of a packed TraceContext."""

TRACE_HEADER = "traceparent"
"""Header of a request over HTTP that names the span it belongs to, as W3C Trace Context has it."""

_API, _CONTEXT = "opentelemetry.trace", "opentelemetry.context"
_SAMPLED = 1
_TRACE_ID_BYTES, _SPAN_ID_BYTES = 16, 8
_PARENT = re.compile("([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_MAX_HEADER = 512
_TRACER = "kvstore"


class SpanKind(enum.Enum):
    """What a span is to others, by OpenTelemetry's names."""

    INTERNAL = "INTERNAL"
    SERVER = "SERVER"
    CLIENT = "CLIENT"


class Attribute(enum.StrEnum):
    """Every attribute that a span may have: OpenTelemetry's where its semantic conventions have one."""

    BLOCKS = "kvstore.blocks"
    BYTES = "kvstore.bytes"
    DB_BATCH = "db.operation.batch.size"
    DB_SYSTEM = "db.system.name"
    DONE_BLOCKS = "kvstore.blocks.done"
    ERROR = "error.type"
    GEN_AI_CACHED_TOKENS = "gen_ai.usage.cache_read.input_tokens"
    GEN_AI_FINISH = "gen_ai.response.finish_reasons"
    GEN_AI_FIRST_CHUNK = "gen_ai.response.time_to_first_chunk"
    GEN_AI_INPUT_TOKENS = "gen_ai.usage.input_tokens"
    GEN_AI_MAX_TOKENS = "gen_ai.request.max_tokens"
    GEN_AI_MODEL = "gen_ai.request.model"
    GEN_AI_OPERATION = "gen_ai.operation.name"
    GEN_AI_OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
    GEN_AI_PROVIDER = "gen_ai.provider.name"
    HTTP_METHOD = "http.request.method"
    HTTP_ROUTE = "http.route"
    HTTP_STATUS = "http.response.status_code"
    MISS_REASON = "kvstore.miss_reason"
    RPC_METHOD = "rpc.method"
    RPC_SYSTEM = "rpc.system.name"
    SERVER_ADDRESS = "server.address"
    SERVER_PORT = "server.port"
    TIER = "kvstore.tier"


Value: TypeAlias = str | int | float | list[str]
Attributes: TypeAlias = Mapping[Attribute, Value]


@dataclass(frozen=True, slots=True)
class TraceContext:
    """Which span something belongs to: 16 bytes of trace, 8 of span, neither all zero; is it sampled?"""

    trace_id: bytes
    span_id: bytes
    is_sampled: bool = True

    def pack(self) -> bytes:
        """Return the 25 bytes that travel in frames: trace, span, flags (1: sampled)."""
        return self.trace_id + self.span_id + bytes([_SAMPLED if self.is_sampled else 0])

    @classmethod
    def unpack(cls, data: bytes) -> Self | None:
        """Return the context in 25 bytes; None if it names no span, as W3C Trace Context has it."""
        trace_id, span_id = data[:_TRACE_ID_BYTES], data[_TRACE_ID_BYTES:-1]
        if not any(trace_id) or not any(span_id):
            return None
        return cls(trace_id, span_id, bool(data[-1] & _SAMPLED))

    def header(self) -> str:
        """Return the value of a ``traceparent`` header."""
        return f"00-{self.trace_id.hex()}-{self.span_id.hex()}-{int(self.is_sampled):02x}"

    @classmethod
    def of_header(cls, text: str | None) -> Self | None:
        """Return the context of a ``traceparent`` header; None if it is absent or malformed."""
        found = _PARENT.fullmatch(text) if text is not None and len(text) <= _MAX_HEADER else None
        if found is None:
            return None
        version, trace_id, span_id, flags, more = found.groups()
        if version == "ff" or (version == "00" and more is not None):
            return None
        return cls.unpack(bytes.fromhex(trace_id + span_id + flags))


class Span:
    """A sampled span under way: the current one inside its ``with`` block, and ended with it or by ``end``.

    One that an exception leaves says which class of error it was, and nothing of its text; unless it
    ``has_outcome``: what came of it has been said.
    """

    def __init__(self, api: Any, span: Any) -> None:  # Any: OpenTelemetry's, which is optional
        self._api = api
        self._span = span
        self.has_outcome = False
        self._token: Token[Any] | None = None  # Any: OpenTelemetry's
        self._parent = span.parent.span_id if getattr(span, "parent", None) is not None else 0

    @property
    def context(self) -> TraceContext:
        """Which span it is."""
        return _context_of(self._span.get_span_context())

    def set(self, attribute: Attribute, value: Value) -> None:
        """Say more of it."""
        self._span.set_attribute(attribute.value, value)

    def serve(self, other: TraceContext) -> None:
        """Note that it is work for another span too; nothing to note if that is its parent."""
        if int.from_bytes(other.span_id, "big") != self._parent:
            self._span.add_link(_otel_context(self._api, other))

    def note_error(self, kind: str) -> None:
        """Note that it failed, and by what kind of error."""
        self.has_outcome = True
        self.set(Attribute.ERROR, kind)
        self._span.set_status(self._api.Status(self._api.StatusCode.ERROR))

    def entered(self) -> Context:
        """Return a copy of the present context in which it is the current span."""
        context = copy_context()
        context.run(sys.modules[_CONTEXT].attach, self._api.set_span_in_context(self._span))
        return context

    def end(self) -> None:
        """End it. Idempotent but for a warning of OpenTelemetry."""
        self._span.end()

    def __enter__(self) -> Self:
        context = sys.modules[_CONTEXT]
        self._token = context.attach(self._api.set_span_in_context(self._span))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._token is not None:
            sys.modules[_CONTEXT].detach(self._token)
        if kind is not None and not self.has_outcome:
            self.note_error(kind.__name__)
        self.end()


def current() -> TraceContext | None:
    """Return the sampled span that this thread or task is in, None if it is in none."""
    api = sys.modules.get(_API)
    if api is None:
        return None
    context = api.get_current_span().get_span_context()
    return _context_of(context) if context.is_valid and context.trace_flags & _SAMPLED else None


@contextmanager
def within(parent: TraceContext | None) -> Iterator[None]:
    """Have this thread or task be in a span that another process or thread has begun; None: leave it be.

    Nothing happens where nothing is traced.
    """
    api = sys.modules.get(_API)
    if api is None or parent is None:
        yield
        return
    context = sys.modules[_CONTEXT]
    token = context.attach(api.set_span_in_context(api.NonRecordingSpan(_otel_context(api, parent))))
    try:
        yield
    finally:
        context.detach(token)


def begin(
    name: str,
    kind: SpanKind,
    attributes: Attributes,
    *,
    parent: TraceContext | None = None,
    links: Sequence[TraceContext] = (),
) -> Span | None:
    """Begin a span below ``parent``, else below the one that this thread or task is in.

    None where neither is sampled, or nothing is traced here: no trace begins with it.
    """
    api = sys.modules.get(_API)
    if api is None:
        return None
    if parent is None and current() is None:
        return None
    if parent is not None and not parent.is_sampled:
        return None
    return _begin(api, name, kind, attributes, parent, links)


def begin_served(
    name: str, kind: SpanKind, attributes: Attributes, *, parent: TraceContext | None
) -> Span | None:
    """Begin the span of a request that came in, below ``parent``; without one a trace begins.

    None where it is not sampled, or nothing is traced here.
    """
    api = sys.modules.get(_API)
    return None if api is None else _begin(api, name, kind, attributes, parent, ())


def _begin(
    api: Any,  # Any: OpenTelemetry's
    name: str,
    kind: SpanKind,
    attributes: Attributes,
    parent: TraceContext | None,
    links: Sequence[TraceContext],
) -> Span | None:
    context = None
    if parent is not None:
        context = api.set_span_in_context(api.NonRecordingSpan(_otel_context(api, parent)))
    span = api.get_tracer(_TRACER).start_span(
        name,
        context=context,
        kind=api.SpanKind[kind.value],
        attributes={attribute.value: value for attribute, value in attributes.items()},
        links=[api.Link(_otel_context(api, other)) for other in links],
    )
    return Span(api, span) if span.is_recording() else None


def _context_of(context: Any) -> TraceContext:  # Any: OpenTelemetry's
    return TraceContext(
        context.trace_id.to_bytes(_TRACE_ID_BYTES, "big"),
        context.span_id.to_bytes(_SPAN_ID_BYTES, "big"),
        bool(context.trace_flags & _SAMPLED),
    )


def _otel_context(api: Any, context: TraceContext) -> Any:  # Any: OpenTelemetry's
    return api.SpanContext(
        trace_id=int.from_bytes(context.trace_id, "big"),
        span_id=int.from_bytes(context.span_id, "big"),
        is_remote=True,
        trace_flags=api.TraceFlags(_SAMPLED if context.is_sampled else 0),
    )
