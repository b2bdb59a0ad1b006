"""The identity of an engine as vLLM's own objects tell it. It needs vLLM."""

import logging
from typing import Any

from kvstore.errors import KVStoreError
from kvstore_engine_adapter.model_identity import NotNameable, commit_in_cache
from kvstore_engine_adapter.vllm.identity import EngineIdentity, identify
from kvstore_engine_adapter.vllm.interface import VERSION, none_hash
from kvstore_engine_adapter.vllm.options import ConnectorOptions

logger = logging.getLogger("vllm.kvstore")


def identify_engine(
    vllm_config: Any, kv_cache_config: Any, options: ConnectorOptions
) -> EngineIdentity | None:
    """Return the identity of an engine; None: it cannot be named, which the log says with what to set."""
    try:
        return identify(
            vllm_config,
            kv_cache_config,
            options,
            version=VERSION,
            none_hash=none_hash(vllm_config),
            resolve_revision=commit_in_cache,
        )
    except (NotNameable, KVStoreError) as error:
        logger.error("kvstore: nothing is shared: %s", error)
        return None
