"""The stored form of a record, the same on disk and in Redis.

    head (120 bytes) | name part | body

All integers are little-endian. The head names the record by a digest, and has the checksums (xxh3-64) of the
two parts and its own. The name part holds collection and name, the body the value; encrypted records have
both encrypted, each behind a seal (see record_sealing). Head and name part together are an *entry*: what a
listing needs.
"""

import hashlib
import struct
from typing import NamedTuple

from kvstore.checksum import checksum
from kvstore.errors import CorruptBlock
from kvstore.records import MAX_RECORD_BYTES, TOKEN_BYTES, RecordKey

_MAGIC = b"KVRC"
_FORMAT = 1
_FIELDS = struct.Struct(f"<4sHH32sQ{TOKEN_BYTES}sQQIIIIQQ")
_SUM = struct.Struct("<Q")
_NAMES = struct.Struct("<B")
_ID_TAG = b"kvstore.record.v1\0"
_LENGTH = struct.Struct("<H")
_SEALED, _DROPPED = 1, 2
_RANDOM_BITS = 29
_COUNTER_MAX = (1 << 24) - 1
_PAGE_BYTES = 4096
_SEAL_MAX_BYTES = 64
_MAX_NAME_PART_BYTES = 512

HEAD_BYTES = _FIELDS.size + _SUM.size
"""Size of a head."""

ID_BYTES = 32
"""Size of a record's digest."""

TENANT_BYTES = 32
"""Size of a tenant's id, which stands before the digest in the keys of a node's records."""

MAX_STORED_BYTES = HEAD_BYTES + _MAX_NAME_PART_BYTES + MAX_RECORD_BYTES + _SEAL_MAX_BYTES
"""Longest stored form."""


class RecordHead(NamedTuple):
    """What is known of a record without its value.

    ``expires_ms`` is when its time is over by the wall clock of whoever wrote it, in milliseconds of Unix
    time; ``ttl_ms`` is the time it was given. ``is_dropped``: a mark that says that the record is gone.
    """

    id: bytes
    version: int
    token: bytes
    expires_ms: int
    ttl_ms: int
    value_bytes: int = 0
    name_bytes: int = 0
    body_bytes: int = 0
    name_sum: int = 0
    body_sum: int = 0
    is_sealed: bool = False
    is_dropped: bool = False

    def pack(self) -> bytes:
        """Return the stored form."""
        fields = _FIELDS.pack(
            _MAGIC,
            _FORMAT,
            _SEALED * self.is_sealed | _DROPPED * self.is_dropped,
            self.id,
            self.version,
            self.token,
            self.expires_ms,
            self.ttl_ms,
            self.value_bytes,
            self.name_bytes,
            self.body_bytes,
            0,
            self.name_sum,
            self.body_sum,
        )
        return fields + _SUM.pack(checksum(fields))

    @classmethod
    def unpack(cls, data: bytes) -> "RecordHead":
        """Return the head at the beginning of stored bytes.

        Raises:
            CorruptBlock: too few bytes, or wrong magic, format, flags, checksum or lengths.
        """
        if len(data) < HEAD_BYTES:
            raise CorruptBlock(f"record: {len(data)} bytes, a head has {HEAD_BYTES}")
        fields = data[: _FIELDS.size]
        magic, form, flags, digest, version, token, expires_ms, ttl_ms, *rest = _FIELDS.unpack(fields)
        value_bytes, name_bytes, body_bytes, unused, name_sum, body_sum = rest
        if magic != _MAGIC or form != _FORMAT or flags & ~(_SEALED | _DROPPED) or unused:
            raise CorruptBlock(f"record: magic {magic!r} format {form} flags {flags} are not this format")
        if data[_FIELDS.size : HEAD_BYTES] != _SUM.pack(checksum(fields)):
            raise CorruptBlock("record: the checksum of its head does not match")
        return cls(
            digest,
            version,
            token,
            expires_ms,
            ttl_ms,
            value_bytes,
            name_bytes,
            body_bytes,
            name_sum,
            body_sum,
            bool(flags & _SEALED),
            bool(flags & _DROPPED),
        )

    @property
    def stored_bytes(self) -> int:
        """Size of the whole stored form."""
        return HEAD_BYTES + self.name_bytes + self.body_bytes


class StoredRecord(NamedTuple):
    """A record in its stored form, cut in three."""

    head: RecordHead
    name: bytes
    body: bytes

    @property
    def entry(self) -> bytes:
        """Head and name part."""
        return self.head.pack() + self.name

    @classmethod
    def unpack(cls, data: bytes, record_id: bytes) -> "StoredRecord":
        """Return the record of that digest in its stored form.

        Raises:
            CorruptBlock: it is not that record, or any of its bytes is wrong.
        """
        head = RecordHead.unpack(data)
        name_end = HEAD_BYTES + head.name_bytes
        name, body = data[HEAD_BYTES:name_end], data[name_end:]
        if head.id != record_id:
            raise CorruptBlock("record: its head is that of another record")
        if len(name) != head.name_bytes or len(body) != head.body_bytes:
            raise CorruptBlock(f"record: {len(data)} bytes, its head says {head.stored_bytes}")
        if checksum(name) != head.name_sum or checksum(body) != head.body_sum:
            raise CorruptBlock("record: its checksum does not match")
        return cls(head, name, body)


def tombstone(record_id: bytes) -> StoredRecord:
    """Return the mark that stands for a record which was dropped."""
    nothing = checksum(b"")
    head = RecordHead(
        record_id, 0, bytes(TOKEN_BYTES), 0, 0, name_sum=nothing, body_sum=nothing, is_dropped=True
    )
    return StoredRecord(head, b"", b"")


def unpack_entry(data: bytes) -> tuple[RecordHead, bytes]:
    """Return head and name part of an entry.

    Raises:
        CorruptBlock: any of its bytes is wrong.
    """
    head = RecordHead.unpack(data)
    name = data[HEAD_BYTES:]
    if len(name) != head.name_bytes or checksum(name) != head.name_sum:
        raise CorruptBlock("record: the checksum of its name does not match")
    return head, name


def record_id(key: RecordKey) -> bytes:
    """Return a record's digest, which tells neither its name nor its tenant's salt."""
    fields = (key.tenant_salt, key.collection.encode(), key.name.encode())
    return hashlib.sha256(_ID_TAG + b"".join(_LENGTH.pack(len(field)) + field for field in fields)).digest()


def pack_names(collection: str, name: str) -> bytes:
    """Return the name part of a record in the clear."""
    return _NAMES.pack(len(collection)) + collection.encode() + name.encode()


def unpack_names(data: bytes) -> tuple[str, str]:
    """Return collection and name.

    Raises:
        CorruptBlock: it is no name part.
    """
    if not data or len(data) < 1 + data[0]:
        raise CorruptBlock("record: its name part is cut short")
    try:
        return data[1 : 1 + data[0]].decode("ascii"), data[1 + data[0] :].decode("ascii")
    except UnicodeDecodeError as error:
        raise CorruptBlock("record: its name part is no text") from error


def next_version(present: int, token: bytes) -> int:
    """Return the version that a put makes of the present one (0: there is none).

    It grows, and ends in 29 bits of the put's token: where a server lost acknowledged puts, the version that
    is made again in their place is another one.
    """
    counter = (present >> _RANDOM_BITS) + 1
    if counter > _COUNTER_MAX:
        counter = 1
    return counter << _RANDOM_BITS | int.from_bytes(token[:4], "little") & ((1 << _RANDOM_BITS) - 1)


def charge_bytes(stored_bytes: int) -> int:
    """Return what a record of that size counts for: whole pages of 4 KiB."""
    return -(-stored_bytes // _PAGE_BYTES) * _PAGE_BYTES
