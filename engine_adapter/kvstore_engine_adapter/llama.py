"""LlamaModel: the forward pass of Llama-architecture models over paged KV memory.

Reproducible under reuse. A token's keys, values and hidden state must not depend on how many tokens before it
were loaded instead of computed, or a reused prefix would change answers in their last bits. Three things
decide the bits of a row: the kernel, the number of rows it runs with, and the length of the context.

- A sequence is cut at fixed absolute positions into chunks of ``chunk_tokens``; one pass never crosses a cut.
  A row's context always reaches to the end of its own chunk (masked beyond the row), so its length is a
  function of the position alone:

      position  0            64           128
      chunk     |------0-----|------1-----|---
      context of a row in chunk 1: [0, 128), whether it is prefilled from 0, from 80, or decoded.

- Every pass runs with a number of rows from a ladder (2, 4, ... chunk_tokens), padded; a rung is on the
  ladder only if ``probe_ladder`` found its rows equal, bit for bit, to those of a full chunk on this machine
  and dtype. oneDNN's bfloat16 products and torch's fused attention are, from 2 rows on; a single row takes
  another kernel.
- Keys are read back from the pool also for the tokens of the pass itself, so all attention sees the stored
  values.

So prefilled, decoded and reused blocks hold equal bits, and the logits after any mix of them are equal.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as functional

from kvstore.layout import KVLayout
from kvstore_engine_adapter.attention import AttentionBackend, causal_mask
from kvstore_engine_adapter.model_config import ModelConfig
from kvstore_engine_adapter.page_pool import TORCH_DTYPES, PagePool
from kvstore_engine_adapter.weights import LayerWeights, ModelWeights

MIN_CHUNK_TOKENS = 64
"""64 rows cost 1.3 times as much per token as 128 in products, but waste less on short tails (measured)."""

_HEAD_ROWS = 2
_PROBE_CHUNKS = 10
"""Long enough that torch's fused attention splits the context (at 512 keys)."""


def chunk_tokens_for(block_tokens: int) -> int:
    """Return the chunk size: the least multiple of the block size that is at least 64."""
    return math.ceil(MIN_CHUNK_TOKENS / block_tokens) * block_tokens


@dataclass(frozen=True, slots=True)
class Step:
    """One pass: ``count`` new tokens of one sequence, padded to ``len(tokens)`` rows.

    ``tokens`` and ``positions`` are ``[rows]``; ``pages`` and ``offsets`` ``[count]`` say where the new keys
    go; ``table`` ``[context / block_tokens]`` names the pages of the context; ``mask`` is ``causal_mask``.
    """

    count: int
    tokens: torch.Tensor
    positions: torch.Tensor
    pages: torch.Tensor
    offsets: torch.Tensor
    table: torch.Tensor
    mask: torch.Tensor


class LlamaModel:
    """Weights and forward pass. Not safe for concurrent calls: the engine runs it in one thread."""

    def __init__(
        self,
        config: ModelConfig,
        weights: ModelWeights,
        attention: AttentionBackend,
        *,
        block_tokens: int,
        max_tokens: int,
    ) -> None:
        self.config = config
        self.chunk_tokens = chunk_tokens_for(block_tokens)
        self.ladder: tuple[int, ...] = (self.chunk_tokens,)
        self._weights = weights
        self._attention = attention
        self._block_tokens = block_tokens
        self._dtype = weights.embedding.dtype
        self._device = weights.embedding.device
        self._groups = config.num_heads // config.num_kv_heads
        turns = config.rope.inverse_frequencies(config.head_dim)
        # One chunk more than the longest sequence: padded rows reach beyond the end of theirs.
        chunks = max(math.ceil(max_tokens / self.chunk_tokens), _PROBE_CHUNKS) + 1
        positions = torch.arange(chunks * self.chunk_tokens)
        angles = positions.to(torch.float64).unsqueeze(1) * turns
        self._cos = angles.cos().to(self._device, torch.float32)
        self._sin = angles.sin().to(self._device, torch.float32)

    def chunk_end(self, position: int) -> int:
        """Return the end of the chunk that holds a position."""
        return (position // self.chunk_tokens + 1) * self.chunk_tokens

    def step(self, tokens: Sequence[int], start: int, slots: Sequence[int], pool: PagePool) -> Step:
        """Prepare a pass over ``tokens`` at positions ``start...``, all within one chunk.

        ``slots`` are the sequence's pages from position 0, at least up to the last new token.
        """
        count, context = len(tokens), self.chunk_end(start)
        assert 0 < count <= context - start, "a pass crosses no chunk boundary"
        rows = next(rung for rung in self.ladder if rung >= count)
        positions = torch.arange(start, start + rows, device=self._device)
        written = positions[:count]
        table = torch.full((context // self._block_tokens,), pool.zero_page, device=self._device)
        known = list(slots[: len(table)])
        table[: len(known)] = torch.tensor(known, device=self._device)
        return Step(
            count=count,
            tokens=torch.tensor([*tokens, *([0] * (rows - count))], device=self._device),
            positions=positions,
            pages=table[written // self._block_tokens],
            offsets=written % self._block_tokens,
            table=table,
            mask=causal_mask(positions, context, groups=self._groups, dtype=self._dtype),
        )

    @torch.inference_mode()
    def run(self, step: Step, pool: PagePool) -> torch.Tensor:
        """Write the step's keys and values into the pool; return its rows, ``[count, hidden]`` float32."""
        hidden = self._embed(step)
        for index, layer in enumerate(self._weights.layers):
            hidden = self._layer(index, layer, hidden, step, pool)
        return hidden[: step.count]

    @torch.inference_mode()
    def logits(self, hidden_row: torch.Tensor) -> torch.Tensor:
        """Return the logits of one hidden row ``[hidden]``: ``[vocab]`` float32."""
        normed = self._norm(hidden_row.unsqueeze(0), self._weights.final_norm)
        rows = normed.expand(_HEAD_ROWS, -1).contiguous()
        return functional.linear(rows, self._weights.head)[0].float()

    @torch.inference_mode()
    def probe_ladder(self) -> tuple[int, ...]:
        """Find the row counts whose rows equal those of a full chunk, bit for bit, and use them from now on.

        One layer is run over ten chunks of pseudo-random tokens; then the first and the last chunk are run
        again in pieces of each rung (all layers have the same shapes). Costs tens of milliseconds.
        """
        chunk, chunks = self.chunk_tokens, _PROBE_CHUNKS
        pages = chunk * chunks // self._block_tokens
        pool = PagePool(self.layout_of_one_layer(), pages, self._device)
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(self.config.vocab_size, (chunk * chunks,), generator=generator).tolist()
        self.ladder = (chunk,)
        wanted = {at: self._probe(tokens, at, chunk, pages, pool) for at in range(0, chunk * chunks, chunk)}
        rungs = [2**power for power in range(1, chunk.bit_length()) if 2**power < chunk]
        exact: list[int] = []
        for rung in rungs:
            self.ladder = (rung, chunk)
            is_exact = all(
                torch.equal(self._probe(tokens, at, rung, pages, pool), wanted[at])
                for at in (0, chunk * (chunks - 1))
            )
            if is_exact:
                exact.append(rung)
        self.ladder = (*exact, chunk)
        return self.ladder

    def layout_of_one_layer(self) -> KVLayout:
        """Return the layout of a block that holds one layer only."""
        name = next(name for name, dtype in TORCH_DTYPES.items() if dtype is self._dtype)
        return KVLayout(name, 1, self._block_tokens, self.config.num_kv_heads, self.config.head_dim)

    def _probe(self, tokens: list[int], at: int, rung: int, pages: int, pool: PagePool) -> torch.Tensor:
        end = at + self.chunk_tokens
        pieces: list[torch.Tensor] = []
        for start in range(at, end, rung):
            step = self.step(tokens[start : min(end, start + rung)], start, range(pages), pool)
            hidden = self._layer(0, self._weights.layers[0], self._embed(step), step, pool)
            pieces.append(hidden[: step.count])
        keys, values = pool.read(0, torch.arange(pages, device=self._device))
        kv = torch.cat([keys[at:end], values[at:end]], dim=1).reshape(self.chunk_tokens, -1).float()
        return torch.cat([torch.cat(pieces), kv], dim=1)

    def _embed(self, step: Step) -> torch.Tensor:
        return self._weights.embedding[step.tokens].float()

    def _layer(
        self, index: int, layer: LayerWeights, hidden: torch.Tensor, step: Step, pool: PagePool
    ) -> torch.Tensor:
        config = self.config
        heads, kv_heads, head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        fused = functional.linear(self._norm(hidden, layer.attention_norm), layer.qkv, layer.qkv_bias)
        queries, keys, values = (
            part.view(len(hidden), -1, head_dim)
            for part in torch.split(
                fused, [heads * head_dim, kv_heads * head_dim, kv_heads * head_dim], dim=1
            )
        )
        queries = self._rotate(self._head_norm(queries, layer.q_norm), step.positions)
        keys = self._rotate(self._head_norm(keys, layer.k_norm), step.positions)
        count = step.count
        pool.write(index, keys[:count], values[:count], pages=step.pages, rows=step.offsets)
        mixed = self._attention.attend(queries, *pool.read(index, step.table), step.mask)
        hidden = hidden + functional.linear(mixed, layer.output, layer.output_bias)
        gate, up = functional.linear(self._norm(hidden, layer.ffn_norm), layer.gate_up).chunk(2, dim=1)
        return hidden + functional.linear(functional.silu(gate) * up, layer.down)

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
