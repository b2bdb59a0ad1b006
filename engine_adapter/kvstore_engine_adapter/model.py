"""Loading a model from a path: a GGUF file or a Hugging Face folder."""

from dataclasses import dataclass, field
from pathlib import Path

import torch

from kvstore.errors import UnsupportedModel
from kvstore_engine_adapter import gguf_model, hf_model
from kvstore_engine_adapter.gguf_file import GgufFile
from kvstore_engine_adapter.model_config import ModelConfig
from kvstore_engine_adapter.model_digest import ModelFiles
from kvstore_engine_adapter.shard import Shard
from kvstore_engine_adapter.tokenizer import ModelTokenizer, tokenizer_from_folder, tokenizer_from_gguf
from kvstore_engine_adapter.weights import ModelWeights, TensorSource, load_weights


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run: its numbers, tensors, tokenizer, and the digest of its files.

    ``config`` is the whole model's; ``weights`` are those of one ``shard``.
    """

    config: ModelConfig
    weights: ModelWeights
    tokenizer: ModelTokenizer
    digest: str
    shard: Shard = field(default_factory=Shard)


def load_model(
    path: Path,
    *,
    dtype: torch.dtype,
    device: torch.device,
    cache_folder: Path | None = None,
    shard: Shard | None = None,
) -> LoadedModel:
    """Load a GGUF file or a Hugging Face folder, or one rank's share of it. Blocking; seconds.

    Its digest takes every byte of its files; it is remembered in ``cache_folder``, if one is given.

    Raises:
        UnsupportedModel: no such path, damaged or changing files, or a model this engine does not compute.
        InvalidConfig: the ranks cannot share the model evenly.
    """
    load = _load_folder if path.is_dir() else _load_gguf
    if not path.exists():
        raise UnsupportedModel(f"{path}: no such file or folder: give a GGUF file or a Hugging Face folder")
    return load(path, _Wanted(dtype, device, shard or Shard()), cache_folder)


@dataclass(frozen=True, slots=True)
class _Wanted:
    """In what form, where and how much of a model's weights are wanted."""

    dtype: torch.dtype
    device: torch.device
    shard: Shard

    def weights(self, config: ModelConfig, source: TensorSource) -> ModelWeights:
        return load_weights(
            self.shard.config_of(config),
            self.shard.tensors_of(source, config),
            dtype=self.dtype,
            device=self.device,
        )


def _load_gguf(path: Path, wanted: _Wanted, cache_folder: Path | None) -> LoadedModel:
    where = str(path)
    files = ModelFiles([path], cache_folder=cache_folder)
    with GgufFile(path) as file:
        config = gguf_model.read_config(file, where=where)
        wanted.shard.config_of(config)  # refused before anything large is read
        tokenizer = tokenizer_from_gguf(file.metadata, where=where)
        source = gguf_model.GgufTensors(file, config, where=where)
        weights = wanted.weights(config, source)
    return _checked(LoadedModel(config, weights, tokenizer, files.digest(), wanted.shard), where)


def _load_folder(folder: Path, wanted: _Wanted, cache_folder: Path | None) -> LoadedModel:
    files = ModelFiles([folder / "config.json", *hf_model.weight_files(folder)], cache_folder=cache_folder)
    config = hf_model.read_config(folder)
    wanted.shard.config_of(config)  # refused before anything large is read
    tokenizer = tokenizer_from_folder(folder, end_ids=hf_model.end_tokens(folder))
    weights = wanted.weights(config, hf_model.SafetensorsTensors(folder))
    return _checked(LoadedModel(config, weights, tokenizer, files.digest(), wanted.shard), str(folder))


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
