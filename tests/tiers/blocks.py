"""Blocks for tests: headers, payloads and page-aligned buffers made from a number."""

import mmap

import numpy as np

from kvstore.checksum import checksum
from kvstore.keys import BlockKey, NamespaceDigest
from kvstore.layout import Part
from kvstore.tier import BlockHeader, BlockId, ReadRequest, WriteRequest

NAMESPACE = NamespaceDigest(b"n" * 32)
LAYOUT = b"l" * 32
WHOLE = Part(0, 2, 0, 1)


def block_id(number: int, *, part: Part = WHOLE, namespace: NamespaceDigest = NAMESPACE) -> BlockId:
    return BlockId(namespace, part, BlockKey(number.to_bytes(32, "little")))


def payload(number: int, length_bytes: int) -> bytes:
    return np.random.default_rng(number).bytes(length_bytes)


def header(number: int, data: bytes, *, block: BlockId | None = None) -> BlockHeader:
    return BlockHeader(
        block or block_id(number), BlockKey(b"p" * 32), number, LAYOUT, len(data), checksum(data)
    )


def aligned(length_bytes: int) -> memoryview:
    return memoryview(mmap.mmap(-1, -(-length_bytes // 4096) * 4096))


def to_write(number: int, length_bytes: int, *, version: int = 0) -> WriteRequest:
    data = payload(number + 1000 * version, length_bytes)
    buffer = aligned(length_bytes)
    buffer[:length_bytes] = data
    return WriteRequest(header(number, data), buffer)


def to_read(number: int, length_bytes: int) -> ReadRequest:
    return ReadRequest(block_id(number), LAYOUT, length_bytes, aligned(length_bytes))


def chain_writes(first: int, depths: range, length_bytes: int) -> list[WriteRequest]:
    """Writes of blocks ``first + depth``, each the child of the one before it."""
    writes = []
    for depth in depths:
        request = to_write(first + depth, length_bytes)
        parent = block_id(first + depth - 1).key if depth else BlockKey(NAMESPACE)
        writes.append(WriteRequest(request.header._replace(parent=parent, depth=depth), request.buffer))
    return writes
