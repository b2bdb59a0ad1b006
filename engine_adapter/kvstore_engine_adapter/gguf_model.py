"""Llama-architecture models in GGUF files: config, and tensors under Hugging Face's names and conventions."""

import re

import numpy as np
import torch

from kvstore.errors import UnsupportedModel
from kvstore_engine_adapter.gguf_file import GgufFile, GgufTensor, MetadataValue
from kvstore_engine_adapter.model_config import ModelConfig, RopeConfig, require_architecture

_GLOBAL_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_LAYER_PATTERN = re.compile(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)")
_PLAIN: dict[int, np.dtype[np.floating]] = {0: np.dtype("<f4"), 1: np.dtype("<f2")}
_BF16 = 30


def read_config(file: GgufFile, *, where: str) -> ModelConfig:
    """Return the model's numbers from the metadata.

    Raises:
        UnsupportedModel: an unknown architecture or rope type, or a missing or impossible number.
    """
    fields = _Fields(file.metadata, where)
    architecture = require_architecture(file.metadata.get("general.architecture"), where=where)
    prefix = architecture + "."
    num_heads = fields.integer(prefix + "attention.head_count")
    hidden_size = fields.integer(prefix + "embedding_length")
    head_dim = fields.integer(prefix + "attention.key_length", hidden_size // max(1, num_heads))
    if fields.integer(prefix + "attention.value_length", head_dim) != head_dim:
        raise UnsupportedModel(f"{where}: keys and values of different sizes are not supported")
    if fields.integer(prefix + "rope.dimension_count", head_dim) != head_dim:
        raise UnsupportedModel(f"{where}: partial rotary embeddings are not supported")
    embedding = file.tensors.get("token_embd.weight")
    return ModelConfig(
        name=str(file.metadata.get("general.name") or architecture),
        architecture=architecture,
        num_layers=fields.integer(prefix + "block_count"),
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=fields.integer(prefix + "attention.head_count_kv", num_heads),
        head_dim=head_dim,
        ffn_size=fields.integer(prefix + "feed_forward_length"),
        vocab_size=embedding.shape[0] if embedding else fields.integer(prefix + "vocab_size"),
        context_tokens=fields.integer(prefix + "context_length"),
        norm_eps=fields.number(prefix + "attention.layer_norm_rms_epsilon"),
        rope=_rope(file, fields, prefix, where),
    )


def _rope(file: GgufFile, fields: "_Fields", prefix: str, where: str) -> RopeConfig:
    theta = fields.number(prefix + "rope.freq_base", 10000.0)
    kind = file.metadata.get(prefix + "rope.scaling.type", "none")
    factor = fields.number(prefix + "rope.scaling.factor", fields.number(prefix + "rope.scale_linear", 1.0))
    factors = file.tensors.get("rope_freqs.weight")
    if factors is not None:
        return RopeConfig(theta, "llama3", frequency_factors=tuple(_dequantised(file, factors).tolist()))
    if kind == "none" and factor == 1.0:
        return RopeConfig(theta)
    if kind in ("linear", "none"):
        return RopeConfig(theta, "linear", factor)
    raise UnsupportedModel(
        f"{where}: rope scaling {kind!r} is not supported: use a model with none or linear"
    )


class GgufTensors:
    """TensorSource over an open GGUF file.

    GGUF's llama architecture stores query and key rows permuted (interleaved rotary pairs); they are put back
    into half-split order here, so that one forward pass serves both formats.
    """

    def __init__(self, file: GgufFile, config: ModelConfig, *, where: str) -> None:
        self._file = file
        self._config = config
        self._where = where

    @property
    def where(self) -> str:
        """The file."""
        return self._where

    def has(self, name: str) -> bool:
        """Return whether the tensor exists."""
        return _gguf_name(name) in self._file.tensors

    def load(self, name: str) -> torch.Tensor:
        """Return the tensor dequantised to float32.

        Raises:
            UnsupportedModel: it is missing, or of a quantisation that cannot be read.
        """
        gguf_name = _gguf_name(name)
        tensor = self._file.tensors.get(gguf_name)
        if tensor is None:
            raise UnsupportedModel(f"{self._where}: tensor {gguf_name} is missing")
        values = _dequantised(self._file, tensor)
        if self._config.architecture == "llama":
            heads = {"q_proj": self._config.num_heads, "k_proj": self._config.num_kv_heads}
            for part, count in heads.items():
                if f"self_attn.{part}" in name:
                    return _half_split(values, count)
        return values


def _half_split(values: torch.Tensor, heads: int) -> torch.Tensor:
    rows = values.shape[0]
    if rows % (2 * heads):
        return values  # the shape check that follows names the tensor
    return values.reshape(heads, rows // heads // 2, 2, -1).transpose(1, 2).reshape(values.shape)


def _gguf_name(name: str) -> str:
    match = _LAYER_PATTERN.fullmatch(name)
    if match is None:
        return _GLOBAL_NAMES[name]
    layer, part, kind = match.groups()
    return f"blk.{layer}.{_LAYER_NAMES[part]}.{kind}"


def _dequantised(file: GgufFile, tensor: GgufTensor) -> torch.Tensor:
    # gguf costs 0.2 s to import and only GGUF models need it.
    import gguf

    data = file.tensor_bytes(tensor)
    if tensor.quant in _PLAIN:
        values = data.view(_PLAIN[tensor.quant]).astype(np.float32)
    elif tensor.quant == _BF16:
        values = (data.view("<u2").astype(np.uint32) << 16).view(np.float32)
    else:
        quant = gguf.GGMLQuantizationType(tensor.quant)
        rows = data.reshape(-1, tensor.length_bytes // max(1, int(np.prod(tensor.shape[:-1]))))
        try:
            with np.errstate(all="ignore"):  # damaged scales are found when the tensor is checked
                values = gguf.dequantize(rows, quant)
        except NotImplementedError as error:
            raise UnsupportedModel(
                f"tensor {tensor.name}: quantisation {quant.name} cannot be read: use another quantisation"
            ) from error
    return torch.from_numpy(np.array(values, dtype=np.float32).reshape(tensor.shape))


class _Fields:
    """Typed reads of metadata."""

    def __init__(self, metadata: dict[str, MetadataValue], where: str) -> None:
        self._metadata = metadata
        self._where = where

    def integer(self, name: str, default: int | None = None) -> int:
        value = self._metadata.get(name, default)
        if not isinstance(value, int) or isinstance(value, bool):
            raise UnsupportedModel(f"{self._where}: {name} is {value!r}, expected one integer")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self._metadata.get(name, default)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise UnsupportedModel(f"{self._where}: {name} is {value!r}, expected a number")
        return float(value)
