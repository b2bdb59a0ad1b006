"""RecordTable: all checks of a stored record, made over columns; slots that overlap."""

import random
import struct

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.keys import BlockKey, NamespaceDigest
from kvstore.layout import Part
from kvstore.tier import BlockHeader, BlockId
from kvstore_tiers.ssd_record import PLAIN_FORM, IndexRecord
from kvstore_tiers.ssd_record_table import RecordTable
from tests.example_counts import examples
from tests.tiers.blocks import header, payload

PAGE = 4096
RECORD_BYTES = PLAIN_FORM.record_bytes
OFFSET, SLOT_BYTES, PART, MAGIC, LENGTH = 192, 200, 44, 0, 8


def record(
    number: int, *, offset: int = 0, pages: int = 1, generation: int = 1, recency: int = 1
) -> IndexRecord:
    data = payload(number, PAGE * (pages - 1) + 1)
    return IndexRecord(header(number, data), offset, PAGE * pages, generation, recency)


def stored(*records: IndexRecord) -> dict[bytes, bytes]:
    return {record.key: record.pack() for record in records}


def changed(value: bytes, position: int, data: bytes) -> bytes:
    """A record with other bytes somewhere and a checksum that agrees with them."""
    body = bytearray(value[:-8])
    body[position : position + len(data)] = data
    return bytes(body) + struct.pack("<Q", xxhash.xxh3_64_intdigest(bytes(body)))


def test_records_come_back_as_they_were_packed_oldest_use_first() -> None:
    made = [record(n, offset=PAGE * n, recency=100 - n, generation=n) for n in range(50)]
    table, damaged = RecordTable.of(stored(*made))
    assert list(table) == made[::-1]
    assert damaged == []
    assert table.highest_number == 100
    assert table.offsets.tolist() == [PAGE * n for n in reversed(range(50))]
    assert table.slot_bytes.tolist() == [PAGE] * 50


def test_parts_and_namespaces_of_many_kinds_come_back() -> None:
    made = [
        IndexRecord(
            BlockHeader(
                BlockId(
                    NamespaceDigest(bytes([n % 3] * 32)), Part(n % 2, 4, 0, 1 + n), BlockKey(bytes([n] * 32))
                ),
                BlockKey(bytes([n + 1] * 32)),
                n,
                bytes([n % 5] * 32),
                PAGE,
                (1 << 64) - 1 - n,
            ),
            PAGE * n,
            PAGE,
            (1 << 64) - 1,
            n,
        )
        for n in range(20)
    ]
    table, damaged = RecordTable.of(stored(*made))
    assert (list(table), damaged) == (made, [])


def test_an_index_without_records_is_sound() -> None:
    table, damaged = RecordTable.of({})
    assert (len(table), damaged, table.highest_number) == (0, [], 0)
    assert len(table.without_overlaps(PAGE)[0]) == 0


def test_a_flipped_bit_anywhere_in_a_record_or_its_key_is_found() -> None:
    good, bad = record(1, offset=PAGE), record(2)
    value = bad.pack()
    for position in range(RECORD_BYTES):
        flipped = bytearray(value)
        flipped[position] ^= 1 << random.Random(position).randrange(8)
        table, damaged = RecordTable.of({**stored(good), bad.key: bytes(flipped)})
        assert (list(table), damaged) == ([good], [bad.key])
    for position in range(len(bad.key)):
        key = bytearray(bad.key)
        key[position] ^= 1
        table, damaged = RecordTable.of({**stored(good), bytes(key): value})
        assert (list(table), damaged) == ([good], [bytes(key)])


@pytest.mark.parametrize(
    ("position", "data"),
    [
        (MAGIC, b"KVBX"),
        (4, b"\2\0"),
        (OFFSET, struct.pack("<Q", 4095)),
        (SLOT_BYTES, struct.pack("<I", 2 * PAGE)),
        (SLOT_BYTES, struct.pack("<I", 0)),
        (LENGTH, struct.pack("<I", 0)),
        (LENGTH, struct.pack("<I", PAGE + 1)),
    ],
    ids=["magic", "version", "offset", "larger slot", "no slot", "no bytes", "longer than its slot"],
)
def test_a_record_with_a_sound_checksum_that_is_impossible_is_refused(position: int, data: bytes) -> None:
    good, bad = record(1, offset=PAGE), record(2)
    table, damaged = RecordTable.of({**stored(good), bad.key: changed(bad.pack(), position, data)})
    assert (list(table), damaged) == ([good], [bad.key])


def test_a_record_with_an_empty_part_is_refused() -> None:
    good, bad = record(1, offset=PAGE), record(2)
    part = struct.pack("<4H", 2, 2, 0, 1)
    key = bad.key[:33] + part
    table, damaged = RecordTable.of({**stored(good), key: changed(bad.pack(), PART, part)})
    assert (list(table), damaged) == ([good], [key])


@pytest.mark.parametrize("cut", [0, 1, 100, RECORD_BYTES - 1])
def test_a_record_that_is_too_short_or_too_long_is_refused(cut: int) -> None:
    good, bad = record(1, offset=PAGE), record(2)
    for value in (bad.pack()[:cut], bad.pack() + bytes(cut + 1)):
        table, damaged = RecordTable.of({**stored(good), bad.key: value})
        assert (list(table), damaged) == ([good], [bad.key])


def test_keys_of_another_size_are_refused() -> None:
    good, bad = record(1, offset=PAGE), record(2)
    for key in (b"", b"b", bad.key[:-1], bad.key + b"\0"):
        table, damaged = RecordTable.of({**stored(good), key: bad.pack()})
        assert (list(table), damaged) == ([good], [key])


def test_a_slot_whose_end_is_beyond_every_number_lies_beyond_the_slab() -> None:
    good, bad = record(1, offset=PAGE), record(2, offset=(1 << 64) - PAGE)
    table, damaged = RecordTable.of(stored(good, bad))
    assert damaged == []
    kept, lost = table.without_overlaps(1 << 62)
    assert (list(kept), lost) == ([good], [bad.key])


def expected_without_overlaps(records: list[IndexRecord], limit: int) -> list[IndexRecord]:
    """The rule, one record at a time."""
    kept: list[IndexRecord] = []
    for found in sorted(records, key=lambda record: record.offset):
        if found.offset + found.slot_bytes > limit:
            continue
        while kept and kept[-1].offset + kept[-1].slot_bytes > found.offset:
            if kept[-1].generation > found.generation:
                break
            kept.pop()
        else:
            kept.append(found)
    return sorted(kept, key=lambda record: record.recency)


@settings(max_examples=examples(200))
@given(
    st.lists(
        st.tuples(st.integers(0, 30), st.integers(1, 6), st.permutations(range(12))),
        max_size=12,
        unique_by=lambda slot: slot[0],
    ),
    st.permutations(range(12)),
)
def test_of_slots_that_overlap_the_newest_stays(
    slots: list[tuple[int, int, list[int]]], generations: list[int]
) -> None:
    made = [
        record(n, offset=PAGE * place, pages=pages, generation=generations[n], recency=order[n])
        for n, (place, pages, order) in enumerate(slots)
    ]
    made = [
        found._replace(recency=n) for n, found in enumerate(sorted(made, key=lambda found: found.recency))
    ]
    limit = 30 * PAGE
    table, _ = RecordTable.of(stored(*made))
    kept, lost = table.without_overlaps(limit)
    assert list(kept) == expected_without_overlaps(made, limit)
    assert sorted(lost) == sorted({found.key for found in made} - {found.key for found in kept})
    assert kept.offsets.tolist() == [found.offset for found in kept]
