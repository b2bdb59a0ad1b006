"""Spans of what tiers are asked: each read, write and probe, below the requests that it serves."""

import enum
from collections.abc import Sequence

from kvstore import tracing
from kvstore.tier import Medium, Tier
from kvstore.tracing import Attribute, Span, SpanKind, TraceContext


class Operation(enum.Enum):
    """What a tier is asked to do."""

    READ = "read"
    WRITE = "write"
    PROBE = "probe"


def begin_asking(tier: Tier, operation: Operation, *, blocks: int, length_bytes: int = 0) -> Span | None:
    """Begin the span of an operation below the request that asks for it; None if that is not sampled."""
    if tracing.current() is None:
        return None
    return tracing.begin(*_about(tier, operation, blocks, length_bytes))


def begin_serving(
    tier: Tier, operation: Operation, causes: Sequence[TraceContext], *, blocks: int, length_bytes: int
) -> Span | None:
    """Begin the span of an operation that serves several requests: below the first, with links to the others.

    None if there are none, or nothing is traced here.
    """
    if not causes:
        return None
    first, *others = dict.fromkeys(causes)
    return tracing.begin(*_about(tier, operation, blocks, length_bytes), parent=first, links=others)


def _about(
    tier: Tier, operation: Operation, blocks: int, length_bytes: int
) -> tuple[str, SpanKind, tracing.Attributes]:
    attributes: dict[Attribute, tracing.Value] = {Attribute.TIER: tier.name, Attribute.BLOCKS: blocks}
    if length_bytes:
        attributes[Attribute.BYTES] = blocks * length_bytes
    kind = SpanKind.INTERNAL
    if tier.medium is Medium.REMOTE:
        kind = SpanKind.CLIENT
        attributes |= {Attribute.DB_SYSTEM: "redis", Attribute.DB_BATCH: blocks}
    return f"{tier.name} {operation.value}", kind, attributes
