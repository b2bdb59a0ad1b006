"""Launches of paged attention: decode, prefill, and the step that combines splits of a long context."""

import torch

from kvstore.errors import InvalidLayout
from kvstore_kernels.tensors import FP8_DTYPES, check_device, check_dtype, check_shape


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
