"""MasterKeys: the keys that tenants' data keys are wrapped under; the first wraps, all of them unwrap."""

import hashlib
import os
import re
from collections.abc import Sequence

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from kvstore.errors import CorruptBlock, InvalidConfig
from kvstore_tiers.sealing import KEY_BYTES, NONCE_BYTES, Derivation, Random

MAX_MASTER_KEYS = 16
"""Most keys in a file: the present one, and those that are being replaced."""

MASTER_ID_BYTES = 8
"""Size of a master key's id."""

WRAPPED_BYTES = NONCE_BYTES + KEY_BYTES + 16
"""Size of 32 wrapped bytes: nonce, ciphertext, tag."""

_ID_TAG = b"kvstore.master.key.v1\0"
_HEX = re.compile(f"[0-9a-fA-F]{{{2 * KEY_BYTES}}}")


class MasterKey:
    """One master key. One event loop's thread."""

    def __init__(self, secret: bytes) -> None:
        assert len(secret) == KEY_BYTES, "a master key has 256 bits"
        self._derivation = Derivation(secret)
        self.id = hashlib.sha256(_ID_TAG + secret).digest()[:MASTER_ID_BYTES]

    def wrap(self, secret: bytes, context: bytes, *, random: Random = os.urandom) -> bytes:
        """Encrypt 32 bytes; ``context`` is authenticated with them."""
        nonce = random(NONCE_BYTES)
        return nonce + AESGCM(self._derivation.key_for(nonce)).encrypt(nonce[12:], secret, context)

    def unwrap(self, wrapped: bytes, context: bytes) -> bytes:
        """Return the 32 bytes that were wrapped in that context.

        Raises:
            CorruptBlock: they were not, by this key.
        """
        nonce, sealed = wrapped[:NONCE_BYTES], wrapped[NONCE_BYTES:]
        try:
            return AESGCM(self._derivation.key_for(nonce)).decrypt(nonce[12:], sealed, context)
        except InvalidTag as error:
            raise CorruptBlock("key record: it was not made by the master key that it names") from error


class MasterKeys:
    """At least one master key; the first is the present one."""

    def __init__(self, keys: Sequence[MasterKey]) -> None:
        assert keys, "no master key"
        self._keys = {key.id: key for key in keys}
        self.present = keys[0]

    @classmethod
    def parse(cls, text: str, *, key: str) -> "MasterKeys":
        """Read keys of 64 hex digits, separated by white space; ``#`` begins a comment.

        ``key`` begins the message of an error, which never quotes the text: ``[encryption] keys``.

        Raises:
            InvalidConfig: there is none, or a word is no key, or one comes twice.
        """
        words = [word for line in text.splitlines() for word in line.partition("#")[0].split()]
        if any(_HEX.fullmatch(word) is None for word in words):
            raise InvalidConfig(f"{key}: expected keys of 64 hex digits each, a line for each")
        if not 1 <= len(words) <= MAX_MASTER_KEYS:
            raise InvalidConfig(f"{key}: {len(words)} keys, expected 1 to {MAX_MASTER_KEYS}")
        keys = [MasterKey(bytes.fromhex(word)) for word in words]
        if len({at.id for at in keys}) < len(keys):
            raise InvalidConfig(f"{key}: a key is there twice: remove one")
        return cls(keys)

    def find(self, master_id: bytes) -> MasterKey | None:
        """Return the key of that id."""
        return self._keys.get(master_id)
