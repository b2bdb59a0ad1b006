"""SGLang's HiCache storage backend on the store: ``module_path`` names this package.

The package imports without SGLang; only the class needs it.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvstore_engine_adapter.sglang.backend import KVStoreBackend

TESTED_VERSIONS = ("0.5.23",)
"""Versions of SGLang that the backend's tests ran with."""

__all__ = ["TESTED_VERSIONS", "KVStoreBackend"]


def __getattr__(name: str) -> object:
    """Load the backend when it is asked for.

    Raises:
        ImportError: SGLang is not installed, or has another interface.
    """
    if name != "KVStoreBackend":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        # Imported here because the package must be importable without SGLang.
        from kvstore_engine_adapter.sglang.backend import KVStoreBackend
    except ImportError as error:
        tested = ", ".join(TESTED_VERSIONS)
        raise ImportError(
            "kvstore_engine_adapter.sglang: SGLang is not installed here, or is a version without the "
            f"interface that the backend needs (tested: {tested}): "
            f"install sglang=={TESTED_VERSIONS[-1]} ({error})"
        ) from error
    return KVStoreBackend
