"""The header of stored copies: golden bytes, and no damage goes unseen."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import CorruptBlock
from kvstore.keys import BlockKey, NamespaceDigest
from kvstore.layout import Part
from kvstore.tier import HEADER_BYTES, BlockHeader, BlockId

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


def test_a_header_has_the_golden_bytes():
    assert HEADER.pack().hex() == GOLDEN


def test_a_header_survives_packing():
    assert BlockHeader.unpack(HEADER.pack()) == HEADER
    assert len(HEADER.pack()) == HEADER_BYTES


@given(st.integers(0, HEADER_BYTES - 1), st.integers(1, 255))
def test_a_changed_byte_anywhere_is_seen(position, change):
    packed = bytearray(HEADER.pack())
    packed[position] ^= change

    with pytest.raises(CorruptBlock):
        BlockHeader.unpack(packed)


@pytest.mark.parametrize("data", [b"", b"x" * 191, b"x" * 193, b"\0" * 192], ids=len)
def test_other_bytes_are_no_header(data):
    with pytest.raises(CorruptBlock):
        BlockHeader.unpack(data)
