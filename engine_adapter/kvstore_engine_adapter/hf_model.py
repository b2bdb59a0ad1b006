"""Llama-architecture models in Hugging Face folders: config.json and safetensors."""

import struct
from pathlib import Path

import safetensors
import torch

from kvstore.errors import UnsupportedModel
from kvstore_engine_adapter.model_config import ModelConfig, RopeConfig, require_architecture
from kvstore_engine_adapter.tokenizer import read_json

_CLASSES = {"LlamaForCausalLM": "llama", "Qwen2ForCausalLM": "qwen2", "Qwen3ForCausalLM": "qwen3"}
_INDEX = "model.safetensors.index.json"


def read_config(folder: Path) -> ModelConfig:
    """Return the model's numbers from ``config.json``.

    Raises:
        UnsupportedModel: it is missing or damaged, names an unknown architecture or rope type, or uses
            something this engine does not compute (sliding windows, another activation).
    """
    where = str(folder / "config.json")
    fields = _Fields(read_json(folder / "config.json"), where)
    classes = fields.values.get("architectures")
    named = classes[0] if isinstance(classes, list) and classes else fields.values.get("model_type")
    architecture = require_architecture(_CLASSES.get(str(named), named), where=where)
    if fields.values.get("hidden_act", "silu") != "silu":
        raise UnsupportedModel(
            f"{where}: activation {fields.values['hidden_act']!r} is not supported: only silu"
        )
    if fields.values.get("use_sliding_window") is True:
        raise UnsupportedModel(f"{where}: sliding-window attention is not supported")
    num_heads, hidden_size = fields.integer("num_attention_heads"), fields.integer("hidden_size")
    return ModelConfig(
        name=folder.resolve().name,
        architecture=architecture,
        num_layers=fields.integer("num_hidden_layers"),
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=fields.integer("num_key_value_heads", num_heads),
        head_dim=fields.integer("head_dim", hidden_size // max(1, num_heads)),
        ffn_size=fields.integer("intermediate_size"),
        vocab_size=fields.integer("vocab_size"),
        context_tokens=fields.integer("max_position_embeddings"),
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope=_rope(fields),
    )


def end_tokens(folder: Path) -> list[int]:
    """Return the end tokens that config.json and generation_config.json name."""
    found: list[int] = []
    for name in ("config.json", "generation_config.json"):
        value = read_json(folder / name, default={}).get("eos_token_id")
        listed = value if isinstance(value, list) else [value]
        found += [token for token in listed if isinstance(token, int)]
    return found


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a folder, sorted by name.

    Raises:
        UnsupportedModel: there are none, or the index names one that is missing.
    """
    index = read_json(folder / _INDEX, default={}).get("weight_map")
    if isinstance(index, dict):
        names = sorted({str(name) for name in index.values()})
        if any(Path(name).name != name for name in names):
            raise UnsupportedModel(f"{folder / _INDEX}: names a file outside the folder")
        paths = [folder / name for name in names]
    else:
        paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        raise UnsupportedModel(
            f"{folder}: no *.safetensors files: give a folder in safetensors format, or a GGUF"
        )
    for path in paths:
        if not path.is_file():
            raise UnsupportedModel(f"{path}: missing, though the index names it: fetch the model again")
    return paths


class SafetensorsTensors:
    """TensorSource over a folder's safetensors files.

    Raises:
        UnsupportedModel: a file is no safetensors, or is cut short.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[str, Path] = {}
        for path in weight_files(folder):
            for name in _tensor_names(path):
                self._files[name] = path

    @property
    def where(self) -> str:
        """The folder."""
        return str(self._folder)

    def has(self, name: str) -> bool:
        """Return whether the tensor exists."""
        return name in self._files

    def load(self, name: str) -> torch.Tensor:
        """Return the tensor as stored.

        Raises:
            UnsupportedModel: it is missing, unreadable, or no floating dtype.
        """
        path = self._files.get(name)
        if path is None:
            raise UnsupportedModel(f"{self._folder}: tensor {name} is missing")
        try:
            with safetensors.safe_open(path, framework="pt") as file:
                tensor = file.get_tensor(name)
        except (OSError, safetensors.SafetensorError) as error:
            raise UnsupportedModel(f"{path}: tensor {name} cannot be read: {error}") from error
        if not isinstance(tensor, torch.Tensor) or not tensor.is_floating_point():
            raise UnsupportedModel(
                f"{path}: tensor {name} is not floating point: quantised folders are not supported"
            )
        return tensor


def _tensor_names(path: Path) -> list[str]:
    try:
        with path.open("rb") as file:
            head = file.read(8)
        size = path.stat().st_size
        if len(head) < 8 or struct.unpack("<Q", head)[0] + 8 > size:
            raise UnsupportedModel(f"{path}: cut short or no safetensors file ({size} bytes): fetch it again")
        with safetensors.safe_open(path, framework="pt") as opened:
            return list(opened.keys())
    except (OSError, safetensors.SafetensorError) as error:
        raise UnsupportedModel(f"{path}: cut short or damaged: {error}: fetch it again") from error


def _rope(fields: "_Fields") -> RopeConfig:
    # Newer files keep theta and scaling together under rope_parameters.
    parameters = fields.values.get("rope_parameters")
    scaling = fields.values.get("rope_scaling") or parameters or {}
    if not isinstance(scaling, dict):
        raise UnsupportedModel(f"{fields.where}: rope_scaling is no object")
    nested = _Fields(scaling, f"{fields.where}: rope_scaling")
    theta = nested.number("rope_theta", fields.number("rope_theta", 10000.0))
    if fields.number("partial_rotary_factor", 1.0) != 1.0:
        raise UnsupportedModel(f"{fields.where}: partial rotary embeddings are not supported")
    kind = str(scaling.get("rope_type") or scaling.get("type") or "default")
    if kind == "default":
        return RopeConfig(theta)
    if kind == "linear":
        return RopeConfig(theta, "linear", nested.number("factor"))
    if kind == "llama3":
        return RopeConfig(
            theta,
            "llama3",
            nested.number("factor"),
            nested.number("low_freq_factor"),
            nested.number("high_freq_factor"),
            nested.integer("original_max_position_embeddings"),
        )
    raise UnsupportedModel(
        f"{fields.where}: rope type {kind!r} is not supported: only default, linear and llama3"
    )


class _Fields:
    """Typed reads of a JSON object; null counts as absent."""

    def __init__(self, values: dict[str, object], where: str) -> None:
        self.values = values
        self.where = where

    def integer(self, name: str, default: int | None = None) -> int:
        value = self.values.get(name)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool):
            raise UnsupportedModel(f"{self.where}: {name} is {value!r}, expected one integer")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self.values.get(name)
        value = default if value is None else value
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise UnsupportedModel(f"{self.where}: {name} is {value!r}, expected a number")
        try:
            return float(value)
        except OverflowError as error:
            raise UnsupportedModel(f"{self.where}: {name} is too large") from error
