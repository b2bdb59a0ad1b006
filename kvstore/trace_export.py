"""Trace export: has the spans of this process sent to an OTLP collector, as the OTEL_ variables say.

Loaded only where these ask for it, since it needs OpenTelemetry's SDK. Spans wait in a bounded queue for a
thread that sends them in batches; what does not fit is dropped and counted, and so is what a collector does
not take. No request waits for any of it, and the end of the process waits two seconds at most.
"""

import logging
import threading
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

from kvstore.log_limit import LimitedWarning

logger = logging.getLogger(__name__)

_END_S = 2.0


@dataclass(slots=True)
class TraceCounters:
    """Sampled spans that ended: taken by the collector, not taken, without room to wait; and those waiting.

    Changed on the threads that spans end on, and on the one that sends them.
    """

    limit: int
    exported: int = 0
    failed: int = 0
    dropped: int = 0
    waiting: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def admit(self) -> bool:
        """Count a span that has ended; False if there is no room for it."""
        with self._lock:
            if self.waiting >= self.limit:
                self.dropped += 1
                return False
            self.waiting += 1
            return True

    def settle(self, spans: int, *, is_exported: bool) -> None:
        """Count spans that were sent, or could not be."""
        with self._lock:
            self.waiting -= spans
            if is_exported:
                self.exported += spans
            else:
                self.failed += spans

    def as_dict(self) -> dict[str, int]:
        """Return a JSON-ready copy."""
        with self._lock:
            return {
                "exported": self.exported,
                "failed": self.failed,
                "dropped": self.dropped,
                "waiting": self.waiting,
            }


class _Admission(SpanProcessor):
    """Lets ended spans into the queue of another processor while there is room."""

    def __init__(self, queue: SpanProcessor, counters: TraceCounters) -> None:
        self._queue = queue
        self._counters = counters

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        """Nothing is done with a span before it ends."""

    def on_end(self, span: ReadableSpan) -> None:
        """Queue a sampled span, or drop it."""
        context = span.get_span_context()
        if context is not None and context.trace_flags.sampled and self._counters.admit():
            self._queue.on_end(span)

    def shutdown(self) -> None:
        """Send what waits, and end."""
        self._queue.shutdown()

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        """Send what waits."""
        return self._queue.force_flush(timeout_millis)


class _CountingExporter(SpanExporter):
    """Counts what another exporter gets rid of; on the thread that sends."""

    def __init__(self, exporter: SpanExporter, counters: TraceCounters) -> None:
        self._exporter = exporter
        self._counters = counters
        self._trouble = LimitedWarning(logger, interval_s=60.0)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Send spans; what goes wrong is counted, and told once a minute."""
        why = "the collector did not take them"
        try:
            result = self._exporter.export(spans)
        except Exception as error:  # whatever an endpoint that is none makes of it
            result, why = SpanExportResult.FAILURE, type(error).__name__
        is_exported = result is SpanExportResult.SUCCESS
        self._counters.settle(len(spans), is_exported=is_exported)
        if not is_exported:
            self._trouble.warn("traces: %d spans were not exported: %s", len(spans), why)
        return result

    def shutdown(self) -> None:
        """Give up what is under way."""
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        """Nothing waits here."""
        return True


@contextmanager
def exporting(*, service: str, queue_spans: int) -> Iterator[TraceCounters]:
    """Have this process's spans exported inside the block; once in a process.

    ``service`` names it unless OTEL_SERVICE_NAME or OTEL_RESOURCE_ATTRIBUTES do. At most ``queue_spans``
    wait.
    """
    counters = TraceCounters(queue_spans)
    # Its warnings come with each batch, and name the endpoint with what may stand in it: ours say enough.
    logging.getLogger("opentelemetry.exporter").setLevel(logging.CRITICAL)
    exporter = _CountingExporter(OTLPSpanExporter(), counters)
    about = {"service.name": service, "service.instance.id": str(uuid.uuid4())}
    resource = Resource.create({**about, **OTELResourceDetector().detect().attributes})
    # In hand are those of the queue, and a batch that is being sent.
    queue = BatchSpanProcessor(exporter, max_queue_size=queue_spans)
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(_Admission(queue, counters))
    trace.set_tracer_provider(provider)
    try:
        yield counters
    finally:
        ending = threading.Thread(target=provider.shutdown, name="kvstore-traces-end", daemon=True)
        ending.start()
        ending.join(_END_S)
        if ending.is_alive():
            logger.warning("traces: %d spans were not exported: no time was left", counters.waiting)
