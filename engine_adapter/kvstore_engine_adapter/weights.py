"""ModelWeights: the tensors of a Llama-architecture model, shaped for the forward pass."""

import math
from dataclasses import dataclass
from typing import Protocol

import torch

from kvstore.errors import UnsupportedModel
from kvstore_engine_adapter.model_config import ModelConfig


class TensorSource(Protocol):
    """Where tensors come from; names and conventions are those of Hugging Face's Llama."""

    @property
    def where(self) -> str:
        """File or folder, for messages."""

    def has(self, name: str) -> bool:
        """Return whether the tensor exists."""

    def load(self, name: str) -> torch.Tensor:
        """Return the tensor on the CPU, in any floating dtype. Raises UnsupportedModel if it is missing."""


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer; matrices are ``[out, in]``.

    ``qkv`` stacks query, key and value rows; ``gate_up`` the FFN's gate and up rows. ``q_norm`` and
    ``k_norm`` are Qwen3's per-head norms, ``[head_dim]``.
    """

    attention_norm: torch.Tensor
    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    output: torch.Tensor
    output_bias: torch.Tensor | None
    ffn_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """All tensors. ``head`` is the same tensor as ``embedding`` when they are tied. Norms are float32."""

    embedding: torch.Tensor
    layers: tuple[LayerWeights, ...]
    final_norm: torch.Tensor
    head: torch.Tensor


def load_weights(
    config: ModelConfig, source: TensorSource, *, dtype: torch.dtype, device: torch.device
) -> ModelWeights:
    """Read every tensor the config calls for, check its shape, and convert it.

    Raises:
        UnsupportedModel: a tensor is missing or has another shape.
    """
    reader = _Reader(config, source, dtype, device)
    embedding = reader.matrix("model.embed_tokens.weight", config.vocab_size, config.hidden_size)
    layers = tuple(reader.layer(index) for index in range(config.num_layers))
    head = embedding
    if source.has("lm_head.weight"):
        head = reader.matrix("lm_head.weight", config.vocab_size, config.hidden_size)
    return ModelWeights(embedding, layers, reader.norm("model.norm.weight", config.hidden_size), head)


class _Reader:
    def __init__(
        self, config: ModelConfig, source: TensorSource, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._config = config
        self._source = source
        self._dtype = dtype
        self._device = device

    def layer(self, index: int) -> LayerWeights:
        config, prefix = self._config, f"model.layers.{index}."
        attention = prefix + "self_attn."
        q_rows, kv_rows = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        hidden, ffn = config.hidden_size, config.ffn_size
        qkv = [
            (f"{attention}{name}_proj", rows)
            for name, rows in zip("qkv", (q_rows, kv_rows, kv_rows), strict=True)
        ]
        has_bias = self._source.has(f"{attention}q_proj.bias")
        has_qk_norm = self._source.has(f"{attention}q_norm.weight")
        if config.architecture == "qwen2" and not has_bias:
            self._source.load(f"{attention}q_proj.bias")
        if config.architecture == "qwen3" and not has_qk_norm:
            self._source.load(f"{attention}q_norm.weight")
        has_output_bias = self._source.has(f"{attention}o_proj.bias")
        return LayerWeights(
            attention_norm=self.norm(prefix + "input_layernorm.weight", hidden),
            qkv=torch.cat([self.matrix(f"{name}.weight", rows, hidden) for name, rows in qkv]),
            qkv_bias=torch.cat([self.vector(f"{name}.bias", rows) for name, rows in qkv])
            if has_bias
            else None,
            q_norm=self.norm(attention + "q_norm.weight", config.head_dim) if has_qk_norm else None,
            k_norm=self.norm(attention + "k_norm.weight", config.head_dim) if has_qk_norm else None,
            output=self.matrix(attention + "o_proj.weight", hidden, q_rows),
            output_bias=self.vector(attention + "o_proj.bias", hidden) if has_output_bias else None,
            ffn_norm=self.norm(prefix + "post_attention_layernorm.weight", hidden),
            gate_up=torch.cat(
                [self.matrix(f"{prefix}mlp.{name}_proj.weight", ffn, hidden) for name in ("gate", "up")]
            ),
            down=self.matrix(prefix + "mlp.down_proj.weight", hidden, ffn),
        )

    def matrix(self, name: str, rows: int, columns: int) -> torch.Tensor:
        return self._checked(name, (rows, columns)).to(self._device, self._dtype).contiguous()

    def vector(self, name: str, size: int) -> torch.Tensor:
        return self._checked(name, (size,)).to(self._device, self._dtype).contiguous()

    def norm(self, name: str, size: int) -> torch.Tensor:
        return self._checked(name, (size,)).to(self._device, torch.float32).contiguous()

    def _checked(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        tensor = self._source.load(name)
        if tuple(tensor.shape) != shape:
            raise UnsupportedModel(
                f"{self._source.where}: tensor {name} has shape {list(tensor.shape)}, expected {list(shape)}"
            )
        if not math.isfinite(float(tensor.sum(dtype=torch.float32))):
            raise UnsupportedModel(
                f"{self._source.where}: tensor {name} holds numbers that are not finite: fetch it again"
            )
        return tensor
