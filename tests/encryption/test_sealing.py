"""The encryption of single payloads: the published vectors, and nothing that was touched is opened."""

import hashlib

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.checksum import checksum
from kvstore.keys import BlockKey, NamespaceDigest
from kvstore.layout import Part
from kvstore.tier import BlockHeader, BlockId
from kvstore_tiers.sealing import (
    PIECE_BYTES,
    DataKey,
    Derivation,
    KeyForgotten,
    Seal,
    open_payload,
    seal_payload,
)
from tests.encryption.keys import TENANT
from tests.example_counts import examples
from tests.tiers.blocks import header, payload

GOLDEN = "2594933e4c83b16b6ba724430f197358bf739fc62be217bf16baf0a6ec08c4bf"
NONCE = b"ABCDEFGHIJKLMNOPQRSTUVWX"
LENGTH = 5000


def xaes(key: bytes, nonce: bytes, plaintext: bytes, context: bytes) -> bytes:
    return AESGCM(Derivation(key).key_for(nonce)).encrypt(nonce[12:], plaintext, context)


@pytest.mark.parametrize(
    ("key", "context", "expected"),
    [
        (b"\1" * 32, b"", "ce546ef63c9cc60765923609b33a9a1974e96e52daf2fcf7075e2271"),
        (
            b"\3" * 32,
            b"c2sp.org/XAES-256-GCM",
            "986ec1832593df5443a179437fd083bf3fdb41abd740a21f71eb769d",
        ),
    ],
)
def test_the_cipher_is_xaes_256_gcm(key: bytes, context: bytes, expected: str) -> None:
    assert xaes(key, NONCE, b"XAES-256-GCM", context).hex() == expected


def test_the_cipher_agrees_with_the_accumulated_vectors_of_its_specification() -> None:
    stream = iter(hashlib.shake_128(b"").digest(6_000_000))

    def take(count: int) -> bytes:
        return bytes(next(stream) for _ in range(count))

    seen = hashlib.shake_128()
    for _ in range(10_000):
        key, nonce = take(32), take(24)
        plaintext = take(take(1)[0])
        seen.update(xaes(key, nonce, plaintext, take(take(1)[0])))
    assert seen.hexdigest(32) == "e6b9edf2df6cec60c8cbd864e2211b597fb69a529160cd040d56c0c210081939"


class Sealed:
    """A sealed payload, and what it was made of."""

    def __init__(self, number: int = 1, length: int = LENGTH) -> None:
        self.key = DataKey.make(TENANT)
        self.data = payload(number, length)
        self.plain = header(number, self.data)
        self.buffer = memoryview(bytearray(length))
        found = seal_payload(self.key, self.plain, memoryview(self.data), self.buffer)
        assert found is not None
        self.header = found


@pytest.mark.parametrize(
    "length", [1, 15, 16, 17, 4096, PIECE_BYTES - 1, PIECE_BYTES, PIECE_BYTES + 1, 3 * PIECE_BYTES + 5]
)
def test_what_was_sealed_is_opened_in_place(length: int) -> None:
    sealed = Sealed(length=length)
    assert bytes(sealed.buffer) != sealed.data
    assert sealed.header.checksum == checksum(sealed.buffer)
    assert open_payload(sealed.key, sealed.header, sealed.buffer) == sealed.plain
    assert bytes(sealed.buffer) == sealed.data


def test_no_two_seals_of_one_payload_are_alike() -> None:
    data, key = payload(1, LENGTH), DataKey.make(TENANT)
    found = [
        seal_payload(key, header(1, data), memoryview(data), memoryview(bytearray(LENGTH))) for _ in range(50)
    ]
    seals = [Seal.unpack(at.seal) for at in found if at is not None]
    assert len({seal.nonce for seal in seals}) == len({seal.checksum for seal in seals}) == 50


def test_the_plaintexts_checksum_is_nowhere_in_the_header() -> None:
    sealed = Sealed()
    plain_sum = sealed.plain.checksum.to_bytes(8, "little")
    assert plain_sum not in sealed.header.pack()
    assert plain_sum[::-1] not in sealed.header.pack()


def test_a_payload_that_changed_in_memory_is_not_sealed() -> None:
    data = payload(1, LENGTH)
    wrong = memoryview(b"\0" + data[1:])
    key, buffer = DataKey.make(TENANT), memoryview(bytearray(LENGTH))
    assert seal_payload(key, header(1, data), wrong, buffer) is None


@settings(max_examples=examples(200))
@given(st.integers(0, LENGTH + 8 * 7), st.integers(1, 255))
def test_a_changed_byte_of_ciphertext_or_seal_opens_nothing(position: int, change: int) -> None:
    sealed = Sealed()
    found = bytearray(sealed.buffer) + sealed.header.seal
    place = position % len(found)
    found[place] ^= change
    buffer = memoryview(bytearray(found[:LENGTH]))
    touched = sealed.header._replace(seal=bytes(found[LENGTH:]))
    # The key's id is only a name: whoever looks it up finds another key or none.
    is_name = LENGTH <= place < LENGTH + 8
    opened = open_payload(sealed.key, touched, buffer)
    assert (opened == sealed.plain) if is_name else (opened is None)
    assert is_name or bytes(buffer) == bytes(LENGTH)


OTHERS = {
    "key": lambda at: at._replace(block=at.block._replace(key=BlockKey(b"x" * 32))),
    "part": lambda at: at._replace(block=at.block._replace(part=Part(0, 1, 0, 1))),
    "namespace": lambda at: at._replace(block=at.block._replace(namespace=NamespaceDigest(b"x" * 32))),
    "parent": lambda at: at._replace(parent=BlockKey(b"x" * 32)),
    "depth": lambda at: at._replace(depth=at.depth + 1),
    "layout": lambda at: at._replace(layout=b"x" * 32),
    "length": lambda at: at._replace(length_bytes=at.length_bytes - 1),
}


@pytest.mark.parametrize("what", OTHERS)
def test_a_seal_holds_for_its_own_place_only(what: str) -> None:
    sealed = Sealed()
    moved: BlockHeader = OTHERS[what](sealed.header)
    assert open_payload(sealed.key, moved, sealed.buffer) is None
    assert not any(sealed.buffer[: moved.length_bytes])


def test_swapped_payloads_or_seals_open_nothing() -> None:
    one, other = Sealed(1), Sealed(2)
    other.key = one.key
    found = seal_payload(one.key, other.plain, memoryview(other.data), other.buffer)
    assert found is not None
    swapped = one.header._replace(seal=found.seal)
    assert open_payload(one.key, swapped, memoryview(bytearray(one.buffer))) is None
    assert open_payload(one.key, one.header, memoryview(bytearray(other.buffer))) is None
    assert open_payload(one.key, found, other.buffer) == other.plain


def test_another_key_opens_nothing() -> None:
    sealed = Sealed()
    assert open_payload(DataKey.make(TENANT), sealed.header, sealed.buffer) is None


def test_a_forgotten_key_neither_seals_nor_opens() -> None:
    sealed = Sealed()
    sealed.key.forget()
    with pytest.raises(KeyForgotten):
        open_payload(sealed.key, sealed.header, sealed.buffer)
    with pytest.raises(KeyForgotten):
        seal_payload(sealed.key, sealed.plain, memoryview(sealed.data), sealed.buffer)


def test_a_key_that_is_forgotten_while_it_opens_leaves_nothing_of_the_block() -> None:
    sealed = Sealed()

    class ForgetsOnce(DataKey):
        def derived(self, nonce: bytes) -> bytes:
            derived = super().derived(nonce)
            self.forget()
            return derived

    key = ForgetsOnce(sealed.key.secret(), TENANT)
    with pytest.raises(KeyForgotten):
        open_payload(key, sealed.header, sealed.buffer)
    assert bytes(sealed.buffer) == bytes(LENGTH)


def test_a_sealed_block_has_the_golden_bytes() -> None:
    data = bytes(range(256))
    block = BlockId(NamespaceDigest(b"n" * 32), Part(0, 2, 0, 1), BlockKey(b"k" * 32))
    plain = BlockHeader(block, BlockKey(b"p" * 32), 3, b"l" * 32, len(data), checksum(data))
    key, buffer = DataKey(bytes(range(32)), TENANT), memoryview(bytearray(256))
    found = seal_payload(key, plain, memoryview(data), buffer, random=lambda count: NONCE[:count])
    assert found is not None
    assert hashlib.sha256(found.pack() + buffer).hexdigest() == GOLDEN
