"""vLLM's interface as the connectors use it, from a module for each minor version. It needs vLLM.

An older version than the oldest known one is refused. A newer one than the newest gets that one's module: if
vLLM has not changed what it names, it works; blocks of two minor versions are never taken for each other's.
"""

import importlib
import logging
import re
from typing import Any

import vllm

logger = logging.getLogger("vllm.kvstore")

SHIMS = {(0, 32): "interface_0_32"}
"""The module for each minor version that is known."""

VERSION = str(vllm.__version__)


def shim_of(version: str) -> str:
    """Return the name of the module for a version.

    Raises:
        ImportError: the version is older than all that are known, or says nothing that can be read.
    """
    found = re.match(r"(\d+)\.(\d+)", version)
    minor = (int(found[1]), int(found[2])) if found else (0, 0)
    if minor < min(SHIMS):
        oldest = ".".join(map(str, min(SHIMS)))
        raise ImportError(f"vllm is {version}: the connectors need {oldest} or a later one")
    if minor not in SHIMS:
        newest = ".".join(map(str, max(SHIMS)))
        logger.warning("kvstore: vllm %s was not tried with the connectors, %s was", version, newest)
    return SHIMS[max(known for known in SHIMS if known <= minor)]


_shim: Any = importlib.import_module(f"kvstore_engine_adapter.vllm.{shim_of(VERSION)}")

BlockRemoved: Any = _shim.BlockRemoved
BlockStored: Any = _shim.BlockStored
JobResult: Any = _shim.JobResult
KVConnectorBase_V1: Any = _shim.KVConnectorBase_V1
KVConnectorMetadata: Any = _shim.KVConnectorMetadata
KVConnectorPromMetrics: Any = _shim.KVConnectorPromMetrics
KVConnectorRole: Any = _shim.KVConnectorRole
KVConnectorStats: Any = _shim.KVConnectorStats
KVConnectorTransferResults: Any = _shim.KVConnectorTransferResults
KVConnectorWorkerMetadata: Any = _shim.KVConnectorWorkerMetadata
LookupResult: Any = _shim.LookupResult
MEDIUM_STORAGE: Any = _shim.MEDIUM_STORAGE
Medium: Any = _shim.Medium
OffloadingConnector: Any = _shim.OffloadingConnector
OffloadingConnectorStats: Any = _shim.OffloadingConnectorStats
OffloadingCounterMetadata: Any = _shim.OffloadingCounterMetadata
OffloadingEvent: Any = _shim.OffloadingEvent
RequestOffloadingContext: Any = _shim.RequestOffloadingContext
SecondaryTierManager: Any = _shim.SecondaryTierManager
SupportsHMA: Any = _shim.SupportsHMA
maybe_convert_block_hash: Any = _shim.maybe_convert_block_hash
none_hash: Any = _shim.none_hash
tensor_parallel_rank: Any = _shim.tensor_parallel_rank
