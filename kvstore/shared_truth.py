"""SharedTruth: records that every replica shares, in Redis, with copies on this node for outages.

The rule. Which version a record has is decided in Redis and nowhere else: a put is STORED when Redis took it,
and no put goes through while Redis does not answer. A copy on this node never decides anything. It is served
(marked as not current) when Redis does not answer in time, or has lost the record; at most for a day after it
was last seen in Redis, and not once it was seen there to be dropped, or to have another version.

Lost. A record that Redis does not have, though nobody dropped it and its time is not over, was lost there: by
an eviction, a restart, or a failover. A put that names its version is then a CONFLICT with version 0, so that
nobody goes on from a copy without knowing it; a put that names version 0 begins anew.

Doubt. A put whose answer did not come is tried again, by the same token, as long as its time allows: that it
was done already is seen then. What is still open at the end is UNAVAILABLE and doubtful.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from kvstore.errors import CorruptBlock, TierUnavailable
from kvstore.record_copies import LOOK_AGAIN_S, RecordCopies
from kvstore.record_truth import (
    UNREAD_ABSENCES,
    ListQuery,
    Named,
    draft_of,
    erase_local,
    over_quota,
    picked,
    unavailable,
    warn_of_other_kind,
)
from kvstore.records import (
    Record,
    RecordAbsence,
    RecordInfo,
    RecordLookup,
    RecordOutcome,
    RecordPlace,
    RecordPut,
    RecordWrite,
)
from kvstore.tenant import TenantId
from kvstore_tiers.record_codec import NameIndex, RecordCodec, Unread
from kvstore_tiers.record_format import StoredRecord
from kvstore_tiers.record_local import LocalRecord
from kvstore_tiers.record_remote import RemoteRecords
from kvstore_tiers.record_shared import (
    SharedEnd,
    SharedFound,
    SharedStatus,
    StoreRequest,
    head_or_none,
)

logger = logging.getLogger(__name__)

_PAUSE_S = 0.005
_PAUSE_MAX_S = 0.1
_LOOK_S = 2.0
_SWEEP_FULL_S = 1.0
_SHARE_FOR_REMOTE = 0.7
_MAX_NOTES = 1024
_EXPIRY_SLACK_MS = 60_000
"""How far the clocks of writers may be behind the server's before it is asked about their records."""


@dataclass(slots=True)
class SharedTruth:
    """Records of all replicas. ``copies`` are this node's."""

    remote: RemoteRecords
    copies: RecordCopies
    codec: RecordCodec
    quota_bytes: int
    clock: Callable[[], float] = time.monotonic
    wall_s: Callable[[], float] = time.time
    counters: Counter[str] = field(default_factory=Counter)
    _index: NameIndex = field(init=False)
    _swept_s: dict[TenantId, float] = field(default_factory=dict)
    _swept_full_s: dict[TenantId, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._index = NameIndex(self.codec)

    @property
    def place(self) -> RecordPlace:
        """The remote tier."""
        return RecordPlace.REMOTE

    async def open(self) -> None:
        """Read the copies of earlier runs, and begin to talk to Redis."""
        self.codec.open()
        await self.copies.local.open()
        warn_of_other_kind(self.copies.local, self.codec, remedy="encrypted when they are put again")
        try:
            await self.remote.open()
        except TierUnavailable as error:
            # The remote tier says the same of its blocks, and ends the start.
            logger.error("records: %s", error)

    async def close(self) -> None:
        """Finish what is under way."""
        await self.copies.finish()
        await self.remote.close()
        await self.copies.local.close()
        await self.codec.close()

    # Puts

    async def put(self, put: RecordPut, named: Named, *, deadline_s: float) -> RecordWrite:
        """Store a record in Redis, if the condition holds there, and a copy here."""
        async with self.copies.locks.of(named.local_key):
            base = put.if_version if put.if_version is not None else self._believed(named)
            return await self._put(put, named, base, deadline_s)

    def _believed(self, named: Named) -> int:
        """Return the version that a record probably has."""
        copy = self.copies.local.find(named.local_key)
        return 0 if copy is None else copy.head.version

    async def _put(self, put: RecordPut, named: Named, base: int, deadline_s: float) -> RecordWrite:
        pause_s, is_doubtful, was_swept = _PAUSE_S, False, False
        record: StoredRecord | None = None
        while True:
            if record is None:
                draft = draft_of(put, named, base, wall_s=self.wall_s())
                record = await self.codec.make(named.tenant, draft, deadline_s=deadline_s)
            if record is None:
                return unavailable("there is no key to encrypt it with now", is_doubtful=is_doubtful)
            end = await self.remote.store(
                named.tenant, StoreRequest(record, base, self.quota_bytes), deadline_s=deadline_s
            )
            is_doubtful |= end.is_sent
            if end.status is SharedStatus.OK:
                return await self._stored(put, named, record, end, deadline_s)
            if end.status is SharedStatus.CHANGED:
                if is_doubtful or put.if_version is not None:
                    return self._changed(named, end, is_doubtful=is_doubtful)
                base, record = end.version, None
            elif end.status is SharedStatus.QUOTA and not was_swept:
                was_swept = True
                await self._sweep_full(named.tenant, deadline_s)
                continue
            elif end.status not in (SharedStatus.ABORTED, SharedStatus.UNKNOWN):
                return self._not_stored(end, is_doubtful=is_doubtful)
            if self.clock() + pause_s >= deadline_s:
                problem = end.problem or "others change the tenant's records all the time"
                return unavailable(problem, is_doubtful=is_doubtful)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _PAUSE_MAX_S)

    def _changed(self, named: Named, end: SharedEnd, *, is_doubtful: bool) -> RecordWrite:
        if is_doubtful:
            # Others came before it, or after it was done. Which of the two nobody knows, and it is done once.
            return unavailable("others changed the record meanwhile", is_doubtful=True)
        copy = self.copies.local.find(named.local_key)
        if not end.version and copy is not None:
            return RecordWrite(
                RecordOutcome.CONFLICT, 0, problem="there is none in Redis any more, only a copy here"
            )
        return RecordWrite(RecordOutcome.CONFLICT, end.version)

    def _not_stored(self, end: SharedEnd, *, is_doubtful: bool) -> RecordWrite:
        if end.status is SharedStatus.QUOTA:
            return over_quota(self.quota_bytes)
        if end.status is SharedStatus.FULL:
            return RecordWrite(RecordOutcome.FULL, problem="the remote server is out of memory")
        return unavailable(end.problem, is_doubtful=is_doubtful)

    async def _stored(
        self, put: RecordPut, named: Named, record: StoredRecord, end: SharedEnd, deadline_s: float
    ) -> RecordWrite:
        if end.problem:
            self.counters["half_done"] += 1
            logger.error("records: %s: the index of a tenant may miss a record", end.problem)
        if not self.codec.is_live((record.head, record.name)):
            return unavailable("its tenant was erased meanwhile")
        self._index.note(named.tenant, named.key, named.id)
        self._swept_s.setdefault(named.tenant, self.clock())
        if end.version == record.head.version:
            left_s = max(0.0, deadline_s - self.clock())
            await self.copies.keep_within(named.local_key, record, put.ttl_s, timeout_s=left_s / 2)
        return RecordWrite(RecordOutcome.STORED, end.version, self.place)

    # Reads

    async def get(self, named: Named, *, deadline_s: float) -> RecordLookup:
        """Read a record from Redis, else its copy here."""
        copy = self.copies.servable(named.local_key)
        now_s = self.clock()
        until_s = deadline_s if copy is None else now_s + _SHARE_FOR_REMOTE * (deadline_s - now_s)
        found = await self.remote.read(named.tenant, named.id, deadline_s=until_s)
        if found.is_known and found.data:
            return await self._read_shared(named, found, deadline_s)
        if copy is not None:
            lookup = await self._read_copy(named, copy, deadline_s)
            if lookup is not None:
                self.counters["lost"] += found.is_known
                return lookup
        if not found.is_known:
            raise TierUnavailable(f"records: {found.problem}")
        return RecordLookup(None, self._absence(named, found))

    def _absence(self, named: Named, found: SharedFound) -> RecordAbsence:
        """Return why Redis has no value: what the index still says of it."""
        head = head_or_none(found.entry)
        if head is None:
            return self.copies.local.absence(named.local_key)
        if head.expires_ms > found.now_ms + _EXPIRY_SLACK_MS:
            self.counters["lost"] += 1
            return RecordAbsence.LOST
        return RecordAbsence.EXPIRED

    async def _read_shared(self, named: Named, found: SharedFound, deadline_s: float) -> RecordLookup:
        data = found.data or b""
        try:
            record = StoredRecord.unpack(data, named.id)
        except CorruptBlock as error:
            return await self._read_damaged(named, data, str(error), deadline_s)
        if record.head.is_dropped:
            await self.copies.forget(named.local_key, RecordAbsence.DROPPED)
            return RecordLookup(None, RecordAbsence.DROPPED)
        value = await self.codec.read(named.tenant, record, deadline_s=deadline_s)
        if value is Unread.NO_KEY:
            raise TierUnavailable("records: the key that it is encrypted under cannot be had now")
        if value is Unread.BROKEN:
            self.counters["broken_seals"] += 1
            return await self._read_damaged(named, data, "its seal is broken", deadline_s)
        if value is Unread.FOREIGN and await self._is_own_copy(named, record):
            value = record.body
        if isinstance(value, Unread):
            self.counters["unreadable"] += value is Unread.FOREIGN
            return RecordLookup(None, UNREAD_ABSENCES[value])
        left_s = max(0, found.left_ms) / 1000
        self._index.note(named.tenant, named.key, named.id)
        self.copies.follow(named.local_key, record, left_s)
        return RecordLookup(Record(value, record.head.version, left_s, self.place))

    async def _is_own_copy(self, named: Named, record: StoredRecord) -> bool:
        """Whether a record in the clear is what this node put or read before encryption was switched on.

        Anybody who may write to Redis could have put one there; nobody else writes to our copies.
        """
        copy = self.copies.local.find(named.local_key)
        if record.head.is_sealed or copy is None or copy.head != record.head:
            return False
        return await self.copies.read(copy) == record

    async def _read_damaged(self, named: Named, data: bytes, problem: str, deadline_s: float) -> RecordLookup:
        """Read again what was damaged; if it is so indeed it is removed. A copy is served if there is one."""
        again = await self.remote.read(named.tenant, named.id, deadline_s=deadline_s)
        if not again.is_known:
            raise TierUnavailable(f"records: a damaged one could not be read again: {again.problem}")
        if again.data != data:
            if not again.data:
                return RecordLookup(None, self._absence(named, again))
            return await self._read_shared(named, again, deadline_s)
        self.counters["corrupt"] += 1
        logger.error("records: one in Redis is damaged and removed: %s", problem)
        await self.remote.discard(named.tenant, named.id, data, deadline_s=deadline_s)
        copy = self.copies.servable(named.local_key)
        lookup = None if copy is None else await self._read_copy(named, copy, deadline_s)
        return lookup or RecordLookup(None, RecordAbsence.CORRUPT)

    async def _read_copy(self, named: Named, copy: LocalRecord, deadline_s: float) -> RecordLookup | None:
        """Return this node's copy, marked as such; None if it cannot be read."""
        stored = await self.copies.read(copy)
        if stored is None:
            return None
        value: bytes | Unread = stored.body
        if stored.head.is_sealed:
            value = await self.codec.read(named.tenant, stored, deadline_s=deadline_s)
        if isinstance(value, Unread):
            return None
        left_s = max(0.0, copy.deadline_s - self.clock())
        place = RecordPlace.SSD if self.copies.local.is_on_disk else RecordPlace.MEMORY
        self.counters["copies_served"] += 1
        return RecordLookup(Record(value, copy.head.version, left_s, place, is_current=False))

    # Dropping and listing

    async def drop(self, named: Named, *, deadline_s: float) -> bool:
        """Forget a record in Redis, and its copy here."""
        async with self.copies.locks.of(named.local_key):
            was_there, pause_s = False, _PAUSE_S
            while True:
                end = await self.remote.drop(named.tenant, named.id, deadline_s=deadline_s)
                was_there |= end.is_sent or end.count > 0
                if end.status is SharedStatus.OK:
                    await self.copies.forget(named.local_key, RecordAbsence.DROPPED)
                    return was_there
                is_final = end.status not in (SharedStatus.ABORTED, SharedStatus.UNKNOWN)
                if is_final or self.clock() + pause_s >= deadline_s:
                    raise TierUnavailable(f"records: not dropped: {end.problem or end.status.value}")
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _PAUSE_MAX_S)

    async def names(self, query: ListQuery, *, deadline_s: float) -> list[RecordInfo]:
        """Return the records that Redis has, by name."""
        found = await self.remote.entries(query.tenant, deadline_s=deadline_s)
        if not found.is_known:
            raise TierUnavailable(f"records: {found.problem}")
        oldest_ms = found.now_ms - _EXPIRY_SLACK_MS
        entries = [
            entry
            for _, entry in found.entries.values()
            if entry is not None and entry[0].expires_ms > oldest_ms
        ]
        chosen = await picked(query, entries, index=self._index, deadline_s=deadline_s)
        infos: list[RecordInfo] = []
        for start in range(0, len(chosen), query.limit):
            page = chosen[start : start + query.limit]
            ids = [head.id for _, head in page]
            times = await self.remote.times(query.tenant, ids, deadline_s=deadline_s)
            if not times.is_known:
                raise TierUnavailable(f"records: {times.problem}")
            infos += [
                RecordInfo(name, head.version, head.value_bytes, left_ms / 1000)
                for (name, head), left_ms in zip(page, times.replies, strict=True)
                if isinstance(left_ms, int) and left_ms >= 0
            ]
            if len(infos) >= query.limit:
                break
        return infos[: query.limit]

    # Erasing and sweeping

    async def erase(
        self, tenant: TenantId, key_ids: Collection[bytes], *, deadline_s: float
    ) -> tuple[int, list[str]]:
        """Forget those of a tenant's records whose key is gone, in Redis and here."""
        self._index.forget(tenant)
        num_copies, problems = await erase_local(self.copies.local, self.codec, tenant, key_ids)
        found = await self.remote.entries(tenant, deadline_s=deadline_s)
        if not found.is_known:
            return num_copies, [*problems, f"records: {found.problem}"]
        entries = [entry for _, entry in found.entries.values() if entry is not None]
        erased = await self.codec.erased_among(tenant, entries, key_ids)
        gone = [(head.id, found.entries[head.id][0]) for head, _ in erased if head.id in found.entries]
        count = await self.remote.remove(tenant, gone, only_absent=False, deadline_s=deadline_s)
        if count is None:
            problems.append("records: not all of them could be removed from Redis")
        return max(num_copies, count or 0), problems

    async def sweep(self) -> None:
        """Forget copies and places in indexes of records that are over, and look at some copies anew."""
        await self.copies.expire()
        if self.codec.is_sealed:
            await self.copies.local.scrub()
        for notes in (self._swept_s, self._swept_full_s):
            while len(notes) > _MAX_NOTES:
                del notes[next(iter(notes))]
        if not self.remote.health().is_up:
            return
        await self.remote.look()
        await self._look_at_copies()
        now_s = self.clock()
        due = [tenant for tenant, at_s in self._swept_s.items() if now_s - at_s >= LOOK_AGAIN_S]
        for tenant in due[:1]:
            await self._sweep_tenant(tenant, deadline_s=now_s + _LOOK_S, is_thorough=False)

    async def _sweep_full(self, tenant: TenantId, deadline_s: float) -> None:
        """Make room in a tenant's quota, now and then."""
        if self.clock() - self._swept_full_s.get(tenant, float("-inf")) >= _SWEEP_FULL_S:
            self._swept_full_s[tenant] = self.clock()
            await self._sweep_tenant(tenant, deadline_s=deadline_s, is_thorough=True)

    async def _sweep_tenant(self, tenant: TenantId, *, deadline_s: float, is_thorough: bool) -> None:
        """Take records that are over out of a tenant's index; with ``is_thorough`` lost ones too."""
        self._swept_s[tenant] = self.clock()
        found = await self.remote.entries(tenant, deadline_s=deadline_s)
        latest_ms = found.now_ms + _EXPIRY_SLACK_MS
        over = [
            (record_id, data)
            for record_id, (data, entry) in found.entries.items()
            if is_thorough or entry is None or entry[0].expires_ms < latest_ms
        ]
        if found.is_known and not found.entries:
            self._swept_s.pop(tenant, None)
            self._swept_full_s.pop(tenant, None)
        removed = await self.remote.remove(tenant, over, only_absent=True, deadline_s=deadline_s)
        self.counters["swept"] += removed or 0

    async def _look_at_copies(self) -> None:
        """See whether Redis still has what some of the copies are of."""
        copies = self.copies.to_look_at()
        if not copies:
            return
        ids = [copy.head.id for copy in copies]
        found = await self.remote.heads(copies[0].tenant, ids, deadline_s=self.clock() + _LOOK_S)
        if not found.is_known:
            return
        for copy, data in zip(copies, found.replies, strict=True):
            head = head_or_none(data) if isinstance(data, bytes) else None
            if head is not None:
                await self.copies.compare(copy, head)

    async def check(self, *, sample_records: int) -> list[str]:
        """Verify the copies' bookkeeping, and a sample of them."""
        return await self.copies.local.check(sample_records=sample_records)

    def stats(self) -> dict[str, object]:
        """Return what there is: ``copies`` are those of this node."""
        health = self.remote.health()
        return {
            "is_encrypted": self.codec.is_sealed,
            "is_up": health.is_up,
            "reason": health.reason,
            "quota_bytes": self.quota_bytes,
            "copies": self.copies.local.stats(),
            "events": {**self.remote.counters, **self.counters, **self.copies.counters},
        }
