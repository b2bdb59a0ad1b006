"""Loading a model from a path: a GGUF file or a Hugging Face folder."""

from dataclasses import dataclass
from pathlib import Path

import torch

from kvstore.errors import UnsupportedModel
from kvstore_engine_adapter import gguf_model, hf_model
from kvstore_engine_adapter.gguf_file import GgufFile
from kvstore_engine_adapter.model_config import ModelConfig
from kvstore_engine_adapter.model_digest import ModelFiles
from kvstore_engine_adapter.tokenizer import ModelTokenizer, tokenizer_from_folder, tokenizer_from_gguf
from kvstore_engine_adapter.weights import ModelWeights, load_weights


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run: its numbers, tensors, tokenizer, and the digest of its files."""

    config: ModelConfig
    weights: ModelWeights
    tokenizer: ModelTokenizer
    digest: str


def load_model(
    path: Path, *, dtype: torch.dtype, device: torch.device, cache_folder: Path | None = None
) -> LoadedModel:
    """Load a GGUF file or a Hugging Face folder. Blocking; seconds.

    Its digest takes every byte of its files; it is remembered in ``cache_folder``, if one is given.

    Raises:
        UnsupportedModel: no such path, damaged or changing files, or a model this engine does not compute.
    """
    if path.is_dir():
        return _load_folder(path, dtype, device, cache_folder)
    if not path.exists():
        raise UnsupportedModel(f"{path}: no such file or folder: give a GGUF file or a Hugging Face folder")
    return _load_gguf(path, dtype, device, cache_folder)


def _load_gguf(
    path: Path, dtype: torch.dtype, device: torch.device, cache_folder: Path | None
) -> LoadedModel:
    where = str(path)
    files = ModelFiles([path], cache_folder=cache_folder)
    with GgufFile(path) as file:
        config = gguf_model.read_config(file, where=where)
        tokenizer = tokenizer_from_gguf(file.metadata, where=where)
        source = gguf_model.GgufTensors(file, config, where=where)
        weights = load_weights(config, source, dtype=dtype, device=device)
    return _checked(LoadedModel(config, weights, tokenizer, files.digest()), where)


def _load_folder(
    folder: Path, dtype: torch.dtype, device: torch.device, cache_folder: Path | None
) -> LoadedModel:
    files = ModelFiles([folder / "config.json", *hf_model.weight_files(folder)], cache_folder=cache_folder)
    config = hf_model.read_config(folder)
    tokenizer = tokenizer_from_folder(folder, end_ids=hf_model.end_tokens(folder))
    weights = load_weights(config, hf_model.SafetensorsTensors(folder), dtype=dtype, device=device)
    return _checked(LoadedModel(config, weights, tokenizer, files.digest()), str(folder))


def _checked(model: LoadedModel, where: str) -> LoadedModel:
    if model.tokenizer.vocab_size > model.config.vocab_size:
        raise UnsupportedModel(
            f"{where}: the tokenizer has {model.tokenizer.vocab_size} tokens, "
            f"the model only {model.config.vocab_size}"
        )
    turns = model.config.rope.inverse_frequencies(model.config.head_dim)
    if not bool((turns.isfinite() & (turns >= 0)).all()):
        raise UnsupportedModel(f"{where}: rope parameters make no rotation: {model.config.rope.describe()}")
    return model
