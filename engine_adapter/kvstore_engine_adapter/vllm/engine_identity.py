"""The identity of an engine as vLLM's own objects tell it. It needs vLLM."""

import logging
from typing import Any

from kvstore.errors import KVStoreError
from kvstore_engine_adapter.model_identity import NotNameable, commit_in_cache
from kvstore_engine_adapter.vllm.identity import EngineIdentity, identify
from kvstore_engine_adapter.vllm.options import ConnectorOptions

logger = logging.getLogger("vllm.kvstore")


def identify_engine(
    vllm_config: Any, kv_cache_config: Any, options: ConnectorOptions, *, version: str
) -> EngineIdentity | None:
    """Return the identity of an engine; None: it cannot be named, which the log says with what to set."""
    try:
        return identify(
            vllm_config,
            kv_cache_config,
            options,
            version=version,
            none_hash=_none_hash(vllm_config),
            resolve_revision=commit_in_cache,
        )
    except (NotNameable, KVStoreError) as error:
        logger.error("kvstore: nothing is shared: %s", error)
        return None


def _none_hash(vllm_config: Any) -> bytes:
    """Return the seed of the block hashes as vLLM makes it from this environment."""
    # Imported here because a contract test replaces vLLM's modules.
    from vllm.utils.hashing import get_hash_fn_by_name  # pyright: ignore[reportMissingImports]
    from vllm.v1.core import kv_cache_utils  # pyright: ignore[reportMissingImports]

    hash_fn = get_hash_fn_by_name(vllm_config.cache_config.prefix_caching_hash_algo)
    return bytes(hash_fn(kv_cache_utils.resolve_none_hash_seed(hash_fn)))
