"""IndexRecord: where one copy lies in the slab, as stored in the index; Change: what a commit does to it.

Stored form, 228 bytes, 260 of an encrypted copy:

    header (192 or 224) | slab offset u64 | slot bytes u32 | generation u64 | recency u64 | xxh3-64 of those
"""

import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import xxhash

from kvstore.checksum import checksum
from kvstore.errors import CorruptBlock, InvalidLayout
from kvstore.keys import BlockKey, NamespaceDigest
from kvstore.layout import Part
from kvstore.tier import (
    ALIGNMENT_BYTES,
    HEADER_BYTES,
    SEAL_BYTES,
    SEALED_HEADER_BYTES,
    BlockHeader,
    BlockId,
)
from kvstore_tiers.slots import padded

RECORD_PREFIX = b"b"
"""First byte of the LMDB key of a record; the storage key follows."""

BUDGET_KEY = b"w"
"""LMDB key of what is left of the write budget."""

_PLACE = struct.Struct("<QIQQ")
_RECORD_SUM = struct.Struct("<Q")
_BUDGET = struct.Struct("<Q")
_FIRST_FIELDS = struct.Struct("<4sHHI32s8s32s32s32sIQ")
_ANY_BLOCK = BlockId(NamespaceDigest(b"n" * 32), Part(0, 1, 0, 1), BlockKey(b"k" * 32))
_SEAL_OFFSET = SEALED_HEADER_BYTES - SEAL_BYTES - _RECORD_SUM.size


def _shape_of(seal: bytes) -> tuple[bytes, int, int]:
    """Return how headers with such a seal begin, their size, and that of their record but for its sum."""
    start = BlockHeader(_ANY_BLOCK, BlockKey(b"p" * 32), 0, b"", 0, 0, seal).pack()[:8]
    header_bytes = SEALED_HEADER_BYTES if seal else HEADER_BYTES
    return start, header_bytes, header_bytes + _PLACE.size


_SHAPES = {shape[2] + _RECORD_SUM.size: shape for shape in map(_shape_of, (b"", bytes(SEAL_BYTES)))}
"""For each size of a record: magic, version and size of its header; bytes of its header; bytes summed."""

_NO_SHAPE = (b"no start", 0, 0)


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

    @classmethod
    def unpack(cls, key: bytes, value: bytes) -> "IndexRecord":
        """Return the record stored under ``key``.

        Raises:
            CorruptBlock: damaged, impossible, or a record of another block.
        """
        records, damaged = unpack_records([(key, value)])
        if damaged:
            raise CorruptBlock(f"index: a record of {len(value)} bytes is damaged, or of another block")
        return records[0]


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
    shape = _SHAPES.get(len(value))
    if shape is None:
        return -1
    generation: int = _PLACE.unpack_from(value, shape[1])[2]
    return generation


def _part_in(data: bytes, known: dict[bytes, Part]) -> Part | None:
    try:
        part = known[data] = Part.unpack(data)
    except InvalidLayout:
        return None
    return part


def unpack_records(items: Iterable[tuple[bytes, bytes]]) -> tuple[list[IndexRecord], list[bytes]]:
    """Return the sound records among stored (key, value) pairs, and the keys of damaged ones.

    The record's checksum covers the header with its own, which need not be taken again. A hundred thousand
    records a second of start matter: one loop, equal fields shared, no call that can be spared.
    """
    records: list[IndexRecord] = []
    damaged: list[bytes] = []
    shared: dict[bytes, bytes] = {}
    parts: dict[bytes, Part] = {}
    add, new, digest = records.append, tuple.__new__, xxhash.xxh3_64_digest
    fields_of, place_of, shape_of = _FIRST_FIELDS.unpack_from, _PLACE.unpack_from, _SHAPES.get
    for key, value in items:
        start, header_bytes, body_bytes = shape_of(len(value), _NO_SHAPE)
        # digest() is big-endian, the stored sum little-endian.
        is_whole = value[:8] == start and value[body_bytes:] == digest(value[:body_bytes])[::-1]
        if not is_whole or value[12:52] != key[1:]:
            damaged.append(key)
            continue
        _, _, _, length, name, part_bytes, namespace, parent, layout, depth, payload_sum = fields_of(value)
        offset, slot_bytes, generation, recency = place_of(value, header_bytes)
        if slot_bytes != padded(length) or offset % ALIGNMENT_BYTES or not slot_bytes:
            damaged.append(key)
            continue
        part = parts.get(part_bytes) or _part_in(part_bytes, parts)
        if part is None:
            damaged.append(key)
            continue
        namespace = shared.setdefault(namespace, namespace)
        layout = shared.setdefault(layout, layout)
        block = new(BlockId, (namespace, part, name))
        seal = value[_SEAL_OFFSET : _SEAL_OFFSET + SEAL_BYTES] if header_bytes == SEALED_HEADER_BYTES else b""
        header = new(BlockHeader, (block, parent, depth, layout, length, payload_sum, seal))
        add(new(IndexRecord, (header, offset, slot_bytes, generation, recency)))
    return records, damaged
