"""TierWork: a tier's requests, loads and saves, without a word of vLLM's own."""

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from kvstore.keys import BlockKey
from kvstore_engine_adapter.block_transfers import BlockLoads, BlockSaves, LoadDone, Move, SaveDone
from kvstore_engine_adapter.prefix_lookups import PrefixLookups
from kvstore_engine_adapter.request_wishes import RequestWishes
from kvstore_engine_adapter.vllm.identity import EngineIdentity
from kvstore_engine_adapter.vllm.request_groups import RequestGroups
from kvstore_engine_adapter.vllm.tier_engine import TierEngine
from kvstore_engine_adapter.vllm.tier_requests import ChunkKey, TierRequests
from kvstore_engine_adapter.vllm.tier_rows import TierRows

_IDLE_PATIENCE_S = 0.001
_DRAIN_STEP_S = 0.002


@dataclass(frozen=True, slots=True)
class JobDone:
    """A job has ended: of its chunks, ``good`` are where they should be, ``failed`` are not.

    ``stored`` are those of a save that the store has from this job.
    """

    job_id: int
    is_load: bool
    good: tuple[ChunkKey, ...]
    failed: tuple[ChunkKey, ...]
    stored: tuple[ChunkKey, ...] = ()
    seconds: float = 0.0
    size_bytes: int = 0


@dataclass(frozen=True, slots=True)
class _Job:
    """A job under way: whose it is, and its chunks by the rows they are in and by their names."""

    job_id: int
    request_id: str
    is_load: bool
    by_row: dict[int, ChunkKey]
    by_name: dict[BlockKey, ChunkKey]


class TierWork:
    """All that one tier does. Every method is called from the scheduler's thread; only ``drain`` waits."""

    def __init__(
        self,
        engine: TierEngine,
        identity: EngineIdentity,
        rows: TierRows,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        options = engine.options
        self._engine = engine
        self._rows = rows
        self._clock = clock
        self._client = engine.connect()
        self._is_read_only = options.is_read_only
        self._groups = RequestGroups(identity.groups, self._client.open_namespace)
        deadline_s, load_s = options.lookup_deadline_ms / 1000, options.load_deadline_ms / 1000
        self._lookups = PrefixLookups(self._client, identity.parts, deadline_s=deadline_s)
        self.requests = TierRequests(self._lookups, chunk_tokens=identity.block_tokens)
        self._loads = BlockLoads(self._client, rows, None, deadline_s=load_s)
        self._saves = BlockSaves(self._client, rows, None, queue_bytes=options.save_queue_bytes, reports=True)
        self._jobs: dict[str, _Job] = {}
        self._ended: list[JobDone] = []

    def begin(self, context: Any) -> None:  # Any: vLLM's ReqContext
        """A request has come."""
        wishes = RequestWishes.read(context.kv_transfer_params)
        self._lookups.counts.add("bad_params", wishes.num_bad)
        adapter, trace = self._engine.forget_request(context.req_id)
        self.requests.begin(context.req_id, self._groups.groups(adapter, wishes), wishes, trace)

    def forget(self, request_id: str) -> None:
        """A request has ended; its jobs may still be under way."""
        self.requests.forget(request_id)

    def end_step(self, started: Collection[str], preempted: Collection[str]) -> None:
        """Send the questions of a step in which these requests were begun and put back."""
        self.requests.note_running(started, preempted)
        self.requests.ask()

    def submit(
        self, job_id: int, keys: Sequence[ChunkKey], rows: Sequence[int], context: Any, *, is_load: bool
    ) -> None:
        """Begin a job: chunks that go into rows of vLLM's cache, or come out of them."""
        name = str(job_id)
        move: Move | None = None
        if is_load:
            move = self.requests.load_move(name, keys, rows, context)
        elif not self._is_read_only:
            move = self.requests.save_move(name, keys, rows, context)
        if move is None or not move.groups:
            good, failed = ((), tuple(keys)) if is_load else (tuple(keys), ())
            self._ended.append(JobDone(job_id, is_load, good, failed))
            return
        by_row = dict(zip(rows, keys, strict=True))
        by_name = {
            key: by_row[row]
            for one in move.groups
            for key, row in zip(one.chain.keys, one.pages, strict=True)
        }
        self._jobs[name] = _Job(job_id, context.req_id, is_load, by_row, by_name)
        if is_load:
            self._loads.begin(move)
        else:
            self._saves.begin(move)

    def take_done(self) -> list[JobDone]:
        """Return the jobs that have ended since; while nothing is computed, wait 1 ms for one or for answers.

        An engine that has nothing to compute steps as fast as it can, and keeps other threads from running.
        """
        is_waiting = self.requests.is_idle and not self._ended
        patience_s = _IDLE_PATIENCE_S if is_waiting else 0.0
        if self.requests.is_asking:
            self.requests.settle(patience_s=patience_s)
            patience_s = 0.0
        return self._take(patience_s)

    def drain(self) -> None:
        """Wait until all jobs have ended; ``take_done`` returns them."""
        while self._jobs:
            self._ended = self._take(_DRAIN_STEP_S)
            if self._jobs and self._loads.is_idle:
                time.sleep(_DRAIN_STEP_S)

    def take_counts(self) -> dict[str, int]:
        """Return what was counted since the last time."""
        return self._lookups.counts.take() | self._loads.counts.take() | self._saves.counts.take()

    def close(self) -> None:
        """End the threads and let go of the rows; what waits to be saved is if the store takes it soon."""
        self._loads.close()
        self._saves.close()
        self._lookups.close()
        self._groups.close()
        self._rows.release()
        self._client.close()

    def _take(self, patience_s: float) -> list[JobDone]:
        done, self._ended = self._ended, []
        done += [self._loaded(one) for one in self._loads.take_done(patience_s=patience_s)]
        done += [self._saved(one) for one in self._saves.take_done()]
        return done

    def _loaded(self, ended: LoadDone) -> JobDone:
        job = self._jobs.pop(ended.request_id)
        bad = {row for _, row in ended.failed}
        failed = tuple(key for row, key in job.by_row.items() if row in bad)
        good = tuple(key for row, key in job.by_row.items() if row not in bad)
        self.requests.note_load(job.request_id, failed)
        size_bytes = len(good) * self._rows.block_bytes(0)
        return JobDone(job.job_id, True, good, failed, (), ended.seconds, size_bytes)

    def _saved(self, ended: SaveDone) -> JobDone:
        job = self._jobs.pop(ended.request_id)
        stored = tuple(job.by_name[key] for key in ended.stored)
        # vLLM's tiers may drop what they are given, so a save that found no room has not failed.
        failed = tuple(job.by_row.values()) if ended.num_dropped == len(job.by_row) else ()
        good = () if failed else tuple(job.by_row.values())
        size_bytes = len(stored) * self._rows.block_bytes(0)
        return JobDone(job.job_id, False, good, failed, stored, ended.seconds, size_bytes)
