"""AttentionBackend: attention of new tokens over the pages of their sequence."""

from typing import Protocol

import torch
import torch.nn.functional as functional


class AttentionBackend(Protocol):
    """Attention over gathered keys and values; kernels that read pages in position plug in here."""

    def attend(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        """Return ``[rows, heads * head_dim]``.

        Args:
            queries: ``[rows, heads, head_dim]``.
            keys: ``[context, kv_heads, head_dim]``.
            values: ``[context, kv_heads, head_dim]``.
            mask: ``[groups * rows, context]``, 0 or -inf, the dtype of the queries (see ``causal_mask``).
        """


class TorchAttention:
    """torch's fused attention, with the query heads of one KV head stacked as rows.

    Softmax and accumulation are float32 inside the kernel. Stacking keeps each KV head's keys shared by its
    query heads, and was the quickest of four forms for 1 to 64 rows (measured on 2 cores).
    """

    def attend(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        """Return ``[rows, heads * head_dim]``; see AttentionBackend."""
        rows, heads, head_dim = queries.shape
        kv_heads = keys.shape[1]
        groups = heads // kv_heads
        stacked = queries.view(rows, kv_heads, groups, head_dim).permute(1, 2, 0, 3)
        mixed = functional.scaled_dot_product_attention(
            stacked.reshape(1, kv_heads, groups * rows, head_dim),
            keys.transpose(0, 1).unsqueeze(0),
            values.transpose(0, 1).unsqueeze(0),
            attn_mask=mask,
        )
        unstacked = mixed.view(kv_heads, groups, rows, head_dim).permute(2, 0, 1, 3)
        return unstacked.reshape(rows, heads * head_dim)


def causal_mask(positions: torch.Tensor, context: int, *, groups: int, dtype: torch.dtype) -> torch.Tensor:
    """Return ``[groups * rows, context]``: 0 where a key is at or before the row's position, else -inf."""
    visible = torch.arange(context, device=positions.device) <= positions.unsqueeze(1)
    mask = torch.zeros(visible.shape, dtype=dtype, device=positions.device)
    return mask.masked_fill_(~visible, float("-inf")).repeat(groups, 1)
