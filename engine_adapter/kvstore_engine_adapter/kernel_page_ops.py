"""KernelPageOps: a pass over pages by paged kernels (`kvstore_kernels`), which read them where they lie."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch

from kvstore_engine_adapter.attention import Segment
from kvstore_engine_adapter.page_pool import PagePool
from kvstore_kernels import PagedKernels, SplitPlan

SPLIT_TOKENS = 1024
"""Length of a split; bits depend on it. Shorter ones fill a device with few sequences, but cost memory."""

PARTIAL_BYTES = 256 << 20
"""Most memory for what the splits of one call give; a call that would need more is made as several."""


class KernelPageOps:
    """Paged kernels behind PageOps.

    All rows, decoded ones too, go through the prefill kernel with splits of one length: what a row gets then
    depends on its sequence and position alone, to the bit. With ``decodes_apart`` single rows go through the
    decode kernel with splits planned for the batch: quicker, and in their last bits the results depend on
    how a token came to be computed, and beside which others.
    """

    def __init__(
        self,
        pool: PagePool,
        kernels: PagedKernels,
        *,
        num_heads: int,
        decodes_apart: bool = False,
        split_tokens: int = SPLIT_TOKENS,
        partial_bytes: int = PARTIAL_BYTES,
    ) -> None:
        self.pool = pool
        self.kernels = kernels
        self.num_heads = num_heads
        self.decodes_apart = decodes_apart
        self.split_tokens = split_tokens
        self.partial_bytes = partial_bytes

    def prepare(self) -> None:
        """Run each kernel once, over the page of zeros, so that what has to be compiled is. Seconds, once."""
        layout, pool = self.pool.layout, self.pool
        blocks = self.split_tokens // layout.block_tokens + 2
        slots = [pool.zero_page] * blocks
        late = (blocks - 1) * layout.block_tokens
        step = self.begin([Segment((0,), late, slots), Segment((0, 0), 0, slots)])
        shape = (3, self.num_heads, layout.head_dim)
        queries = torch.zeros(shape, dtype=pool.computes_in, device=pool.device)
        new = queries[:, : layout.num_kv_heads]
        # The two segments write the same zeros to the same rows.
        step.write(0, new, new)
        step.attend(0, queries)
        pool.finish()

    def begin(self, segments: Sequence[Segment]) -> "KernelPageStep":
        """Lay out slots, block tables and lengths on the device."""
        return KernelPageStep(self, segments)

    def describe(self) -> str:
        """Name the kernels and how they are used."""
        how = "decode apart" if self.decodes_apart else f"splits of {self.split_tokens} tokens"
        return f"{type(self.kernels).__name__}, {how}"

    def close(self) -> None:
        """Do nothing."""

    def rows_within(self, splits: int) -> int:
        """Return the most rows of one call whose contexts are cut into so many splits."""
        row_bytes = self.num_heads * splits * (self.pool.layout.head_dim + 1) * 4
        return max(1, self.partial_bytes // row_bytes)


@dataclass(frozen=True, slots=True)
class _Piece:
    """``count`` rows of one sequence, the last of which sees ``context`` tokens."""

    slots: Sequence[int]
    count: int
    context: int


@dataclass(frozen=True, slots=True)
class _Call:
    """Rows ``first...stop`` of a pass that one launch attends for. ``starts`` None: one row per sequence."""

    first: int
    stop: int
    tables: torch.Tensor
    lengths: torch.Tensor
    starts: torch.Tensor | None
    plan: SplitPlan | None


class KernelPageStep:
    """One pass of KernelPageOps."""

    def __init__(self, ops: KernelPageOps, segments: Sequence[Segment]) -> None:
        self._ops = ops
        block_tokens = ops.pool.layout.block_tokens
        rows = [
            segment.slots[position // block_tokens] * block_tokens + position % block_tokens
            for segment in segments
            for position in range(segment.start, segment.start + len(segment.tokens))
        ]
        self._count = len(rows)
        self._rows = torch.tensor(rows, dtype=torch.int64, device=ops.pool.device)
        groups = list(_groups(ops, list(_pieces(ops, segments))))
        self._calls = _calls(ops, groups)

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store new keys and values; see PageStep."""
        count, pool = self._count, self._ops.pool
        self._ops.kernels.write_kv(
            keys[:count],
            values[:count],
            pool.tensor[:, layer],
            self._rows,
            kv_scales=pool.layer_scales(layer),
        )

    def attend(self, layer: int, queries: torch.Tensor) -> torch.Tensor:
        """Attend in as few calls as the memory for splits allows; see PageStep."""
        rows, heads, head_dim = queries.shape
        mixed = [self._attend(call, layer, queries[call.first : call.stop]) for call in self._calls]
        if self._count < rows:
            mixed.append(queries.new_zeros(rows - self._count, heads, head_dim))
        return (mixed[0] if len(mixed) == 1 else torch.cat(mixed)).reshape(rows, heads * head_dim)

    def _attend(self, call: _Call, layer: int, queries: torch.Tensor) -> torch.Tensor:
        kernels, pool = self._ops.kernels, self._ops.pool
        pages, scales = pool.tensor[:, layer], pool.layer_scales(layer)
        if call.starts is None:
            return kernels.paged_decode(
                queries, pages, call.tables, call.lengths, kv_scales=scales, plan=call.plan
            )
        return kernels.paged_prefill(
            queries, pages, call.tables, call.starts, call.lengths, kv_scales=scales, plan=call.plan
        )


def _pieces(ops: KernelPageOps, segments: Sequence[Segment]) -> Iterator[_Piece]:
    """Cut segments that alone would need too much memory for splits."""
    for segment in segments:
        start, stop = segment.start, segment.start + len(segment.tokens)
        limit = ops.rows_within(math.ceil(stop / ops.split_tokens))
        for first in range(start, stop, limit):
            last = min(first + limit, stop)
            yield _Piece(segment.slots, last - first, last)


def _groups(ops: KernelPageOps, pieces: Sequence[_Piece]) -> Iterator[list[_Piece]]:
    """Put neighbours into one call: single rows together, others together, within the memory for splits."""
    group: list[_Piece] = []
    rows = splits = 0
    for piece in pieces:
        needed = max(splits, math.ceil(piece.context / ops.split_tokens))
        is_alike = bool(group) and (piece.count == 1) == (group[-1].count == 1)
        if group and not (is_alike and rows + piece.count <= ops.rows_within(needed)):
            yield group
            group, rows, needed = [], 0, math.ceil(piece.context / ops.split_tokens)
        group.append(piece)
        rows, splits = rows + piece.count, needed
    if group:
        yield group


def _calls(ops: KernelPageOps, groups: Sequence[Sequence[_Piece]]) -> list[_Call]:
    """Bring all tables and lengths of a pass to the device in one copy."""
    parts = [part for group in groups for part in _numbers(ops, group)]
    bounds = np.cumsum([0, *(part.size for part in parts)])
    there = torch.from_numpy(np.concatenate([part.ravel() for part in parts])).to(ops.pool.device)
    views = [
        there[begin:end].view(part.shape)
        for part, (begin, end) in zip(parts, pairwise(bounds.tolist()), strict=True)
    ]
    calls: list[_Call] = []
    first = 0
    for number, group in enumerate(groups):
        tables, lengths, starts = views[3 * number : 3 * number + 3]
        stop = first + sum(piece.count for piece in group)
        is_decoded = ops.decodes_apart and group[0].count == 1
        longest = max(piece.context for piece in group)
        plan = SplitPlan(ops.split_tokens, math.ceil(longest / ops.split_tokens))
        calls.append(
            _Call(
                first,
                stop,
                tables,
                lengths,
                starts=None if is_decoded else starts,
                plan=None if ops.decodes_apart else plan,
            )
        )
        first = stop
    return calls


def _numbers(
    ops: KernelPageOps, group: Sequence[_Piece]
) -> "list[np.ndarray[tuple[int, ...], np.dtype[np.int32]]]":
    """Return block tables ``[sequences, blocks]``, context lengths, and starts of rows of one call."""
    block_tokens = ops.pool.layout.block_tokens
    blocks = [math.ceil(piece.context / block_tokens) for piece in group]
    tables = np.full((len(group), max(blocks)), ops.pool.zero_page, dtype=np.int32)
    for row, (piece, count) in enumerate(zip(group, blocks, strict=True)):
        tables[row, :count] = piece.slots[:count]
    lengths = np.array([piece.context for piece in group], dtype=np.int32)
    starts = np.cumsum([0, *(piece.count for piece in group)], dtype=np.int32)
    return [tables, lengths, starts]
