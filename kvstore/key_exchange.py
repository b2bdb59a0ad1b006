"""KeyExchange: the records of tenants' keys in a tier that nodes share, each like a block, header and all.

A tenant has a record that says how many of its keys were erased, and one for each key. A key's record is made
only where there is none, so of nodes that make a key at the same time one wins. An erasure overwrites the
key's record, since an answer to that says that it happened.
"""

import enum
import hashlib
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from kvstore.checksum import checksum
from kvstore.errors import CorruptBlock
from kvstore.keys import BlockKey
from kvstore.layout import Part
from kvstore.master_keys import MasterKeys
from kvstore.shared_records import KEY_RECORDS
from kvstore.tenant import TenantId
from kvstore.tenant_record import RECORD_BYTES, RecordKind, TenantRecord, UnknownMaster
from kvstore.tier import BlockHeader, BlockId, ReadRequest, ReadStatus, Tier, WriteRequest, WriteStatus

_LAYOUT = hashlib.sha256(b"kvstore.tenant.key.record.1").digest()
_NUMBER = struct.Struct("<Q")
_TIMEOUT_S = 1.0


class Presence(enum.Enum):
    """What was found under a record's name.

    FOREIGN: a record by a master key that is not here, which may be another node's. BROKEN: anything else
    that is no record of that name. UNKNOWN: the tier did not say.
    """

    THERE = "there"
    ABSENT = "absent"
    FOREIGN = "foreign"
    BROKEN = "broken"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Found:
    """What was found; ``record`` and its stored form are given exactly when it is THERE."""

    presence: Presence
    record: TenantRecord | None = None
    packed: bytes = b""


def erased_record_id(tenant: TenantId) -> BlockId:
    """Return the name of the record that says how many of a tenant's keys were erased."""
    return _record_id(b"erased" + tenant)


def key_record_id(tenant: TenantId, number: int) -> BlockId:
    """Return the name of the record of one of a tenant's keys."""
    return _record_id(b"key" + _NUMBER.pack(number) + tenant)


class KeyExchange:
    """Reads and writes records in one shared tier. Methods run on the event loop and end within seconds."""

    def __init__(self, tier: Tier, masters: MasterKeys, *, clock: Callable[[], float]) -> None:
        self._tier = tier
        self._masters = masters
        self._clock = clock

    @property
    def name(self) -> str:
        """The tier's name."""
        return self._tier.name

    @property
    def is_up(self) -> bool:
        """Whether the tier is worth asking now."""
        return self._tier.health().is_up

    async def read_erased(self, tenants: Sequence[TenantId]) -> list[int | None]:
        """Return for each tenant how many of its keys were erased; None if that is not known now."""
        found = await self._read([erased_record_id(tenant) for tenant in tenants])
        return [_erased(at, tenant) for at, tenant in zip(found, tenants, strict=True)]

    async def read_keys(self, wanted: Sequence[tuple[TenantId, int]]) -> list[Found]:
        """Return what is there of each tenant's key of that number."""
        found = await self._read([key_record_id(tenant, number) for tenant, number in wanted])
        return [
            at if at.record is None or _is_about(at.record, tenant, number) else Found(Presence.BROKEN)
            for at, (tenant, number) in zip(found, wanted, strict=True)
        ]

    async def publish(self, tenant: TenantId, number: int, packed: bytes, *, replaces: bool) -> bool:
        """Write a key's record; False if it is not there now.

        Unless it ``replaces`` what is there, that may be because there is one.
        """
        request = _write(key_record_id(tenant, number), packed, only_if_absent=not replaces)
        return await self._write_all([request])

    async def tell_erased(self, tenant: TenantId, number: int, *, keys: Iterable[int]) -> bool:
        """Say that all keys up to ``number`` are gone, and overwrite the records of ``keys``.

        False if not all of it is done.
        """
        packed = TenantRecord(RecordKind.ERASED, tenant, number).pack(self._masters.present)
        requests = [_write(erased_record_id(tenant), packed)]
        requests += [_write(key_record_id(tenant, at), packed) for at in keys]
        return await self._write_all(requests)

    async def _read(self, blocks: Sequence[BlockId]) -> list[Found]:
        requests = [
            ReadRequest(block, _LAYOUT, RECORD_BYTES, memoryview(bytearray(RECORD_BYTES))) for block in blocks
        ]
        outcomes = await self._tier.read(requests, deadline_s=self._clock() + _TIMEOUT_S)
        return [
            self._judge(request, outcome.status) for request, outcome in zip(requests, outcomes, strict=True)
        ]

    def _judge(self, request: ReadRequest, status: ReadStatus) -> Found:
        if status is ReadStatus.ABSENT:
            return Found(Presence.ABSENT)
        if status in (ReadStatus.CORRUPT, ReadStatus.MISMATCH):
            return Found(Presence.BROKEN)
        if status is not ReadStatus.OK:
            return Found(Presence.UNKNOWN)
        packed = bytes(request.buffer)
        try:
            return Found(Presence.THERE, TenantRecord.unpack(packed, self._masters), packed)
        except UnknownMaster:
            return Found(Presence.FOREIGN)
        except CorruptBlock:
            return Found(Presence.BROKEN)

    async def _write_all(self, requests: Sequence[WriteRequest]) -> bool:
        statuses = await self._tier.write(requests, deadline_s=self._clock() + _TIMEOUT_S)
        return all(status is WriteStatus.OK for status in statuses)


def _erased(found: Found, tenant: TenantId) -> int | None:
    record = found.record
    if found.presence is Presence.UNKNOWN:
        return None
    is_sound = record is not None and record.tenant == tenant and record.kind is not RecordKind.KEY
    return record.number if record is not None and is_sound else 0


def _is_about(record: TenantRecord, tenant: TenantId, number: int) -> bool:
    """Whether a record may stand under the name of that key: the key itself, or that it is gone."""
    is_key = record.kind is RecordKind.KEY
    return record.tenant == tenant and (record.number == number if is_key else record.number >= number)


def _record_id(name: bytes) -> BlockId:
    return BlockId(KEY_RECORDS, Part(0, 1, 0, 1), BlockKey(hashlib.sha256(KEY_RECORDS + name).digest()))


def _write(block: BlockId, packed: bytes, *, only_if_absent: bool = False) -> WriteRequest:
    header = BlockHeader(block, BlockKey(KEY_RECORDS), 0, _LAYOUT, len(packed), checksum(packed))
    return WriteRequest(header, memoryview(packed), only_if_absent)
