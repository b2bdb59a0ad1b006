"""The header of stored copies: golden bytes, and no damage goes unseen."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import CorruptBlock
from kvstore.keys import BlockKey, NamespaceDigest
from kvstore.layout import Part
from kvstore.tier import HEADER_BYTES, SEALED_HEADER_BYTES, BlockHeader, BlockId, stored_header_bytes

HEADER = BlockHeader(
    block=BlockId(NamespaceDigest(b"n" * 32), Part(0, 2, 1, 3), BlockKey(b"k" * 32)),
    parent=BlockKey(b"p" * 32),
    depth=7,
    layout=b"l" * 32,
    length_bytes=4096,
    checksum=0x0123_4567_89AB_CDEF,
)
GOLDEN = (
    "4b564248" "0100" "c000" "00100000" + "6b" * 32 + "0000020001000300" + "6e" * 32 + "70" * 32 + "6c" * 32
    + "07000000" + "efcdab8967452301" + "00" * 24 + "57ea58434f142b71"
)  # fmt: skip

SEALED = HEADER._replace(seal=bytes(range(56)))
SEALED_GOLDEN = (
    "4b564248" "0200" "e000" "00100000" + "6b" * 32 + "0000020001000300" + "6e" * 32 + "70" * 32 + "6c" * 32
    + "07000000" + "efcdab8967452301" + bytes(range(56)).hex() + "e284b8f9fbb56bfd"
)  # fmt: skip


@pytest.mark.parametrize(("header", "golden"), [(HEADER, GOLDEN), (SEALED, SEALED_GOLDEN)])
def test_a_header_has_the_golden_bytes(header, golden):
    assert header.pack().hex() == golden


@pytest.mark.parametrize(("header", "size"), [(HEADER, HEADER_BYTES), (SEALED, SEALED_HEADER_BYTES)])
def test_a_header_survives_packing(header, size):
    assert BlockHeader.unpack(header.pack()) == header
    assert len(header.pack()) == header.packed_bytes == size


@given(st.sampled_from([HEADER, SEALED]), st.integers(0, SEALED_HEADER_BYTES - 1), st.integers(1, 255))
def test_a_changed_byte_anywhere_is_seen(header, position, change):
    packed = bytearray(header.pack())
    packed[position % len(packed)] ^= change

    with pytest.raises(CorruptBlock):
        BlockHeader.unpack(packed)


@pytest.mark.parametrize(
    "data", [b"", b"x" * 191, b"x" * 193, b"\0" * 192, b"\0" * 224, SEALED.pack()[:192]], ids=len
)
def test_other_bytes_are_no_header(data):
    with pytest.raises(CorruptBlock):
        BlockHeader.unpack(data)


@pytest.mark.parametrize(
    ("data", "size"),
    [(HEADER.pack(), 192), (SEALED.pack()[:8], 224), (b"KVBH\1\0\xe0\0", None), (b"KVBH", None), (b"", None)],
)
def test_the_first_bytes_of_a_header_tell_its_size(data, size):
    assert stored_header_bytes(data) == size
