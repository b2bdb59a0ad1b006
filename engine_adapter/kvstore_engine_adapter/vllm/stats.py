"""ConnectorStats: what the connector has counted, in vLLM's log and its Prometheus metrics.

Counts of one interval; vLLM adds up those of all workers and of the scheduler.
"""

from collections.abc import Mapping
from typing import Any

from kvstore_engine_adapter.vllm.counted import MISS, NAMES
from kvstore_engine_adapter.vllm.interface import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)


class ConnectorStats(KVConnectorStats):  # type: ignore[misc]  # vLLM is not installed where types are checked
    """Counts by name; those that begin with ``miss_`` count lookups that found less than all, by reason."""

    def reset(self) -> None:
        """Count from zero."""
        self.data.clear()

    def aggregate(self, other: "ConnectorStats") -> "ConnectorStats":
        """Add another's counts."""
        for name, count in other.data.items():
            self.data[name] = self.data.get(name, 0) + count
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return what the log shows."""
        return dict(self.data)

    def is_empty(self) -> bool:
        """Whether nothing was counted."""
        return not any(self.data.values())


class ConnectorMetrics(KVConnectorPromMetrics):  # type: ignore[misc]  # the same
    """``vllm:kvstore_<name>_total``, and ``vllm:kvstore_misses_total`` by ``reason``."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        labels: list[str] = given[2]
        engines: dict[int, list[object]] = given[3]
        self._counters = {}
        for name, text in NAMES.items():
            counter = self._counter_cls(name=f"vllm:kvstore_{name}", documentation=text, labelnames=labels)
            self._counters[name] = {engine: counter.labels(*values) for engine, values in engines.items()}
        self._misses = self._counter_cls(
            name="vllm:kvstore_misses",
            documentation="lookups that found less than all, by reason",
            labelnames=[*labels, "reason"],
        )

    def observe(self, transfer_stats_data: Mapping[str, Any], engine_idx: int = 0) -> None:
        """Add the counts of an interval."""
        for name, count in transfer_stats_data.items():
            if name in self._counters:
                self._counters[name][engine_idx].inc(count)
            elif name.startswith(MISS):
                values = [*self.per_engine_labelvalues[engine_idx], name.removeprefix(MISS)]
                self._misses.labels(*values).inc(count)
