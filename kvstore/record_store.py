"""RecordStore: the records of one store, as clients ask for them: in bounded time and memory, and counted."""

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Coroutine
from typing import Any, TypeVar

from kvstore.errors import KVStoreError, TierUnavailable, TimedOut
from kvstore.record_truth import ListQuery, Named, RecordTruth, unavailable
from kvstore.records import RecordInfo, RecordKey, RecordLookup, RecordPlace, RecordPut, RecordWrite
from kvstore.tenant import TenantId, tenant_of

logger = logging.getLogger(__name__)

T = TypeVar("T")

MAX_PENDING_BYTES = 64 << 20
"""Values of puts that may be under way at a time."""

_MAX_PENDING = 1024
_SWEEP_S = 1.0
_CLOSE_S = 5.0
_ERASE_S = 2.0
_CHECK_S = 5.0
_END_S = 0.02
_LEAST_S = 0.05
"""What a call is given at least: with less, not even what is in memory could be looked at."""

_OFF = "this store keeps no records: set records_bytes of [store]"


class RecordStore:
    """Serves records. ``truth`` None: it keeps none. One event loop's thread.

    A call that its caller stops waiting for goes on to its end; how many do is bounded.
    """

    def __init__(self, truth: RecordTruth | None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._truth = truth
        self._clock = clock
        self._pending: set[asyncio.Task[Any]] = set()  # Any: what late work returns is dropped
        self._pending_bytes = 0
        self._sweeper: asyncio.Task[None] | None = None
        self._is_open = False
        self._unerased: dict[TenantId, Collection[bytes]] = {}
        self._puts: Counter[str] = Counter()
        self._gets: Counter[str] = Counter()
        self._absent: Counter[str] = Counter()
        self._calls: Counter[str] = Counter()

    @property
    def is_durable(self) -> bool:
        """Whether records survive the process."""
        return self._truth is not None and self._truth.place is not RecordPlace.MEMORY

    async def open(self) -> None:
        """Read what is there, and say so where it is in memory only. Never fails: see ``stats``."""
        if self._truth is None:
            return
        await self._truth.open()
        if not self.is_durable:
            logger.info("records: kept in memory only: there is neither [tiers.ssd] nor [tiers.remote]")
        self._is_open = True
        self._sweeper = asyncio.create_task(self._sweep_forever(), name="records-sweep")

    async def close(self) -> None:
        """Finish what is under way, within seconds. Idempotent."""
        self._is_open = False
        sweeper, self._sweeper = self._sweeper, None
        if sweeper is not None:
            sweeper.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await sweeper
        if self._pending:
            await asyncio.wait(set(self._pending), timeout=_CLOSE_S)
        if self._truth is not None:
            await self._truth.close()
        for task in self._pending:
            task.cancel()

    async def put(self, put: RecordPut, *, timeout_s: float) -> RecordWrite:
        """Store a record. Every failure is an outcome."""
        write = await self._put(put, timeout_s)
        self._puts[write.outcome.value] += 1
        return write

    async def _put(self, put: RecordPut, timeout_s: float) -> RecordWrite:
        if self._pending_bytes + len(put.value) > MAX_PENDING_BYTES:
            return unavailable(f"puts of {self._pending_bytes} bytes are under way, no more: try again")
        try:
            truth = self._open_truth()
            named, deadline_s = Named.of(put.key), self._deadline_s(timeout_s)
            work = truth.put(put, named, deadline_s=deadline_s)
            return await self._within(work, timeout_s, len(put.value))
        except TimedOut as error:
            return unavailable(str(error), is_doubtful=True)
        except TierUnavailable as error:
            return unavailable(str(error))

    async def get(self, key: RecordKey, *, timeout_s: float) -> RecordLookup:
        """Return a record, or why there is none.

        Raises:
            TierUnavailable, TimedOut: it is not known whether there is one.
        """
        try:
            truth = self._open_truth()
            deadline_s = self._deadline_s(timeout_s)
            found = await self._within(truth.get(Named.of(key), deadline_s=deadline_s), timeout_s)
        except KVStoreError:
            self._gets["unavailable"] += 1
            raise
        if found.record is not None:
            self._gets[found.record.place.value] += 1
            self._gets["not_current"] += not found.record.is_current
        else:
            assert found.reason is not None, "a record that is absent has a reason"
            self._gets["absent"] += 1
            self._absent[found.reason.value] += 1
        return found

    async def drop(self, key: RecordKey, *, timeout_s: float) -> bool:
        """Forget a record; whether there was one.

        Raises:
            TierUnavailable, TimedOut: it is not known whether it is gone.
        """
        truth = self._open_truth()
        self._calls["drops"] += 1
        deadline_s = self._deadline_s(timeout_s)
        return await self._within(truth.drop(Named.of(key), deadline_s=deadline_s), timeout_s)

    async def names(
        self, tenant_salt: bytes, collection: str, *, prefix: str, after: str, limit: int, timeout_s: float
    ) -> list[RecordInfo]:
        """Return the records of a collection by name.

        Raises:
            TierUnavailable, TimedOut: it is not known which there are.
        """
        truth = self._open_truth()
        self._calls["listings"] += 1
        query = ListQuery(tenant_of(tenant_salt), collection, prefix, after, limit)
        deadline_s = self._deadline_s(timeout_s)
        return await self._within(truth.names(query, deadline_s=deadline_s), timeout_s)

    async def erase(self, tenant: TenantId, key_ids: Collection[bytes]) -> tuple[int, list[str]]:
        """Forget those of a tenant's records whose key is gone; ``key_ids`` are erased ones.

        Returns how many, and what is tried again.
        """
        if self._truth is None:
            return 0, []
        key_ids = {*key_ids, *self._unerased.get(tenant, ())}
        try:
            work = self._truth.erase(tenant, key_ids, deadline_s=self._clock() + _ERASE_S)
            count, problems = await self._within(work, _ERASE_S)
        except KVStoreError as error:
            count, problems = 0, [str(error)]
        if problems:
            self._unerased[tenant] = key_ids
        else:
            self._unerased.pop(tenant, None)
        return count, problems

    def stats(self) -> dict[str, object]:
        """Return what there is and what happened, ready for JSON."""
        if self._truth is None:
            return {"is_on": False}
        return {
            "is_on": True,
            "place": self._truth.place.value,
            "is_durable": self.is_durable,
            **self._truth.stats(),
            "puts": dict(self._puts),
            "gets": dict(self._gets),
            "absent": dict(self._absent),
            **self._calls,
            "pending": len(self._pending),
            "pending_bytes": self._pending_bytes,
        }

    def _deadline_s(self, timeout_s: float) -> float:
        """Return when a call is to be over by itself: so much before its time is that its end is told."""
        return self._clock() + timeout_s - min(_END_S, timeout_s / 10)

    async def check(self, *, sample_records: int) -> list[str]:
        """Verify what is known of this node's records, and a sample of them; one line per violation."""
        if self._truth is None or not self._is_open:
            return []
        try:
            return await self._within(self._truth.check(sample_records=sample_records), _CHECK_S)
        except KVStoreError as error:
            return [str(error)]

    def _open_truth(self) -> RecordTruth:
        if self._truth is None:
            raise TierUnavailable(f"records: {_OFF}")
        if not self._is_open:
            raise TierUnavailable("records: not open")
        return self._truth

    async def _within(
        self, work: "Coroutine[Any, Any, T]", timeout_s: float, num_bytes: int = 0
    ) -> T:  # Any: what coroutines yield and are sent
        """Return what the work comes to by then; later, or if the caller is cancelled, it goes on."""
        if len(self._pending) >= _MAX_PENDING:
            work.close()
            raise TierUnavailable(f"records: {len(self._pending)} calls are under way, no more: try again")
        task = asyncio.create_task(work)
        self._pending.add(task)
        self._pending_bytes += num_bytes
        task.add_done_callback(lambda ended: self._end(ended, num_bytes))
        await asyncio.wait([task], timeout=max(_LEAST_S, timeout_s))
        if not task.done():
            raise TimedOut(f"records: not done within {timeout_s:g} s, it goes on")
        return task.result()

    def _end(self, task: "asyncio.Task[Any]", num_bytes: int) -> None:
        self._pending.discard(task)
        self._pending_bytes -= num_bytes
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, KVStoreError):
            logger.error("records: a call failed", exc_info=error)

    async def _sweep_forever(self) -> None:
        assert self._truth is not None, "there is nothing to sweep"
        while True:
            await asyncio.sleep(_SWEEP_S)
            try:
                await self._truth.sweep()
                for tenant in list(self._unerased):
                    await self.erase(tenant, ())
            except Exception:
                logger.exception("records: forgetting what is over failed; it is tried again")
