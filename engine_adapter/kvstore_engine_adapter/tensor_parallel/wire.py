"""Messages between rank 0 and its followers: msgpack arrays behind a length, over socket pairs.

Both ends are processes of one engine, started from the same code by rank 0; no other process has an end.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Self

import msgpack
import numpy as np

from kvstore.errors import ProtocolMismatch
from kvstore.tier import Slot
from kvstore_engine_adapter.attention import Segment

MAX_FRAME_BYTES = 16 << 20
"""Largest message; a pass over 32 sequences of 128k tokens in blocks of 16 is 1 MiB."""

LENGTH = struct.Struct("<I")

_MAX_TEXT_BYTES = 1 << 16
_MAX_ARRAY = 1 << 20


def frame(values: Sequence[object]) -> bytes:
    """Return a message as bytes with its length before it.

    Raises:
        ProtocolMismatch: it is larger than a message may be.
    """
    body: bytes = msgpack.packb(values, use_bin_type=True)  # pyright: ignore[reportAssignmentType]
    if len(body) > MAX_FRAME_BYTES:
        raise ProtocolMismatch(f"ranks: a message of {len(body)} bytes, limit {MAX_FRAME_BYTES}")
    return LENGTH.pack(len(body)) + body


def frame_length(head: bytes) -> int:
    """Return the length of the body behind these 4 bytes. Raises ProtocolMismatch if it is too large."""
    (length,) = LENGTH.unpack(head)
    if length > MAX_FRAME_BYTES:
        raise ProtocolMismatch(f"ranks: a message of {length} bytes, limit {MAX_FRAME_BYTES}")
    return int(length)


def unframe(body: bytes) -> list[Any]:  # Any: whoever knows the message checks or converts each value
    """Return the values of a message.

    Raises:
        ProtocolMismatch: it is not one array within the limits.
    """
    try:
        values = msgpack.unpackb(
            body,
            raw=False,
            max_str_len=_MAX_TEXT_BYTES,
            max_bin_len=MAX_FRAME_BYTES,
            max_array_len=_MAX_ARRAY,
            max_map_len=0,
            max_ext_len=0,
        )
    except (ValueError, OverflowError, msgpack.exceptions.UnpackException) as error:
        raise ProtocolMismatch(f"ranks: not a valid message: {type(error).__name__}") from error
    if not isinstance(values, list):
        raise ProtocolMismatch(f"ranks: a {type(values).__name__}, expected an array")
    return values


@dataclass(frozen=True, slots=True)
class Pass:
    """What a pass computes, as a follower has to know it; ``number`` counts passes from 0.

    Slots are the same on every rank.
    """

    number: int
    copies: Sequence[tuple[Slot, Slot]]
    cleared: Sequence[Slot]
    segments: Sequence[Segment]

    def pack(self) -> bytes:
        """Return the message."""
        segments = [
            [_int32(segment.tokens), segment.start, _int32(segment.slots)] for segment in self.segments
        ]
        return frame([self.number, [list(pair) for pair in self.copies], list(self.cleared), segments])

    @classmethod
    def unpack(cls, body: bytes) -> Self:
        """Return the pass of a message.

        Raises:
            ProtocolMismatch: it is none.
        """
        try:
            number, copies, cleared, segments = unframe(body)
            return cls(
                int(number),
                [(Slot(source), Slot(target)) for source, target in copies],
                [Slot(slot) for slot in cleared],
                [Segment(_from_int32(tokens), int(at), _from_int32(slots)) for tokens, at, slots in segments],
            )
        except (TypeError, ValueError) as error:
            raise ProtocolMismatch(f"ranks: not a pass: {error}") from error


def _int32(values: Sequence[int]) -> bytes:
    return np.asarray(values, dtype="<i4").tobytes()


def _from_int32(data: bytes) -> list[int]:
    return [int(value) for value in np.frombuffer(data, dtype="<i4").tolist()]


class Message:
    """A dataclass whose fields msgpack can hold; its name is the first value of the message."""

    __slots__ = ()
    kinds: ClassVar[dict[str, type["Message"]]] = {}

    def __init_subclass__(cls) -> None:
        Message.kinds[cls.__name__] = cls

    def values(self) -> list[object]:
        """Return what is sent."""
        names = [item.name for item in fields(self)]  # type: ignore[arg-type]  # every subclass is a dataclass
        return [type(self).__name__, *(getattr(self, name) for name in names)]


def message_of(values: Sequence[object]) -> Message:
    """Return the message that was sent.

    Raises:
        ProtocolMismatch: there is no such message.
    """
    try:
        return Message.kinds[str(values[0])](*values[1:])
    except (IndexError, KeyError, TypeError) as error:
        raise ProtocolMismatch(f"ranks: no message: {error}") from error
