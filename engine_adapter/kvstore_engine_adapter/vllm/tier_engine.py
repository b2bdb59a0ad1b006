"""TierEngine: what the tier needs of the engine and its requests, beside what vLLM tells its tiers."""

from dataclasses import dataclass, field
from typing import Any

from kvstore.client import KVStore
from kvstore.tracing import TraceContext
from kvstore_engine_adapter.trace_headers import trace_of
from kvstore_engine_adapter.vllm.identity import EngineIdentity
from kvstore_engine_adapter.vllm.options import ConnectorOptions


@dataclass(slots=True)
class TierEngine:
    """One engine, in its scheduler's process.

    ``identity`` None: its blocks cannot be named. ``adapters`` are the LoRA requests, vLLM's objects, of
    requests that have come and that the tier has not heard of yet; ``traces`` are the spans of such requests.
    """

    identity: EngineIdentity | None
    options: ConnectorOptions
    adapters: dict[str, Any] = field(default_factory=dict)
    traces: dict[str, TraceContext] = field(default_factory=dict)

    def note_request(self, request: Any) -> None:
        """A request has come, vLLM's ``Request``; the tier hears of it next."""
        adapter = getattr(request, "lora_request", None)
        if adapter is not None:
            self.adapters[request.request_id] = adapter
        trace = trace_of(request)
        if trace is not None:
            self.traces[request.request_id] = trace

    def forget_request(self, request_id: str) -> tuple[Any, TraceContext | None]:
        """Return the LoRA request and the span of a request that the tier has heard of, None each without."""
        return self.adapters.pop(request_id, None), self.traces.pop(request_id, None)

    def connect(self) -> KVStore:
        """Return a client of the store."""
        return KVStore.connect(self.options.store, is_read_only=self.options.is_read_only)
