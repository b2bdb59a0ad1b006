"""Answers of the protocol: what a server may say to a request."""

import enum
import struct
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Self

from kvstore.errors import (
    CorruptBlock,
    EpochEnded,
    InvalidLayout,
    InvalidRequest,
    KVStoreError,
    NamespaceNotOpen,
    ProtocolMismatch,
    RejectedRequest,
    ServerUnavailable,
    TierFull,
    TierUnavailable,
    TimedOut,
)
from kvstore.layout import MAX_BLOCK_BYTES
from kvstore.message_fields import (
    MAX_TIMEOUT_US,
    U32,
    U64,
    EmptyMessage,
    TierNames,
    Values,
    byte_string,
    check_positions,
    count_fields,
    integer,
    miss_reason_or_none,
    text,
    unused_from_wire,
    unused_to_wire,
)
from kvstore.miss import MissReason
from kvstore.wire import MAX_KEYS

INSTANCE_BYTES = 16
"""Length of the random id that tells a server from its successor."""


@dataclass(frozen=True, slots=True)
class Welcome:
    """Answer to Hello; the arena's file descriptor comes with it when ``arena_bytes`` is not 0."""

    KIND: ClassVar[int] = 0x8001
    instance: bytes
    arena_bytes: int
    max_in_flight: int

    def to_wire(self) -> Values:
        """Return the fields in order."""
        return (self.instance, self.arena_bytes, self.max_in_flight)

    @classmethod
    def from_wire(cls, values: Values) -> Self:
        """Return the checked answer."""
        count_fields(values, 3, "welcome")
        return cls(
            byte_string(values[0], "instance", low=INSTANCE_BYTES, high=INSTANCE_BYTES),
            integer(values[1], 0, U64, "arena_bytes"),
            integer(values[2], 1, 65536, "max_in_flight"),
        )


@dataclass(frozen=True, slots=True)
class Done(EmptyMessage):
    """Answer of a request that has nothing to say but that it was done."""

    KIND: ClassVar[int] = 0x8002


@dataclass(frozen=True, slots=True)
class Count:
    """Answer of a request that counts: blocks prefetched or dropped; 1 or 0 for a flush."""

    KIND: ClassVar[int] = 0x8003
    count: int

    def to_wire(self) -> Values:
        """Return the number."""
        return (self.count,)

    @classmethod
    def from_wire(cls, values: Values) -> Self:
        """Return the checked answer."""
        count_fields(values, 1, "count")
        return cls(integer(values[0], 0, U32, "count"))


@dataclass(frozen=True, slots=True)
class Matched:
    """Answer to Match: the tier of each stored leading block, and why the next one missed."""

    KIND: ClassVar[int] = 0x8004
    tiers: TierNames
    reason: MissReason | None

    def to_wire(self) -> Values:
        """Return names, indices and the reason."""
        return (self.tiers.names, self.tiers.indices, None if self.reason is None else self.reason.value)

    @classmethod
    def from_wire(cls, values: Values) -> Self:
        """Return the checked answer."""
        count_fields(values, 3, "matched")
        blob = byte_string(values[1], "tier indices", high=MAX_KEYS)
        return cls(TierNames.from_wire(values[0], blob, len(blob)), miss_reason_or_none(values[2]))


class ReadySlot(NamedTuple):
    """A leased block in the arena: where, in which generation, and its bytes' xxh3-64."""

    offset: int
    generation: int
    checksum: int


_READY = struct.Struct("<QQQ")


@dataclass(frozen=True, slots=True)
class Ready:
    """Answer to Fetch: leased slots of the leading blocks (no lease when there are none)."""

    KIND: ClassVar[int] = 0x8005
    lease: int | None
    length_bytes: int
    slots: tuple[ReadySlot, ...]
    origins: TierNames
    reason: MissReason | None

    def to_wire(self) -> Values:
        """Return the fields, one record per slot."""
        return (
            self.lease,
            self.length_bytes,
            b"".join([_READY.pack(*slot) for slot in self.slots]),
            self.origins.names,
            self.origins.indices,
            None if self.reason is None else self.reason.value,
        )

    @classmethod
    def from_wire(cls, values: Values) -> Self:
        """Return the checked answer."""
        count_fields(values, 6, "ready")
        lease, length, records, names, indices, reason = values
        blob = byte_string(records, "slots", high=MAX_KEYS * _READY.size, step=_READY.size)
        slots = tuple(map(ReadySlot._make, _READY.iter_unpack(blob)))
        if (lease is None) != (not slots):
            raise ProtocolMismatch("message: a lease is given exactly when there are blocks")
        return cls(
            None if lease is None else integer(lease, 0, U64, "lease"),
            integer(length, 0, MAX_BLOCK_BYTES, "length_bytes"),
            slots,
            TierNames.from_wire(names, indices, len(slots)),
            miss_reason_or_none(reason),
        )


@dataclass(frozen=True, slots=True)
class Seen:
    """Answer to Peek: slots of all blocks of the chain, in one tier and not leased."""

    KIND: ClassVar[int] = 0x800B
    length_bytes: int
    slots: tuple[ReadySlot, ...]
    tier: str

    def to_wire(self) -> Values:
        """Return the fields, one record per slot."""
        return (self.length_bytes, b"".join([_READY.pack(*slot) for slot in self.slots]), self.tier)

    @classmethod
    def from_wire(cls, values: Values) -> Self:
        """Return the checked answer; whether it has a slot per block is checked by who knows their number."""
        count_fields(values, 3, "seen")
        blob = byte_string(values[1], "slots", high=MAX_KEYS * _READY.size, step=_READY.size)
        return cls(
            integer(values[0], 0, MAX_BLOCK_BYTES, "length_bytes"),
            tuple(map(ReadySlot._make, _READY.iter_unpack(blob))),
            text(values[2], "a tier name", limit=64),
        )


class LentSlot(NamedTuple):
    """A slot lent to a writer: position in the chain, where it is, in which generation."""

    position: int
    offset: int
    generation: int


_LENT = struct.Struct("<IQQ")


@dataclass(frozen=True, slots=True)
class Lent:
    """Answer to Reserve: slots to write into, and how many blocks of the chain need none: present already.

    ``reason`` says why there is no slot for the first block that is neither.
    """

    KIND: ClassVar[int] = 0x8006
    slots: tuple[LentSlot, ...]
    present: int
    reason: MissReason | None = None

    def to_wire(self) -> Values:
        """Return one record per slot, the number of present blocks, and the reason."""
        records = b"".join([_LENT.pack(*slot) for slot in self.slots])
        return (records, self.present, None if self.reason is None else self.reason.value)

    @classmethod
    def from_wire(cls, values: Values) -> Self:
        """Return the checked answer; positions grow."""
        count_fields(values, 3, "lent")
        blob = byte_string(values[0], "slots", high=MAX_KEYS * _LENT.size, step=_LENT.size)
        slots = tuple(map(LentSlot._make, _LENT.iter_unpack(blob)))
        check_positions([slot.position for slot in slots], MAX_KEYS)
        return cls(slots, integer(values[1], 0, MAX_KEYS, "present"), miss_reason_or_none(values[2]))


class StoreOutcome(enum.IntEnum):
    """What became of one block of a Store: a byte in the answer."""

    STORED = 0
    PRESENT = 1
    DROPPED = 2


@dataclass(frozen=True, slots=True)
class Stored:
    """Answer to Store, and to a Commit that wants slots ahead: how many blocks were stored.

    ``outcomes`` has a `StoreOutcome` for each block of a Store; it is empty if all were stored, and for a
    Commit. ``reason`` says why the first dropped one was. ``slots``, as offsets and generations, are
    lent for the next put, for ``lent_us`` microseconds: all that were wanted, or none.
    """

    KIND: ClassVar[int] = 0x800F
    stored: int
    outcomes: bytes = b""
    reason: MissReason | None = None
    slots: tuple[tuple[int, int], ...] = ()
    lent_us: int = 0

    def to_wire(self) -> Values:
        """Return the fields, one byte per outcome and one record per slot."""
        reason = None if self.reason is None else self.reason.value
        return (self.stored, self.outcomes, reason, unused_to_wire(self.slots), self.lent_us)

    @classmethod
    def from_wire(cls, values: Values) -> Self:
        """Return the checked answer; whether it fits the request is checked by who made that."""
        count_fields(values, 5, "stored")
        stored = integer(values[0], 0, MAX_KEYS, "stored")
        outcomes = byte_string(values[1], "outcomes", high=MAX_KEYS)
        if outcomes and (max(outcomes) > StoreOutcome.DROPPED or outcomes.count(0) != stored):
            raise ProtocolMismatch("message: outcomes are unknown, or do not add up")
        return cls(
            stored,
            outcomes,
            miss_reason_or_none(values[2]),
            unused_from_wire(values[3]),
            integer(values[4], 0, MAX_TIMEOUT_US, "lending time"),
        )


@dataclass(frozen=True, slots=True)
class Report:
    """Answer to Stats and Check: JSON text in UTF-8."""

    KIND: ClassVar[int] = 0x8007
    json: bytes

    def to_wire(self) -> Values:
        """Return the text's bytes."""
        return (self.json,)

    @classmethod
    def from_wire(cls, values: Values) -> Self:
        """Return the checked answer; the JSON itself is checked by who reads it."""
        count_fields(values, 1, "report")
        return cls(byte_string(values[0], "report"))


@dataclass(frozen=True, slots=True)
class Presence:
    """Answer to Exists: one bit per key, the first key in the lowest bit of the first byte."""

    KIND: ClassVar[int] = 0x8008
    bits: bytes

    def to_wire(self) -> Values:
        """Return the bits."""
        return (self.bits,)

    @classmethod
    def from_wire(cls, values: Values) -> Self:
        """Return the checked answer; whether it has a bit per key is checked by who knows their number."""
        count_fields(values, 1, "presence")
        return cls(byte_string(values[0], "presence", high=-(-MAX_KEYS // 8)))


@dataclass(frozen=True, slots=True)
class Leased:
    """Answer to LeaseChain and MatchAndLease: what is stored, and the slots of the blocks that are leased.

    ``slots`` are those of the leading blocks, of all or fewer of the blocks that ``tiers`` counts. The lease
    (none if there are no slots) ends by itself ``lease_us`` microseconds after it was granted.
    ``lease_reason`` says why the next block, which is in a slot too, is not leased.
    """

    KIND: ClassVar[int] = 0x8009
    lease: int | None
    lease_us: int
    length_bytes: int
    slots: tuple[ReadySlot, ...]
    tiers: TierNames
    reason: MissReason | None
    lease_reason: MissReason | None = None

    def to_wire(self) -> Values:
        """Return the fields, one record per slot."""
        return (
            self.lease,
            self.lease_us,
            self.length_bytes,
            b"".join([_READY.pack(*slot) for slot in self.slots]),
            self.tiers.names,
            self.tiers.indices,
            None if self.reason is None else self.reason.value,
            None if self.lease_reason is None else self.lease_reason.value,
        )

    @classmethod
    def from_wire(cls, values: Values) -> Self:
        """Return the checked answer."""
        count_fields(values, 8, "leased")
        lease, lease_us, length, records, names, indices, reason, lease_reason = values
        blob = byte_string(records, "slots", high=MAX_KEYS * _READY.size, step=_READY.size)
        slots = tuple([ReadySlot(*fields) for fields in _READY.iter_unpack(blob)])
        if (lease is None) != (not slots):
            raise ProtocolMismatch("message: a lease is given exactly when there are blocks")
        stored = byte_string(indices, "tier indices", low=len(slots), high=MAX_KEYS)
        return cls(
            None if lease is None else integer(lease, 0, U64, "lease"),
            integer(lease_us, 0, MAX_TIMEOUT_US, "lease time"),
            integer(length, 0, MAX_BLOCK_BYTES, "length_bytes"),
            slots,
            TierNames.from_wire(names, stored, len(stored)),
            miss_reason_or_none(reason),
            miss_reason_or_none(lease_reason),
        )


@dataclass(frozen=True, slots=True)
class Renewed:
    """Answer to Renew: the microseconds that the lease lasts from now; 0 if it had ended."""

    KIND: ClassVar[int] = 0x800A
    lease_us: int

    def to_wire(self) -> Values:
        """Return the time."""
        return (self.lease_us,)

    @classmethod
    def from_wire(cls, values: Values) -> Self:
        """Return the checked answer."""
        count_fields(values, 1, "renewed")
        return cls(integer(values[0], 0, MAX_TIMEOUT_US, "lease time"))


class FailureCode(enum.Enum):
    """Why a request was refused or failed. A closed set."""

    INVALID_REQUEST = "invalid_request"
    NAMESPACE_NOT_OPEN = "namespace_not_open"
    INVALID_LAYOUT = "invalid_layout"
    TIER_FULL = "tier_full"
    TIER_UNAVAILABLE = "tier_unavailable"
    CORRUPT = "corrupt"
    OTHER_EPOCH = "other_epoch"
    TIMED_OUT = "timed_out"
    STOPPING = "stopping"
    INTERNAL = "internal"


# The first that fits counts: a class stands before those it inherits from.
_FAILURES: tuple[tuple[type[KVStoreError], FailureCode], ...] = (
    (NamespaceNotOpen, FailureCode.NAMESPACE_NOT_OPEN),
    (InvalidRequest, FailureCode.INVALID_REQUEST),
    (InvalidLayout, FailureCode.INVALID_LAYOUT),
    (TierFull, FailureCode.TIER_FULL),
    (TierUnavailable, FailureCode.TIER_UNAVAILABLE),
    (CorruptBlock, FailureCode.CORRUPT),
    (EpochEnded, FailureCode.OTHER_EPOCH),
    (TimedOut, FailureCode.TIMED_OUT),
    (ServerUnavailable, FailureCode.STOPPING),
)


@dataclass(frozen=True, slots=True)
class Failed:
    """Answer of a request that was refused or failed; the connection goes on."""

    KIND: ClassVar[int] = 0x80FF
    code: FailureCode
    message: str

    @classmethod
    def of(cls, error: KVStoreError) -> "Failed":
        """Return the answer that carries an error to the client."""
        for kind, code in _FAILURES:
            if isinstance(error, kind):
                # A text with lone surrogates (from a path, say) could not be sent.
                return cls(code, str(error)[:1024].encode(errors="replace").decode())
        return cls(FailureCode.INTERNAL, type(error).__name__)

    def to_error(self) -> KVStoreError:
        """Return the error it carries; an internal one is the server's, so the store counts as away."""
        if self.code in (FailureCode.INVALID_REQUEST, FailureCode.INVALID_LAYOUT):
            return RejectedRequest(self.message)
        for kind, code in _FAILURES:
            if code is self.code:
                return kind(self.message)
        return ServerUnavailable(f"server: the request failed there: {self.message}")

    def to_wire(self) -> Values:
        """Return code and text."""
        return (self.code.value, self.message)

    @classmethod
    def from_wire(cls, values: Values) -> Self:
        """Return the checked answer."""
        count_fields(values, 2, "failed")
        try:
            code = FailureCode(text(values[0], "a failure code", limit=32))
        except ValueError as error:
            raise ProtocolMismatch("message: unknown failure code") from error
        return cls(code, text(values[1], "a failure text"))
