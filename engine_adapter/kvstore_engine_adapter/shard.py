"""Shard: the share of a model that one of several ranks has: KV heads, and with them all that follows."""

import math
from dataclasses import dataclass, replace

import torch

from kvstore.errors import InvalidConfig, UnsupportedModel
from kvstore.layout import KVLayout, Part
from kvstore_engine_adapter.model_config import ModelConfig
from kvstore_engine_adapter.weights import TensorSource


@dataclass(frozen=True, slots=True)
class Shard:
    """Rank ``rank`` of ``size``: KV heads ``[rank, rank + 1) * num_kv_heads / size`` and their query heads.

    It also has as large a share of the feed-forward part. Embedding, norms and the sum of what the ranks
    computed are whole on every rank.
    """

    rank: int = 0
    size: int = 1

    def config_of(self, config: ModelConfig) -> ModelConfig:
        """Return the numbers of this rank's share of a model.

        Raises:
            InvalidConfig: the model cannot be shared evenly by so many ranks; the message says by how many.
        """
        if self.size == 1:
            return config
        common = math.gcd(config.num_kv_heads, config.ffn_size)
        if common % self.size:
            fitting = [str(size) for size in range(1, common + 1) if not common % size]
            raise InvalidConfig(
                f"engine: --tensor-parallel-size {self.size}: {config.name} has {config.num_heads} heads, "
                f"{config.num_kv_heads} KV heads and {config.ffn_size} feed-forward rows, which "
                f"{self.size} ranks cannot share evenly: give {', '.join(fitting)}"
            )
        return replace(
            config,
            num_heads=config.num_heads // self.size,
            num_kv_heads=config.num_kv_heads // self.size,
            ffn_size=config.ffn_size // self.size,
        )

    def part_of(self, layout: KVLayout) -> Part:
        """Return the part of a block that this rank writes and reads: all layers, its KV heads."""
        heads = layout.num_kv_heads // self.size
        return Part(0, layout.num_layers, self.rank * heads, (self.rank + 1) * heads)

    def pages_of(self, layout: KVLayout) -> KVLayout:
        """Return the layout of this rank's pages: its part of a block, by itself."""
        if self.size == 1:
            return layout
        return replace(layout, num_kv_heads=layout.num_kv_heads // self.size)

    def weights_name(self, digest: str) -> str:
        """Return what a Namespace calls the weights.

        Sums over ranks are rounded otherwise than those of one rank, so blocks of engines of other sizes go
        by other names, and whoever asks for them finds none.
        """
        return digest if self.size == 1 else f"{digest} in {self.size} shards"

    def tensors_of(self, source: TensorSource, config: ModelConfig) -> TensorSource:
        """Return a source of this rank's share of a whole model's tensors."""
        return source if self.size == 1 else _ShardTensors(source, config, self)


class _ShardTensors:
    """TensorSource that cuts: matrices that fan out by rows, those that add up by columns."""

    def __init__(self, source: TensorSource, config: ModelConfig, shard: Shard) -> None:
        self._source = source
        self._shard = shard
        queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self._cuts = {
            "self_attn.q_proj.weight": (0, queries),
            "self_attn.q_proj.bias": (0, queries),
            "self_attn.k_proj.weight": (0, keys),
            "self_attn.k_proj.bias": (0, keys),
            "self_attn.v_proj.weight": (0, keys),
            "self_attn.v_proj.bias": (0, keys),
            "self_attn.o_proj.weight": (1, queries),
            "mlp.gate_proj.weight": (0, config.ffn_size),
            "mlp.up_proj.weight": (0, config.ffn_size),
            "mlp.down_proj.weight": (1, config.ffn_size),
        }

    @property
    def where(self) -> str:
        """File or folder, for messages."""
        return self._source.where

    def has(self, name: str) -> bool:
        """Return whether this rank has the tensor."""
        if self._shard.rank and (name.endswith("self_attn.o_proj.bias") or name == "lm_head.weight"):
            # A bias that is added to a sum belongs to one rank; logits are computed by rank 0.
            return False
        return self._source.has(name)

    def load(self, name: str) -> torch.Tensor:
        """Return this rank's share of the tensor.

        Raises:
            UnsupportedModel: it is missing, or cannot be cut for want of the right shape.
        """
        tensor = self._source.load(name)
        cut = next((at for end, at in self._cuts.items() if name.endswith(end)), None)
        if cut is None:
            return tensor
        axis, length = cut
        if tensor.dim() <= axis or tensor.shape[axis] != length:
            raise UnsupportedModel(
                f"{self.where}: tensor {name} has shape {list(tensor.shape)}, "
                f"expected {length} on axis {axis}"
            )
        # A copy: a view would keep the whole tensor.
        return tensor.chunk(self._shard.size, axis)[self._shard.rank].clone()
