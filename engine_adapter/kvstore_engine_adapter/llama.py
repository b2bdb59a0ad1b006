"""LlamaModel: the forward pass of Llama-architecture models over paged KV memory.

Reproducible in a batch and under reuse. A token's keys, values and hidden state must depend neither on the
requests computed beside it nor on how many tokens before it were loaded instead of computed, or batching and
reuse would change answers in their last bits. Two things decide the bits of a row besides its inputs:

- The number of rows a matrix product runs with, and the row's place among them. Every pass runs with a number
  of rows from a ladder, padded; one is on the ladder only if ``prepare`` found its rows, in any place, equal
  bit for bit to the same rows in another pass (see ``exact_rows``). Everything else is computed row by row.
- Attention, which each row has with its own sequence alone: see ``PageOps``. Keys are read back from the
  pages also for the tokens of the pass itself, so all attention sees the stored values.

So prefilled, decoded and reused blocks hold equal bits, and the logits after any mix of them, in any company,
are equal.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as functional

from kvstore_engine_adapter.attention import PageStep, Segment
from kvstore_engine_adapter.exact_rows import (
    cancelling_product,
    candidate_row_counts,
    exact_row_counts,
    rung_of,
)
from kvstore_engine_adapter.model_config import ModelConfig
from kvstore_engine_adapter.weights import LayerWeights, ModelWeights

logger = logging.getLogger(__name__)

_SAMPLE_ROWS = 64
_SPARE_POSITIONS = 256
"""Rotary angles beyond the longest sequence."""

RankSum = Callable[[torch.Tensor], torch.Tensor]
"""Adds up what each rank computed of ``[rows, hidden]``; a row's bits depend on the ranks' rows alone."""


@dataclass(frozen=True, slots=True)
class Batch:
    """One pass: ``count`` new tokens of any sequences, padded to ``len(tokens)`` rows.

    ``tokens`` and ``positions`` are ``[rows]``, in the order of the segments ``pages`` was begun with.
    """

    count: int
    tokens: torch.Tensor
    positions: torch.Tensor
    pages: PageStep


class LlamaModel:
    """Weights and forward pass. Not safe for concurrent calls: the engine runs it in one thread.

    With ``rank_sum`` config and weights are one rank's share, and all ranks run every pass together.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: ModelWeights,
        *,
        max_tokens: int,
        rank_sum: RankSum | None = None,
    ) -> None:
        self.config = config
        self.max_tokens = max_tokens
        self.row_ladder: tuple[int, ...] = (_SAMPLE_ROWS,)
        self.head_ladder: tuple[int, ...] = (_SAMPLE_ROWS,)
        self._weights = weights
        self._rank_sum = rank_sum or _as_it_is
        self._dtype = weights.embedding.dtype
        self._device = weights.embedding.device
        turns = config.rope.inverse_frequencies(config.head_dim)
        positions = torch.arange(max_tokens + _SPARE_POSITIONS)
        angles = positions.to(torch.float64).unsqueeze(1) * turns
        self._cos = angles.cos().to(self._device, torch.float32)
        self._sin = angles.sin().to(self._device, torch.float32)

    @property
    def max_rows(self) -> int:
        """Most rows of one pass."""
        return self.row_ladder[-1]

    @property
    def max_head_rows(self) -> int:
        """Most rows whose logits are computed together."""
        return self.head_ladder[-1]

    def batch(self, segments: Sequence[Segment], pages: PageStep) -> Batch:
        """Prepare a pass over the segments that ``pages`` was begun with; at most ``max_rows`` tokens."""
        tokens = [token for segment in segments for token in segment.tokens]
        positions = [
            position
            for segment in segments
            for position in range(segment.start, segment.start + len(segment.tokens))
        ]
        count = len(tokens)
        padding = [0] * (rung_of(self.row_ladder, count) - count)
        return Batch(
            count=count,
            tokens=torch.tensor(tokens + padding, device=self._device),
            positions=torch.tensor(positions + padding, device=self._device),
            pages=pages,
        )

    @torch.inference_mode()
    def run(self, batch: Batch) -> torch.Tensor:
        """Write the pass's keys and values into the pages; return its rows, ``[count, hidden]`` float32."""
        hidden = self._weights.embedding[batch.tokens].float()
        for index, layer in enumerate(self._weights.layers):
            queries, keys, values = self._project(layer, hidden, batch.positions)
            batch.pages.write(index, keys, values)
            hidden = self._absorb(layer, hidden, batch.pages.attend(index, queries), self._rank_sum)
        return hidden[: batch.count]

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits of hidden rows ``[rows, hidden]``: ``[rows, vocab]`` float32."""
        pieces = torch.split(hidden, self.max_head_rows)
        return torch.cat([self._head(piece) for piece in pieces])

    @torch.inference_mode()
    def prepare(self, *, max_rows: int, max_head_rows: int | None) -> None:
        """Find the row counts, up to about those given, that give rows the same bits in any company.

        ``max_head_rows`` None: no logits will be computed here. Other ranks have no part in it.

        One layer is run over pseudo-random rows, and products of all its shapes over rows whose terms cancel
        (all layers have the same shapes); and the head. Costs tens to hundreds of milliseconds.
        """
        config = self.config
        generator = torch.Generator().manual_seed(0)
        products = _products(self._weights.layers[0], generator)
        hidden = torch.randn(_SAMPLE_ROWS, config.hidden_size, generator=generator).to(self._device)
        width = config.num_heads * config.head_dim
        mixed = torch.randn(_SAMPLE_ROWS, width, generator=generator).to(self._device, self._dtype)
        positions = torch.arange(_SAMPLE_ROWS, device=self._device)
        layer = self._weights.layers[0]

        def compute(index: torch.Tensor) -> torch.Tensor:
            parts = self._project(layer, hidden[index], positions[index])
            absorbed = self._absorb(layer, hidden[index], mixed[index], _as_it_is)
            sums = (functional.linear(left[index], right, bias) for left, right, bias in products)
            return torch.cat([*(part.flatten(1).float() for part in (*parts, *sums)), absorbed], dim=1)

        self.row_ladder = _ladder("layers", compute, max_rows)
        if max_head_rows is None:
            return
        left, right = cancelling_product(_SAMPLE_ROWS, self._weights.head, generator)
        self.head_ladder = _ladder(
            "logits", lambda index: functional.linear(left[index], right), max_head_rows
        )

    def _head(self, hidden: torch.Tensor) -> torch.Tensor:
        count = len(hidden)
        rows = rung_of(self.head_ladder, count)
        if rows > count:
            hidden = torch.cat([hidden, hidden[-1:].expand(rows - count, -1)])
        return self._logits_of_exactly(hidden)[:count]

    def _logits_of_exactly(self, hidden: torch.Tensor) -> torch.Tensor:
        return functional.linear(self._norm(hidden, self._weights.final_norm), self._weights.head).float()

    def _project(
        self, layer: LayerWeights, hidden: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return queries, keys and values, each ``[rows, heads or kv_heads, head_dim]``."""
        config = self.config
        heads, kv_heads, head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        fused = functional.linear(self._norm(hidden, layer.attention_norm), layer.qkv, layer.qkv_bias)
        queries, keys, values = (
            part.view(len(hidden), -1, head_dim)
            for part in torch.split(
                fused, [heads * head_dim, kv_heads * head_dim, kv_heads * head_dim], dim=1
            )
        )
        queries = self._rotate(self._head_norm(queries, layer.q_norm), positions)
        keys = self._rotate(self._head_norm(keys, layer.k_norm), positions)
        return queries, keys, values

    def _absorb(
        self, layer: LayerWeights, hidden: torch.Tensor, mixed: torch.Tensor, rank_sum: RankSum
    ) -> torch.Tensor:
        """Add what attention mixed, ``[rows, heads * head_dim]``, and the feed-forward part."""
        hidden = hidden + rank_sum(functional.linear(mixed, layer.output, layer.output_bias))
        gate, up = functional.linear(self._norm(hidden, layer.ffn_norm), layer.gate_up).chunk(2, dim=1)
        return hidden + rank_sum(functional.linear(functional.silu(gate) * up, layer.down))

    def _norm(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(hidden, weight.shape, weight, self.config.norm_eps).to(self._dtype)

    def _head_norm(self, rows: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        if weight is None:
            return rows.float()
        return functional.rms_norm(rows.float(), weight.shape, weight, self.config.norm_eps)

    def _rotate(self, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        cos, sin = self._cos[positions].unsqueeze(1), self._sin[positions].unsqueeze(1)
        first, second = rows.chunk(2, dim=-1)
        turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
        return turned.to(self._dtype)


def _as_it_is(partial: torch.Tensor) -> torch.Tensor:
    return partial


def _products(
    layer: LayerWeights, generator: torch.Generator
) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]]:
    """Return rows, a matrix and a bias of zeros or none, for each product of a layer."""
    matrices = [
        (layer.qkv, layer.qkv_bias),
        (layer.output, layer.output_bias),
        (layer.gate_up, None),
        (layer.down, None),
    ]
    return [
        (*cancelling_product(_SAMPLE_ROWS, matrix, generator), None if bias is None else bias * 0)
        for matrix, bias in matrices
    ]


def _ladder(what: str, compute: Callable[[torch.Tensor], torch.Tensor], limit: int) -> tuple[int, ...]:
    exact = exact_row_counts(compute, _SAMPLE_ROWS, candidate_row_counts(max(limit, _SAMPLE_ROWS)))
    if _SAMPLE_ROWS not in exact:
        logger.warning(
            "engine: %s: rows computed together depend on their places here: answers of batched requests "
            "may differ in their last bits from those of requests alone",
            what,
        )
        return tuple(candidate_row_counts(limit))
    return tuple(exact)
