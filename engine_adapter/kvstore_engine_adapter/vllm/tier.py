"""KVStoreTier: the store as a tier behind vLLM's CPU cache. It needs vLLM.

vLLM moves blocks between the GPU and a CPU cache of its own, in chunks; the tier moves chunks between that
cache and the store. It lives in the scheduler's process alone, and none of its calls waits.
"""

import logging
from collections.abc import Collection, Iterable
from typing import Any

from kvstore.errors import InvalidLayout, KVStoreError
from kvstore_engine_adapter.model_identity import NotNameable
from kvstore_engine_adapter.vllm.counted import MISS, NAMES
from kvstore_engine_adapter.vllm.interface import (
    VERSION,
    JobResult,
    LookupResult,
    Medium,
    OffloadingConnectorStats,
    OffloadingCounterMetadata,
    OffloadingEvent,
    RequestOffloadingContext,
    SecondaryTierManager,
)
from kvstore_engine_adapter.vllm.tier_engine import TierEngine
from kvstore_engine_adapter.vllm.tier_requests import Answer
from kvstore_engine_adapter.vllm.tier_rows import TierRows, chunk_bytes_of, chunk_identity
from kvstore_engine_adapter.vllm.tier_work import JobDone, TierWork

logger = logging.getLogger("vllm.kvstore")

_ANSWERS = {
    Answer.HIT: LookupResult.HIT,
    Answer.MISS: LookupResult.MISS,
    Answer.NOT_YET: LookupResult.RETRY,
}
_METRIC = "vllm:kvstore_{}"


class KVStoreTier(SecondaryTierManager):  # type: ignore[misc]  # vLLM is not there for mypy
    """Chunks of vLLM's CPU cache in a store.

    ``engine`` comes from ``KVStoreOffloadingConnector``: vLLM tells its tiers too little of the model to name
    blocks for certain. Without it, or if they cannot be named, nothing is stored and everything is a miss.
    """

    medium = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        *,
        engine: TierEngine | None = None,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        self._emits_events = bool(offloading_spec.config.enable_kv_cache_events)
        self._events: list[Any] = []
        self._refused: list[Any] = []
        self._engine = engine
        self._work = self._open(offloading_spec, primary_kv_view, engine)

    def _open(self, spec: Any, view: memoryview, engine: TierEngine | None) -> TierWork | None:
        if engine is None:
            logger.error(
                "kvstore: nothing is shared: vLLM's OffloadingConnector does not tell the tier what the "
                'model is: set "kv_connector": "KVStoreOffloadingConnector"'
            )
            return None
        if engine.identity is None:
            return None
        try:
            identity = chunk_identity(engine.identity, spec, version=VERSION)
            rows = TierRows(view, chunk_bytes_of(spec))
        except (NotNameable, InvalidLayout, KVStoreError) as error:
            logger.error("kvstore: nothing is shared: %s", error)
            return None
        logger.info(
            "kvstore: shares chunks of %d tokens and %d bytes through %s",
            identity.block_tokens,
            rows.block_bytes(0),
            engine.options.store,
        )
        return TierWork(engine, identity, rows)

    def on_new_request(self, req_context: Any) -> Any:
        """A request has come."""
        if self._work is not None:
            self._work.begin(req_context)
        elif self._engine is not None:
            self._engine.forget_request(req_context.req_id)
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: Any) -> None:
        """A request has ended; its jobs may still be under way."""
        if self._work is not None:
            self._work.forget(req_context.req_id)

    def lookup(self, key: Any, req_context: Any) -> Any:
        """Say whether a chunk is stored: RETRY until the store has answered, or its time is over."""
        if self._work is None:
            return LookupResult.MISS
        return _ANSWERS[self._work.requests.answer(bytes(key), req_context)]

    def submit_store(self, job_metadata: Any) -> None:
        """Begin to store chunks."""
        self._submit(job_metadata, is_load=False)

    def submit_load(self, job_metadata: Any) -> None:
        """Begin to load chunks."""
        self._submit(job_metadata, is_load=True)

    def _submit(self, job: Any, *, is_load: bool) -> None:
        if self._work is None:
            self._refused.append(JobResult(job_id=job.job_id, success=False))
            return
        keys, rows = [bytes(key) for key in job.keys], [int(at) for at in job.chunk_ids]
        self._work.submit(job.job_id, keys, rows, job.req_context, is_load=is_load)

    def get_finished_jobs(self) -> Iterable[Any]:
        """Return the jobs that have ended since."""
        refused, self._refused = self._refused, []
        if self._work is None:
            return refused
        done = self._work.take_done()
        if self._emits_events:
            self._events += [self._event(one) for one in done if one.stored]
        return [*refused, *(self._result(one) for one in done)]

    @staticmethod
    def _result(done: JobDone) -> Any:
        return JobResult(
            job_id=done.job_id,
            success=not done.failed,
            successful_keys=list(done.good) if done.is_load else None,
            transfer_time=done.seconds,
            transfer_bytes=done.size_bytes,
        )

    def _event(self, done: JobDone) -> Any:
        return OffloadingEvent(
            keys=list(done.stored), medium=Medium.STORAGE, removed=False, ownership=self.tier_type
        )

    def take_events(self) -> Iterable[Any]:
        """Return what was stored since the last time. The store drops blocks without telling its engines."""
        events, self._events = self._events, []
        return events

    def on_schedule_end(self, context: Any) -> None:
        """Send the questions of this step."""
        if self._work is not None:
            self._work.end_step(context.new_req_ids, context.preempted_req_ids)

    def touch(self, keys: Collection[Any], req_context: Any) -> None:
        """Nothing: the store sees its own uses, and these were of vLLM's cache."""

    def drain_jobs(self) -> None:
        """Wait until every job has ended: at most as long as their deadlines."""
        if self._work is not None:
            self._work.drain()

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, Any]:
        """Return the tier's Prometheus metrics, named as the connector's."""
        made = {
            _METRIC.format(name): OffloadingCounterMetadata(documentation=text)
            for name, text in NAMES.items()
        }
        made[_METRIC.format("misses")] = OffloadingCounterMetadata(
            documentation="lookups that found less than all, by reason", labelnames=("reason",)
        )
        return made

    def get_stats(self) -> Any:
        """Return what was counted since the last time."""
        counts = {} if self._work is None else self._work.take_counts()
        if not counts:
            return None
        stats = OffloadingConnectorStats()
        for name, count in counts.items():
            if name in NAMES:
                stats.increase_counter(_METRIC.format(name), count)
            elif name.startswith(MISS):
                stats.increase_counter(_METRIC.format("misses"), count, (name.removeprefix(MISS),))
        return stats

    def shutdown(self) -> None:
        """End the threads and let go of vLLM's memory."""
        work, self._work = self._work, None
        if work is not None:
            work.close()
        self._primary_kv_view = memoryview(b"")
