"""vLLM's connectors to the store: ``kv_connector_module_path`` names this package.

The package imports without vLLM; only the classes need it.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvstore_engine_adapter.vllm.connector import KVStoreConnector
    from kvstore_engine_adapter.vllm.offloading import KVStoreOffloadingConnector
    from kvstore_engine_adapter.vllm.tier import KVStoreTier

TESTED_VERSIONS = ("0.32.0",)
"""Versions of vLLM that the connector's tests ran with."""

__all__ = ["TESTED_VERSIONS", "KVStoreConnector", "KVStoreOffloadingConnector", "KVStoreTier"]

_MODULES = {
    "KVStoreConnector": "connector",
    "KVStoreOffloadingConnector": "offloading",
    "KVStoreTier": "tier",
}


def __getattr__(name: str) -> object:
    """Load a class that needs vLLM when it is asked for.

    Raises:
        ImportError: vLLM is not installed, or has another interface.
    """
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = importlib.import_module(f"{__name__}.{_MODULES[name]}")
    except ImportError as error:
        tested = ", ".join(TESTED_VERSIONS)
        raise ImportError(
            f"kvstore_engine_adapter.vllm: vLLM is not installed here, or is a version without the interface "
            f"that the connector needs (tested: {tested}): install vllm=={TESTED_VERSIONS[-1]} ({error})"
        ) from error
    return getattr(module, name)
