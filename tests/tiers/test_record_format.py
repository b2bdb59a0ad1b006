"""The stored form of a record: golden bytes, round trips, and not one bit that may be wrong."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import CorruptBlock
from kvstore.records import MAX_VERSION, RecordKey
from kvstore_tiers.record_codec import Draft, assembled
from kvstore_tiers.record_format import (
    HEAD_BYTES,
    RecordHead,
    StoredRecord,
    charge_bytes,
    next_version,
    pack_names,
    record_id,
    tombstone,
    unpack_entry,
    unpack_names,
)

KEY = RecordKey("sessions", "resp_1", b"salt")
GOLDEN = (
    "4b56524301000000a15e9aed98c25e1e0ce38a4468e96e4203d99749b1074ad7765815763948221a050000e000000000"
    "000102030405060708090a0b0c0d0e0f00505c18a301000060ea000000000000050000000f0000000500000000000000"
    "5a4a582f1b4bf445f0f09d9b267ed58771baa2283b597d400873657373696f6e73726573705f3176616c7565"
)


def record_of(value: bytes = b"value", version: int = 7 << 29 | 5) -> StoredRecord:
    head = RecordHead(record_id(KEY), version, bytes(range(16)), 1_800_000_000_000, 60_000)
    return assembled(Draft(head, KEY, value), pack_names(KEY.collection, KEY.name), value)


def stored(record: StoredRecord) -> bytes:
    return record.entry + record.body


@given(st.binary(max_size=300), st.integers(1, MAX_VERSION), st.booleans())
def test_a_record_comes_back_equal(value: bytes, version: int, is_sealed: bool) -> None:
    made = record_of(value, version)
    made = made._replace(head=made.head._replace(is_sealed=is_sealed))

    assert StoredRecord.unpack(stored(made), made.head.id) == made
    assert unpack_entry(made.entry) == (made.head, made.name)
    assert unpack_names(made.name) == ("sessions", "resp_1")
    assert made.head.stored_bytes == len(stored(made))


def test_no_bit_of_it_may_be_another() -> None:
    sound = stored(record_of())
    for at, bit in itertools.product(range(len(sound)), range(8)):
        damaged = bytearray(sound)
        damaged[at] ^= 1 << bit
        with pytest.raises(CorruptBlock):
            StoredRecord.unpack(bytes(damaged), record_id(KEY))


@pytest.mark.parametrize("length", [0, 1, HEAD_BYTES - 1, HEAD_BYTES, HEAD_BYTES + 10])
def test_a_record_that_is_cut_off_is_damaged(length: int) -> None:
    with pytest.raises(CorruptBlock):
        StoredRecord.unpack(stored(record_of())[:length], record_id(KEY))


def test_a_record_with_more_behind_it_or_of_another_name_is_damaged() -> None:
    with pytest.raises(CorruptBlock):
        StoredRecord.unpack(stored(record_of()) + b"\0", record_id(KEY))
    with pytest.raises(CorruptBlock, match="another record"):
        StoredRecord.unpack(stored(record_of()), bytes(32))


def test_a_mark_of_a_dropped_record_is_sound_and_no_version() -> None:
    mark = tombstone(record_id(KEY))

    found = StoredRecord.unpack(stored(mark), record_id(KEY))

    assert (found.head.is_dropped, found.head.version, found.body) == (True, 0, b"")


def test_the_stored_form_is_the_golden_one() -> None:
    assert stored(record_of()).hex() == GOLDEN


@pytest.mark.parametrize("data", [b"", b"\5abc", b"\1\xff\xfe"])
def test_what_is_no_name_part_is_damaged(data: bytes) -> None:
    with pytest.raises(CorruptBlock):
        unpack_names(data)


names = st.from_regex(r"[a-z]{1,3}", fullmatch=True)


@given(st.lists(st.tuples(names, names, st.binary(max_size=3)), min_size=2, max_size=2, unique=True))
def test_records_of_different_names_have_different_digests(parts: list[tuple[str, str, bytes]]) -> None:
    one, other = (RecordKey(*part) for part in parts)

    assert record_id(one) != record_id(other)


@given(st.integers(0, MAX_VERSION), st.binary(min_size=16, max_size=16))
def test_a_version_grows_and_never_is_none(present: int, token: bytes) -> None:
    version = next_version(present, token)

    assert 0 < version <= MAX_VERSION
    assert version > present or present >> 29 == (1 << 24) - 1


def test_versions_of_two_puts_over_the_same_one_differ() -> None:
    assert next_version(5 << 29, b"a" * 16) != next_version(5 << 29, b"b" * 16)


@pytest.mark.parametrize(("stored_bytes", "charge"), [(1, 4096), (4096, 4096), (4097, 8192)])
def test_a_record_counts_for_whole_pages(stored_bytes: int, charge: int) -> None:
    assert charge_bytes(stored_bytes) == charge
