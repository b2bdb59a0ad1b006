"""Messages of the store's protocol: typed values and their frames.

A message is a frozen dataclass. ``to_wire`` gives the positional values of its body, ``from_wire`` checks
them again one by one. Lists with one record per block travel as one byte string of fixed-size records.
"""

from typing import TypeAlias

from kvstore.answers import (
    INSTANCE_BYTES,
    Count,
    Done,
    Failed,
    FailureCode,
    Leased,
    Lent,
    LentSlot,
    Matched,
    Presence,
    Ready,
    ReadySlot,
    Renewed,
    Report,
    Seen,
    Stored,
    StoreOutcome,
    Welcome,
)
from kvstore.errors import ProtocolMismatch
from kvstore.message_fields import ChainRef, KeySet, TierNames, UnusedSlot, byte_string, timeout_us
from kvstore.record_messages import (
    DropRecord,
    GetRecord,
    ListRecords,
    PutRecord,
    RecordFound,
    RecordWritten,
)
from kvstore.requests import (
    AdvanceEpoch,
    AskSizes,
    ChangePolicy,
    Check,
    Commit,
    Demote,
    Drop,
    Erase,
    Exists,
    Fetch,
    FilledSlots,
    Flush,
    Hello,
    HelloReader,
    LeaseChain,
    ListNamespaces,
    Match,
    MatchAndLease,
    NoteHints,
    NoteReads,
    OpenNamespace,
    Peek,
    Ping,
    Prefetch,
    Release,
    Renew,
    ReportDamage,
    Reserve,
    ReturnSlots,
    Stats,
    Store,
    Why,
    WrittenSlot,
)
from kvstore.tracing import CONTEXT_BYTES, TraceContext
from kvstore.wire import TRACED, Frame, decode_body, encode_frame

Request: TypeAlias = (
    Hello
    | OpenNamespace
    | Match
    | Fetch
    | Release
    | Reserve
    | Commit
    | ReturnSlots
    | Prefetch
    | Drop
    | Stats
    | Check
    | Flush
    | Ping
    | Why
    | Demote
    | AdvanceEpoch
    | ListNamespaces
    | Exists
    | LeaseChain
    | MatchAndLease
    | Renew
    | ReportDamage
    | HelloReader
    | NoteHints
    | NoteReads
    | ChangePolicy
    | Peek
    | Erase
    | PutRecord
    | GetRecord
    | DropRecord
    | ListRecords
    | AskSizes
    | Store
)
Answer: TypeAlias = (
    Welcome
    | Done
    | Count
    | Matched
    | Ready
    | Lent
    | Report
    | Presence
    | Leased
    | Renewed
    | Seen
    | RecordWritten
    | RecordFound
    | Stored
    | Failed
)

_REQUESTS: dict[int, type[Request]] = {
    kind.KIND: kind
    for kind in (
        Hello,
        OpenNamespace,
        Match,
        Fetch,
        Release,
        Reserve,
        Commit,
        ReturnSlots,
        Prefetch,
        Drop,
        Stats,
        Check,
        Flush,
        Ping,
        Why,
        Demote,
        AdvanceEpoch,
        ListNamespaces,
        Exists,
        LeaseChain,
        MatchAndLease,
        Renew,
        ReportDamage,
        HelloReader,
        NoteHints,
        NoteReads,
        ChangePolicy,
        Peek,
        Erase,
        PutRecord,
        GetRecord,
        DropRecord,
        ListRecords,
        AskSizes,
        Store,
    )
}
_ANSWERS: dict[int, type[Answer]] = {
    kind.KIND: kind
    for kind in (
        Welcome,
        Done,
        Count,
        Matched,
        Ready,
        Lent,
        Report,
        Presence,
        Leased,
        Renewed,
        Seen,
        RecordWritten,
        RecordFound,
        Stored,
        Failed,
    )
}


def encode_message(message: Request | Answer, request_id: int, *, trace: TraceContext | None = None) -> bytes:
    """Return the frame of a message; ``trace`` is the span that a request belongs to.

    Raises:
        InvalidRequest: it names more than MAX_KEYS keys.
    """
    if trace is not None:
        return encode_frame(message.KIND | TRACED, request_id, (*message.to_wire(), trace.pack()))
    return encode_frame(message.KIND, request_id, message.to_wire())


def decode_request(frame: Frame) -> Request:
    """Return the request in a frame.

    Raises:
        ProtocolMismatch: it is none, or malformed.
        InvalidRequest: it is well-formed and names a block twice, or what can be no record.
    """
    kind = _REQUESTS.get(frame.kind)
    if kind is None:
        raise ProtocolMismatch(f"message: unknown request kind {frame.kind}")
    return kind.from_wire(decode_body(frame.body))


def decode_traced(frame: Frame) -> tuple[Request, TraceContext | None]:
    """Return the request in a frame, and the span it says it belongs to. Raises as ``decode_request``."""
    if not frame.kind & TRACED:
        return decode_request(frame), None
    kind = _REQUESTS.get(frame.kind ^ TRACED)
    if kind is None:
        raise ProtocolMismatch(f"message: unknown request kind {frame.kind}")
    values = decode_body(frame.body)
    if not values:
        raise ProtocolMismatch("message: a traced request names no span")
    packed = byte_string(values[-1], "trace", low=CONTEXT_BYTES, high=CONTEXT_BYTES)
    return kind.from_wire(values[:-1]), TraceContext.unpack(packed)


def decode_answer(frame: Frame) -> Answer:
    """Return the answer in a frame. Raises ProtocolMismatch if it is none, or malformed."""
    kind = _ANSWERS.get(frame.kind)
    if kind is None:
        raise ProtocolMismatch(f"message: unknown answer kind {frame.kind}")
    return kind.from_wire(decode_body(frame.body))


__all__ = [
    "INSTANCE_BYTES",
    "AdvanceEpoch",
    "Answer",
    "AskSizes",
    "ChainRef",
    "ChangePolicy",
    "Check",
    "Commit",
    "Count",
    "Demote",
    "Done",
    "Drop",
    "DropRecord",
    "Erase",
    "Exists",
    "Failed",
    "FailureCode",
    "Fetch",
    "FilledSlots",
    "Flush",
    "GetRecord",
    "Hello",
    "HelloReader",
    "KeySet",
    "LeaseChain",
    "Leased",
    "Lent",
    "LentSlot",
    "ListNamespaces",
    "ListRecords",
    "Match",
    "MatchAndLease",
    "Matched",
    "NoteHints",
    "NoteReads",
    "OpenNamespace",
    "Peek",
    "Ping",
    "Prefetch",
    "Presence",
    "PutRecord",
    "Ready",
    "ReadySlot",
    "RecordFound",
    "RecordWritten",
    "Release",
    "Renew",
    "Renewed",
    "Report",
    "ReportDamage",
    "Request",
    "Reserve",
    "ReturnSlots",
    "Seen",
    "Stats",
    "Store",
    "StoreOutcome",
    "Stored",
    "TierNames",
    "UnusedSlot",
    "Welcome",
    "Why",
    "WrittenSlot",
    "decode_answer",
    "decode_request",
    "decode_traced",
    "encode_message",
    "timeout_us",
]
