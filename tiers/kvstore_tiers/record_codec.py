"""RecordCodec: records made of values, and values read out of records; here in the clear."""

import asyncio
import enum
from collections.abc import Collection, Sequence
from typing import NamedTuple, Protocol

from kvstore.checksum import checksum
from kvstore.errors import CorruptBlock
from kvstore.records import RecordKey
from kvstore.tenant import TenantId
from kvstore_tiers.record_format import RecordHead, StoredRecord, pack_names, unpack_names

Entry = tuple[RecordHead, bytes]
"""Head and name part."""

_MAX_NAMES = 131_072


class Unread(enum.Enum):
    """Why there is no value in a record whose checksums are right.

    NO_KEY: the key may be had later. ERASED: it is gone for good. FOREIGN: encrypted where records in the
    clear are kept, or the other way round. BROKEN: not what was encrypted for that place.
    """

    NO_KEY = "no_key"
    ERASED = "erased"
    FOREIGN = "foreign"
    BROKEN = "broken"


class Draft(NamedTuple):
    """A record to be: ``head`` says all but lengths and checksums."""

    head: RecordHead
    key: RecordKey
    value: bytes


class RecordCodec(Protocol):
    """Turns values into records and back. Methods run on the event loop and do not block it."""

    @property
    def is_sealed(self) -> bool:
        """Whether records are encrypted."""

    def open(self) -> None:
        """Make it usable. Idempotent."""

    async def close(self) -> None:
        """Finish what is under way. Idempotent."""

    async def make(self, tenant: TenantId, draft: Draft, *, deadline_s: float) -> StoredRecord | None:
        """Return the stored form; None if there is no key for it in time."""

    async def read(self, tenant: TenantId, record: StoredRecord, *, deadline_s: float) -> bytes | Unread:
        """Return the value of a record, or why there is none."""

    async def names(
        self, tenant: TenantId, entries: Sequence[Entry], *, deadline_s: float
    ) -> list[tuple[str, str] | None]:
        """Return collection and name of each entry; None where they cannot be read."""

    def is_live(self, entry: Entry) -> bool:
        """Return whether a record can be read still: its key was not erased since it was made."""

    async def erased_among(
        self, tenant: TenantId, entries: Sequence[Entry], key_ids: Collection[bytes]
    ) -> list[Entry]:
        """Return the entries of records whose key is certain to be gone, ``key_ids`` being erased keys."""


class PlainCodec:
    """Records in the clear."""

    @property
    def is_sealed(self) -> bool:
        """False."""
        return False

    def open(self) -> None:
        """Do nothing."""

    async def close(self) -> None:
        """Do nothing."""

    async def make(self, tenant: TenantId, draft: Draft, *, deadline_s: float) -> StoredRecord | None:
        """Return the stored form."""
        return assembled(draft, pack_names(draft.key.collection, draft.key.name), draft.value)

    async def read(self, tenant: TenantId, record: StoredRecord, *, deadline_s: float) -> bytes | Unread:
        """Return the value."""
        return Unread.FOREIGN if record.head.is_sealed else record.body

    async def names(
        self, tenant: TenantId, entries: Sequence[Entry], *, deadline_s: float
    ) -> list[tuple[str, str] | None]:
        """Return collection and name of each entry."""

        def read_all() -> list[tuple[str, str] | None]:
            return [None if head.is_sealed else names_or_none(name) for head, name in entries]

        return await asyncio.to_thread(read_all)

    def is_live(self, entry: Entry) -> bool:
        """Return True."""
        return True

    async def erased_among(
        self, tenant: TenantId, entries: Sequence[Entry], key_ids: Collection[bytes]
    ) -> list[Entry]:
        """Return none: there are no keys."""
        return []


def assembled(draft: Draft, name: bytes, body: bytes, *, is_sealed: bool = False) -> StoredRecord:
    """Return the record of a draft whose parts are ready to be stored."""
    head = draft.head._replace(
        value_bytes=len(draft.value),
        name_bytes=len(name),
        body_bytes=len(body),
        name_sum=checksum(name),
        body_sum=checksum(body),
        is_sealed=is_sealed,
    )
    return StoredRecord(head, name, body)


def names_or_none(data: bytes) -> tuple[str, str] | None:
    """Return collection and name; None if there are none."""
    try:
        return unpack_names(data)
    except CorruptBlock:
        return None


class NameIndex:
    """The names of records that were put or listed, by digest: a digest never gets another name."""

    def __init__(self, codec: RecordCodec) -> None:
        self._codec = codec
        self._known: dict[TenantId, dict[bytes, tuple[str, str]]] = {}
        self._num_known = 0

    def note(self, tenant: TenantId, key: RecordKey, record_id: bytes) -> None:
        """Take down the name of a record."""
        self._add(tenant, record_id, (key.collection, key.name))

    def forget(self, tenant: TenantId) -> None:
        """Forget the names of a tenant's records."""
        self._num_known -= len(self._known.pop(tenant, {}))

    async def names_of(
        self, tenant: TenantId, entries: Sequence[Entry], *, deadline_s: float
    ) -> list[tuple[str, str] | None]:
        """Return collection and name of each entry; None where they cannot be read."""
        known = self._known.get(tenant, {})
        new = [entry for entry in entries if entry[0].id not in known]
        if not new:
            return [known[head.id] for head, _ in entries]
        read = await self._codec.names(tenant, new, deadline_s=deadline_s)
        found = dict(zip((head.id for head, _ in new), read, strict=True))
        names = [known.get(head.id) or found.get(head.id) for head, _ in entries]
        for digest, name in found.items():
            if name is not None:
                self._add(tenant, digest, name)
        return names

    def _add(self, tenant: TenantId, record_id: bytes, names: tuple[str, str]) -> None:
        if self._num_known >= _MAX_NAMES:
            self._known.clear()
            self._num_known = 0
        known = self._known.setdefault(tenant, {})
        self._num_known += record_id not in known
        known[record_id] = names
