"""PageOps: what a pass does with the pages (write keys and values, attend over them), and its torch form."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as functional

from kvstore_engine_adapter.exact_rows import exact_row_counts
from kvstore_engine_adapter.page_pool import PagePool

MIN_CHUNK_TOKENS = 64
"""64 rows cost 1.3 times as much per token as 128 in products, but waste less on short tails (measured)."""

_LONG_CHUNKS = 10
"""Long enough that torch's fused attention splits the context (at 512 keys)."""


_DRAWS = 3


@dataclass(frozen=True, slots=True)
class Segment:
    """New tokens of one sequence in a pass, at positions ``start...``.

    ``slots`` are the sequence's pages from position 0, at least up to the last new token. A sequence may have
    several segments in a pass, in the order of their positions.
    """

    tokens: Sequence[int]
    start: int
    slots: Sequence[int]


class PageStep(Protocol):
    """One pass over the pages: the rows of its segments, one after the other; further rows are padding."""

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store the new keys and values ``[rows, kv_heads, head_dim]`` of one layer in their pages."""

    def attend(self, layer: int, queries: torch.Tensor) -> torch.Tensor:
        """Return ``[rows, heads * head_dim]``: each row attends to all positions up to its own.

        ``queries`` are ``[rows, heads, head_dim]``. The keys are read from the pages, those just written too,
        so that all attention sees stored values. What padding rows get is arbitrary but finite.
        """


class PageOps(Protocol):
    """Operations on one pool's pages; C++ for the CPU and paged kernels plug in here (see ``device_pages``).

    Unless its description says otherwise, the bits of a row depend on its sequence and position alone: not on
    the segments beside it, nor on how its sequence is cut into segments.
    """

    def prepare(self) -> None:
        """Find out or build what a pass needs. Blocking; called once, in the thread that computes."""

    def begin(self, segments: Sequence[Segment]) -> PageStep:
        """Prepare a pass."""

    def describe(self) -> str:
        """Name the implementation and what it found, for the log."""

    def close(self) -> None:
        """Let go of what ``prepare`` made. Idempotent."""


class TorchPageOps:
    """torch's fused attention over gathered pages, on any device.

    A sequence is cut at multiples of ``chunk_tokens``, and attention never crosses a cut. A row's context
    always reaches to the end of its own chunk (masked beyond the row), so its length is a function of the
    position alone:

        position  0            64           128
        chunk     |------0-----|------1-----|---
        context of a row in chunk 1: [0, 128), whether it is prefilled from 0, from 80, or decoded.

    It runs with numbers of rows from a ladder, padded; one is on it only if ``prepare`` found that its rows
    equal those of a full chunk, bit for bit. A single query row per KV head takes another kernel.
    """

    def __init__(self, pool: PagePool, *, num_heads: int) -> None:
        self._pool = pool
        self._groups = num_heads // pool.layout.num_kv_heads
        self.chunk_tokens = chunk_tokens_for(pool.layout.block_tokens)
        self.ladder: tuple[int, ...] = (self.chunk_tokens,)

    def prepare(self) -> None:
        """Find the numbers of rows that give the same bits as a full chunk; tens of milliseconds."""
        generator = torch.Generator().manual_seed(0)
        layout, chunk = self._pool.layout, self.chunk_tokens
        candidates = [2**power for power in range(1, chunk.bit_length()) if 2**power < chunk]
        found = set(candidates)
        for chunks in (1, _LONG_CHUNKS) * _DRAWS:
            context = chunk * chunks
            queries, keys, values = (
                torch.randn(count, heads, layout.head_dim, generator=generator).to(
                    self._pool.device, self._pool.computes_in
                )
                for count, heads in (
                    (chunk, layout.num_kv_heads * self._groups),
                    (context, layout.num_kv_heads),
                    (context, layout.num_kv_heads),
                )
            )
            positions = torch.arange(context - chunk, context, device=self._pool.device)
            found &= set(
                exact_row_counts(
                    lambda index, q=queries, k=keys, v=values, at=positions: self._mix(  # type: ignore[misc]
                        q[index], k, v, self._mask(at[index], len(k))
                    ),
                    chunk,
                    candidates,
                )
            )
        self.ladder = (*sorted(found), chunk)

    def begin(self, segments: Sequence[Segment]) -> "TorchPageStep":
        """Cut the segments at the chunks' ends, and make block tables and masks."""
        return TorchPageStep(self, self._pool, segments)

    def describe(self) -> str:
        """Name the row counts."""
        return f"torch, query rows {', '.join(map(str, self.ladder))}"

    def close(self) -> None:
        """Do nothing."""

    def chunk_end(self, position: int) -> int:
        """Return the end of the chunk that holds a position."""
        return (position // self.chunk_tokens + 1) * self.chunk_tokens

    def rung(self, count: int) -> int:
        """Return the number of rows that ``count`` of one chunk are computed with."""
        return next(rung for rung in self.ladder if rung >= count)

    def mask(self, start: int, count: int, context: int) -> torch.Tensor:
        """Return the mask of rows at ``start...`` over a context, padded to a rung."""
        positions = torch.arange(start, start + self.rung(count), device=self._pool.device)
        return self._mask(positions.clamp_(max=context - 1), context)

    def _mask(self, positions: torch.Tensor, context: int) -> torch.Tensor:
        return causal_mask(positions, context, groups=self._groups, dtype=self._pool.computes_in)

    def attend(
        self, queries: torch.Tensor, layer: int, table: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        """Return ``[rows, heads * head_dim]`` for rows of one chunk, padded to those of the mask."""
        count, rows = len(queries), len(mask) // self._groups
        if count < rows:
            queries = torch.cat([queries, queries[-1:].expand(rows - count, -1, -1)])
        return self._mix(queries, *self._pool.read(layer, table), mask)[:count]

    def _mix(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        # The query heads of one KV head are stacked as rows: the quickest of four forms for 1 to 64 rows
        # (measured on 2 cores). Softmax and accumulation are float32 inside the kernel.
        rows, heads, head_dim = queries.shape
        kv_heads, groups = keys.shape[1], self._groups
        stacked = queries.view(rows, kv_heads, groups, head_dim).permute(1, 2, 0, 3)
        mixed = functional.scaled_dot_product_attention(
            stacked.reshape(1, kv_heads, groups * rows, head_dim),
            keys.transpose(0, 1).unsqueeze(0),
            values.transpose(0, 1).unsqueeze(0),
            attn_mask=mask,
        )
        unstacked = mixed.view(kv_heads, groups, rows, head_dim).permute(2, 0, 1, 3)
        return unstacked.reshape(rows, heads * head_dim)


@dataclass(frozen=True, slots=True)
class _Piece:
    """Rows ``first...`` of a pass that lie in one chunk of their sequence."""

    first: int
    count: int
    table: torch.Tensor
    mask: torch.Tensor


class TorchPageStep:
    """One pass of TorchPageOps."""

    def __init__(self, ops: TorchPageOps, pool: PagePool, segments: Sequence[Segment]) -> None:
        self._ops = ops
        self._pool = pool
        self._pieces: list[_Piece] = []
        pages: list[int] = []
        offsets: list[int] = []
        block_tokens = pool.layout.block_tokens
        for segment in segments:
            self._cut(segment, len(pages))
            positions = range(segment.start, segment.start + len(segment.tokens))
            pages += [segment.slots[position // block_tokens] for position in positions]
            offsets += [position % block_tokens for position in positions]
        self._pages = torch.tensor(pages, device=pool.device)
        self._offsets = torch.tensor(offsets, device=pool.device)

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store new keys and values; see PageStep."""
        count = len(self._pages)
        self._pool.write(layer, keys[:count], values[:count], pages=self._pages, rows=self._offsets)

    def attend(self, layer: int, queries: torch.Tensor) -> torch.Tensor:
        """Attend piece by piece; see PageStep."""
        rows, heads, head_dim = queries.shape
        mixed = queries.new_zeros(rows, heads * head_dim)
        for piece in self._pieces:
            span = slice(piece.first, piece.first + piece.count)
            mixed[span] = self._ops.attend(queries[span], layer, piece.table, piece.mask)
        return mixed

    def _cut(self, segment: Segment, first: int) -> None:
        pool, position = self._pool, segment.start
        stop = segment.start + len(segment.tokens)
        while position < stop:
            context = self._ops.chunk_end(position)
            end = min(stop, context)
            table = torch.full((context // pool.layout.block_tokens,), pool.zero_page)
            known = list(segment.slots[: len(table)])
            table[: len(known)] = torch.tensor(known)
            mask = self._ops.mask(position, end - position, context)
            row = first + position - segment.start
            self._pieces.append(_Piece(row, end - position, table.to(pool.device), mask))
            position = end


def chunk_tokens_for(block_tokens: int) -> int:
    """Return the chunk size: the least multiple of the block size that is at least 64."""
    return math.ceil(MIN_CHUNK_TOKENS / block_tokens) * block_tokens


def causal_mask(positions: torch.Tensor, context: int, *, groups: int, dtype: torch.dtype) -> torch.Tensor:
    """Return ``[groups * rows, context]``: 0 where a key is at or before the row's position, else -inf."""
    visible = torch.arange(context, device=positions.device) <= positions.unsqueeze(1)
    mask = torch.zeros(visible.shape, dtype=dtype, device=positions.device)
    return mask.masked_fill_(~visible, float("-inf")).repeat(groups, 1)
