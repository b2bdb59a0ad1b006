"""KVStoreConnector: the class that vLLM loads. It needs vLLM; what it does is in the two sides."""

import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from kvstore.client import KVStore
from kvstore.errors import InvalidConfig
from kvstore_engine_adapter.vllm.engine_identity import identify_engine
from kvstore_engine_adapter.vllm.interface import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
    tensor_parallel_rank,
)
from kvstore_engine_adapter.vllm.kv_events import BlockReport, as_vllm_events
from kvstore_engine_adapter.vllm.options import ConnectorOptions
from kvstore_engine_adapter.vllm.plans import StepPlan
from kvstore_engine_adapter.vllm.scheduler_side import SchedulerSide
from kvstore_engine_adapter.vllm.stats import ConnectorMetrics, ConnectorStats
from kvstore_engine_adapter.vllm.worker_side import WorkerSide

if TYPE_CHECKING:
    import torch

logger = logging.getLogger("vllm.kvstore")

KVConnectorMetadata.register(StepPlan)


class KVStoreConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]  # vLLM's classes have no types
    """Shares vLLM's blocks through a store: loads ahead of a request, saves after each step.

    vLLM makes one for the scheduler and one for each worker. If blocks of this configuration cannot be named
    for certain, it says so in the log once and does nothing.

    Raises:
        InvalidConfig: an option is unknown or has a bad value, or ``kv_load_failure_policy`` is not
            "recompute".
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        if transfer.kv_load_failure_policy != "recompute":
            raise InvalidConfig(
                'kv_transfer_config: set "kv_load_failure_policy": "recompute", otherwise vLLM fails a '
                "request whose blocks cannot be loaded"
            )
        self._options = ConnectorOptions.parse(transfer.kv_connector_extra_config)
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        self._has_many_groups = len(kv_cache_config.kv_cache_groups) > 1
        self._failed_pages: set[int] = set()
        self._identity = identify_engine(vllm_config, kv_cache_config, self._options)
        if self._identity is None:
            return
        events = getattr(vllm_config, "kv_events_config", None)
        tells_events = bool(getattr(events, "enable_kv_cache_events", False))
        if role is KVConnectorRole.SCHEDULER:
            self._scheduler = SchedulerSide(
                self._connect(), self._identity, self._options, tells_events=tells_events
            )
            logger.info(
                "kvstore: shares blocks of %d tokens through %s",
                self._identity.block_tokens,
                self._options.store,
            )
        else:
            self._worker = WorkerSide(
                self._connect(),
                self._identity,
                self._options,
                rank=tensor_parallel_rank(),
                tells_events=tells_events,
            )

    def _connect(self) -> KVStore:
        return KVStore.connect(self._options.store, is_read_only=self._options.is_read_only)

    @property
    def requires_kv_delivery(self) -> bool:
        """A save that is dropped is a later miss, nothing more."""
        return False

    # The worker's side.

    def register_kv_caches(self, kv_caches: "dict[str, torch.Tensor]") -> None:
        """Take the tensors of the KV cache."""
        if self._worker is not None:
            self._worker.register(kv_caches)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Begin the loads of this step."""
        plan = self._connector_metadata
        if self._worker is not None and isinstance(plan, StepPlan):
            self._worker.begin_loads(plan)

    def has_connector_metadata(self) -> bool:
        """Say no: vLLM asks before each layer, to wait for it and to save it, and both are nothing here."""
        return False

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: a request waits for its loads before it is computed."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing: blocks are saved after the step."""

    def wait_for_save(self) -> None:
        """Take snapshots of the blocks that this step has filled."""
        plan = self._connector_metadata
        if self._worker is not None and isinstance(plan, StepPlan):
            self._worker.begin_saves(plan)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Return the requests whose loads have ended; saves hold no request."""
        loaded, _ = self._take_loaded()
        return None, loaded or None

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """Return the requests whose loads have ended, and those of several groups that have failed."""
        loaded, failed = self._take_loaded()
        return KVConnectorTransferResults(
            finished_sending=set(), finished_recving=loaded, failed_recving=failed
        )

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the pages that loads left without their bytes."""
        failed, self._failed_pages = self._failed_pages, set()
        return failed

    def build_connector_worker_meta(self) -> BlockReport | None:
        """Return which blocks this rank has stored and found gone since, if events are told."""
        if self._worker is None:
            return None
        stored, gone = self._worker.take_stored(), self._worker.take_gone()
        return BlockReport(stored, gone) if stored or gone else None

    def get_kv_connector_stats(self) -> ConnectorStats | None:
        """Return what this side has counted since the last time."""
        counts: dict[str, int] = {}
        if self._worker is not None:
            counts = self._worker.take_counts()
        elif self._scheduler is not None:
            counts = self._scheduler.lookups.counts.take()
        return ConnectorStats(dict(counts)) if counts else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> ConnectorStats:
        """Return counts that came from another process."""
        return ConnectorStats(data or {})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: Any, per_engine_labelvalues: Any
    ) -> ConnectorMetrics:
        """Return the connector's Prometheus metrics."""
        return ConnectorMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        """End the threads and connections."""
        for side in (self._worker, self._scheduler):
            if side is not None:
                side.close()
        self._worker = self._scheduler = None

    def _take_loaded(self) -> tuple[set[str], set[str]]:
        plan = self._connector_metadata
        if self._worker is None:
            return set(), set()
        done = self._worker.take_loaded(is_idle=isinstance(plan, StepPlan) and plan.is_idle)
        failed = {one.request_id for one in done if one.failed}
        if not self._has_many_groups:
            self._failed_pages |= {page for one in done for _, page in one.failed}
            failed = set()
        return {one.request_id for one in done}, failed

    # The scheduler's side.

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Return how many tokens can be loaded (None: not known yet), and that they are loaded meanwhile."""
        if self._scheduler is None:
            return 0, False
        tokens = self._scheduler.blocks_to_load(request, num_computed_tokens)
        return tokens, tokens is not None and tokens > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Plan the load of what was promised."""
        if self._scheduler is not None and num_external_tokens:
            self._scheduler.plan_load(request, blocks.get_block_ids(), num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        """Return the plan of this step."""
        if self._scheduler is None:
            return StepPlan()
        return self._scheduler.plan_step(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        """Learn which loads have ended."""
        if self._scheduler is not None:
            self._scheduler.note_output(connector_output)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Forget a request; its blocks may be freed at once."""
        if self._scheduler is not None:
            self._scheduler.forget(request.request_id)
        return False, None

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Forget a request; its blocks may be freed at once."""
        return self.request_finished(request, [])

    def reset_cache(self) -> bool | None:
        """Say that nothing was forgotten: the store is not this engine's alone."""
        logger.warning(
            "kvstore: the store forgets nothing when this engine's cache is reset; if weights have changed "
            "in place, run: kvstore epoch --advance, and restart the replicas"
        )
        return False

    def take_events(self) -> Iterable[Any]:
        """Return what this engine has stored, and what of it lookups and loads have found gone since."""
        if self._scheduler is None or self._identity is None:
            return ()
        return as_vllm_events(self._scheduler.take_events(), self._identity.block_tokens)
