"""Records of stores of every kind in this process, for tests of what they promise."""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from kvstore.record_copies import RecordCopies
from kvstore.record_store import RecordStore
from kvstore.record_truth import LocalTruth, RecordTruth
from kvstore.records import MAX_TTL_S, TOKEN_BYTES, RecordKey, RecordLookup, RecordPut, RecordWrite
from kvstore.shared_truth import SharedTruth
from kvstore.tenant import TenantId, tenant_of
from kvstore_tiers.record_codec import PlainCodec, RecordCodec
from kvstore_tiers.record_disk import RecordDisk
from kvstore_tiers.record_local import LocalRecords
from kvstore_tiers.record_remote import RemoteRecords
from kvstore_tiers.record_sealing import SealedCodec
from kvstore_tiers.sealing import DataKey

MIB = 1 << 20
PATIENT_S = 20.0
ANN, BOB = b"salt of ann", b"salt of bob"


def memory_records(*, capacity_bytes: int = 16 * MIB, quota_bytes: int = 16 * MIB) -> RecordStore:
    """Return records in memory that are not open yet."""
    local = LocalRecords(None, capacity_bytes=capacity_bytes, clock=time.monotonic, wall_s=time.time)
    return RecordStore(LocalTruth(local, PlainCodec(), capacity_bytes, quota_bytes))


class MovedClock:
    """A clock that runs, and can be moved."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.moved_s = 0.0

    def __call__(self) -> float:
        return self._clock() + self.moved_s


class FixedKeys:
    """Data keys of tenants, made when they are first wanted, shared between stores in this process."""

    def __init__(self) -> None:
        self.keys: dict[TenantId, DataKey] = {}
        self.erased: set[bytes] = set()
        self.is_down = False

    async def shared_key_of(self, tenant: TenantId, *, deadline_s: float) -> DataKey | None:
        if self.is_down:
            return None
        return self.keys.setdefault(tenant, DataKey.make(tenant))

    async def opening_key_of(self, tenant: TenantId, key_id: bytes, *, deadline_s: float) -> DataKey | None:
        key = self.keys.get(tenant)
        return None if self.is_down or key is None or key.id != key_id else key

    def is_known(self, key_id: bytes) -> bool:
        return any(key.id == key_id for key in self.keys.values())

    async def is_gone(self, tenant: TenantId, wanted: bytes) -> bool:
        return not self.is_down and wanted in self.erased

    def erase(self, salt: bytes) -> tuple[TenantId, set[bytes]]:
        """Erase a tenant's key; returns what stores are told."""
        tenant = tenant_of(salt)
        key = self.keys.pop(tenant)
        self.erased.add(key.id)
        key.forget()
        return tenant, {key.id}


@dataclass
class Kit:
    """What stores are made of. ``redis_url`` empty: each is on its own; ``folder`` None: in memory."""

    folder: Path | None = None
    redis_url: str = ""
    is_sealed: bool = False
    capacity_bytes: int = 16 * MIB
    quota_bytes: int = 16 * MIB
    key_prefix: str = "kvstore"
    user: str = ""
    password: str = ""
    sentinel_master: str = "mymaster"
    clock: MovedClock = field(default_factory=lambda: MovedClock(time.monotonic))
    wall: MovedClock = field(default_factory=lambda: MovedClock(time.time))
    keys: FixedKeys = field(default_factory=FixedKeys)

    def codec(self) -> RecordCodec:
        return SealedCodec(self.keys, reads_clear=not self.redis_url) if self.is_sealed else PlainCodec()

    def local(self, name: str = "a", codec: RecordCodec | None = None) -> LocalRecords:
        more = {"capacity_bytes": self.capacity_bytes, "clock": self.clock, "wall_s": self.wall}
        if self.folder is None:
            return LocalRecords(None, **more)
        folder, is_sealed = self.folder / name, self.is_sealed
        return LocalRecords(
            lambda: RecordDisk.open(folder, capacity_bytes=self.capacity_bytes, is_sealed=is_sealed),
            where=str(folder),
            **more,
        )

    def remote(self) -> RemoteRecords:
        return RemoteRecords(
            self.redis_url,
            user=self.user,
            password=self.password,
            sentinel_master=self.sentinel_master,
            key_prefix=self.key_prefix,
            breaker_backoff_s=0.05,
            breaker_backoff_max_s=0.2,
            clock=self.clock,
        )

    def truth(self, name: str = "a") -> RecordTruth:
        codec, local, clocks = self.codec(), self.local(name), (self.clock, self.wall)
        if not self.redis_url:
            return LocalTruth(local, codec, self.capacity_bytes, self.quota_bytes, *clocks)
        copies = RecordCopies(local, self.capacity_bytes, *clocks)
        return SharedTruth(self.remote(), copies, codec, self.quota_bytes, *clocks)

    def store(self, name: str = "a") -> "Store":
        return Store(self.truth(name), self.clock)


class Store(RecordStore):
    """A RecordStore, and calls with less to say."""

    def __init__(self, truth: RecordTruth, clock: Callable[[], float]) -> None:
        super().__init__(truth, clock=clock)
        self.truth = truth

    async def __aenter__(self) -> "Store":
        await self.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def set(
        self,
        name: str,
        value: bytes,
        if_version: int | None = None,
        *,
        salt: bytes = ANN,
        ttl_s: float = MAX_TTL_S,
        token: bytes | None = None,
        timeout_s: float = PATIENT_S,
    ) -> RecordWrite:
        key = RecordKey("c", name, salt)
        put = RecordPut(key, value, ttl_s, if_version, token or os.urandom(TOKEN_BYTES))
        return await self.put(put, timeout_s=timeout_s)

    async def look(self, name: str, *, salt: bytes = ANN, timeout_s: float = PATIENT_S) -> RecordLookup:
        return await self.get(RecordKey("c", name, salt), timeout_s=timeout_s)

    async def value(self, name: str, *, salt: bytes = ANN) -> bytes | None:
        record = (await self.look(name, salt=salt)).record
        return None if record is None else record.value

    async def remove(self, name: str, *, salt: bytes = ANN, timeout_s: float = PATIENT_S) -> bool:
        return await self.drop(RecordKey("c", name, salt), timeout_s=timeout_s)

    async def listed(self, *, salt: bytes = ANN, prefix: str = "", after: str = "", limit: int = 1000):
        return await self.names(salt, "c", prefix=prefix, after=after, limit=limit, timeout_s=PATIENT_S)

    @property
    def events(self) -> dict[str, int]:
        return self.stats()["events"]  # type: ignore[return-value]  # what stats hold there
