"""ModelConfig: the numbers of a Llama-architecture model, whichever file they came from."""

import math
from dataclasses import dataclass

import torch

from kvstore.errors import UnsupportedModel

ARCHITECTURES = ("llama", "qwen2", "qwen3")
"""Architectures the runtime computes; GGUF's names."""

_LIMITS = {
    "num_layers": 1024,
    "hidden_size": 1 << 20,
    "num_heads": 1 << 12,
    "num_kv_heads": 1 << 12,
    "head_dim": 1 << 12,
    "ffn_size": 1 << 22,
    "vocab_size": 1 << 22,
    "context_tokens": 1 << 28,
}


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position parameters; ``kind`` is ``default``, ``linear`` or ``llama3``.

    ``frequency_factors`` divide the frequencies one by one (GGUF's ``rope_freqs.weight``); empty: none.
    The half-split pairing of Hugging Face is used: element i turns with element i + head_dim / 2.
    """

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context_tokens: int = 8192
    frequency_factors: tuple[float, ...] = ()

    def inverse_frequencies(self, head_dim: int) -> torch.Tensor:
        """Return radians per position, ``[head_dim / 2]``, float64.

        Raises:
            UnsupportedModel: ``frequency_factors`` has another length.
        """
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
        frequencies = self.theta**-exponents
        if self.frequency_factors:
            if len(self.frequency_factors) != head_dim // 2:
                raise UnsupportedModel(
                    f"rope: {len(self.frequency_factors)} frequency factors, expected {head_dim // 2}"
                )
            return frequencies / torch.tensor(self.frequency_factors, dtype=torch.float64)
        if self.kind == "linear":
            return frequencies / self.factor
        if self.kind == "llama3":
            return self._llama3(frequencies)
        return frequencies

    def _llama3(self, frequencies: torch.Tensor) -> torch.Tensor:
        # Llama 3.1's rule (transformers, modeling_rope_utils.py): long waves are slowed by `factor`, short
        # ones kept, those between are interpolated.
        turns = self.original_context_tokens * frequencies / (2 * math.pi)
        smooth = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        smooth = smooth.clamp(0.0, 1.0)
        return (1 - smooth) * frequencies / self.factor + smooth * frequencies

    def describe(self) -> str:
        """Return every parameter as text, for the Namespace: equal only when positions turn alike."""
        factors = ",".join(repr(value) for value in self.frequency_factors)
        return (
            f"half-split theta={self.theta!r} kind={self.kind} factor={self.factor!r} "
            f"low={self.low_freq_factor!r} high={self.high_freq_factor!r} "
            f"original={self.original_context_tokens} factors=[{factors}]"
        )


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shape of a Llama-architecture model.

    ``name`` is for people; ``context_tokens`` the longest sequence the model was made for.

    Raises:
        UnsupportedModel: a number is missing, out of range, or does not fit the others.
    """

    name: str
    architecture: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    vocab_size: int
    context_tokens: int
    norm_eps: float
    rope: RopeConfig

    def __post_init__(self) -> None:
        for name, limit in _LIMITS.items():
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= limit:
                raise UnsupportedModel(f"model config: {name} is {value!r}, expected 1..{limit}")
        if self.num_heads % self.num_kv_heads:
            raise UnsupportedModel(
                f"model config: {self.num_heads} heads are no multiple of {self.num_kv_heads} KV heads"
            )
        if self.head_dim % 2:
            raise UnsupportedModel(
                f"model config: head_dim {self.head_dim} is odd; rotary pairs need an even one"
            )
        rope = self.rope
        if not (0 < self.norm_eps < 1 and 1 < rope.theta < math.inf and 0 < rope.factor < math.inf):
            raise UnsupportedModel(
                f"model config: norm_eps {self.norm_eps}, rope theta {rope.theta} or factor "
                f"{rope.factor} is out of range"
            )


def require_architecture(architecture: object, *, where: str) -> str:
    """Return the architecture if the runtime computes it.

    Raises:
        UnsupportedModel: it does not; the message lists those it does.
    """
    if architecture not in ARCHITECTURES:
        raise UnsupportedModel(
            f"{where}: architecture {architecture!r} is unknown to this engine: "
            f"use one of {', '.join(ARCHITECTURES)}"
        )
    return str(architecture)
