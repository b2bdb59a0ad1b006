"""Reading a trace: which format it has, what its blocks hold, and the whole of it."""

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from kvstore.errors import InvalidTrace
from kvstore.replay.kv_events import KvEvents, is_event_line
from kvstore.replay.lines import BadLine, TraceLines, open_lines
from kvstore.replay.request_lines import (
    ACCESS_LOG_MARK,
    BAILIAN_BLOCK_TOKENS,
    MOONCAKE_BLOCK_TOKENS,
    access_log_block_tokens,
    read_access_log,
    read_bailian,
    read_mooncake,
)
from kvstore.replay.trace import Trace, TraceBuilder, TraceRequest

FORMATS = ("mooncake", "bailian", "vllm", "access-log")
"""The formats by name."""

_REPORT_EVERY = 256
"""Requests between two reports of progress."""


def read_trace(
    path: str,
    *,
    format_name: str | None = None,
    block_tokens: int | None = None,
    max_requests: int | None = None,
    skip_bad_lines: bool = False,
    report: Callable[[int], None] | None = None,
) -> Trace:
    """Read a trace of one of ``FORMATS``.

    ``format_name`` None: what its first line looks like. ``block_tokens`` None: what the trace says, else
    what its format has. ``max_requests`` stops there. ``report`` is told now and then how many bytes were
    read.

    Raises:
        InvalidTrace: it cannot be read, a line is bad, or there is no request in it.
    """
    with open_lines(path, skips=skip_bad_lines) as lines:
        first = lines.peek()
        chosen = format_name or _format_of(first, lines.source)
        events = KvEvents(block_tokens)
        tokens = block_tokens or _block_tokens(chosen, first, lines.source)
        builder = TraceBuilder(source=lines.source, format_name=chosen)
        requests = _requests(chosen, lines, tokens, events)
        for request in itertools.islice(requests, max_requests):
            _add(builder, request, lines)
            if report is not None and len(builder) % _REPORT_EVERY == 0:
                report(lines.read_bytes)
        if not len(builder):
            raise InvalidTrace(f"{lines.source}: no request in it, read as {chosen}: see --format")
        notes = [*lines.notes(), *(events.notes() if chosen == "vllm" else [])]
        return builder.build(events.block_tokens or tokens, notes)


def _add(builder: TraceBuilder, request: TraceRequest, lines: TraceLines) -> None:
    try:
        builder.add(request)
    except InvalidTrace as error:
        raise InvalidTrace(f"{lines.source}: line {lines.line_number}: {error}") from error


def _requests(
    format_name: str, lines: TraceLines, block_tokens: int, events: KvEvents
) -> Iterator[TraceRequest]:
    match format_name:
        case "mooncake":
            return read_mooncake(lines, block_tokens)
        case "bailian":
            return read_bailian(lines, block_tokens)
        case "access-log":
            return read_access_log(lines, block_tokens)
        case "vllm":
            return events.read(lines)
        case _:
            raise InvalidTrace(f"format {format_name!r} is unknown, expected one of {', '.join(FORMATS)}")


def _format_of(value: Any, source: str) -> str:  # Any: a JSON value
    """Return the format of a trace that begins with this value."""
    if isinstance(value, dict):
        if ACCESS_LOG_MARK in value:
            return "access-log"
        if "hash_ids" in value:
            return "bailian" if "chat_id" in value else "mooncake"
    if is_event_line(value):
        return "vllm"
    raise InvalidTrace(
        f"{source}: line 1 looks like none of the formats {', '.join(FORMATS)}: give --format, or see"
        " docs/replay.md"
    )


def _block_tokens(format_name: str, first: Any, source: str) -> int:  # Any: a JSON value
    """Return the block size that the format or its first line has; 0 where later lines tell it."""
    match format_name:
        case "mooncake":
            return MOONCAKE_BLOCK_TOKENS
        case "bailian":
            return BAILIAN_BLOCK_TOKENS
        case "access-log":
            return _from_header(first, source)
        case _:
            return 0


def _from_header(first: Any, source: str) -> int:  # Any: a JSON value
    if not isinstance(first, Mapping) or ACCESS_LOG_MARK not in first:
        raise InvalidTrace(f"{source}: line 1 is no head of an access log: give --block-tokens")
    try:
        return access_log_block_tokens(first)
    except BadLine as error:
        raise InvalidTrace(f"{source}: line 1: {error}") from error
