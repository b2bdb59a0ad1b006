"""What the tests of the connectors share."""

from collections.abc import Callable

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
LOOKUP, SAVE, LOAD = "kvstore/MatchAndLease", "kvstore/Commit", {"kvstore/Peek", "kvstore/Fetch"}
TakeSpans = Callable[[], set[str]]


@pytest.fixture
def take_spans(monkeypatch: pytest.MonkeyPatch) -> TakeSpans:
    """Have this process trace; returns what takes the names of the spans so far, which lie below SPAN."""
    kept, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(kept))
    monkeypatch.setattr(trace, "get_tracer", provider.get_tracer)

    def take() -> set[str]:
        spans = kept.get_finished_spans()
        kept.clear()
        assert all(_is_below(span) for span in spans)
        return {span.name for span in spans}

    return take


def _is_below(span: ReadableSpan) -> bool:
    parent = span.parent
    return parent is not None and (parent.trace_id, parent.span_id) == (int(TRACE, 16), int(SPAN, 16))


def headers(*, is_sampled: bool = True) -> dict[str, str]:
    """Return what an engine passes on of a request's headers."""
    return {"traceparent": f"00-{TRACE}-{SPAN}-{int(is_sampled):02x}"}
