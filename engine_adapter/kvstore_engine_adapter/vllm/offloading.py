"""KVStoreOffloadingConnector: vLLM's OffloadingConnector, the store behind its CPU cache. It needs vLLM."""

import copy
import logging
from typing import Any

from kvstore.errors import InvalidConfig
from kvstore_engine_adapter.vllm.engine_identity import identify_engine
from kvstore_engine_adapter.vllm.interface import (
    KVConnectorRole,
    OffloadingConnector,
)
from kvstore_engine_adapter.vllm.options import ConnectorOptions
from kvstore_engine_adapter.vllm.tier_engine import TierEngine

logger = logging.getLogger("vllm.kvstore")

_SECTION, _SPEC = "kvstore", "TieringOffloadingSpec"
_MODULE, _TIER = "kvstore_engine_adapter.vllm", "KVStoreTier"


class KVStoreOffloadingConnector(OffloadingConnector):  # type: ignore[misc]  # vLLM is not there for mypy
    """vLLM's own connector, with ``KVStoreTier`` as its last tier.

    vLLM moves blocks between the GPU and its CPU cache of ``cpu_bytes_to_use``; the tier moves them between
    that cache and the store. Options of the store are under ``kvstore`` in ``kv_connector_extra_config``, all
    other keys are vLLM's.

    Raises:
        InvalidConfig: an option of the store is unknown or has a bad value.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        options = _options(extra)
        self._engine: TierEngine | None = None
        if role is KVConnectorRole.SCHEDULER:
            identity = identify_engine(vllm_config, kv_cache_config, options)
            self._engine = TierEngine(identity, options)
        super().__init__(_completed(vllm_config, self._engine), role, kv_cache_config)

    def on_new_request(self, request: Any) -> None:
        """A request has come."""
        if self._engine is not None:
            self._engine.note_request(request)
        super().on_new_request(request)

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: Any, per_engine_labelvalues: Any
    ) -> Any:
        """Return vLLM's metrics of its connector, and the tier's."""
        completed = _completed(vllm_config, None)
        return super().build_prom_metrics(completed, metric_types, labelnames, per_engine_labelvalues)


def _options(extra: dict[str, Any]) -> ConnectorOptions:
    given = extra.get(_SECTION)
    if not isinstance(given, dict):
        raise InvalidConfig(
            f'kv_connector_extra_config: no options of the store: set "{_SECTION}": '
            '{"store": "unix:/run/kvstore/kvstore.sock"}'
        )
    return ConnectorOptions.parse(given)


def _completed(vllm_config: Any, engine: TierEngine | None) -> Any:
    """Return vLLM's configuration with the tier in it, as vLLM reads its tiers."""
    completed = copy.copy(vllm_config)
    transfer = completed.kv_transfer_config = copy.copy(vllm_config.kv_transfer_config)
    extra = {"spec_name": _SPEC, **transfer.kv_connector_extra_config}
    tier = {"type": _TIER, "module_path": _MODULE, "engine": engine}
    extra["secondary_tiers"] = [*extra.get("secondary_tiers", []), tier]
    transfer.kv_connector_extra_config = extra
    return completed
