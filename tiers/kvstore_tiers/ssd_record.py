"""IndexRecord: where one copy lies in the slab, as stored in the index; Change: what a commit does to it.

Stored form, 228 bytes, 260 of an encrypted copy:

    header (192 or 224) | slab offset u64 | slot bytes u32 | generation u64 | recency u64 | xxh3-64 of those
"""

import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from kvstore.checksum import checksum
from kvstore.keys import BlockKey, NamespaceDigest
from kvstore.layout import Part
from kvstore.tier import SEAL_BYTES, SEALED_HEADER_BYTES, STORAGE_KEY_BYTES, BlockHeader, BlockId

RECORD_PREFIX = b"b"
"""First byte of the LMDB key of a record; the storage key follows."""

BUDGET_KEY = b"w"
"""LMDB key of what is left of the write budget."""

_RECORD_SUM = struct.Struct("<Q")
NAME_IN_RECORD = slice(12, 12 + STORAGE_KEY_BYTES)
"""Where the storage key is in it."""

RECORD_KEY_BYTES = len(RECORD_PREFIX) + STORAGE_KEY_BYTES
"""Size of its LMDB key."""

_PLACE = struct.Struct("<QIQQ")
_BUDGET = struct.Struct("<Q")
_HEADER_FIELDS = struct.Struct("<8xI32s8s32s32s32sIQ")
_ANY_BLOCK = BlockId(NamespaceDigest(b"n" * 32), Part(0, 1, 0, 1), BlockKey(b"k" * 32))
_SEAL_OFFSET = SEALED_HEADER_BYTES - SEAL_BYTES - _RECORD_SUM.size


@dataclass(frozen=True, slots=True)
class RecordForm:
    """Sizes of a stored record: of a copy in the clear, or of an encrypted one.

    ``start`` is magic, version and size of its header.
    """

    header_bytes: int
    start: bytes

    @classmethod
    def of(cls, seal: bytes) -> "RecordForm":
        """Return the form of records whose headers have such a seal."""
        header = BlockHeader(_ANY_BLOCK, BlockKey(b"p" * 32), 0, b"", 0, 0, seal)
        return cls(header.packed_bytes, header.pack()[:8])

    @property
    def summed_bytes(self) -> int:
        """Bytes of a record that its checksum, the last eight, covers."""
        return self.header_bytes + _PLACE.size

    @property
    def record_bytes(self) -> int:
        """Size of a record."""
        return self.summed_bytes + _RECORD_SUM.size


PLAIN_FORM = RecordForm.of(b"")
SEALED_FORM = RecordForm.of(bytes(SEAL_BYTES))
_HEADER_BYTES_OF = {form.record_bytes: form.header_bytes for form in (PLAIN_FORM, SEALED_FORM)}


class IndexRecord(NamedTuple):
    """Where one copy lies. ``generation`` tells copies of the same block apart; recency grows with use."""

    header: BlockHeader
    offset: int
    slot_bytes: int
    generation: int
    recency: int

    @property
    def key(self) -> bytes:
        """The LMDB key."""
        return RECORD_PREFIX + self.header.block.storage_key

    def pack(self) -> bytes:
        """Return the stored form."""
        place = _PLACE.pack(self.offset, self.slot_bytes, self.generation, self.recency)
        body = self.header.pack() + place
        return body + _RECORD_SUM.pack(checksum(body))


class BudgetNote(NamedTuple):
    """What is left of the write budget, stored along with the writes it was spent on."""

    left_bytes: int

    @property
    def key(self) -> bytes:
        """The LMDB key."""
        return BUDGET_KEY

    def pack(self) -> bytes:
        """Return the stored form."""
        body = _BUDGET.pack(self.left_bytes)
        return body + _RECORD_SUM.pack(checksum(body))

    @classmethod
    def unpack(cls, value: bytes) -> "BudgetNote":
        """Return what was stored; nothing left if it is damaged."""
        body = value[: _BUDGET.size]
        if len(value) != _BUDGET.size + _RECORD_SUM.size or value[_BUDGET.size :] != _RECORD_SUM.pack(
            checksum(body)
        ):
            return cls(0)
        return cls(*_BUDGET.unpack(body))


@dataclass(frozen=True, slots=True)
class Change:
    """One change of the index: store something, renew a record that is still there, or delete one.

    ``renew``, ``restore`` and ``delete`` act only while the stored record is of that ``generation``.
    """

    kind: str
    record: IndexRecord | BudgetNote
    generation: int = -1

    @classmethod
    def store(cls, record: IndexRecord) -> "Change":
        """Store a record, in place of any other of the block."""
        return cls("store", record)

    @classmethod
    def renew(cls, record: IndexRecord) -> "Change":
        """Rewrite a record with a new recency."""
        return cls("renew", record, record.generation)

    @classmethod
    def restore(cls, record: IndexRecord, *, instead_of: IndexRecord) -> "Change":
        """Store a record again, in place of one whose commit failed and may have happened all the same."""
        return cls("restore", record, instead_of.generation)

    @classmethod
    def delete(cls, record: IndexRecord) -> "Change":
        """Delete a record."""
        return cls("delete", record, record.generation)

    @classmethod
    def note_budget(cls, left_bytes: int) -> "Change":
        """Store what is left of the write budget."""
        return cls("budget", BudgetNote(left_bytes))

    @property
    def is_unconditional(self) -> bool:
        """Whether it acts whatever the index holds."""
        return self.kind in ("store", "budget")

    def concerns(self, held: bytes | None) -> bool:
        """Whether a stored record is of the generation that this change is about."""
        return held is not None and generation_of(held) == self.generation


def generation_of(value: bytes) -> int:
    """Return the generation of a stored record, -1 if it cannot be one."""
    header_bytes = _HEADER_BYTES_OF.get(len(value))
    if header_bytes is None:
        return -1
    generation: int = _PLACE.unpack_from(value, header_bytes)[2]
    return generation


def unpack_sound(value: bytes) -> IndexRecord:
    """Return the record in a stored form that was found sound (see ``RecordTable``)."""
    (header,) = headers_in([value])
    return IndexRecord(header, *_PLACE.unpack_from(value, _HEADER_BYTES_OF[len(value)]))


def headers_in(values: Iterable[bytes]) -> Iterator[BlockHeader]:
    """Yield the headers in stored records that were found sound, equal fields shared."""
    parts: dict[bytes, Part] = {}
    shared: dict[bytes, bytes] = {}
    share, new, fields_of = shared.setdefault, tuple.__new__, _HEADER_FIELDS.unpack_from
    sealed_bytes = SEALED_FORM.record_bytes
    for value in values:
        length, key, packed_part, namespace, parent, layout, depth, payload_sum = fields_of(value)
        part = parts.get(packed_part)
        if part is None:
            part = parts[packed_part] = Part.unpack(packed_part)
        block = new(BlockId, (share(namespace, namespace), part, key))
        seal = value[_SEAL_OFFSET : _SEAL_OFFSET + SEAL_BYTES] if len(value) == sealed_bytes else b""
        yield new(BlockHeader, (block, parent, depth, share(layout, layout), length, payload_sum, seal))


def name_in(value: bytes) -> bytes:
    """Return the storage key in a stored record."""
    return value[NAME_IN_RECORD]


def recency_in(value: bytes) -> int:
    """Return the recency in a stored record."""
    recency: int = _PLACE.unpack_from(value, _HEADER_BYTES_OF[len(value)])[3]
    return recency
