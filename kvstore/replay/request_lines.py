"""Formats with one request a line: Mooncake's, Qwen-Bailian's, and the store's own access log."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kvstore.replay.lines import BadLine, TraceLines, block_ids, count, number
from kvstore.replay.trace import TraceRequest

MOONCAKE_BLOCK_TOKENS = 512
BAILIAN_BLOCK_TOKENS = 16

ACCESS_LOG_MARK = "kvstore_access_log"
"""The key of an access log's first line, with the format's version."""

ACCESS_LOG_VERSION = 1


def read_mooncake(lines: TraceLines, block_tokens: int) -> Iterator[TraceRequest]:
    """Yield the requests of Mooncake's format: ``timestamp`` (ms), lengths in tokens, ``hash_ids``.

    Raises:
        InvalidTrace: a line is bad.
    """
    for fields in _objects(lines):
        try:
            yield _hashed_request(fields, block_tokens, ticks_per_s=1000)
        except BadLine as error:
            lines.complain(error)


def read_bailian(lines: TraceLines, block_tokens: int) -> Iterator[TraceRequest]:
    """Yield the requests of Qwen-Bailian's format: as Mooncake's, with ``timestamp`` in seconds.

    ``chat_id``, ``parent_chat_id``, ``turn`` and ``type`` may be there; a store does not see them.

    Raises:
        InvalidTrace: a line is bad.
    """
    for fields in _objects(lines):
        try:
            yield _hashed_request(fields, block_tokens, ticks_per_s=1)
        except BadLine as error:
            lines.complain(error)


def read_access_log(lines: TraceLines, block_tokens: int) -> Iterator[TraceRequest]:
    """Yield the requests of a store's access log: ``t`` (s) and ``blocks`` (a list of hashed ids).

    Raises:
        InvalidTrace: a line is bad, or of a version that is not known.
    """
    for fields in _objects(lines):
        try:
            if ACCESS_LOG_MARK in fields:
                _check_version(fields)
                continue
            ids = block_ids(fields, "blocks")
            yield TraceRequest(number(fields, "t"), len(ids) * block_tokens, None, ids)
        except BadLine as error:
            lines.complain(error)


def access_log_block_tokens(header: Mapping[str, Any]) -> int:
    """Return the block size that an access log's first line tells.

    Raises:
        BadLine: it tells none.
    """
    _check_version(header)
    tokens = count(header, "block_tokens")
    if not tokens:
        raise BadLine("block_tokens is 0, expected at least 1")
    return tokens


def _check_version(header: Mapping[str, Any]) -> None:
    if header[ACCESS_LOG_MARK] != ACCESS_LOG_VERSION:
        raise BadLine(f"{ACCESS_LOG_MARK} is {header[ACCESS_LOG_MARK]!r}, expected {ACCESS_LOG_VERSION}")


def _objects(lines: TraceLines) -> Iterator[Mapping[str, Any]]:
    for value in lines:
        if isinstance(value, dict):
            yield value
        else:
            lines.complain(BadLine("is no JSON object"))


def _hashed_request(fields: Mapping[str, Any], block_tokens: int, *, ticks_per_s: int) -> TraceRequest:
    ids = block_ids(fields, "hash_ids")
    input_tokens = count(fields, "input_length")
    if not input_tokens // block_tokens <= len(ids) <= -(-input_tokens // block_tokens):
        raise BadLine(_wrong_size(input_tokens, ids, block_tokens))
    output_tokens = count(fields, "output_length") if "output_length" in fields else None
    return TraceRequest(number(fields, "timestamp") / ticks_per_s, input_tokens, output_tokens, ids)


def _wrong_size(input_tokens: int, ids: Sequence[object], block_tokens: int) -> str:
    text = (
        f"input_length {input_tokens} does not fit {len(ids)} hash_ids of {block_tokens} tokens each"
        ", the last one partly filled or left out"
    )
    if ids and input_tokens >= len(ids):
        low, high = -(-input_tokens // len(ids)), (input_tokens - 1) // max(len(ids) - 1, 1)
        text += f": blocks of {low} to {max(low, high)} tokens would, give --block-tokens"
    return text
