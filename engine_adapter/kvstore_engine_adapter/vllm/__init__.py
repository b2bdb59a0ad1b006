"""vLLM's connector to the store: ``kv_connector_module_path`` names this package.

The package imports without vLLM; only the class needs it.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvstore_engine_adapter.vllm.connector import KVStoreConnector

TESTED_VERSIONS = ("0.32.0",)
"""Versions of vLLM that the connector's tests ran with."""

__all__ = ["TESTED_VERSIONS", "KVStoreConnector"]


def __getattr__(name: str) -> object:
    """Load the connector when it is asked for.

    Raises:
        ImportError: vLLM is not installed, or has another interface.
    """
    if name != "KVStoreConnector":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        # Imported here because the package must be importable without vLLM.
        from kvstore_engine_adapter.vllm.connector import KVStoreConnector
    except ImportError as error:
        tested = ", ".join(TESTED_VERSIONS)
        raise ImportError(
            f"kvstore_engine_adapter.vllm: vLLM is not installed here, or is a version without the interface "
            f"that the connector needs (tested: {tested}): install vllm=={TESTED_VERSIONS[-1]} ({error})"
        ) from error
    return KVStoreConnector
