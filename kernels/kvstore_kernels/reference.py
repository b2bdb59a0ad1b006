"""What each kernel means, in torch: plain code, on any device, for tests and for machines without a GPU.

Shapes, everywhere in this package:

* one layer's pages: ``[pages, 2, block_tokens, kv_heads, head_dim]``; plane 0 holds keys, plane 1 values. A
view
  ``pool[:, layer]`` of pages that hold all layers is what is meant: only the last dimension must be
  contiguous.
* all layers' pages: ``[pages, layers, 2, block_tokens, kv_heads, head_dim]``, where a page is a block of the
store
  (`kvstore.layout.KVLayout`); a slot is the number of a page.
* ``block_tables``: ``[sequences, max_blocks]``, int32: the slots of each sequence's blocks in order. What
lies behind
  a sequence's last block is never read.
* ``kv_scales``: float32, ``[2, kv_heads]`` for one layer, ``[layers, 2, kv_heads]`` for all: a number held
as fp8
  stands for itself times its scale.
"""

import math

import torch

from kvstore_kernels.attention import check_decode, check_prefill
from kvstore_kernels.moves import check_blocks, check_write
from kvstore_kernels.tensors import FP8_DTYPES


def quantise(values: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return ``values / scales`` as fp8, rounded to nearest even and held within the format's finite range.

    The quotient is ``float(value) * (1 / scale)``, both in float32. NaN stays NaN.

    Args:
        values: any shape; bfloat16 or float16.
        scales: float32, broadcastable to ``values``.
        dtype: ``float8_e4m3fn`` or ``float8_e5m2``.
    """
    limit = torch.finfo(dtype).max
    return (values.float() * (1.0 / scales)).clamp(-limit, limit).to(dtype)


def dequantise(values: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return ``values * scales``, the product in float32 rounded once to ``dtype``."""
    return (values.float() * scales).to(dtype)


def write_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    kv_pages: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    kv_scales: torch.Tensor | None = None,
) -> None:
    """Write new keys and values of one layer into page rows; quantise them if the pages hold fp8.

    Args:
        k: ``[tokens, kv_heads, head_dim]``.
        v: the same shape and dtype.
        kv_pages: one layer's pages.
        slot_mapping: ``[tokens]``, int64: page * block_tokens + row; a negative one is skipped. No row twice.
        kv_scales: ``[2, kv_heads]``; needed if the pages hold fp8 and ``k`` does not.

    Raises:
        InvalidLayout: shapes, dtypes or devices that do not fit each other.
    """
    check_write(k, v, kv_pages, slot_mapping, kv_scales)
    is_kept = slot_mapping >= 0
    slots = slot_mapping[is_kept]
    block_tokens = kv_pages.shape[2]
    pages, rows = slots // block_tokens, slots % block_tokens
    for plane, new in enumerate((k, v)):
        kept = new[is_kept]
        if kv_pages.dtype != new.dtype:
            assert kv_scales is not None  # check_write has seen it
            kept = quantise(kept, kv_scales[plane, :, None], kv_pages.dtype)
        _raw(kv_pages)[pages, plane, rows] = _raw(kept)


def gather_blocks(
    kv_pages: torch.Tensor, slots: torch.Tensor, out: torch.Tensor, *, kv_scales: torch.Tensor | None = None
) -> None:
    """Copy pages into one contiguous run of blocks; convert between fp8 and 16 bits if the dtypes differ.

    For some layers only, pass views of both: ``kv_pages[:, a:b]`` and ``out[:, a:b]``.

    Args:
        kv_pages: all layers' pages.
        slots: ``[blocks]``, int64.
        out: ``[blocks, layers, 2, block_tokens, kv_heads, head_dim]``.
        kv_scales: ``[layers, 2, kv_heads]``; needed if the dtypes differ.

    Raises:
        InvalidLayout: shapes, dtypes or devices that do not fit each other.
    """
    check_blocks(out, kv_pages, slots, kv_scales)
    _raw(out).copy_(_raw(_converted(kv_pages[slots.to(kv_pages.device)], out.dtype, kv_scales)))


def scatter_blocks(
    blocks: torch.Tensor,
    kv_pages: torch.Tensor,
    slots: torch.Tensor,
    *,
    kv_scales: torch.Tensor | None = None,
) -> None:
    """Copy one contiguous run of blocks into pages; the inverse of gather_blocks. No slot twice.

    Raises:
        InvalidLayout: shapes, dtypes or devices that do not fit each other.
    """
    check_blocks(blocks, kv_pages, slots, kv_scales)
    _raw(kv_pages)[slots] = _raw(_converted(blocks, kv_pages.dtype, kv_scales))


def _converted(values: torch.Tensor, dtype: torch.dtype, kv_scales: torch.Tensor | None) -> torch.Tensor:
    if values.dtype == dtype:
        return values
    assert kv_scales is not None  # check_blocks has seen it
    scales = kv_scales[:, :, None, :, None]
    return quantise(values, scales, dtype) if dtype in FP8_DTYPES else dequantise(values, scales, dtype)


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as unsigned bytes where torch cannot index the dtype itself."""
    return tensor.view(torch.uint8) if tensor.dtype in FP8_DTYPES else tensor


def paged_decode(
    q: torch.Tensor,
    kv_pages: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    *,
    scale: float | None = None,
    kv_scales: torch.Tensor | None = None,
    compute_dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Return the attention of one new token per sequence over its cached tokens, itself among them.

    Query head h reads KV head ``h // (heads // kv_heads)``. A sequence of length 0 gives zeros.

    Args:
        q: ``[sequences, heads, head_dim]``.
        kv_pages: one layer's pages.
        block_tables: ``[sequences, max_blocks]``, int32.
        context_lens: ``[sequences]``, int32: cached tokens of each sequence, the new one included.
        scale: factor of the scores; ``head_dim ** -0.5`` by default.
        kv_scales: ``[2, kv_heads]``; needed if the pages hold fp8.
        compute_dtype: dtype in which everything is computed.

    Returns:
        The shape and dtype of ``q``.

    Raises:
        InvalidLayout: shapes, dtypes or devices that do not fit each other.
    """
    check_decode(q, kv_pages, block_tables, context_lens, kv_scales)
    starts = torch.arange(q.shape[0] + 1, dtype=torch.int32, device=q.device)
    return paged_prefill(
        q,
        kv_pages,
        block_tables,
        starts,
        context_lens,
        scale=scale,
        kv_scales=kv_scales,
        compute_dtype=compute_dtype,
    )


def paged_prefill(
    q: torch.Tensor,
    kv_pages: torch.Tensor,
    block_tables: torch.Tensor,
    query_starts: torch.Tensor,
    context_lens: torch.Tensor,
    *,
    scale: float | None = None,
    kv_scales: torch.Tensor | None = None,
    compute_dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Return the causal attention of each sequence's newest tokens over its cached tokens.

    The queries of sequence s are rows ``query_starts[s]`` to ``query_starts[s + 1]`` of ``q``; they stand at
    the last positions of its context, whose keys and values are already in the pages. A row that sees no key
    gives zeros.

    Args:
        q: ``[tokens, heads, head_dim]``.
        kv_pages: one layer's pages.
        block_tables: ``[sequences, max_blocks]``, int32.
        query_starts: ``[sequences + 1]``, int32, ascending from 0 to at most ``tokens``.
        context_lens: ``[sequences]``, int32, the new tokens included.
        scale: factor of the scores; ``head_dim ** -0.5`` by default.
        kv_scales: ``[2, kv_heads]``; needed if the pages hold fp8.
        compute_dtype: dtype in which everything is computed.

    Returns:
        The shape and dtype of ``q``.

    Raises:
        InvalidLayout: shapes, dtypes or devices that do not fit each other.
    """
    check_prefill(q, kv_pages, block_tables, query_starts, context_lens, kv_scales)
    out = torch.zeros_like(q)
    starts, lengths = query_starts.tolist(), context_lens.tolist()
    for sequence, context in enumerate(lengths):
        rows = slice(starts[sequence], starts[sequence + 1])
        keys, values = _cached(kv_pages, block_tables[sequence], context, kv_scales, compute_dtype)
        out[rows] = _attend(q[rows].to(compute_dtype), keys, values, scale).to(q.dtype)
    return out


def _cached(
    kv_pages: torch.Tensor,
    table: torch.Tensor,
    context: int,
    kv_scales: torch.Tensor | None,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values ``[context, kv_heads, head_dim]`` of one sequence."""
    block_tokens, kv_heads, head_dim = kv_pages.shape[2:]
    slots = table[: -(-context // block_tokens)].long()
    planes = kv_pages[slots].to(dtype).transpose(0, 1).reshape(2, -1, kv_heads, head_dim)[:, :context]
    if kv_scales is not None:
        planes = planes * kv_scales[:, None, :, None].to(dtype)
    return planes[0], planes[1]


def _attend(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float | None) -> torch.Tensor:
    rows, heads, head_dim = q.shape
    context, kv_heads, _ = keys.shape
    group = heads // kv_heads
    scores = torch.einsum("qhd,khd->hqk", q, keys.repeat_interleave(group, dim=1))
    scores = scores * (1.0 / math.sqrt(head_dim) if scale is None else scale)
    positions = torch.arange(context - rows, context, device=q.device)
    is_hidden = torch.arange(context, device=q.device) > positions[:, None]
    weights = torch.softmax(scores.masked_fill(is_hidden, -math.inf), dim=-1)
    weights = weights.masked_fill(is_hidden.all(dim=-1)[:, None], 0.0)
    return torch.einsum("hqk,khd->qhd", weights, values.repeat_interleave(group, dim=1))
