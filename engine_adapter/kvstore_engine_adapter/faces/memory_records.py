"""MemoryRecords: the records of an engine without a store, for as long as it runs."""

import bisect
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from kvstore.records import (
    MAX_LISTED_RECORDS,
    MAX_TTL_S,
    Record,
    RecordInfo,
    RecordKey,
    RecordOutcome,
    RecordPlace,
    RecordWrite,
    require_collection,
    require_limit,
    require_prefix,
    require_ttl,
)

MAX_BYTES = 256 << 20
"""What all records may take before those not used for longest are dropped."""

_OVERHEAD_BYTES = 512


@dataclass(frozen=True, slots=True)
class _Entry:
    """One record. ``ends_s`` is by the monotonic clock."""

    value: bytes
    version: int
    ends_s: float

    @property
    def cost_bytes(self) -> int:
        return len(self.value) + _OVERHEAD_BYTES


class MemoryRecords:
    """Records of a Records protocol in this process's memory. When it is full, the least recently used go."""

    def __init__(self, *, max_bytes: int = MAX_BYTES, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_bytes = max_bytes
        self._clock = clock
        self._entries: OrderedDict[RecordKey, _Entry] = OrderedDict()
        self._used_bytes = 0
        self._last_version = 0

    async def put_record(
        self,
        collection: str,
        name: str,
        value: bytes,
        *,
        ttl_s: float | None = None,
        if_version: int | None = None,
        tenant_salt: bytes = b"",
    ) -> RecordWrite:
        """Store a value. Raises InvalidRequest for a name or a time that can be none."""
        key = RecordKey(collection, name, tenant_salt)
        ends_s = self._clock() + require_ttl(MAX_TTL_S if ttl_s is None else ttl_s)
        present = self._live(key)
        version = 0 if present is None else present.version
        if if_version is not None and if_version != version:
            return RecordWrite(RecordOutcome.CONFLICT, version)
        self._last_version += 1
        entry = _Entry(value, self._last_version, ends_s)
        if entry.cost_bytes > self._max_bytes:
            return RecordWrite(RecordOutcome.FULL, problem=f"memory: {self._max_bytes} bytes for records")
        self._forget(key)
        self._entries[key] = entry
        self._used_bytes += entry.cost_bytes
        if self._used_bytes > self._max_bytes:
            self._make_room()
        return RecordWrite(RecordOutcome.STORED, entry.version, RecordPlace.MEMORY)

    async def get_record(self, collection: str, name: str, *, tenant_salt: bytes = b"") -> Record | None:
        """Return a record. Raises InvalidRequest for a name that can be none."""
        key = RecordKey(collection, name, tenant_salt)
        entry = self._live(key)
        if entry is None:
            return None
        self._entries.move_to_end(key)
        return Record(entry.value, entry.version, entry.ends_s - self._clock(), RecordPlace.MEMORY)

    async def drop_record(self, collection: str, name: str, *, tenant_salt: bytes = b"") -> bool:
        """Forget a record. Raises InvalidRequest for a name that can be none."""
        key = RecordKey(collection, name, tenant_salt)
        was_there = self._live(key) is not None
        self._forget(key)
        return was_there

    async def list_records(
        self,
        collection: str,
        *,
        prefix: str = "",
        after: str = "",
        limit: int = MAX_LISTED_RECORDS,
        tenant_salt: bytes = b"",
    ) -> list[RecordInfo]:
        """Return the records of a collection by name. Raises InvalidRequest as a store's client does."""
        require_collection(collection)
        require_prefix(prefix)
        require_prefix(after, "after")
        require_limit(limit)
        now_s = self._clock()
        found = sorted(
            (key.name, entry)
            for key, entry in self._entries.items()
            if key.collection == collection and key.tenant_salt == tenant_salt and entry.ends_s > now_s
        )
        start = bisect.bisect_right(found, after, key=lambda at: at[0])
        return [
            RecordInfo(name, entry.version, len(entry.value), entry.ends_s - now_s)
            for name, entry in found[start:]
            if name.startswith(prefix)
        ][:limit]

    def _make_room(self) -> None:
        """Drop what has ended, and then the least recently used until the rest fits."""
        now_s = self._clock()
        for key in [key for key, entry in self._entries.items() if entry.ends_s <= now_s]:
            self._forget(key)
        while self._used_bytes > self._max_bytes:
            self._forget(next(iter(self._entries)))

    def _live(self, key: RecordKey) -> _Entry | None:
        entry = self._entries.get(key)
        if entry is not None and entry.ends_s <= self._clock():
            self._forget(key)
            return None
        return entry

    def _forget(self, key: RecordKey) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self._used_bytes -= entry.cost_bytes
