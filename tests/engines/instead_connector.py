"""Has an engine answer with no connector, or with one that does nothing, for its own. It needs vLLM."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)


class _Empty(KVConnectorMetadata):
    pass


class EmptyConnector(KVConnectorBase_V1, SupportsHMA):
    """A connector that finds nothing and does nothing: what vLLM does for any of them is left."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        pass

    def build_connector_meta(self, scheduler_output: Any) -> _Empty:
        return _Empty()

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        return False, None

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        pass

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        pass

    def wait_for_save(self) -> None:
        pass


@contextmanager
def connector_instead(engine: Any, kind: str) -> Iterator[None]:
    """Have an idle vLLM find no connector (``none``) or an ``empty`` one, in scheduler and worker."""
    scheduler = engine.llm_engine.engine_core.engine_core.scheduler
    kept = scheduler.connector, kv_transfer_state._KV_CONNECTOR_AGENT
    other: tuple[Any, Any] = (None, None)
    if kind == "empty":
        config, cache = scheduler.vllm_config, scheduler.kv_cache_config
        scheduling, working = KVConnectorRole.SCHEDULER, KVConnectorRole.WORKER
        other = EmptyConnector(config, scheduling, cache), EmptyConnector(config, working, cache)
    scheduler.connector, kv_transfer_state._KV_CONNECTOR_AGENT = other
    try:
        yield
    finally:
        scheduler.connector, kv_transfer_state._KV_CONNECTOR_AGENT = kept
