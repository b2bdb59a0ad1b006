"""What the connectors use of vLLM 0.32, under the names that all versions have here. It needs vLLM."""

from typing import Any

from vllm.distributed.kv_events import (  # pyright: ignore[reportMissingImports]
    MEDIUM_STORAGE,
    BlockRemoved,
    BlockStored,
)
from vllm.distributed.kv_transfer.kv_connector.v1.base import (  # pyright: ignore[reportMissingImports]
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (  # pyright: ignore[reportMissingImports]
    KVConnectorPromMetrics,
    KVConnectorStats,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (  # pyright: ignore[reportMissingImports]
    OffloadingConnectorStats,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import (  # pyright: ignore[reportMissingImports]
    OffloadingConnector,
)
from vllm.utils.hashing import get_hash_fn_by_name  # pyright: ignore[reportMissingImports]
from vllm.v1.core.kv_cache_utils import (  # pyright: ignore[reportMissingImports]
    maybe_convert_block_hash,
    resolve_none_hash_seed,
)
from vllm.v1.kv_offload.base import (  # pyright: ignore[reportMissingImports]
    LookupResult,
    Medium,
    OffloadingCounterMetadata,
    OffloadingEvent,
    RequestOffloadingContext,
)
from vllm.v1.kv_offload.tiering.base import (  # pyright: ignore[reportMissingImports]
    JobResult,
    SecondaryTierManager,
)

__all__ = [
    "MEDIUM_STORAGE",
    "BlockRemoved",
    "BlockStored",
    "JobResult",
    "KVConnectorBase_V1",
    "KVConnectorMetadata",
    "KVConnectorPromMetrics",
    "KVConnectorRole",
    "KVConnectorStats",
    "KVConnectorTransferResults",
    "KVConnectorWorkerMetadata",
    "LookupResult",
    "Medium",
    "OffloadingConnector",
    "OffloadingConnectorStats",
    "OffloadingCounterMetadata",
    "OffloadingEvent",
    "RequestOffloadingContext",
    "SecondaryTierManager",
    "SupportsHMA",
    "maybe_convert_block_hash",
    "none_hash",
    "tensor_parallel_rank",
]


def none_hash(vllm_config: Any) -> bytes:
    """Return the seed of the block hashes as vLLM makes it from this environment."""
    hash_fn = get_hash_fn_by_name(vllm_config.cache_config.prefix_caching_hash_algo)
    return bytes(hash_fn(resolve_none_hash_seed(hash_fn)))


def tensor_parallel_rank() -> int:
    """Return the rank of this worker."""
    # Imported here because only a worker has ranks.
    from vllm.distributed import (  # pyright: ignore[reportMissingImports]
        get_tensor_model_parallel_rank,
    )

    return int(get_tensor_model_parallel_rank())
