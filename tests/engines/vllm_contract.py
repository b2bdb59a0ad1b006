"""What vLLM demands of any connector, checked with vLLM's own factory, config and worker's mixin.

``python vllm_contract.py MODEL STORE FILE`` with the engines' own Python writes a JSON object of what is so.
"""

import json
import sys
from pathlib import Path
from unittest.mock import MagicMock, patch

import torch
from vllm.config import CacheConfig, DeviceConfig, KVTransferConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole, supports_hma
from vllm.distributed.kv_transfer.kv_transfer_state import (
    ensure_kv_transfer_initialized,
    ensure_kv_transfer_shutdown,
    get_kv_transfer_group,
)
from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin

from tests.engines.replica_process import transfer_config

_BLOCK = 32


def main() -> None:
    """Check, and write what was found."""
    model, store, file = sys.argv[1:]
    config, cache = _config(model, store), _cache()
    found = {"supports_hma": supports_hma(KVConnectorFactory.get_connector_class(config.kv_transfer_config))}
    with patch("vllm.distributed.get_tensor_model_parallel_rank", return_value=0):
        for role in KVConnectorRole:
            made = KVConnectorFactory.create_connector(config, role, cache)
            found[f"is_made_as_{role.name.lower()}"] = made.role is role
            found[f"keeps_the_cache_config_as_{role.name.lower()}"] = made._kv_cache_config == cache
            found["does_not_require_delivery"] = made.requires_kv_delivery is False
            made.shutdown()
        found |= _without_forward(config, cache)
    Path(file).write_text(json.dumps(found))


def _without_forward(config: VllmConfig, cache: KVCacheConfig) -> dict[str, bool]:
    """Run a step that computes nothing through the worker's own code."""
    ranks = MagicMock()
    ranks.broadcast_object.side_effect = lambda value, src=0: value
    with patch("vllm.distributed.parallel_state.get_tp_group", return_value=ranks):
        ensure_kv_transfer_initialized(config, cache)
    try:
        worker = get_kv_transfer_group()
        planner = KVConnectorFactory.create_connector(config, KVConnectorRole.SCHEDULER, cache)
        output = _empty_output()
        output.kv_connector_metadata = planner.build_connector_meta(output)
        KVConnectorModelRunnerMixin.kv_connector_no_forward(output, config)
        planner.shutdown()
        return {"metadata_is_cleared_after_a_step": worker._connector_metadata is None}
    finally:
        ensure_kv_transfer_shutdown()


def _empty_output() -> SchedulerOutput:
    return SchedulerOutput(
        scheduled_new_reqs=[],
        scheduled_cached_reqs=CachedRequestData.make_empty(),
        num_scheduled_tokens={},
        total_num_scheduled_tokens=0,
        scheduled_spec_decode_tokens={},
        scheduled_encoder_inputs={},
        num_common_prefix_blocks=[],
        finished_req_ids=set(),
        free_encoder_mm_hashes=[],
    )


def _config(model: str, store: str) -> VllmConfig:
    cache = CacheConfig(block_size=_BLOCK, enable_prefix_caching=True)
    cache.kv_cache_layout = "LBHNC"
    return VllmConfig(
        model_config=ModelConfig(model=model, dtype="float32"),
        scheduler_config=SchedulerConfig(
            max_num_seqs=4, max_num_batched_tokens=256, max_model_len=256, is_encoder_decoder=False
        ),
        cache_config=cache,
        kv_transfer_config=KVTransferConfig(**transfer_config(store)),
        device_config=DeviceConfig("cpu"),
    )


def _cache() -> KVCacheConfig:
    spec = FullAttentionSpec(block_size=_BLOCK, num_kv_heads=2, head_size=64, dtype=torch.float32)
    return KVCacheConfig(
        num_blocks=16,
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec(["model.layers.0.attn"], spec)],
        kv_cache_layout="LBHNC",
        hash_block_size=_BLOCK,
    )


if __name__ == "__main__":
    main()
