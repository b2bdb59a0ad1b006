"""Identity: what decides what vLLM's KV bytes mean, read from its configuration, as one Namespace per group.

vLLM's block hash covers tokens, multimodal inputs, LoRA names and the cache salt, and nothing of the model.
Everything else is put into the namespace here. What cannot be named for certain is refused (``NotNameable``),
and then nothing is shared.
"""

import hashlib
import json
import os
import platform
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kvstore.errors import InvalidLayout
from kvstore.keys import Namespace
from kvstore.layout import KVLayout, Part
from kvstore_engine_adapter.model_identity import NotNameable, name_model
from kvstore_engine_adapter.vllm.options import ConnectorOptions

_WINDOWED, _FULL = ("SlidingWindowSpec",), ("FullAttentionSpec", "MLAAttentionSpec")
_WITHOUT_DRAFT_LAYERS = ("ngram", "suffix")
_UNFIXED = ("_name_or_path", "transformers_version", "name_or_path", "_commit_hash")

Config = Any  # vLLM's configuration objects: attributes only, so that contract tests need no vLLM
"""vLLM's ``VllmConfig`` and ``KVCacheConfig``, of which only attributes are read."""


@dataclass(frozen=True, slots=True)
class GroupIdentity:
    """One group of layers that share a block table.

    ``page_bytes`` maps each layer's name to its bytes of one block on one rank, in the order in which they
    are stored. ``window_blocks``: only so many trailing blocks are needed; None: all. ``hashes_per_block``:
    vLLM may hash finer than it allocates.
    """

    index: int
    namespace: Namespace
    page_bytes: Mapping[str, int]
    window_blocks: int | None
    hashes_per_block: int

    @property
    def block_bytes(self) -> int:
        """Bytes of a block of this group on one rank."""
        return sum(self.page_bytes.values())


@dataclass(frozen=True, slots=True)
class EngineIdentity:
    """The groups, tokens per block, and how many ranks hold a part of each block."""

    groups: tuple[GroupIdentity, ...]
    block_tokens: int
    num_ranks: int

    def part(self, rank: int) -> Part | None:
        """Return the part that a rank holds; None if it holds whole blocks."""
        return None if self.num_ranks == 1 else Part(0, 1, rank, rank + 1)

    @property
    def parts(self) -> tuple[Part | None, ...]:
        """The parts of all ranks."""
        return tuple(self.part(rank) for rank in range(self.num_ranks))


def identify(
    vllm_config: Config,
    kv_cache_config: Config,
    options: ConnectorOptions,
    *,
    version: str,
    none_hash: bytes,
    resolve_revision: Callable[[str, str | None], str | None],
    environ: Mapping[str, str] = os.environ,
) -> EngineIdentity:
    """Return the identity of an engine. Reads the model's files when nothing else names the weights.

    ``none_hash`` is the seed of vLLM's block hashes; ``resolve_revision`` finds the commit of a model of a
    hub that is cached here.

    Raises:
        NotNameable: it cannot be named; the text says what to set.
    """
    _check_parallel(vllm_config.parallel_config)
    _check_computing(vllm_config)
    _check_hashes(vllm_config.cache_config, environ)
    model, weights = _model_and_weights(vllm_config, options, resolve_revision)
    facts = _facts(vllm_config, kv_cache_config, version=version, none_hash=none_hash)
    num_ranks = int(vllm_config.parallel_config.tensor_parallel_size)
    sizes = {int(group.kv_cache_spec.block_size) for group in kv_cache_config.kv_cache_groups}
    if len(sizes) != 1:
        raise NotNameable(
            f"its groups of layers have blocks of {sorted(sizes)} tokens: unequal sizes are not supported"
        )
    block_tokens = sizes.pop()
    hash_tokens = int(getattr(kv_cache_config, "hash_block_size", None) or block_tokens)
    if block_tokens % hash_tokens:
        raise NotNameable(f"blocks of {block_tokens} tokens are hashed by {hash_tokens}")
    order = getattr(kv_cache_config, "kv_cache_layout", None)
    if not order:
        raise NotNameable("vLLM does not say in which order the bytes of its KV cache lie")
    groups = []
    for index, group in enumerate(kv_cache_config.kv_cache_groups):
        page_bytes = _page_bytes(group)
        try:
            layout = KVLayout(
                dtype="uint8",
                num_layers=1,
                block_tokens=block_tokens,
                num_kv_heads=num_ranks,
                head_dim=max(1, sum(page_bytes.values()) // block_tokens),
                kv_planes=1,
                order=f"vllm:{order}",
            )
        except InvalidLayout as error:
            raise NotNameable(f"{error}: lower vLLM's --block-size") from error
        if layout.block_bytes != num_ranks * sum(page_bytes.values()):
            raise NotNameable(
                f"blocks of {sum(page_bytes.values())} bytes do not divide into {block_tokens} tokens"
            )
        about = {**facts, "group": index, "layers": _layer_facts(group)}
        digest = hashlib.sha256(json.dumps(about, sort_keys=True, default=str).encode()).hexdigest()
        namespace = Namespace(
            model=model,
            layout=layout,
            weights=weights,
            rope=f"vllm:{digest}",
            tenant_salt=options.salt.encode(),
        )
        groups.append(
            GroupIdentity(index, namespace, page_bytes, _window_blocks(group), block_tokens // hash_tokens)
        )
    if all(group.window_blocks is not None for group in groups):
        raise NotNameable("it has no group of layers with full attention")
    groups.sort(key=lambda group: group.window_blocks is not None)
    return EngineIdentity(tuple(groups), block_tokens, num_ranks)


def _check_parallel(parallel: Config) -> None:
    for name, text in (
        ("pipeline_parallel_size", "pipeline parallelism"),
        ("decode_context_parallel_size", "decode context parallelism"),
        ("prefill_context_parallel_size", "prefill context parallelism"),
    ):
        if int(getattr(parallel, name, 1) or 1) > 1:
            raise NotNameable(f"{text} is not supported by the connector: set {name} to 1")


def _check_computing(vllm_config: Config) -> None:
    speculative = getattr(vllm_config, "speculative_config", None)
    if speculative is not None and str(getattr(speculative, "method", "")) not in _WITHOUT_DRAFT_LAYERS:
        raise NotNameable(
            "speculative decoding with a draft model is not supported by the connector: leave it out, or use "
            f"one of the methods {', '.join(_WITHOUT_DRAFT_LAYERS)}"
        )
    if getattr(vllm_config.cache_config, "calculate_kv_scales", False):
        raise NotNameable(
            "scales of the KV cache that are computed while it runs differ between replicas: leave out "
            "--calculate-kv-scales"
        )


def _check_hashes(cache: Config, environ: Mapping[str, str]) -> None:
    algo = str(cache.prefix_caching_hash_algo)
    if not getattr(cache, "enable_prefix_caching", True):
        raise NotNameable("vLLM makes no block hashes: leave out --no-enable-prefix-caching")
    if "PYTHONHASHSEED" not in environ and not algo.startswith("sha256"):
        raise NotNameable(
            f"block hashes by {algo} have a random seed in each process: set --prefix-caching-hash-algo "
            "sha256_cbor, or PYTHONHASHSEED to the same secret number on every replica"
        )
    if str(environ.get("PYTHONHASHSEED")) == "random":
        raise NotNameable(
            "PYTHONHASHSEED is 'random': set it to the same number on every replica, or unset it"
        )


def _model_and_weights(
    vllm_config: Config, options: ConnectorOptions, resolve: Callable[[str, str | None], str | None]
) -> tuple[str, str]:
    model = vllm_config.model_config
    return name_model(
        str(model.model),
        revision=getattr(model, "revision", None),
        load_format=str(getattr(getattr(vllm_config, "load_config", None), "load_format", "auto")),
        given_model=options.model,
        given_weights=options.weights,
        where="kv_connector_extra_config",
        resolve=resolve,
    )


def _facts(
    vllm_config: Config, kv_cache_config: Config, *, version: str, none_hash: bytes
) -> dict[str, object]:
    model, cache, parallel = vllm_config.model_config, vllm_config.cache_config, vllm_config.parallel_config
    algo = str(cache.prefix_caching_hash_algo)
    facts: dict[str, object] = {
        "version": ".".join(version.split("+")[0].split(".")[:2]),
        "hash": algo,
        "seed": none_hash.hex(),
        "dtype": str(model.dtype),
        "kv_dtype": str(cache.cache_dtype),
        "quantization": str(getattr(model, "quantization", None)),
        "layout": str(getattr(kv_cache_config, "kv_cache_layout", None)),
        "hash_tokens": str(getattr(kv_cache_config, "hash_block_size", None)),
        "tensor_parallel_size": int(parallel.tensor_parallel_size),
        "config": _config_facts(model),
        "attention": str(getattr(getattr(vllm_config, "attention_config", None), "backend", None)),
    }
    if algo == "sha256":
        # It hashes a pickle, whose bytes are Python's affair.
        facts["python"] = ".".join(platform.python_version_tuple()[:2])
    return facts


def _config_facts(model: Config) -> str:
    """Return a digest of the model's own configuration: rope, windows, sizes, with overrides."""
    config = getattr(model, "hf_config", None)
    if config is None:
        return "none"
    known = config.to_dict()
    return hashlib.sha256(
        json.dumps(
            {k: v for k, v in known.items() if k not in _UNFIXED}, sort_keys=True, default=str
        ).encode()
    ).hexdigest()


def _page_bytes(group: Config) -> dict[str, int]:
    """Return the bytes of one block of each layer, in the order of the layers' names."""
    spec = group.kv_cache_spec
    per_layer = getattr(spec, "kv_cache_specs", None)  # UniformTypeKVCacheSpecs: one for each layer
    names = sorted(group.layer_names, key=_natural)
    if per_layer is None:
        return {name: int(spec.page_size_bytes) for name in names}
    return {name: int(per_layer[name].page_size_bytes) for name in names}


def _layer_facts(group: Config) -> list[str]:
    spec = group.kv_cache_spec
    per_layer = getattr(spec, "kv_cache_specs", {})
    return [f"{name}={per_layer.get(name, spec)!r}" for name in sorted(group.layer_names, key=_natural)]


def _window_blocks(group: Config) -> int | None:
    spec = group.kv_cache_spec
    kind = type(spec).__name__
    if kind in _WINDOWED:
        # The next token, at the start of a block, attends to window - 1 tokens before it.
        return -(-(int(spec.sliding_window) - 1) // int(spec.block_size))
    per_layer = getattr(spec, "kv_cache_specs", None)
    kinds = {kind} if per_layer is None else {type(one).__name__ for one in per_layer.values()}
    if not kinds <= set(_FULL):
        raise NotNameable(f"layers of the kind {', '.join(sorted(kinds - set(_FULL)))} are not supported")
    return None


def _natural(name: str) -> list[tuple[int, str]]:
    return [(int(text), "") if text.isdigit() else (-1, text) for text in re.split(r"(\d+)", name)]
