"""trace_of: the span that a request of an engine belongs to, as the engine was told."""

from collections.abc import Mapping
from typing import Any

from kvstore.tracing import TRACE_HEADER, TraceContext


def trace_of(request: Any) -> TraceContext | None:
    """Return the context in ``trace_headers`` of an engine's request; None without one. Never raises."""
    headers = getattr(request, "trace_headers", None)
    text = headers.get(TRACE_HEADER) if isinstance(headers, Mapping) else None
    return TraceContext.of_header(text) if isinstance(text, str) else None
