"""RecordTruth: the place that decides which version a record has; and that place on one node, LocalTruth."""

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kvstore.errors import TierUnavailable
from kvstore.records import (
    Record,
    RecordAbsence,
    RecordInfo,
    RecordKey,
    RecordLookup,
    RecordOutcome,
    RecordPlace,
    RecordPut,
    RecordWrite,
)
from kvstore.tenant import TenantId, tenant_of
from kvstore_tiers.record_codec import Draft, Entry, NameIndex, RecordCodec, Unread, names_or_none
from kvstore_tiers.record_format import RecordHead, StoredRecord, charge_bytes, next_version, record_id
from kvstore_tiers.record_local import Kept, LocalRecord, LocalRecords

logger = logging.getLogger(__name__)

_SEALED_AT_ONCE = 64
_SEAL_S = 1.0

UNREAD_ABSENCES = {
    Unread.ERASED: RecordAbsence.ERASED,
    Unread.FOREIGN: RecordAbsence.UNREADABLE,
    Unread.BROKEN: RecordAbsence.CORRUPT,
}
"""Why there is no record where its value cannot be read for good."""


@dataclass(frozen=True, slots=True)
class Named:
    """A record's name as the store works with it."""

    key: RecordKey
    tenant: TenantId
    id: bytes

    @classmethod
    def of(cls, key: RecordKey) -> "Named":
        """Return what follows from a key."""
        return cls(key, tenant_of(key.tenant_salt), record_id(key))

    @property
    def local_key(self) -> bytes:
        """The key among the records of a node."""
        return self.tenant + self.id


@dataclass(frozen=True, slots=True)
class ListQuery:
    """What a listing asks for."""

    tenant: TenantId
    collection: str
    prefix: str
    after: str
    limit: int

    def picks(self, names: tuple[str, str] | None) -> bool:
        """Whether a record with that collection and name is asked for."""
        if names is None or names[0] != self.collection:
            return False
        return names[1].startswith(self.prefix) and (not self.after or names[1] > self.after)


class RecordTruth(Protocol):
    """Where versions are decided. Calls end about by their deadline; they may be left to themselves."""

    @property
    def place(self) -> RecordPlace:
        """Where that is."""

    async def open(self) -> None:
        """Read what is there. What cannot be used now is tried again."""

    async def close(self) -> None:
        """Finish what is under way. Idempotent."""

    async def put(self, put: RecordPut, named: Named, *, deadline_s: float) -> RecordWrite:
        """Store a record."""

    async def get(self, named: Named, *, deadline_s: float) -> RecordLookup:
        """Read a record. Raises TierUnavailable if it is not known whether there is one."""

    async def drop(self, named: Named, *, deadline_s: float) -> bool:
        """Forget a record; whether there was one. Raises TierUnavailable if that is not known."""

    async def names(self, query: ListQuery, *, deadline_s: float) -> list[RecordInfo]:
        """Return records by name. Raises TierUnavailable if it is not known which there are."""

    async def erase(
        self, tenant: TenantId, key_ids: Collection[bytes], *, deadline_s: float
    ) -> tuple[int, list[str]]:
        """Forget those of a tenant's records whose key is gone; ``key_ids`` are erased ones.

        Returns how many, and a line for each place that could not be reached.
        """

    async def sweep(self) -> None:
        """Forget what is over. To be called every few seconds."""

    async def check(self, *, sample_records: int) -> list[str]:
        """Verify what is known of this node's records, and a sample of them; one line per violation."""

    def stats(self) -> dict[str, object]:
        """Return what there is, ready for JSON."""


class RecordLocks:
    """One writer at a time per record."""

    def __init__(self) -> None:
        self._locks: dict[bytes, tuple[asyncio.Lock, int]] = {}

    @property
    def num_held(self) -> int:
        """Keys that somebody holds, or waits for."""
        return len(self._locks)

    @contextlib.asynccontextmanager
    async def of(self, key: bytes) -> AsyncIterator[None]:
        """Hold the lock of a key."""
        lock, waiting = self._locks.get(key) or (asyncio.Lock(), 0)
        self._locks[key] = lock, waiting + 1
        try:
            async with lock:
                yield
        finally:
            lock, waiting = self._locks[key]
            if waiting > 1:
                self._locks[key] = lock, waiting - 1
            else:
                del self._locks[key]


@dataclass(slots=True)
class LocalTruth:
    """Records of one node without a remote tier. ``quota_bytes`` is what one tenant's may count for."""

    local: LocalRecords
    codec: RecordCodec
    capacity_bytes: int
    quota_bytes: int
    clock: Callable[[], float] = time.monotonic
    wall_s: Callable[[], float] = time.time
    locks: RecordLocks = field(default_factory=RecordLocks)
    counters: Counter[str] = field(default_factory=Counter)
    _promised: Counter[TenantId] = field(default_factory=Counter)
    _erasing: set[TenantId] = field(default_factory=set)
    _index: NameIndex = field(init=False)

    def __post_init__(self) -> None:
        self._index = NameIndex(self.codec)

    @property
    def place(self) -> RecordPlace:
        """The disk, or memory where there is none."""
        return RecordPlace.SSD if self.local.is_on_disk else RecordPlace.MEMORY

    async def open(self) -> None:
        """Read what earlier runs left."""
        self.codec.open()
        await self.local.open()
        warn_of_other_kind(self.local, self.codec, remedy="each is encrypted within minutes")

    async def close(self) -> None:
        """Finish what is under way."""
        await self.local.close()
        await self.codec.close()

    async def put(self, put: RecordPut, named: Named, *, deadline_s: float) -> RecordWrite:
        """Store a record, if the condition holds and there is room."""
        async with self.locks.of(named.local_key):
            if not await self.local.ready():
                return unavailable(self.local.trouble)
            present = self.local.find(named.local_key)
            version = 0 if present is None else present.head.version
            if present is not None and present.head.token == put.token:
                return RecordWrite(RecordOutcome.STORED, present.head.version, self.place)
            if put.if_version not in (None, version):
                return RecordWrite(RecordOutcome.CONFLICT, version, problem=conflict_of(present, self.codec))
            record = await self.codec.make(
                named.tenant, draft_of(put, named, version, wall_s=self.wall_s()), deadline_s=deadline_s
            )
            if record is None:
                return unavailable("there is no key to encrypt it with now")
            more_bytes = charge_bytes(record.head.stored_bytes)
            more_bytes = max(0, more_bytes - (0 if present is None else present.charge_bytes))
            if self._refusal(named.tenant, more_bytes) is not None:
                await self.local.expire()
            refusal = self._refusal(named.tenant, more_bytes)
            if refusal is not None:
                return refusal
            self._promised[named.tenant] += more_bytes
            try:
                return await self._keep(put, named, record)
            finally:
                self._promised[named.tenant] -= more_bytes
                if not self._promised[named.tenant]:
                    del self._promised[named.tenant]

    def _refusal(self, tenant: TenantId, more_bytes: int) -> RecordWrite | None:
        """Return why there is no room for so much more, beside what is on its way."""
        if not more_bytes:
            return None
        if self.local.used_by(tenant) + self._promised[tenant] + more_bytes > self.quota_bytes:
            return over_quota(self.quota_bytes)
        if self.local.used_bytes + self._promised.total() + more_bytes > self.capacity_bytes:
            return RecordWrite(
                RecordOutcome.FULL, problem=f"records take all of their {self.capacity_bytes} bytes"
            )
        return None

    async def _keep(self, put: RecordPut, named: Named, record: StoredRecord) -> RecordWrite:
        status = await self.local.keep(named.local_key, record, ttl_s=put.ttl_s)
        if status is Kept.FULL:
            return RecordWrite(RecordOutcome.FULL, problem="the disk is full")
        if status is Kept.UNAVAILABLE:
            return unavailable(self.local.trouble, is_doubtful=True)
        if not self.codec.is_live((record.head, record.name)):
            await self.local.forget([named.local_key], RecordAbsence.ERASED)
            return unavailable("its tenant was erased meanwhile")
        self._index.note(named.tenant, named.key, named.id)
        return RecordWrite(RecordOutcome.STORED, record.head.version, self.place)

    async def get(self, named: Named, *, deadline_s: float) -> RecordLookup:
        """Read a record."""
        if not await self.local.ready():
            raise TierUnavailable(f"records: {self.local.trouble}")
        found = await self._read_now(named, deadline_s)
        if found is not None:
            return found
        async with self.locks.of(named.local_key):
            present = self.local.find(named.local_key)
            stored = None if present is None else await self.local.read(present)
            if present is None or self.local.find(named.local_key) is not present:
                return RecordLookup(None, self.local.absence(named.local_key))
            return await self._read(named, present, stored, deadline_s)

    async def _read_now(self, named: Named, deadline_s: float) -> RecordLookup | None:
        """Read a record while others may put it; None if that gave none.

        A put is on disk before it is known here: what is not as expected may be its record. Whether that is
        damaged is decided where no put is under way.
        """
        present = self.local.find(named.local_key)
        if present is None:
            return RecordLookup(None, self.local.absence(named.local_key))
        stored = await self.local.read(present, is_alone=False)
        if stored is None or stored.head != present.head:
            return None
        value = await self.codec.read(named.tenant, stored, deadline_s=deadline_s)
        return None if isinstance(value, Unread) else self._found(present, value)

    async def _read(
        self, named: Named, present: LocalRecord, stored: StoredRecord | None, deadline_s: float
    ) -> RecordLookup:
        """Return the value of a record that was read from where it is kept; no put of it is under way."""
        if stored is None or stored.head != present.head:
            return await self._discard(named, RecordAbsence.CORRUPT)
        value = await self.codec.read(named.tenant, stored, deadline_s=deadline_s)
        if value is Unread.NO_KEY:
            raise TierUnavailable("records: the key that it is encrypted under cannot be had now")
        if value is Unread.FOREIGN:
            return RecordLookup(None, RecordAbsence.UNREADABLE)
        if isinstance(value, Unread):
            self.counters["broken_seals"] += value is Unread.BROKEN
            return await self._discard(named, UNREAD_ABSENCES[value])
        return self._found(present, value)

    def _found(self, present: LocalRecord, value: bytes) -> RecordLookup:
        left_s = max(0.0, present.deadline_s - self.clock())
        return RecordLookup(Record(value, present.head.version, left_s, self.place))

    async def _discard(self, named: Named, reason: RecordAbsence) -> RecordLookup:
        """Remove a record that cannot be read."""
        await self.local.forget([named.local_key], reason)
        return RecordLookup(None, reason)

    async def drop(self, named: Named, *, deadline_s: float) -> bool:
        """Forget a record."""
        async with self.locks.of(named.local_key):
            if not await self.local.ready():
                raise TierUnavailable(f"records: {self.local.trouble}")
            was_there = self.local.find(named.local_key) is not None
            if await self.local.forget([named.local_key], RecordAbsence.DROPPED) is not Kept.OK:
                raise TierUnavailable("records: the disk failed while a record was dropped")
            return was_there

    async def names(self, query: ListQuery, *, deadline_s: float) -> list[RecordInfo]:
        """Return records by name."""
        if not await self.local.ready():
            raise TierUnavailable(f"records: {self.local.trouble}")
        now_s = self.clock()
        live = [at for at in self.local.of_tenant(query.tenant) if at.deadline_s > now_s]
        entries = [(at.head, at.name) for at in live]
        left_s = {at.head.id: at.deadline_s - now_s for at in live}
        chosen = await picked(query, entries, index=self._index, deadline_s=deadline_s)
        return [
            RecordInfo(name, head.version, head.value_bytes, left_s[head.id])
            for name, head in chosen[: query.limit]
        ]

    async def erase(
        self, tenant: TenantId, key_ids: Collection[bytes], *, deadline_s: float
    ) -> tuple[int, list[str]]:
        """Forget those of a tenant's records whose key is gone."""
        self._index.forget(tenant)
        self._erasing.add(tenant)
        count, problems = await erase_local(self.local, self.codec, tenant, key_ids)
        if not problems:
            self._erasing.discard(tenant)
        return count, problems

    async def sweep(self) -> None:
        """Forget records whose time is over, and encrypt those that are from before that was switched on."""
        if not await self.local.ready():
            return
        await self.local.expire()
        if self.codec.is_sealed:
            for present in self.local.in_the_clear(_SEALED_AT_ONCE):
                if not await self._seal(present):
                    break
            await self.local.scrub()

    async def _seal(self, present: LocalRecord) -> bool:
        """Encrypt a record in the clear, all else of it the same; False if that cannot be done now."""
        async with self.locks.of(present.key):
            if self.local.find(present.key) is not present:
                return True
            stored = await self.local.read(present)
            names = None if stored is None or stored.head != present.head else names_or_none(stored.name)
            if stored is None or names is None:
                return await self.local.forget([present.key], RecordAbsence.CORRUPT) is Kept.OK
            draft = Draft(present.head, RecordKey(*names), stored.body)
            deadline_s = self.clock() + _SEAL_S
            record = await self.codec.make(present.tenant, draft, deadline_s=deadline_s)
            if record is None:
                return False
            if present.tenant in self._erasing or self.local.find(present.key) is not present:
                return True
            left_s = present.deadline_s - self.clock()
            if await self.local.keep(present.key, record, ttl_s=left_s) is not Kept.OK:
                return False
            if not self.codec.is_live((record.head, record.name)):
                await self.local.forget([present.key], RecordAbsence.ERASED)
            self.counters["sealed"] += 1
            return True

    async def check(self, *, sample_records: int) -> list[str]:
        """Verify the records' bookkeeping, and a sample of them."""
        lines = await self.local.check(sample_records=sample_records)
        if self._promised and not self.locks.num_held:
            lines.append("records: room is promised to puts that are not under way")
        return lines

    def stats(self) -> dict[str, object]:
        """Return what there is."""
        events = {**self.local.counters, **self.counters}
        kept = {"is_encrypted": self.codec.is_sealed, **self.local.stats()}
        return {**kept, "quota_bytes": self.quota_bytes, "events": events}


def warn_of_other_kind(local: LocalRecords, codec: RecordCodec, *, remedy: str) -> None:
    """Say which records are from before encryption was switched; ``remedy``: what becomes of clear ones."""
    if codec.is_sealed and local.num_clear:
        logger.warning(
            "records: %d of %d are in the clear, from before encryption was switched on: read, and %s",
            *(local.num_clear, len(local), remedy),
        )
    num_sealed = len(local) - local.num_clear
    if not codec.is_sealed and num_sealed:
        logger.warning(
            "records: %d of %d are encrypted and cannot be read without [encryption]: they are kept for when"
            " it is switched on again, or until their time is over",
            *(num_sealed, len(local)),
        )


def conflict_of(present: LocalRecord | None, codec: RecordCodec) -> str:
    """Return what is to be said of a record that a put is in conflict with."""
    if present is None or codec.is_sealed or not present.head.is_sealed:
        return ""
    return "it is encrypted, and this store's records are not: it cannot be read here"


def draft_of(put: RecordPut, named: Named, version: int, *, wall_s: float) -> Draft:
    """Return the record that a put makes of the one with that version."""
    ttl_ms = max(1, int(put.ttl_s * 1000))
    head = RecordHead(
        named.id, next_version(version, put.token), put.token, int(wall_s * 1000) + ttl_ms, ttl_ms
    )
    return Draft(head, put.key, put.value)


def unavailable(problem: str, *, is_doubtful: bool = False) -> RecordWrite:
    """Return the end of a put that could not be done."""
    return RecordWrite(RecordOutcome.UNAVAILABLE, is_doubtful=is_doubtful, problem=problem[:500])


def over_quota(quota_bytes: int) -> RecordWrite:
    """Return the end of a put that the tenant has no share left for."""
    return RecordWrite(
        RecordOutcome.QUOTA, problem=f"the tenant's records may count for {quota_bytes} bytes, no more"
    )


async def picked(
    query: ListQuery, entries: Sequence[Entry], *, index: NameIndex, deadline_s: float
) -> list[tuple[str, RecordHead]]:
    """Return those entries that a listing asks for, in the order of their names, more than its limit too."""
    names = await index.names_of(query.tenant, entries, deadline_s=deadline_s)

    def pick() -> list[tuple[str, RecordHead]]:
        found = [
            (name[1], head)
            for name, (head, _) in zip(names, entries, strict=True)
            if name is not None and query.picks(name)
        ]
        return sorted(found, key=lambda item: item[0])

    return await asyncio.to_thread(pick)


async def erase_local(
    local: LocalRecords, codec: RecordCodec, tenant: TenantId, key_ids: Collection[bytes]
) -> tuple[int, list[str]]:
    """Forget records whose key is gone on this node; returns how many, and what could not be done."""
    if not await local.ready():
        return 0, [f"records: {local.trouble}"]
    entries = [(at.head, at.name) for at in local.of_tenant(tenant)]
    keys = [tenant + head.id for head, _ in await codec.erased_among(tenant, entries, key_ids)]
    if await local.forget(keys, RecordAbsence.ERASED) is not Kept.OK:
        return 0, ["records: the disk does not take the erasure now"]
    return len(keys), []
