"""Frames between a client and the store's server, and their bounded msgpack bodies; no I/O here.

A frame is a fixed prefix and a body. All integers are little-endian::

    0      4        6     8           16            20
    | KVSF | version | kind | request id | body bytes | body: one msgpack array of scalars ...

A body holds only nil, integers, texts, byte strings and short arrays: maps and extension types are refused,
so a duplicate key cannot occur. Payloads never travel in frames; they lie in the arena.
"""

import struct
from typing import NamedTuple, TypeAlias

import msgpack

from kvstore.errors import ProtocolMismatch

MAGIC = b"KVSF"
VERSION = 1
MAX_KEYS = 10_000
"""Most keys one request may name (320 kB)."""

MAX_BODY_BYTES = 1 << 20
"""Largest body of a frame; what a peer can make us hold per frame."""

MAX_REQUEST_ID = (1 << 64) - 1
_MAX_TEXT_BYTES = 4096
_MAX_ARRAY = 64
_PREFIX = struct.Struct("<4sHHQI")
PREFIX_BYTES = _PREFIX.size

WireValue: TypeAlias = "int | str | bytes | tuple[WireValue, ...] | None"
"""What a body may hold."""


class Frame(NamedTuple):
    """One frame: what it is, which request it belongs to, and its body."""

    kind: int
    request_id: int
    body: bytes


def encode_frame(kind: int, request_id: int, values: tuple[WireValue, ...]) -> bytes:
    """Return the bytes of one frame whose body holds ``values``.

    Raises:
        ProtocolMismatch: the body is larger than a frame may be.
    """
    body: bytes = msgpack.packb(values, use_bin_type=True)  # pyright: ignore[reportAssignmentType]
    if len(body) > MAX_BODY_BYTES:
        raise ProtocolMismatch(f"frame: a body of {len(body)} bytes, limit {MAX_BODY_BYTES}")
    return _PREFIX.pack(MAGIC, VERSION, kind, request_id, len(body)) + body


def decode_body(body: bytes) -> tuple[WireValue, ...]:
    """Return the values in a body.

    Raises:
        ProtocolMismatch: it is not one array within the limits, or holds a map or an extension type.
    """
    try:
        values = msgpack.unpackb(
            body,
            raw=False,
            use_list=False,
            strict_map_key=True,
            max_str_len=_MAX_TEXT_BYTES,
            max_bin_len=MAX_BODY_BYTES,
            max_array_len=_MAX_ARRAY,
            max_map_len=0,
            max_ext_len=0,
        )
    except (ValueError, OverflowError, msgpack.exceptions.UnpackException) as error:
        raise ProtocolMismatch(f"frame: its body is not a valid message: {type(error).__name__}") from error
    if not isinstance(values, tuple):
        raise ProtocolMismatch(f"frame: its body is a {type(values).__name__}, expected an array")
    return values


class FrameDecoder:
    """Cuts a byte stream into frames; holds at most one unfinished frame plus what was fed last."""

    def __init__(self, data: bytes = b"") -> None:
        self._buffer = bytearray(data)

    @property
    def pending_bytes(self) -> int:
        """Bytes that were fed and belong to no returned frame."""
        return len(self._buffer)

    def feed(self, data: bytes | memoryview) -> None:
        """Take bytes from the stream."""
        self._buffer += data

    def next_frame(self) -> Frame | None:
        """Return the next whole frame, or None if more bytes are needed.

        Raises:
            ProtocolMismatch: foreign magic, another version, or a body above the limit. The stream cannot
                be read any further.
        """
        buffer = self._buffer
        if len(buffer) < PREFIX_BYTES:
            return None
        magic, version, kind, request_id, length = _PREFIX.unpack_from(buffer)
        if magic != MAGIC:
            raise ProtocolMismatch(f"frame: begins with {magic!r}, expected {MAGIC!r}")
        if version != VERSION:
            raise ProtocolMismatch(f"frame: protocol version {version}, this side speaks {VERSION}")
        if length > MAX_BODY_BYTES:
            raise ProtocolMismatch(f"frame: a body of {length} bytes, limit {MAX_BODY_BYTES}")
        end = PREFIX_BYTES + length
        if len(buffer) < end:
            return None
        body = bytes(buffer[PREFIX_BYTES:end])
        del buffer[:end]
        return Frame(kind, request_id, body)
