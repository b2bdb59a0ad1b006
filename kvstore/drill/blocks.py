"""Blocks whose bytes follow from their key, so that any byte served can be verified without a copy of it."""

import random

import numpy as np
import numpy.typing as npt

from kvstore.keys import BlockKey, Namespace, PrefixChain
from kvstore.layout import KVLayout

BLOCK_TOKENS = 4

Bytes = npt.NDArray[np.uint8]


def drill_namespace(name: str = "drill", *, block_bytes: int = 64 << 10) -> Namespace:
    """Return a namespace of blocks of that size."""
    return Namespace(name, KVLayout.opaque(block_bytes=block_bytes, block_tokens=BLOCK_TOKENS))


def new_chain(namespace: Namespace, num_blocks: int, rng: random.Random) -> PrefixChain:
    """Name the blocks of a random token sequence."""
    return namespace.chain([rng.getrandbits(32) for _ in range(num_blocks * BLOCK_TOKENS)])


def payload_of(key: BlockKey, length_bytes: int) -> Bytes:
    """Return the bytes that belong under a key: ``[length_bytes]`` uint8, read-only."""
    generator = np.random.Generator(np.random.SFC64(int.from_bytes(key[:16], "little")))
    return np.frombuffer(generator.bytes(length_bytes), np.uint8)


def payloads_of(chain: PrefixChain, length_bytes: int) -> list[Bytes]:
    """Return the bytes of every block of a chain."""
    return [payload_of(key, length_bytes) for key in chain.keys]


def count_wrong_bytes(key: BlockKey, served: Bytes) -> int:
    """Return in how many bytes a served block differs from what was put under its key."""
    return int(np.count_nonzero(served != payload_of(key, len(served))))
