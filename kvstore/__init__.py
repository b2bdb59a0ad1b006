"""Tiered KV-cache storage for LLM inference: names, layouts and the clients."""

from kvstore.errors import KVStoreError
from kvstore.keys import BlockKey, Namespace, PrefixChain
from kvstore.layout import KVLayout, Part

__version__ = "0.1.0"

__all__ = ["BlockKey", "KVLayout", "KVStoreError", "Namespace", "Part", "PrefixChain", "__version__"]
