"""Sealing: single payloads encrypted and decrypted, XAES-256-GCM, in pieces that are checked on the way.

XAES-256-GCM (c2sp.org/XAES-256-GCM) derives an AES-256-GCM key for every copy from the data key and half of a
nonce of 192 bits, so that random nonces never become a limit on the number of copies.

A copy's seal, 56 bytes at the end of its header:

    key id (8) | nonce (24) | tag (16) | encrypted xxh3-64 of the plaintext (8)

The checksum is encrypted as the last 8 bytes of the message: on a medium it would tell whether a guess of the
content is right. What else the header says (block, part, namespace, parent, depth, layout, length) and the
key's id are authenticated with it, so a seal holds for one copy in one place.

Measured (benchmarks/sealing.py, see docs/encryption.md): pieces of 128 KiB are within a tenth of one call for
the whole payload, and no piece holds the interpreter longer than some tens of microseconds.
"""

import hashlib
import os
import struct
import threading
from collections.abc import Callable
from typing import NamedTuple

import xxhash
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import ECB, GCM

from kvstore.tenant import TenantId
from kvstore.tier import BlockHeader

KEY_BYTES = 32
"""Size of a data key."""

KEY_ID_BYTES = 8
"""Size of its id."""

NONCE_BYTES = 24
"""Size of a nonce of XAES-256-GCM."""

PIECE_BYTES = 128 << 10
"""Bytes that one call of the cipher works on."""

_SEAL = struct.Struct(f"<{KEY_ID_BYTES}s{NONCE_BYTES}s16s8s")
_SUM = struct.Struct("<Q")
_ID_TAG = b"kvstore.data.key.v1\0"
_CONTEXT_TAG = b"kvstore.sealed.block.v1\0"
_CONTEXT = struct.Struct("<I32s8s32s32s32sI")

Random = Callable[[int], bytes]
"""Returns that many unpredictable bytes."""


class KeyForgotten(Exception):
    """The data key was erased: nothing is encrypted or decrypted with it any more."""


class DataKey:
    """One tenant's key. ``forget`` may come at any time, from any thread."""

    def __init__(self, secret: bytes, tenant: TenantId) -> None:
        assert len(secret) == KEY_BYTES, "a data key has 256 bits"
        self._secret = bytearray(secret)
        self._derivation: Derivation | None = Derivation(self._secret)
        self._lock = threading.Lock()
        self.tenant = tenant
        self.id = key_id(secret)

    @classmethod
    def make(cls, tenant: TenantId, random: Random = os.urandom) -> "DataKey":
        """Return a new one."""
        return cls(random(KEY_BYTES), tenant)

    @property
    def is_forgotten(self) -> bool:
        """Whether it was erased."""
        return self._derivation is None

    def derived(self, nonce: bytes) -> bytes:
        """Return the key for the copy with that nonce.

        Raises:
            KeyForgotten: it was erased.
        """
        with self._lock:
            if self._derivation is None:
                raise KeyForgotten
            return self._derivation.key_for(nonce)

    def secret(self) -> bytes:
        """Return the key itself.

        Raises:
            KeyForgotten: it was erased.
        """
        with self._lock:
            if self._derivation is None:
                raise KeyForgotten
            return bytes(self._secret)

    def forget(self) -> None:
        """Overwrite it. Copies that were made to wrap it are freed memory by then, and out of reach."""
        with self._lock:
            self._derivation = None
            self._secret[:] = bytes(KEY_BYTES)


def key_id(secret: bytes) -> bytes:
    """Return the public name of a data key, 8 bytes."""
    return hashlib.sha256(_ID_TAG + secret).digest()[:KEY_ID_BYTES]


class Seal(NamedTuple):
    """What a header says of the encryption of its copy."""

    key_id: bytes
    nonce: bytes
    tag: bytes
    checksum: bytes

    def pack(self) -> bytes:
        """Return the stored form, 56 bytes."""
        return _SEAL.pack(*self)

    @classmethod
    def unpack(cls, data: bytes) -> "Seal":
        """Return the seal in 56 stored bytes."""
        return cls._make(_SEAL.unpack(data))


def seal_payload(
    key: DataKey, header: BlockHeader, source: memoryview, target: memoryview, *, random: Random = os.urandom
) -> BlockHeader | None:
    """Encrypt ``source`` into ``target``, both of the header's length; returns the header of the sealed copy.

    None if the plaintext does not match the header's checksum: it was changed in memory. Blocks.

    Raises:
        KeyForgotten: the key was erased.
    """
    nonce = random(NONCE_BYTES)
    encryptor = Cipher(AES(key.derived(nonce)), GCM(nonce[12:])).encryptor()
    encryptor.authenticate_additional_data(_context(header, key.id))
    plain_sum, stored_sum = xxhash.xxh3_64(), xxhash.xxh3_64()
    for start in range(0, header.length_bytes, PIECE_BYTES):
        stop = min(start + PIECE_BYTES, header.length_bytes)
        encryptor.update_into(source[start:stop], target[start:stop])
        plain_sum.update(source[start:stop])
        stored_sum.update(target[start:stop])
    encrypted_sum = encryptor.update(_SUM.pack(header.checksum))
    encryptor.finalize()
    if plain_sum.intdigest() != header.checksum:
        return None
    seal = Seal(key.id, nonce, encryptor.tag, encrypted_sum)
    return header._replace(checksum=stored_sum.intdigest(), seal=seal.pack())


def open_payload(key: DataKey, header: BlockHeader, buffer: memoryview) -> BlockHeader | None:
    """Decrypt a sealed copy in place; returns the header of the copy in the clear.

    None if it is not what was sealed under that key for that place; the buffer is zeroed then. Blocks.

    Raises:
        KeyForgotten: the key was erased, before or meanwhile. The buffer then holds nothing of the block.
    """
    payload = buffer[: header.length_bytes]
    seal = Seal.unpack(header.seal)
    decryptor = Cipher(AES(key.derived(seal.nonce)), GCM(seal.nonce[12:], seal.tag)).decryptor()
    decryptor.authenticate_additional_data(_context(header, key.id))
    plain_sum = xxhash.xxh3_64()
    for start in range(0, len(payload), PIECE_BYTES):
        piece = payload[start : start + PIECE_BYTES]
        decryptor.update_into(piece, piece)
        plain_sum.update(piece)
    (expected,) = _SUM.unpack(decryptor.update(seal.checksum))
    is_sound = _is_authentic(decryptor.finalize) and plain_sum.intdigest() == expected
    if key.is_forgotten or not is_sound:
        zero(payload)
    if key.is_forgotten:
        raise KeyForgotten
    return header._replace(checksum=expected, seal=b"") if is_sound else None


def zero(buffer: memoryview) -> None:
    """Overwrite a buffer."""
    for start in range(0, len(buffer), PIECE_BYTES):
        piece = buffer[start : start + PIECE_BYTES]
        piece[:] = bytes(len(piece))


class Derivation:
    """How XAES-256-GCM derives keys from one key. One thread at a time."""

    def __init__(self, secret: bytes | bytearray) -> None:
        cipher = Cipher(AES(secret), ECB())  # noqa: S305 (a block cipher on its own, as CMAC uses it)
        self._block = cipher.encryptor()
        first = int.from_bytes(self._block.update(bytes(16)), "big")
        # Multiplication by x in GF(2^128), as NIST SP 800-38B makes its subkey K1; here for two blocks.
        subkey = (first << 1) & ((1 << 128) - 1) ^ (0b10000111 if first >> 127 else 0)
        self._subkeys = subkey << 128 | subkey

    def key_for(self, nonce: bytes) -> bytes:
        """Return the AES-256-GCM key for a nonce of 24 bytes, of which the last 12 go with it."""
        half = nonce[:12]
        messages = int.from_bytes(b"\0\1X\0" + half + b"\0\2X\0" + half, "big")
        return self._block.update((messages ^ self._subkeys).to_bytes(32, "big"))


def _is_authentic(finalize: Callable[[], bytes]) -> bool:
    try:
        finalize()
    except InvalidTag:
        return False
    return True


def _context(header: BlockHeader, key: bytes) -> bytes:
    """Return what is authenticated beside the payload: all that says which copy this is."""
    block = header.block
    fields = (block.key, block.part.pack(), block.namespace, header.parent, header.layout, header.depth)
    return _CONTEXT_TAG + key + _CONTEXT.pack(header.length_bytes, *fields)
