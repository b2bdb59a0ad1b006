"""Names of blocks: Namespace, BlockKey and PrefixChain.

A key is the SHA-256 of its parent's key and its own tokens; the first block's parent is the digest of the
Namespace. So a key names a block together with everything before it and everything that decides what its
bytes mean. SHA-256 is never truncated: prefix sharing between tenants rests on digest equality, and fast
hashes (xxHash) can be collided on purpose.
"""

import array
import contextlib
import hashlib
import struct
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import NewType, cast

import numpy as np
import numpy.typing as npt

from kvstore.errors import InvalidLayout, InvalidRequest, InvalidTokens
from kvstore.layout import KVLayout

BlockKey = NewType("BlockKey", bytes)
"""SHA-256 name of a block, 32 bytes."""

NamespaceDigest = NewType("NamespaceDigest", bytes)
"""SHA-256 of a Namespace, 32 bytes; the parent of every first block in it."""

KEY_BYTES = 32
_MAX_START, _MAX_BLOCK_TOKENS = (1 << 32) - 1, (1 << 16) - 1
_KEYS_REMEDY = f"expected {KEY_BYTES}: name blocks by Namespace.chain or Namespace.chain_of_hashes"

# Exactly as long as a digest: a block's hash input begins with its parent's digest, so no block's input can
# begin with this text, and a namespace can never be mistaken for a block.
_NAMESPACE_TAG = b"kvstore.namespace.v1".ljust(KEY_BYTES, b"\0")
_TOKEN_MAX = 0xFFFF_FFFF
_FIELD_MAX_BYTES = 4096
_IS_ARRAY_U32 = array.array("I").itemsize == 4 and sys.byteorder == "little"


@dataclass(frozen=True, slots=True)
class Namespace:
    """Everything that decides what KV bytes mean, and who may share them.

    Two engines share blocks exactly when all fields agree. ``weights`` is a digest or revision of the
    weights, ``adapter`` a digest of the LoRA or other adapter (empty: none), ``rope`` a text of the rotary
    parameters in force, ``tenant_salt`` secret bytes that separate tenants (the repr leaves them out),
    ``epoch`` a counter raised when everything stored under the model must be forgotten.

    Raises:
        InvalidLayout: a field has the wrong type, is no valid text, is longer than 4096 bytes, or ``epoch``
            is negative.
    """

    model: str
    layout: KVLayout
    weights: str = ""
    tokenizer: str = ""
    adapter: str = ""
    rope: str = ""
    tenant_salt: bytes = field(default=b"", repr=False)
    epoch: int = 0

    def __post_init__(self) -> None:
        for name in ("model", "weights", "tokenizer", "adapter", "rope"):
            value = getattr(self, name)
            if not isinstance(value, str) or not _fits(value):
                raise InvalidLayout(f"namespace: {name} must be text of at most {_FIELD_MAX_BYTES} bytes")
        if not isinstance(self.tenant_salt, bytes) or len(self.tenant_salt) > _FIELD_MAX_BYTES:
            raise InvalidLayout(f"namespace: tenant_salt must be at most {_FIELD_MAX_BYTES} bytes")
        if not isinstance(self.epoch, int) or not 0 <= self.epoch < 1 << 63:
            raise InvalidLayout(f"namespace: epoch is {self.epoch!r}, expected an integer in 0..2**63-1")

    @property
    def block_tokens(self) -> int:
        """Tokens per block."""
        return self.layout.block_tokens

    @property
    def digest(self) -> NamespaceDigest:
        """SHA-256 over every field, each with its name, type and length."""
        sha = hashlib.sha256(_NAMESPACE_TAG)
        for item in fields(self):
            kind, data = _encode_field(getattr(self, item.name))
            name = item.name.encode()
            sha.update(struct.pack("<B", len(name)) + name + kind + struct.pack("<I", len(data)) + data)
        return NamespaceDigest(sha.digest())

    def at_epoch(self, epoch: int) -> "Namespace":
        """Return this namespace in another epoch."""
        return replace(self, epoch=epoch)

    def chain(self, tokens: Sequence[int] | npt.NDArray[np.integer]) -> "PrefixChain":
        """Name the full blocks of a token sequence; the last, unfilled block has no name.

        Raises:
            InvalidTokens: a token is no integer or lies outside 0..2**32-1.
        """
        digest = self.digest
        named = self._keys_after(digest, tokens)
        return PrefixChain(namespace=digest, keys=named, block_tokens=self.block_tokens)

    def extend(self, chain: "PrefixChain", tokens: Sequence[int] | npt.NDArray[np.integer]) -> "PrefixChain":
        """Return a chain of this namespace's with the full blocks of the tokens that follow its last block.

        Raises:
            InvalidTokens: a token is no integer or lies outside 0..2**32-1.
            InvalidRequest: the chain is another namespace's, or does not start at block 0.
        """
        if chain.namespace != self.digest or chain.start:
            raise InvalidRequest("chain: only a whole chain of the same namespace can be extended")
        named = self._keys_after(chain.keys[-1] if chain.keys else chain.namespace, tokens)
        return replace(chain, keys=chain.keys + named)

    def _keys_after(
        self, key: bytes, tokens: Sequence[int] | npt.NDArray[np.integer]
    ) -> "tuple[BlockKey, ...]":
        data = token_bytes(tokens)
        step = 4 * self.block_tokens
        sha256 = hashlib.sha256
        # One expression per block: measured with benchmarks/data_plane.py, nearly all of it is SHA-256.
        keys = [
            key := sha256(key + data[start : start + step]).digest()
            for start in range(0, len(data) - step + 1, step)
        ]
        return cast("tuple[BlockKey, ...]", tuple(keys))  # a NewType each would cost a call each

    def chain_of_hashes(self, hashes: Sequence[bytes]) -> "PrefixChain":
        """Name blocks by an engine's own chained block hashes, one per full block.

        The engine's hash must already cover the tokens of all blocks before it (vLLM's and SGLang's do).

        Raises:
            InvalidRequest: two hashes are equal, so they do not cover the blocks before them.
        """
        digest = self.digest
        keys = tuple(BlockKey(hashlib.sha256(digest + b"engine-hash" + h).digest()) for h in hashes)
        chain = PrefixChain(namespace=digest, keys=keys, block_tokens=self.block_tokens)
        chain.require_distinct()
        return chain


@dataclass(frozen=True, slots=True)
class PrefixChain:
    """Keys of consecutive full blocks of one token sequence, in order.

    ``start`` is the index of the first key in its sequence and ``parent`` the key before it (None at the
    start of a sequence). Slicing keeps both right: ``chain[4:8]`` are blocks 4 to 7.

    No two keys are equal. Chains made by a Namespace are so; ``require_distinct`` is for those from elsewhere
    (measured: 0.27 ms for 6250 keys, 2 cores; so it is not part of every construction and slice).
    """

    namespace: NamespaceDigest
    keys: tuple[BlockKey, ...]
    block_tokens: int
    start: int = 0
    parent: BlockKey | None = None

    def __post_init__(self) -> None:
        if (self.start == 0) != (self.parent is None):
            raise InvalidRequest("chain: a parent is given exactly when the chain does not start at block 0")
        if not 0 <= self.start <= _MAX_START or not 1 <= self.block_tokens <= _MAX_BLOCK_TOKENS:
            raise InvalidRequest(
                f"chain: start {self.start} and block_tokens {self.block_tokens} lie in 0..{_MAX_START} "
                f"and 1..{_MAX_BLOCK_TOKENS}"
            )
        if self.parent is not None and len(self.parent) != KEY_BYTES:
            raise InvalidRequest(f"chain: its parent has {len(self.parent)} bytes, {_KEYS_REMEDY}")

    def require_distinct(self) -> None:
        """Raise InvalidRequest if two keys are equal: such a chain names no sequence of blocks."""
        if len(set(self.keys)) != len(self.keys):
            raise InvalidRequest("chain: it names a block twice: the keys of a chain differ")

    def require_key_lengths(self) -> None:
        """Raise InvalidRequest if a key has not KEY_BYTES bytes: such a chain names no blocks."""
        require_key_lengths(self.keys, "chain")

    def __len__(self) -> int:
        return len(self.keys)

    def __iter__(self) -> Iterator[BlockKey]:
        return iter(self.keys)

    def __getitem__(self, index: slice) -> "PrefixChain":
        start, stop, step = index.indices(len(self.keys))
        if step != 1:
            raise InvalidRequest("chain: a slice of a chain must be contiguous")
        stop = max(start, stop)
        parent = self.parent if start == 0 else self.keys[start - 1]
        return PrefixChain(
            self.namespace, self.keys[start:stop], self.block_tokens, self.start + start, parent
        )

    @property
    def num_tokens(self) -> int:
        """Tokens covered by the keys of this chain."""
        return len(self.keys) * self.block_tokens


def require_key_lengths(keys: Sequence[BlockKey], what: str) -> None:
    """Raise InvalidRequest, about ``what``, if a key has not KEY_BYTES bytes.

    Measured, 2 cores: 3 us for 64 keys, 0.11 ms for 6250, a quarter of what a loop takes.
    """
    try:
        lengths = list(map(len, keys))
    except TypeError as error:
        raise InvalidRequest(f"{what}: a key is no bytes: {error}; {_KEYS_REMEDY}") from error
    if lengths.count(KEY_BYTES) != len(lengths):
        at, length = next((at, length) for at, length in enumerate(lengths) if length != KEY_BYTES)
        raise InvalidRequest(f"{what}: key {at} of {len(lengths)} has {length} bytes, {_KEYS_REMEDY}")


def token_bytes(tokens: Sequence[int] | npt.NDArray[np.integer]) -> bytes:
    """Return tokens as little-endian u32, the form that is hashed.

    Raises:
        InvalidTokens: a token is no integer or lies outside 0..2**32-1.
    """
    if isinstance(tokens, list | tuple) and _IS_ARRAY_U32 and tokens and type(tokens[0]) is int:
        # Four times faster than NumPy's way through objects: measured, 100 000 tokens in 0.4 ms, 2 cores.
        with contextlib.suppress(TypeError, OverflowError):  # the way below says what is wrong with them
            return array.array("I", tokens).tobytes()
    try:
        given = np.asarray(tokens)
    except (ValueError, OverflowError) as error:
        raise InvalidTokens(f"tokens: not a flat sequence of integers: {error}") from error
    if given.size == 0:
        return b""
    if given.ndim != 1 or given.dtype.kind not in "iu":
        raise InvalidTokens(
            f"tokens: expected a flat sequence of integers, got {given.dtype} of {given.ndim} axes"
        )
    low, high = int(given.min()), int(given.max())
    if low < 0 or high > _TOKEN_MAX:
        raise InvalidTokens(f"tokens: {low if low < 0 else high} is outside 0..{_TOKEN_MAX}")
    return given.astype("<u4", copy=False).tobytes()


def require_model(model: str) -> None:
    """Raise InvalidRequest if text cannot be a model's name: longer than 4096 bytes, or no valid text."""
    if not is_model(model):
        raise InvalidRequest(f"model: must be text of at most {_FIELD_MAX_BYTES} bytes")


def is_model(model: object) -> bool:
    """Whether a namespace may name this as its model."""
    return isinstance(model, str) and _fits(model)


def _fits(text: str) -> bool:
    try:
        return len(text.encode()) <= _FIELD_MAX_BYTES
    except UnicodeEncodeError:
        return False


def _encode_field(value: object) -> tuple[bytes, bytes]:
    if isinstance(value, KVLayout):
        return b"l", value.fingerprint
    if isinstance(value, str):
        return b"s", value.encode()
    if isinstance(value, bytes):
        return b"b", value
    if isinstance(value, int):
        return b"i", struct.pack("<q", value)
    raise InvalidLayout(f"namespace: a field of type {type(value).__name__} cannot be named")
