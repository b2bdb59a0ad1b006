"""What a model and its weights are called in the store, for engines that load them themselves.

A commit of a hub's model, a digest of every byte of a folder's files, or what the operator says. What cannot
be named for certain is refused (``NotNameable``), and then nothing is shared.
"""

import os
import re
from collections.abc import Callable
from pathlib import Path

from kvstore.errors import KVStoreError
from kvstore_engine_adapter.model_digest import ModelFiles

_REVISION = re.compile(r"[0-9a-f]{40}")
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")


class NotNameable(KVStoreError):
    """Blocks of this configuration cannot be named so that others may use them; the text says what to set."""


def name_model(
    path_or_name: str,
    *,
    revision: str | None,
    load_format: str,
    given_model: str,
    given_weights: str,
    where: str,
    resolve: Callable[[str, str | None], str | None],
) -> tuple[str, str]:
    """Return the name of a model and of its weights. Reads the model's files when nothing else names them.

    ``where`` is the part of the engine's configuration that may say ``weights``; ``resolve`` finds the
    commit of a model of a hub that is cached here.

    Raises:
        NotNameable: the weights cannot be named; the text says what to set.
        UnsupportedModel: the model's files cannot be read.
    """
    path = Path(path_or_name)
    is_here = path.exists()
    name = given_model or (path.resolve().name if is_here else path_or_name)
    if given_weights:
        return name, f"given:{given_weights}"
    if load_format == "dummy":
        raise NotNameable(
            'its weights are random (load_format "dummy"): set "weights" if they are the same everywhere'
        )
    if is_here and path.resolve().parent.name == "snapshots" and _REVISION.fullmatch(path.resolve().name):
        return name, f"commit:{path.resolve().name}"
    if is_here:
        return name, _digest_of(path, where)
    commit = resolve(path_or_name, revision)
    if commit is None or not _REVISION.fullmatch(commit):
        raise NotNameable(
            f'the commit of {path_or_name} is not known here: set "weights" in {where} to its revision'
        )
    return name, f"commit:{commit}"


def commit_in_cache(model: str, revision: str | None) -> str | None:
    """Return the commit of a model of the Hugging Face hub that is in the cache here."""
    # Imported here because only engines with such models have the package.
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(model, "config.json", revision=revision)
    return Path(found).parent.name if isinstance(found, str) else None


def _digest_of(path: Path, where: str) -> str:
    files = (
        [path]
        if path.is_file()
        else sorted(
            file for file in path.iterdir() if file.suffix in _WEIGHT_SUFFIXES or file.name == "config.json"
        )
    )
    if not any(file.suffix in _WEIGHT_SUFFIXES for file in files):
        raise NotNameable(f'{path}: no files of weights found there: set "weights" in {where}')
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvstore"
    return ModelFiles(files, cache_folder=cache).digest()
