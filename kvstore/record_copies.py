"""RecordCopies: this node's copies of records that are decided in Redis, for when that does not answer.

A copy never decides anything. It may be served for a day after it was put, or after this process last saw in
Redis that it is the record; not once it was seen there to be dropped or changed. Only copies leave to make
room, the oldest first.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from kvstore.errors import TierUnavailable
from kvstore.record_truth import RecordLocks
from kvstore.records import RecordAbsence
from kvstore_tiers.record_format import RecordHead, StoredRecord, charge_bytes
from kvstore_tiers.record_local import Kept, LocalRecord, LocalRecords
from kvstore_tiers.record_shared import COPY_LIFE_S

logger = logging.getLogger(__name__)

LOOK_AGAIN_S = 600.0
"""How often all copies are compared with what Redis has."""

_KEEP_S = 1.0
_LOOK_RECORDS = 64
_MAX_NOTES = 1024
_MAX_REFRESH_BYTES = 8 << 20


@dataclass(slots=True)
class RecordCopies:
    """Copies in ``local``. Whoever changes a record holds its lock."""

    local: LocalRecords
    capacity_bytes: int
    clock: Callable[[], float] = time.monotonic
    wall_s: Callable[[], float] = time.time
    locks: RecordLocks = field(default_factory=RecordLocks)
    _counters: Counter[str] = field(default_factory=Counter)
    _seen_s: dict[bytes, float] = field(default_factory=dict)
    _keeping: set["asyncio.Task[None]"] = field(default_factory=set)
    _refreshing_bytes: int = 0
    _unlooked: list[LocalRecord] = field(default_factory=list)
    _look_again_s: float = float("-inf")

    @property
    def counters(self) -> dict[str, int]:
        """Events so far: copies_not_kept, copies_evicted, and those of ``local``."""
        return {**self.local.counters, **self._counters}

    async def finish(self) -> None:
        """Wait for what is being kept, not for long."""
        if self._keeping:
            await asyncio.wait(set(self._keeping), timeout=_KEEP_S)

    def servable(self, key: bytes) -> LocalRecord | None:
        """Return a copy that may stand in for its record; None if there is none, or none fresh enough."""
        copy = self.local.find(key)
        return copy if copy is not None and self._age_s(copy) < COPY_LIFE_S else None

    def _age_s(self, copy: LocalRecord) -> float:
        """Return how long ago a copy was last known to be the record."""
        seen_s = self._seen_s.get(copy.key)
        if seen_s is not None:
            return self.clock() - seen_s
        put_ms = copy.head.expires_ms - copy.head.ttl_ms
        return max(0.0, self.wall_s() - put_ms / 1000)

    async def read(self, copy: LocalRecord) -> StoredRecord | None:
        """Return a whole copy; None if it cannot be read."""
        if not await self.local.ready():
            return None
        try:
            stored = await self.local.read(copy, is_alone=not self.local.is_storing(copy.key))
        except TierUnavailable:
            return None
        if stored is not None and stored.head == copy.head:
            return stored
        await self._forget_seen(copy, None)
        return None

    async def keep_within(self, key: bytes, record: StoredRecord, left_s: float, *, timeout_s: float) -> None:
        """Keep a copy of what was put, and wait for that, but not for long.

        A disk that does not answer must not turn a put that was done into one that is in doubt.
        """
        await asyncio.wait([self._begin(self._keep(key, record, left_s))], timeout=min(_KEEP_S, timeout_s))

    def follow(self, key: bytes, record: StoredRecord, left_s: float) -> None:
        """Bring a copy up to what was read from Redis, without waiting for it."""
        copy = self.local.find(key)
        if copy is not None and copy.head == record.head:
            self._seen_s[key] = self.clock()
            return
        size = record.head.stored_bytes
        if self._refreshing_bytes + size > _MAX_REFRESH_BYTES:
            if copy is not None:
                self._begin(self.forget(key, None))
            return
        self._refreshing_bytes += size
        self._begin(self._refresh(key, record, left_s, copy))

    async def forget(self, key: bytes, reason: RecordAbsence | None) -> None:
        """Forget a copy; ``reason`` says why its record is gone, None that it is not."""
        self._seen_s.pop(key, None)
        if await self.local.ready():
            await self.local.forget([key], reason)

    async def _forget_seen(self, copy: LocalRecord, reason: RecordAbsence | None) -> None:
        """As ``forget``, but not what takes the copy's place meanwhile."""
        if await self.local.ready():
            await self.local.forget_seen([copy], reason)

    async def expire(self) -> None:
        """Forget copies whose time is over."""
        if await self.local.ready():
            await self.local.expire()
        if len(self._seen_s) > 2 * len(self.local) + _MAX_NOTES:
            self._seen_s = {at.key: self._seen_s[at.key] for at in self.local.all() if at.key in self._seen_s}

    def to_look_at(self) -> list[LocalRecord]:
        """Return some copies, all of one tenant, that have not been compared with Redis for a while."""
        if not self._unlooked and self.clock() >= self._look_again_s:
            self._look_again_s = self.clock() + LOOK_AGAIN_S
            self._unlooked = self.local.all()
        chosen: list[LocalRecord] = []
        while self._unlooked and len(chosen) < _LOOK_RECORDS:
            if chosen and self._unlooked[-1].tenant != chosen[0].tenant:
                break
            chosen.append(self._unlooked.pop())
        return chosen

    async def compare(self, copy: LocalRecord, head: RecordHead) -> None:
        """Take note of what Redis has in the place of a copy's record."""
        if self.local.find(copy.key) is not copy:
            return
        if head == copy.head:
            self._seen_s[copy.key] = self.clock()
        else:
            await self._forget_seen(copy, RecordAbsence.DROPPED if head.is_dropped else None)

    async def _keep(self, key: bytes, record: StoredRecord, left_s: float) -> None:
        if not await self.local.ready():
            self._counters["copies_not_kept"] += 1
            return
        present = self.local.find(key)
        more_bytes = charge_bytes(record.head.stored_bytes) - (present.charge_bytes if present else 0)
        over_bytes = self.local.used_bytes + more_bytes - self.capacity_bytes
        if over_bytes > 0:
            oldest = self.local.oldest(over_bytes)
            self._counters["copies_evicted"] += len(oldest)
            await self.local.forget_seen(oldest, None)
        if await self.local.keep(key, record, ttl_s=left_s) is Kept.OK:
            self._seen_s[key] = self.clock()
        else:
            # What is there may be older than what Redis has.
            self._counters["copies_not_kept"] += 1
            await self.forget(key, None)

    async def _refresh(
        self, key: bytes, record: StoredRecord, left_s: float, seen: LocalRecord | None
    ) -> None:
        """Keep what was read, unless a put came between."""
        try:
            async with self.locks.of(key):
                if self.local.find(key) is seen and not self.local.is_storing(key):
                    await self._keep(key, record, left_s)
        finally:
            self._refreshing_bytes -= record.head.stored_bytes

    def _begin(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        """Run work that nobody need wait for. Any: what coroutines yield and are sent."""
        task = asyncio.create_task(work)
        self._keeping.add(task)
        task.add_done_callback(self._end)
        return task

    def _end(self, task: "asyncio.Task[None]") -> None:
        self._keeping.discard(task)
        if not task.cancelled() and task.exception() is not None:
            logger.error("records: keeping a copy failed", exc_info=task.exception())
