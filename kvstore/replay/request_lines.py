"""Formats with the lengths and block ids of one request a line: Mooncake's and Qwen-Bailian's."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvstore.replay.lines import BadLine, TraceLines, block_ids, count, number
from kvstore.replay.trace import TraceRequest

MOONCAKE_BLOCK_TOKENS = 512
BAILIAN_BLOCK_TOKENS = 16


@dataclass(slots=True)
class HashedLines:
    """Requests with ``timestamp``, ``input_length`` and ``output_length`` in tokens, and ``hash_ids``.

    Mooncake's timestamps are milliseconds, Qwen-Bailian's are seconds. What else is there (``chat_id``,
    ``parent_chat_id``, ``turn``, ``type``) a store does not see.
    """

    block_tokens: int | None
    ticks_per_s: int

    def read(self, lines: TraceLines) -> Iterator[TraceRequest]:
        """Yield the requests.

        Raises:
            InvalidTrace: a line is bad.
        """
        assert self.block_tokens is not None, "the format has a block size"
        for fields in lines.objects():
            try:
                yield _hashed_request(fields, self.block_tokens, ticks_per_s=self.ticks_per_s)
            except BadLine as error:
                lines.complain(error)

    def notes(self) -> list[str]:
        """Nothing is left out."""
        return []


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
