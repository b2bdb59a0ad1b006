"""TenantRecord: what is stored of a tenant's key: the key itself, wrapped, or that it was erased.

Stored form, 136 bytes, all of it authenticated by the master key that it names:

    magic (8) | kind u64 | number u64 | tenant (32) | master key's id (8) | wrapped key (72)

Keys of a tenant are numbered: the first is 1, and an erasure with number n says that all up to n are gone.
An erasure that other nodes were not told of yet is of a kind of its own, which only files hold.
"""

import enum
import os
import struct
from dataclasses import dataclass

from kvstore.errors import CorruptBlock
from kvstore.master_keys import MASTER_ID_BYTES, WRAPPED_BYTES, MasterKey, MasterKeys
from kvstore.tenant import TenantId
from kvstore_tiers.sealing import KEY_BYTES, Random

_MAGIC = b"KVKEY\0\0\1"
_RECORD = struct.Struct(f"<8sQQ32s{MASTER_ID_BYTES}s{WRAPPED_BYTES}s")
_CONTEXT_BYTES = _RECORD.size - WRAPPED_BYTES
_ABOUT_BYTES = _CONTEXT_BYTES - MASTER_ID_BYTES
RECORD_BYTES = _RECORD.size
"""Size of a stored record."""

MAX_NUMBER = 1 << 62
"""Largest number of a key."""


class RecordKind(enum.IntEnum):
    """What a record says."""

    KEY = 1
    ERASED = 2
    ERASED_UNTOLD = 3


class UnknownMaster(Exception):
    """A record names a master key that is not here. What it says is not authenticated."""

    def __init__(self, tenant: TenantId) -> None:
        super().__init__()
        self.tenant = tenant


@dataclass(frozen=True, slots=True)
class TenantRecord:
    """One record. ``secret`` is the data key, empty for an erasure; ``master_id`` says what wrapped it."""

    kind: RecordKind
    tenant: TenantId
    number: int
    secret: bytes = b""
    master_id: bytes = b""

    @property
    def num_erased(self) -> int:
        """How many of the tenant's keys are gone, as far as this record tells."""
        return self.number - (self.kind is RecordKind.KEY)

    def pack(self, master: MasterKey, *, random: Random = os.urandom) -> bytes:
        """Return the stored form, wrapped by a master key."""
        fields = (_MAGIC, self.kind, self.number, self.tenant, master.id)
        context = _RECORD.pack(*fields, b"")[:_CONTEXT_BYTES]
        wrapped = master.wrap(self.secret or bytes(KEY_BYTES), context, random=random)
        return context + wrapped

    def is_stored_as(self, packed: bytes) -> bool:
        """Whether a stored form, made here before, is of a record that says the same."""
        about = _RECORD.pack(_MAGIC, self.kind, self.number, self.tenant, b"", b"")
        return packed[:_ABOUT_BYTES] == about[:_ABOUT_BYTES]

    @classmethod
    def unpack(cls, data: bytes, masters: MasterKeys) -> "TenantRecord":
        """Return the record in 136 stored bytes.

        Raises:
            UnknownMaster: it names another master key.
            CorruptBlock: it is no record, or was not made by the master key that it names.
        """
        if len(data) != RECORD_BYTES:
            raise CorruptBlock(f"key record: {len(data)} bytes, expected {RECORD_BYTES}")
        magic, kind, number, tenant, master_id, wrapped = _RECORD.unpack(data)
        is_known = kind in RecordKind.__members__.values()
        if magic != _MAGIC or not is_known or not 1 <= number <= MAX_NUMBER:
            raise CorruptBlock(f"key record: magic {magic!r} kind {kind} number {number} are not this format")
        master = masters.find(master_id)
        if master is None:
            raise UnknownMaster(TenantId(tenant))
        secret = master.unwrap(wrapped, data[:_CONTEXT_BYTES])
        what = RecordKind(kind)
        return cls(what, TenantId(tenant), number, secret if what is RecordKind.KEY else b"", master_id)
