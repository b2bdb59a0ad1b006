"""RequestTrace: the span of one request of an engine, by OpenTelemetry's conventions for generative AI."""

from collections.abc import Callable
from contextvars import Context
from typing import Self

from kvstore import tracing
from kvstore.tracing import Attribute, Span, SpanKind
from kvstore_engine_adapter.generation import Finished, RequestReport

_OPERATION = "text_completion"
_PROVIDER = "kvstore"


class RequestTrace:
    """What is done for a request in its own span, if it has one: the engine's task serves many at a time."""

    def __init__(self, span: Span | None = None) -> None:
        self._span = span

    @classmethod
    def begin(cls, model: str, report: RequestReport, max_tokens: int) -> Self:
        """Begin the span of a request, below the one that its caller is in, if that is sampled."""
        span = tracing.begin(
            f"{_OPERATION} {model}",
            SpanKind.INTERNAL,
            {
                Attribute.GEN_AI_OPERATION: _OPERATION,
                Attribute.GEN_AI_PROVIDER: _PROVIDER,
                Attribute.GEN_AI_MODEL: model,
                Attribute.GEN_AI_MAX_TOKENS: max_tokens,
                Attribute.GEN_AI_INPUT_TOKENS: report.prompt_tokens,
            },
        )
        return cls(span)

    @property
    def context(self) -> Context | None:
        """The context for a task of the request; None: the present one."""
        return None if self._span is None else self._span.entered()

    def run(self, work: Callable[[], None]) -> None:
        """Do what belongs to the request."""
        context = self.context
        if context is None:
            work()
        else:
            context.run(work)

    def end(self, report: RequestReport, last: Finished | Exception | None) -> None:
        """End the span; ``last`` is the last that the request's consumer hears. Idempotent."""
        span, self._span = self._span, None
        if span is None:
            return
        span.set(Attribute.GEN_AI_OUTPUT_TOKENS, report.output_tokens)
        span.set(Attribute.GEN_AI_CACHED_TOKENS, report.matched_tokens)
        if report.miss_reason is not None:
            span.set(Attribute.MISS_REASON, report.miss_reason)
        if report.ttft_s:
            span.set(Attribute.GEN_AI_FIRST_CHUNK, report.ttft_s)
        if isinstance(last, Finished):
            span.set(Attribute.GEN_AI_FINISH, [last.reason])
        elif last is not None:
            span.note_error(type(last).__name__)
        span.end()
