"""Master keys and the records they wrap."""

import pytest

from kvstore.errors import CorruptBlock, InvalidConfig
from kvstore.master_keys import MasterKeys
from kvstore.tenant import tenant_of
from kvstore.tenant_record import RECORD_BYTES, RecordKind, TenantRecord, UnknownMaster

A, B = "a1" * 32, "b2" * 32
TENANT = tenant_of(b"salt")


def masters(*keys: str) -> MasterKeys:
    return MasterKeys.parse("\n".join(keys), key="keys")


def test_keys_are_read_with_comments_the_first_is_the_present_one() -> None:
    found = masters("# made in May", f"  {A}  # present", "", B.upper())
    assert found.present.id == masters(A).present.id
    assert found.find(masters(B).present.id) is not None
    assert found.find(b"x" * 8) is None


@pytest.mark.parametrize(
    "text", ["", "# nothing", "a1" * 31, "a1" * 33, "zz" * 32, f"{A}\n{A}", f"{A} junk", "\n".join([A] * 17)]
)
def test_other_text_is_refused_and_never_quoted(text: str) -> None:
    with pytest.raises(InvalidConfig) as refused:
        MasterKeys.parse(text, key="[encryption] keys")
    assert str(refused.value).startswith("[encryption] keys: ")
    assert not any(word in str(refused.value) for word in text.split() if len(word) > 3)


KEY = TenantRecord(RecordKind.KEY, TENANT, 3, bytes(range(32)))
ERASED = TenantRecord(RecordKind.ERASED, TENANT, 3)


@pytest.mark.parametrize("record", [KEY, ERASED])
def test_a_record_survives_its_stored_form_and_shows_no_key(record: TenantRecord) -> None:
    packed = record.pack(masters(A).present)
    found = TenantRecord.unpack(packed, masters(B, A))
    assert (found.kind, found.tenant, found.number, found.secret) == (
        *(record.kind, record.tenant, record.number),
        record.secret,
    )
    assert found.master_id == masters(A).present.id
    assert len(packed) == RECORD_BYTES
    assert bytes(range(8)) not in packed


def test_a_record_of_another_master_key_is_told_from_a_damaged_one() -> None:
    with pytest.raises(UnknownMaster) as unknown:
        TenantRecord.unpack(KEY.pack(masters(A).present), masters(B))
    assert unknown.value.tenant == TENANT


def test_a_changed_byte_anywhere_is_seen() -> None:
    packed = KEY.pack(masters(A).present)
    for place in range(RECORD_BYTES):
        damaged = bytearray(packed)
        damaged[place] ^= 0x41
        with pytest.raises((CorruptBlock, UnknownMaster)):
            TenantRecord.unpack(bytes(damaged), masters(A))


def test_an_erasure_cannot_be_made_from_a_key_nor_a_key_from_an_erasure() -> None:
    key, erased = bytearray(KEY.pack(masters(A).present)), bytearray(ERASED.pack(masters(A).present))
    key[8], erased[8] = RecordKind.ERASED, RecordKind.KEY
    for forged in (key, erased):
        with pytest.raises(CorruptBlock):
            TenantRecord.unpack(bytes(forged), masters(A))


def test_a_record_has_the_golden_bytes() -> None:
    packed = KEY.pack(masters(A).present, random=lambda count: bytes(count))
    assert packed.hex() == (
        "4b564b4559000001" "0100000000000000" "0300000000000000"
        "7d3fb33ad151fa7c74f0dd0e3a138e377b471907409b1ec376086a047a26bfc6" "38d82b5de655762a"
        + "00" * 24
        + "8f589da89e75a4df1d4c78504d2de0d3a12c8b8699863dd205a6fbe3b18d8479"
        "502670015349644c4d2ec1a1d19f6142"
    )  # fmt: skip
