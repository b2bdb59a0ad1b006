"""Launches of paged attention: decode, prefill, and the step that combines splits of a long context."""

import functools
import math
from typing import NamedTuple

import numpy as np
import torch

from kvstore.errors import InvalidLayout
from kvstore_kernels.attention_builds import combine_spec, decode_build, prefill_build
from kvstore_kernels.launching import Argument, DeviceLimits, KernelSpec, Launch, Written
from kvstore_kernels.splits import SplitPlan, plan_splits
from kvstore_kernels.tensors import (
    FP8_DTYPES,
    byte_strides,
    check_device,
    check_dtype,
    check_rows,
    check_shape,
)

_COMBINED_ROWS = 4  # rows of one thread block of combine_splits.cu


class Problem(NamedTuple):
    """Arguments of an attention call after checking."""

    q: torch.Tensor
    kv_pages: torch.Tensor
    block_tables: torch.Tensor
    context_lens: torch.Tensor
    kv_scales: torch.Tensor | None
    scale: float

    @property
    def kv_heads(self) -> int:
        """KV heads."""
        return self.kv_pages.shape[3]

    @property
    def group(self) -> int:
        """Query heads of one KV head."""
        return self.q.shape[1] // self.kv_heads

    @property
    def longest(self) -> int:
        """Most cached tokens that the block tables have room for."""
        return self.block_tables.shape[1] * self.kv_pages.shape[2]


def problem_of(
    q: torch.Tensor,
    kv_pages: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    *,
    kv_scales: torch.Tensor | None,
    scale: float | None,
) -> Problem:
    """Return the problem of arguments that fit each other (check_decode, check_prefill).

    Raises:
        InvalidLayout: rows, dtypes or a scale that the kernels cannot take.
    """
    check_rows("q", q)
    check_rows("kv_pages", kv_pages)
    check_dtype("q", q, (torch.bfloat16, torch.float16))
    factor = float(q.shape[2] ** -0.5 if scale is None else scale)
    if not 0 < factor < math.inf:
        raise InvalidLayout(f"scale: {scale}, expected a positive number")
    for name, tensor in (("block_tables", block_tables), ("context_lens", context_lens)):
        if not tensor.is_contiguous():
            raise InvalidLayout(f"{name}: must be contiguous")
    return Problem(q, kv_pages, block_tables, context_lens, kv_scales, factor)


class Attention(NamedTuple):
    """Launches of one attention call, and the tensor that holds the result after them."""

    launches: tuple[Launch, ...]
    out: torch.Tensor


def plan_decode(problem: Problem, limits: DeviceLimits) -> SplitPlan:
    """Plan the splits of a decode step from the sizes of its tensors alone: no wait for the device."""
    build = decode_build(problem.q.dtype, problem.kv_pages.dtype, problem.q.shape[2], limits)
    at_once = max(1, limits.multiprocessor_shared_bytes // (build.shared_bytes + 1024))
    rows = problem.kv_heads * -(-problem.group // build.query_rows)
    return _even_plan(problem.longest, problem.q.shape[0], rows, limits.multiprocessors * at_once)


@functools.lru_cache(maxsize=512)
def _even_plan(longest: int, sequences: int, rows: int, places: int) -> SplitPlan:
    """The plan for sequences of one length; kept, since all layers of a step ask for the same."""
    return plan_splits([longest] * sequences, rows=rows, places=places)


def decode_launches(problem: Problem, plan: SplitPlan, limits: DeviceLimits) -> Attention:
    """The launches of paged_decode.

    Raises:
        InvalidLayout: a head size that the kernel cannot take, or too many sequences.
    """
    q = problem.q
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    if not q.numel():
        return Attention((), out)
    if q.shape[0] > _MAX_GRID_Z:
        raise InvalidLayout(f"q: {q.shape[0]} sequences, limit {_MAX_GRID_Z}")
    build = decode_build(q.dtype, problem.kv_pages.dtype, q.shape[2], limits)
    partial = _Partial.of(q, plan)
    arguments: tuple[Argument, ...] = (
        *(q, Written(out), problem.kv_pages, problem.block_tables, problem.context_lens, problem.kv_scales),
        *partial.written(),
        *(np.int64(n) for n in (*byte_strides(q)[:2], *byte_strides(out)[:2])),
        *_page_arguments(problem),
        *(np.int32(n) for n in (problem.kv_heads, problem.group, problem.block_tables.shape[1])),
        *(np.int32(plan.tokens), np.int32(plan.count), np.float32(problem.scale * math.log2(math.e))),
    )
    row_blocks = -(-problem.group // build.query_rows)
    grid = (problem.kv_heads * row_blocks, plan.count, q.shape[0])
    launch = Launch(build.spec, grid, arguments, build.shared_bytes)
    return Attention((launch, *partial.combined(out)), out)


def plan_prefill(problem: Problem, limits: DeviceLimits) -> SplitPlan:
    """Plan the splits of a prefill step from the sizes of its tensors alone: one, unless rows are few."""
    build = prefill_build(problem.q.dtype, problem.kv_pages.dtype, problem.q.shape[2])
    at_once = max(1, min(2, limits.multiprocessor_shared_bytes // (build.shared_bytes + 1024)))
    rows = problem.kv_heads * _most_tiles(problem, build.rows)
    return _even_plan(problem.longest, 1, rows, limits.multiprocessors * at_once)


def prefill_launches(problem: Problem, query_starts: torch.Tensor, plan: SplitPlan) -> Attention:
    """The launches of paged_prefill.

    Raises:
        InvalidLayout: a head size that the kernel cannot take, or query_starts that are not contiguous.
    """
    if not query_starts.is_contiguous():
        raise InvalidLayout("query_starts: must be contiguous")
    q = problem.q
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    if not q.numel() or not problem.context_lens.shape[0]:
        return Attention((), out)
    build = prefill_build(q.dtype, problem.kv_pages.dtype, q.shape[2])
    partial = _Partial.of(q, plan)
    arguments: tuple[Argument, ...] = (
        *(q, Written(out), problem.kv_pages, problem.block_tables, query_starts, problem.context_lens),
        *(problem.kv_scales, *partial.written()),
        *(np.int64(n) for n in (*byte_strides(q)[:2], *byte_strides(out)[:2])),
        *_page_arguments(problem),
        *(np.int32(n) for n in (problem.context_lens.shape[0], problem.kv_heads, problem.group)),
        *(np.int32(n) for n in (problem.block_tables.shape[1], plan.tokens, plan.count)),
        np.float32(problem.scale * math.log2(math.e)),
    )
    grid = (_most_tiles(problem, build.rows), problem.kv_heads, plan.count)
    launch = Launch(build.spec, grid, arguments, build.shared_bytes)
    return Attention((launch, *partial.combined(out)), out)


def _most_tiles(problem: Problem, rows: int) -> int:
    """Most tiles of rows that any division of the query tokens among the sequences makes."""
    tokens = problem.q.shape[0]
    return tokens * problem.group // rows + min(tokens, problem.context_lens.shape[0])


class _Partial(NamedTuple):
    """What the splits give: outputs ``[tokens, heads, splits, head_dim]`` and logarithms of their weights."""

    out: torch.Tensor | None
    lse: torch.Tensor | None

    @classmethod
    def of(cls, q: torch.Tensor, plan: SplitPlan) -> "_Partial":
        if plan.count == 1:
            return cls(None, None)
        tokens, heads, head_dim = q.shape
        out = torch.empty(tokens, heads, plan.count, head_dim, dtype=torch.float32, device=q.device)
        return cls(out, torch.empty(tokens, heads, plan.count, dtype=torch.float32, device=q.device))

    def written(self) -> tuple[Argument, Argument]:
        if self.out is None or self.lse is None:
            return None, None
        return Written(self.out), Written(self.lse)

    def combined(self, out: torch.Tensor) -> tuple[Launch, ...]:
        if self.out is None:
            return ()
        tokens, heads, splits, head_dim = self.out.shape
        spec: KernelSpec = combine_spec(out.dtype, head_dim)
        arguments: tuple[Argument, ...] = (
            *(self.out, self.lse, Written(out)),
            *(np.int32(n) for n in (tokens * heads, heads, splits)),
            *(np.int64(n) for n in byte_strides(out)[:2]),
        )
        return (Launch(spec, (-(-tokens * heads // _COMBINED_ROWS), 1, 1), arguments),)


_MAX_GRID_Z = 65535


def _page_arguments(problem: Problem) -> tuple[Argument, ...]:
    strides = byte_strides(problem.kv_pages)[:4]
    return (
        *(np.int64(stride) for stride in strides),
        *(np.int32(problem.kv_pages.shape[2]), np.int32(problem.kv_pages.shape[0])),
    )


def check_decode(
    q: torch.Tensor,
    kv_pages: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    kv_scales: torch.Tensor | None,
) -> None:
    """Refuse arguments of paged_decode that do not fit each other.

    Raises:
        InvalidLayout: a shape, dtype or device.
    """
    _check_attention(q, kv_pages, block_tables, context_lens, kv_scales)
    check_shape("context_lens", context_lens, (q.shape[0],))


def check_prefill(
    q: torch.Tensor,
    kv_pages: torch.Tensor,
    block_tables: torch.Tensor,
    query_starts: torch.Tensor,
    context_lens: torch.Tensor,
    kv_scales: torch.Tensor | None,
) -> None:
    """Refuse arguments of paged_prefill that do not fit each other.

    Raises:
        InvalidLayout: a shape, dtype or device.
    """
    _check_attention(q, kv_pages, block_tables, context_lens, kv_scales)
    check_shape("query_starts", query_starts, (context_lens.shape[0] + 1,))
    check_dtype("query_starts", query_starts, (torch.int32,))
    check_device(q.device, query_starts=query_starts)


def _check_attention(
    q: torch.Tensor,
    kv_pages: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    kv_scales: torch.Tensor | None,
) -> None:
    check_shape("kv_pages", kv_pages, (None, 2, None, None, None))
    kv_heads, head_dim = kv_pages.shape[3:]
    check_shape("q", q, (None, None, head_dim))
    if q.shape[1] % kv_heads:
        raise InvalidLayout(f"q: {q.shape[1]} heads are no multiple of {kv_heads} KV heads")
    check_shape("context_lens", context_lens, (None,))
    check_shape("block_tables", block_tables, (context_lens.shape[0], None))
    for name, tensor in (("block_tables", block_tables), ("context_lens", context_lens)):
        check_dtype(name, tensor, (torch.int32,))
    check_device(
        q.device, kv_pages=kv_pages, block_tables=block_tables, context_lens=context_lens, kv_scales=kv_scales
    )
    if kv_pages.dtype == q.dtype:
        return
    if kv_pages.dtype not in FP8_DTYPES:
        raise InvalidLayout(f"kv_pages: dtype {kv_pages.dtype}, expected fp8 or that of q, {q.dtype}")
    if kv_scales is None:
        raise InvalidLayout("kv_scales: missing, needed for pages of fp8")
    check_shape("kv_scales", kv_scales, (2, kv_heads))
    check_dtype("kv_scales", kv_scales, (torch.float32,))
