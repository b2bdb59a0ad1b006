"""Spans of requests in frames, the client's and the server's: one for each, named after its kind."""

from collections.abc import Awaitable, Callable

from kvstore import tracing
from kvstore.message_fields import ChainRef, KeySet
from kvstore.messages import Answer, Count, Failed, Leased, Lent, Matched, Ready, Request, Seen, Stored
from kvstore.tracing import Attribute, Span, SpanKind, TraceContext

_SYSTEM = "kvstore"


def begin_call(request: Request) -> Span | None:
    """Begin the span of a client's request below its caller's; None if that is not sampled."""
    if tracing.current() is None:
        return None
    return tracing.begin(_name(request), SpanKind.CLIENT, _attributes(request))


async def answer_in_span(
    request: Request, parent: TraceContext, answer: Callable[[Request], Awaitable[Answer]]
) -> Answer:
    """Answer a request, in a span of its own if ``parent`` is sampled and anything is traced here."""
    span = tracing.begin(_name(request), SpanKind.SERVER, _attributes(request), parent=parent)
    if span is None:
        return await answer(request)
    with span:
        answered = await answer(request)
        note_answer(span, answered)
        return answered


def note_answer(span: Span, answer: Answer) -> None:
    """Say of a request's span what came of it."""
    done, reason = None, None
    match answer:
        case Failed(code, _):
            span.note_error(code.value)
        case Matched():
            done, reason = len(answer.tiers.indices), answer.reason
        case Ready() | Leased():
            done, reason = len(answer.slots), answer.reason
        case Lent():
            done, reason = len(answer.slots), answer.reason
        case Seen():
            done = len(answer.slots)
        case Stored():
            done, reason = answer.stored, answer.reason
        case Count(count):
            done = count
        case _:
            pass
    if done is not None:
        span.set(Attribute.DONE_BLOCKS, done)
    if reason is not None:
        span.set(Attribute.MISS_REASON, reason.value)


def _name(request: Request) -> str:
    return f"{_SYSTEM}/{type(request).__name__}"


def _attributes(request: Request) -> tracing.Attributes:
    attributes: dict[Attribute, tracing.Value] = {
        Attribute.RPC_SYSTEM: _SYSTEM,
        Attribute.RPC_METHOD: _name(request),
    }
    about = getattr(request, "about", None)
    if isinstance(about, ChainRef):
        attributes[Attribute.BLOCKS] = len(about.chain.keys)
    elif isinstance(about, KeySet):
        attributes[Attribute.BLOCKS] = len(about.keys)
    return attributes
