"""Reading a trace: which format it has, what its blocks hold, and the whole of it."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from kvstore.errors import InvalidTrace
from kvstore.replay.access_lines import MARK, AccessLines
from kvstore.replay.kv_events import KvEvents, is_event_line
from kvstore.replay.lines import TraceLines, open_lines
from kvstore.replay.request_lines import BAILIAN_BLOCK_TOKENS, MOONCAKE_BLOCK_TOKENS, HashedLines
from kvstore.replay.trace import Trace, TraceBuilder, TraceRequest

ACCESS_LOG = "access-log"
FORMATS = ("mooncake", "bailian", "vllm", ACCESS_LOG)
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
        chosen = format_name or _format_in(lines)
        lines.may_be_torn = chosen == ACCESS_LOG
        reader = _reader(chosen, block_tokens)
        builder = TraceBuilder(source=lines.source, format_name=chosen)
        for request in itertools.islice(reader.read(lines), max_requests):
            _add(builder, request, lines)
            if report is not None and len(builder) % _REPORT_EVERY == 0:
                report(lines.read_bytes)
        if not len(builder):
            raise InvalidTrace(f"{lines.source}: no request in it, read as {chosen}: see --format")
        return builder.build(reader.block_tokens or 1, [*lines.notes(), *reader.notes()])


def _add(builder: TraceBuilder, request: TraceRequest, lines: TraceLines) -> None:
    try:
        builder.add(request)
    except InvalidTrace as error:
        raise InvalidTrace(f"{lines.source}: line {lines.line_number}: {error}") from error


class _Reader(Protocol):
    """What reads one format. ``block_tokens`` is known once a request was read."""

    block_tokens: int | None

    def read(self, lines: TraceLines) -> Iterator[TraceRequest]:
        """Yield the requests."""

    def notes(self) -> list[str]:
        """Say what was left out or guessed."""


def _reader(format_name: str, block_tokens: int | None) -> _Reader:
    match format_name:
        case "mooncake":
            return HashedLines(block_tokens or MOONCAKE_BLOCK_TOKENS, ticks_per_s=1000)
        case "bailian":
            return HashedLines(block_tokens or BAILIAN_BLOCK_TOKENS, ticks_per_s=1)
        case "access-log":
            return AccessLines(block_tokens)
        case "vllm":
            return KvEvents(block_tokens)
        case _:
            raise InvalidTrace(f"format {format_name!r} is unknown, expected one of {', '.join(FORMATS)}")


def _format_in(lines: TraceLines) -> str:
    """Return the format of a trace by its first line; of a log that line may be torn."""
    try:
        return _format_of(lines.peek(), lines.source)
    except InvalidTrace as error:
        if _is_torn_log(lines):
            return ACCESS_LOG
        raise error from None


def _is_torn_log(lines: TraceLines) -> bool:
    """Whether the first line is no JSON, and the next begins an access log."""
    if lines.line_number != 1 or lines.is_ahead:
        return False
    lines.may_be_torn = True
    try:
        is_log = _format_of(lines.peek(), lines.source) == ACCESS_LOG
    except InvalidTrace:
        return False
    lines.num_torn += is_log
    return is_log


def _format_of(value: Any, source: str) -> str:  # Any: a JSON value
    """Return the format of a trace that begins with this value."""
    if isinstance(value, dict):
        if MARK in value:
            return ACCESS_LOG
        if "hash_ids" in value:
            return "bailian" if "chat_id" in value else "mooncake"
    if is_event_line(value):
        return "vllm"
    raise InvalidTrace(
        f"{source}: line 1 looks like none of the formats {', '.join(FORMATS)}: give --format, or see"
        " docs/replay.md"
    )
