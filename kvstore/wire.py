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

from kvstore.errors import InvalidRequest, OtherVersion, ProtocolMismatch

MAGIC = b"KVSF"
VERSION = 2
"""Rises with every change after which two sides could take each other's messages for something else.

1: the first. 2: nil was made a value of some fields, and `Lent` and `Leased` tell why there is no more.
"""

MAX_KEYS = 10_000
"""Most keys one request may name (320 kB)."""

MAX_BODY_BYTES = (1 << 20) + (16 << 10)
"""Largest body of a frame; what a peer can make us hold per frame."""

MAX_REQUEST_ID = (1 << 64) - 1
_BUFFER_BYTES = 16 << 10
"""Size of a decoder's buffer while it waits for no larger frame."""

TRACED = 0x4000
"""Flag of a request's kind: behind its fields stands the span that it belongs to."""

TAKES_TRACES = 1
"""Flag in the request id of a greeting and of its answer: requests may be TRACED.

A client offers it, and a server that knows it sends it back; one that does not answers with id 0.
"""

READS_DIRECTLY = 16
"""Another such flag: behind the arena's descriptors comes that of the table of READY blocks.

Of its version 3; the flags 2 and 8 were those of versions 1 and 2.
"""

LENDS_AHEAD = 4
"""Another such flag: slots may be lent before they are asked for, and `Store` puts in one exchange."""

AHEAD_BYTES = 4 << 20
"""Most bytes of slots that a connection may have lent ahead, if it is more than one of them."""

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


def encode_frame(
    kind: int, request_id: int, values: tuple[WireValue, ...], *, version: int = VERSION
) -> bytes:
    """Return the bytes of one frame whose body holds ``values``. Another ``version``: to be understood by it.

    Raises:
        ProtocolMismatch: the body is larger than a frame may be.
        InvalidRequest: a text is no valid Unicode.
    """
    try:
        body: bytes = msgpack.packb(values, use_bin_type=True)  # pyright: ignore[reportAssignmentType]
    except UnicodeEncodeError as error:
        raise InvalidRequest("frame: a text with half of a surrogate pair cannot be sent") from error
    if len(body) > MAX_BODY_BYTES:
        raise ProtocolMismatch(f"frame: a body of {len(body)} bytes, limit {MAX_BODY_BYTES}")
    return _PREFIX.pack(MAGIC, version, kind, request_id, len(body)) + body


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
    """Cuts a byte stream into frames, in a buffer that bytes are received into or fed to.

    It holds at most one unfinished frame and what arrived behind it. The buffer grows to the frame it waits
    for and falls back to its first size once that has been taken.
    """

    def __init__(self, data: bytes = b"") -> None:
        self._view = memoryview(bytearray(_BUFFER_BYTES))
        self._start = 0
        self._end = 0
        self._wanted_bytes = PREFIX_BYTES
        self.feed(data)

    @property
    def pending_bytes(self) -> int:
        """Bytes that came and belong to no returned frame."""
        return self._end - self._start

    def feed(self, data: bytes | memoryview) -> None:
        """Take bytes from the stream."""
        end = self._end + len(data)
        if end > len(self._view):
            self._make_space(len(data))
            end = self._end + len(data)
        self._view[self._end : end] = data
        self._end = end

    def space(self) -> memoryview:
        """Return where to receive bytes into; not empty, and valid until the next call of any method."""
        if self._end == len(self._view) or len(self._view) - self._start < self._wanted_bytes:
            self._make_space(1)
        return self._view[self._end :]

    def received(self, count: int) -> None:
        """Take note of ``count`` bytes that were received into ``space``."""
        self._end += count

    def next_frame(self) -> Frame | None:
        """Return the next whole frame, or None if more bytes are needed.

        Raises:
            ProtocolMismatch: foreign magic, another version, or a body above the limit. The stream cannot
                be read any further.
        """
        start = self._start
        pending = self._end - start
        if pending < PREFIX_BYTES:
            self._wanted_bytes = PREFIX_BYTES
            return None
        magic, version, kind, request_id, length = _PREFIX.unpack_from(self._view, start)
        if magic != MAGIC or version != VERSION or length > MAX_BODY_BYTES:
            raise _not_ours(magic, version, length)
        size = PREFIX_BYTES + length
        if pending < size:
            self._wanted_bytes = size
            return None
        self._wanted_bytes = PREFIX_BYTES
        end = start + size
        body = bytes(self._view[start + PREFIX_BYTES : end])
        if end == self._end:
            self._start = self._end = 0
            if len(self._view) > _BUFFER_BYTES:
                self._view = memoryview(bytearray(_BUFFER_BYTES))
        else:
            self._start = end
        return Frame(kind, request_id, body)

    def _make_space(self, free_bytes: int) -> None:
        """Move what is pending to the front of a buffer with room for the frame it begins, and for more."""
        pending = bytes(self._view[self._start : self._end])
        size = max(self._wanted_bytes, len(pending) + free_bytes)
        if size > len(self._view):
            self._view = memoryview(bytearray(size))
        self._view[: len(pending)] = pending
        self._start, self._end = 0, len(pending)


def _not_ours(magic: bytes, version: int, length: int) -> ProtocolMismatch:
    if magic != MAGIC:
        return ProtocolMismatch(f"frame: begins with {magic!r}, expected {MAGIC!r}")
    if version != VERSION:
        return OtherVersion(
            f"frame: protocol version {version}, this side speaks {VERSION}: update the older side",
            version=version,
        )
    return ProtocolMismatch(f"frame: a body of {length} bytes, limit {MAX_BODY_BYTES}")
