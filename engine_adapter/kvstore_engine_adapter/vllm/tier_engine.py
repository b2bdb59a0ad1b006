"""TierEngine: what the tier needs of the engine and its requests, beside what vLLM tells its tiers."""

from dataclasses import dataclass, field
from typing import Any

from kvstore.client import KVStore
from kvstore_engine_adapter.vllm.identity import EngineIdentity
from kvstore_engine_adapter.vllm.options import ConnectorOptions


@dataclass(slots=True)
class TierEngine:
    """One engine, in its scheduler's process.

    ``identity`` None: its blocks cannot be named. ``adapters`` are the LoRA requests, vLLM's objects, of
    requests that have come and that the tier has not heard of yet.
    """

    identity: EngineIdentity | None
    options: ConnectorOptions
    adapters: dict[str, Any] = field(default_factory=dict)

    def note_request(self, request: Any) -> None:
        """A request has come, vLLM's ``Request``; the tier hears of it next."""
        adapter = getattr(request, "lora_request", None)
        if adapter is not None:
            self.adapters[request.request_id] = adapter

    def forget_request(self, request_id: str) -> Any:
        """Return the LoRA request of a request that the tier has heard of, None if it has none."""
        return self.adapters.pop(request_id, None)

    def connect(self) -> KVStore:
        """Return a client of the store."""
        return KVStore.connect(self.options.store, is_read_only=self.options.is_read_only)
