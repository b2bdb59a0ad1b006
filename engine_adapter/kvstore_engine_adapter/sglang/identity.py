"""PoolIdentity: what decides what the bytes of a host pool's pages mean, as one Namespace per pool.

SGLang's page hash covers tokens, ``extra_key`` and ``cache_salt``, and nothing of the model. Everything else
is put into the namespace here. What cannot be named for certain is refused (``NotNameable``).
"""

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvstore.errors import InvalidLayout
from kvstore.keys import Namespace
from kvstore.layout import KVLayout, Part
from kvstore_engine_adapter.model_identity import NotNameable, name_model
from kvstore_engine_adapter.sglang.options import WHERE, BackendOptions
from kvstore_engine_adapter.sglang.pages import HostPages, HostPool, page_tokens

Config = Any  # SGLang's configuration objects: attributes only, so that contract tests need no SGLang
"""SGLang's ``HiCacheStorageConfig`` and ``ServerArgs``, of which only attributes are read."""

_WITHOUT_DRAFT_LAYERS = (None, "", "NGRAM")
_OF_POOL = (
    "layout",
    "dtype",
    "page_size",
    "layer_num",
    "target_layer_num",
    "start_layer",
    "end_layer",
    "head_num",
    "head_dim",
    "v_head_dim",
    "head_group_num",
    "kv_lora_rank",
    "qk_rope_head_dim",
    "kv_cache_dim",
    "size_per_token",
    "storage_format_tag",
)
_OF_CONFIG = (
    "tp_size",
    "pp_size",
    "pp_rank",
    "attn_cp_size",
    "attn_cp_rank",
    "is_mla_model",
    "should_split_heads",
)
_OF_SERVER = (
    "dtype",
    "quantization",
    "kv_cache_dtype",
    "quantization_param_path",
    "json_model_override_args",
    "torchao_config",
    "model_impl",
)


@dataclass(frozen=True, slots=True)
class PoolIdentity:
    """The namespace of a pool's pages, and the part of each that this rank holds (None: all of it)."""

    namespace: Namespace
    part: Part | None


def identify(
    pool: HostPool,
    pages: HostPages,
    storage_config: Config,
    server_args: Config | None,
    options: BackendOptions,
    *,
    pool_name: str,
    version: str,
    resolve: Callable[[str, str | None], str | None],
) -> PoolIdentity:
    """Return the identity of a pool. Reads the model's files when nothing else names the weights.

    ``server_args``: None if SGLang does not say; then ``weights`` must be set. ``resolve`` finds the
    commit of a model of a hub that is cached here.

    Raises:
        NotNameable: it cannot be named; the text says what to set.
    """
    _require_supported(storage_config, server_args)
    model, weights = _model_and_weights(storage_config, server_args, options, resolve)
    # Latent attention keeps the same on every rank; states and heads are shared out among the ranks.
    is_shared = bool(storage_config.is_mla_model) and pool_name != "mamba"
    num_ranks = 1 if is_shared else int(storage_config.tp_size)
    rank = 0 if is_shared else int(storage_config.tp_rank)
    tokens = page_tokens(pool)
    about = {
        "version": version,
        "pool": pool_name,
        "kind": type(pool).__name__,
        "bytes": pages.kind,
        "pool_facts": {name: str(getattr(pool, name, None)) for name in _OF_POOL},
        "config": {name: str(getattr(storage_config, name, None)) for name in _OF_CONFIG},
        "server": {name: str(getattr(server_args, name, None)) for name in _OF_SERVER},
        "model_config": _config_digest(server_args),
    }
    digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()
    try:
        layout = _layout(pool, pages, tokens, num_ranks)
    except InvalidLayout as error:
        raise NotNameable(f"{error}: lower SGLang's --page-size") from error
    namespace = Namespace(
        model=model,
        layout=layout,
        weights=weights,
        rope=f"sglang:{digest}",
        tenant_salt=options.salt.encode(),
    )
    return PoolIdentity(namespace, None if num_ranks == 1 else Part(0, 1, rank, rank + 1))


def _layout(pool: HostPool, pages: HostPages, tokens: int, num_ranks: int) -> KVLayout:
    block_tokens = tokens if pages.page_bytes % tokens == 0 else 1
    return KVLayout(
        dtype="uint8",
        num_layers=1,
        block_tokens=block_tokens,
        num_kv_heads=num_ranks,
        head_dim=pages.page_bytes // block_tokens,
        kv_planes=1,
        order=f"sglang:{getattr(pool, 'layout', None)}"[:64],
    )


def _require_supported(storage_config: Config, server_args: Config | None) -> None:
    if int(getattr(storage_config, "dcp_size", 1) or 1) > 1:
        raise NotNameable("decode context parallelism is not supported by the backend: set dcp_size to 1")
    algorithm = getattr(server_args, "speculative_algorithm", None)
    if algorithm not in _WITHOUT_DRAFT_LAYERS:
        raise NotNameable(
            f"speculative decoding by {algorithm} has a draft model, which is not supported by the backend: "
            "leave it out, or use NGRAM"
        )
    if getattr(server_args, "enable_lora", None) or getattr(server_args, "lora_paths", None):
        raise NotNameable(
            "SGLang names LoRA adapters by name and path, not by what they are: not supported by the "
            "backend, leave out --enable-lora and --lora-paths"
        )


def _model_and_weights(
    storage_config: Config,
    server_args: Config | None,
    options: BackendOptions,
    resolve: Callable[[str, str | None], str | None],
) -> tuple[str, str]:
    path = getattr(server_args, "model_path", None) or storage_config.model_name
    if not path or (server_args is None and not options.weights):
        raise NotNameable(f'SGLang does not say which model it runs: set "model" and "weights" in {WHERE}')
    load_format = getattr(server_args, "load_format", "auto")
    return name_model(
        str(path),
        revision=getattr(server_args, "revision", None),
        load_format=str(getattr(load_format, "value", load_format)),
        given_model=options.model,
        given_weights=options.weights,
        where=WHERE,
        resolve=resolve,
    )


def _config_digest(server_args: Config | None) -> str:
    """Return a digest of the configuration beside the weights: rope, windows, sizes."""
    path = Path(str(getattr(server_args, "model_path", "") or "")) / "config.json"
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "none"
