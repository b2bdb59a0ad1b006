"""Traces for tests: small ones with results counted by hand, and the published one where it is at hand."""

import json
from pathlib import Path

import pytest

from kvstore.replay import Trace
from kvstore.replay.trace import TraceBuilder, TraceRequest

CHECKOUT = Path(__file__).parents[2]
PUBLISHED = next(
    (
        path
        for folder in (CHECKOUT / "shared", CHECKOUT.parent / "shared")
        if (path := folder / "data" / "traces" / "mooncake_conversation.jsonl").is_file()
    ),
    None,
)
REFERENCE = None if PUBLISHED is None else PUBLISHED.parents[1] / "hit_rate_reference.json"

needs_published_trace = pytest.mark.skipif(
    REFERENCE is None or not REFERENCE.is_file(),
    reason="../shared/data/traces/mooncake_conversation.jsonl and its reference are not beside the checkout",
)

BLOCK_TOKENS = 512


def trace_of(*chains: list, block_tokens: int = 4, tail_tokens: int = 4, gap_s: float = 1.0) -> Trace:
    """A trace of these chains; the last block of each holds ``tail_tokens``."""
    builder = TraceBuilder(source="test", format_name="test")
    for at, ids in enumerate(chains):
        tokens = max(len(ids) - 1, 0) * block_tokens + (tail_tokens if ids else 0)
        builder.add(TraceRequest(at * gap_s, tokens, None, ids))
    return builder.build(block_tokens)


def mooncake_line(ids, *, at_ms=0, tail_tokens=BLOCK_TOKENS):
    tokens = (len(ids) - 1) * BLOCK_TOKENS + tail_tokens
    return json.dumps({"timestamp": at_ms, "input_length": tokens, "output_length": 1, "hash_ids": list(ids)})


CHAT = (
    [1, 2, 3],  # a conversation begins: 3 blocks, none known
    [1, 2, 4],  # another with the same beginning: 2 hits
    [1, 2, 3, 5, 6],  # the first goes on: 3 hits if block 3 is still there
    [7, 8],  # somebody else
    [1, 2, 4, 9],  # the second goes on: 3 hits if block 4 is still there
)
"""Five requests over nine blocks, 17 accesses. Every capacity's hits are counted by hand in the tests."""


def write_mooncake(path: Path, chains=CHAT, *, tail_tokens=BLOCK_TOKENS) -> Path:
    lines = [mooncake_line(ids, at_ms=1000 * at, tail_tokens=tail_tokens) for at, ids in enumerate(chains)]
    path.write_text("\n".join(lines) + "\n")
    return path
