"""SealedCodec: records encrypted under their tenants' data keys, as blocks are (see sealing).

Name part and body are sealed apart, each as a seal (56 bytes) and the ciphertext. Authenticated with each are
the record's digest, its version, its times and the part's role: neither an older state of a record, nor
another record's bytes, nor other times pass for it.
"""

import functools
import hashlib
import struct
from collections.abc import Collection, Sequence
from typing import Protocol

from kvstore.checksum import checksum
from kvstore.keys import BlockKey, NamespaceDigest
from kvstore.layout import Part
from kvstore.tenant import TenantId
from kvstore.tier import SEAL_BYTES, BlockHeader, BlockId
from kvstore_tiers.jobs import Jobs
from kvstore_tiers.record_codec import Draft, Entry, Unread, assembled, names_or_none
from kvstore_tiers.record_format import RecordHead, StoredRecord, pack_names
from kvstore_tiers.sealing import KEY_ID_BYTES, DataKey, KeyForgotten, open_payload, seal_payload

_NAMESPACE = NamespaceDigest(hashlib.sha256(b"kvstore.records").digest())
_LAYOUT = hashlib.sha256(b"kvstore.record.1").digest()
_WHOLE = Part(0, 1, 0, 1)
_STATE = struct.Struct("<Q16sQQI")
_NAME, _BODY = 0, 1


class RecordKeys(Protocol):
    """Who has the keys. Methods run on the event loop."""

    async def shared_key_of(self, tenant: TenantId, *, deadline_s: float) -> DataKey | None:
        """Return the key for a tenant's new records, made if need be, which other nodes can have too.

        None if there is none in time.
        """

    async def opening_key_of(self, tenant: TenantId, key_id: bytes, *, deadline_s: float) -> DataKey | None:
        """Return the key of that id; None if it is not known, or not the tenant's."""

    def is_known(self, key_id: bytes) -> bool:
        """Return whether the key of that id can be had at once."""

    async def is_gone(self, tenant: TenantId, wanted: bytes) -> bool:
        """Return whether it is certain that the tenant's key of that id was erased, on every node."""


class SealedCodec:
    """Records encrypted, in a thread of its own. ``open`` and ``close`` frame its use.

    ``reads_clear`` says that records in the clear are read too: from a disk that only this store writes to.
    """

    def __init__(self, keys: RecordKeys, *, reads_clear: bool = False) -> None:
        self._keys = keys
        self._reads_clear = reads_clear
        self._jobs = Jobs("records-seal", 1)

    @property
    def is_sealed(self) -> bool:
        """True."""
        return True

    def open(self) -> None:
        """Make the thread available. Idempotent."""
        self._jobs.start()

    async def close(self) -> None:
        """Finish what is under way. Idempotent."""
        await self._jobs.close()

    async def make(self, tenant: TenantId, draft: Draft, *, deadline_s: float) -> StoredRecord | None:
        """Return the record, encrypted; None if there is no key in time."""
        key = await self._keys.shared_key_of(tenant, deadline_s=deadline_s)
        if key is None:
            return None

        def seal() -> StoredRecord | None:
            head = draft.head._replace(value_bytes=len(draft.value))
            names = pack_names(draft.key.collection, draft.key.name)
            try:
                name = _seal(key, head, _NAME, names)
                body = _seal(key, head, _BODY, draft.value)
            except KeyForgotten:
                return None
            return assembled(draft, name, body, is_sealed=True)

        return await self._jobs.run(seal)

    async def read(self, tenant: TenantId, record: StoredRecord, *, deadline_s: float) -> bytes | Unread:
        """Return the value of a record, decrypted, or why there is none."""
        if not record.head.is_sealed:
            return record.body if self._reads_clear else Unread.FOREIGN
        key = await self._key_of(tenant, record.body[:KEY_ID_BYTES], deadline_s)
        if isinstance(key, Unread):
            return key
        return await self._jobs.run(functools.partial(_open, key, record.head, _BODY, record.body))

    async def names(
        self, tenant: TenantId, entries: Sequence[Entry], *, deadline_s: float
    ) -> list[tuple[str, str] | None]:
        """Return collection and name of each entry whose key can be had."""
        keys: dict[bytes, DataKey | None] = {}
        for head, name in entries:
            key_id = name[:KEY_ID_BYTES]
            if head.is_sealed and key_id not in keys:
                keys[key_id] = await self._keys.opening_key_of(tenant, key_id, deadline_s=deadline_s)

        def open_all() -> list[tuple[str, str] | None]:
            return [
                _open_names(keys.get(name[:KEY_ID_BYTES]), head, name) if head.is_sealed else clear(name)
                for head, name in entries
            ]

        def clear(name: bytes) -> tuple[str, str] | None:
            return names_or_none(name) if self._reads_clear else None

        return await self._jobs.run(open_all)

    def is_live(self, entry: Entry) -> bool:
        """Return whether the key that a record is encrypted under is here."""
        head, name = entry
        return head.is_sealed and self._keys.is_known(name[:KEY_ID_BYTES])

    async def erased_among(
        self, tenant: TenantId, entries: Sequence[Entry], key_ids: Collection[bytes]
    ) -> list[Entry]:
        """Return the entries of records whose key is certain to be gone, ``key_ids`` being erased keys.

        Those in the clear are from before encryption was switched on, so from before the erasure: they too.
        """
        gone = dict.fromkeys(key_ids, True)
        erased: list[Entry] = []
        for entry in entries:
            head, name = entry
            key_id = name[:KEY_ID_BYTES]
            if head.is_sealed and key_id not in gone:
                gone[key_id] = await self._keys.is_gone(tenant, key_id)
            if not head.is_sealed or gone[key_id]:
                erased.append(entry)
        return erased

    async def _key_of(self, tenant: TenantId, key_id: bytes, deadline_s: float) -> DataKey | Unread:
        """Return the key of that id, or why there is none: ERASED if it is certain that nobody has it."""
        key = await self._keys.opening_key_of(tenant, key_id, deadline_s=deadline_s)
        if key is not None:
            return key
        if await self._keys.is_gone(tenant, key_id):
            return Unread.ERASED
        # Asking whether it is gone may have brought it.
        key = await self._keys.opening_key_of(tenant, key_id, deadline_s=deadline_s)
        return Unread.NO_KEY if key is None else key


def _header(head: RecordHead, role: int, length_bytes: int, total: int, seal: bytes = b"") -> BlockHeader:
    """Return what the cipher takes for the header of one part."""
    state = _STATE.pack(head.version, head.token, head.expires_ms, head.ttl_ms, head.value_bytes)
    block = BlockId(_NAMESPACE, _WHOLE, BlockKey(head.id))
    parent = BlockKey(hashlib.sha256(state).digest())
    return BlockHeader(block, parent, role, _LAYOUT, length_bytes, total, seal)


def _seal(key: DataKey, head: RecordHead, role: int, data: bytes) -> bytes:
    """Return a part encrypted: seal and ciphertext. Raises KeyForgotten."""
    target = bytearray(len(data))
    sealed = seal_payload(
        key, _header(head, role, len(data), checksum(data)), memoryview(data), memoryview(target)
    )
    assert sealed is not None, "bytes do not change"
    return sealed.seal + bytes(target)


def _open(key: DataKey, head: RecordHead, role: int, part: bytes) -> bytes | Unread:
    """Return a part decrypted, or why it is not."""
    seal, buffer = part[:SEAL_BYTES], bytearray(part[SEAL_BYTES:])
    if len(seal) < SEAL_BYTES:
        return Unread.BROKEN
    header = _header(head, role, len(buffer), checksum(buffer), seal)
    try:
        opened = open_payload(key, header, memoryview(buffer))
    except KeyForgotten:
        return Unread.ERASED
    return Unread.BROKEN if opened is None else bytes(buffer)


def _open_names(key: DataKey | None, head: RecordHead, part: bytes) -> tuple[str, str] | None:
    if key is None:
        return None
    data = _open(key, head, _NAME, part)
    return None if isinstance(data, Unread) else names_or_none(data)
