"""The clients' calls, decided without I/O: each is a plan that yields steps and gets their results.

A plan is a generator. It yields ``Ask`` (send a request, give back the answer), ``Tell`` (send a message that
has no answer) or ``Work`` (run a copy, on a thread where the caller must not block), and returns the call's
result. `KVStore` and `AsyncKVStore` differ only in how they carry out steps, so both keep the same promises:
on the data path an absent, dying or slow server is a result; bytes are handed out only if checksum and
generation agree after the copy; a lease is given back however the copy ends.
"""

import json
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, TypeVar

from kvstore.arena_link import MappedArena
from kvstore.errors import (
    CorruptBlock,
    EpochEnded,
    InvalidLayout,
    InvalidRequest,
    KVStoreError,
    ProtocolMismatch,
    TierFull,
    TimedOut,
)
from kvstore.hints import Hints
from kvstore.keys import Namespace, NamespaceDigest, PrefixChain
from kvstore.layout import KVLayout, Part
from kvstore.messages import (
    AdvanceEpoch,
    Answer,
    AskSizes,
    ChainRef,
    ChangePolicy,
    Check,
    Count,
    Demote,
    Done,
    Drop,
    Erase,
    Failed,
    Flush,
    Lent,
    ListNamespaces,
    Match,
    Matched,
    NoteHints,
    Ping,
    Prefetch,
    Report,
    Request,
    Reserve,
    Stats,
    Stored,
    StoreOutcome,
    Why,
    WrittenSlot,
    timeout_us,
)
from kvstore.miss import MissReason
from kvstore.results import BlockReport, EraseReport, PrefixMatch, PutResult
from kvstore.stock import Stock
from kvstore.tenant import TenantId
from kvstore.transfer import SlotReader
from kvstore.wire import MAX_KEYS

WINDOW_BYTES = 128 << 20
"""Payload bytes that one request of a larger call leases or reserves, so that no call holds the arena."""

_MAX_WINDOW_BLOCKS = 1024
MALFORMED = (KeyError, TypeError, ValueError, AttributeError, ArithmeticError, InvalidLayout)
"""What reading JSON of another form than expected raises; a number of hundreds of digits is no float."""

_ANSWER_RESERVE_S = 0.002
_MAX_REPORT_JSON = 1 << 20


@dataclass(frozen=True, slots=True)
class FetchResult:
    """How many leading blocks were copied into the buffers, and where each came from.

    Buffers behind ``blocks`` hold nothing of value. ``checksums`` are the blocks' xxh3-64. ``reason`` says
    why the next block was not served; None when every block was.
    """

    blocks: int
    origins: tuple[str, ...]
    checksums: tuple[int, ...]
    reason: MissReason | None


@dataclass(frozen=True, slots=True)
class Ask:
    """Step: send a request, give back its answer.

    ``meanwhile`` is work of some ten microseconds that may be done, or not, while the server makes it.
    """

    request: Request
    meanwhile: Callable[[], object] | None = None


@dataclass(frozen=True, slots=True)
class Tell:
    """Step: send a message that is not answered."""

    message: Request


@dataclass(frozen=True, slots=True)
class Work:
    """Step: run a function that copies.

    It gets a predicate that says to stop: time is up, nobody waits any more, or the connection is lost.
    """

    run: Callable[[Callable[[], bool]], object]
    size_bytes: int


Step: TypeAlias = Ask | Tell | Work
T = TypeVar("T")
A = TypeVar("A", bound=Answer)
Plan: TypeAlias = Generator[Step, Any, T]  # Any: what a step gives back depends on the step


class Connection(Protocol):
    """The connection that what is lent belongs to; with it ends all that was lent on it."""

    @property
    def is_lost(self) -> bool:
        """Whether it has ended, as far as this process knows."""


class Session(Protocol):
    """What a plan may know of the connection that carries out its steps."""

    @property
    def connection(self) -> Connection:
        """The connection itself."""

    def remaining_s(self) -> float:
        """Seconds until the call must be over; not negative."""

    def reading_arena(self) -> SlotReader:
        """Return the arena for reading. Raises ServerUnavailable if the server has none."""

    def writing_arena(self) -> SlotReader:
        """Return the arena for writing. Raises ServerUnavailable if the server has sent none."""

    def mapped_arena(self) -> MappedArena:
        """Return the arena as it is mapped here. Raises ServerUnavailable if the server has none."""

    @property
    def stock(self) -> Stock | None:
        """Slots lent ahead to the connection; None if that takes none."""

    def note_corrupt(self) -> None:
        """Count a block whose bytes were wrong."""


def ask_for(request: Request, expected: type[A], meanwhile: Callable[[], object] | None = None) -> Plan[A]:
    """Ask, and return the answer if it is of the expected kind.

    Raises:
        KVStoreError: the error that the server answered with.
        ProtocolMismatch: an answer of another kind.
    """
    answer = yield Ask(request, meanwhile)
    return answer_of(answer, type(request), expected)


def answer_of(answer: Answer, asked: type[Request], expected: type[A]) -> A:
    """Return an answer that is of the expected kind. Raises as ``ask_for``."""
    if isinstance(answer, Failed):
        raise answer.to_error()
    if not isinstance(answer, expected):
        raise ProtocolMismatch(f"answer: {type(answer).__name__} to {asked.__name__}")
    return answer


def server_timeout_us(session: Session) -> int:
    """Return how long the server may take, in microseconds."""
    return time_for_server_us(session.remaining_s())


def time_for_server_us(remaining_s: float) -> int:
    """Return how much of what is left of a call's time is the server's, in microseconds."""
    # The server must end first, or its answer would arrive when nobody waits any more.
    return timeout_us(remaining_s - min(_ANSWER_RESERVE_S, remaining_s / 4))


def check_keys(chain: PrefixChain) -> None:
    """Raise InvalidRequest if a chain names more blocks than a request may."""
    if len(chain) > MAX_KEYS:
        raise InvalidRequest(f"chain: {len(chain)} keys, limit {MAX_KEYS}: split it")


def match_plan(session: Session, chain: PrefixChain, part: Part | None) -> Plan[PrefixMatch]:
    """Count the leading blocks that are stored."""
    check_keys(chain)
    about = ChainRef(chain, part)
    answer = yield from ask_for(Match(about, server_timeout_us(session)), Matched)
    tiers = answer.tiers.expand()
    if len(tiers) > len(chain):
        raise ProtocolMismatch(f"answer: {len(tiers)} blocks match a chain of {len(chain)}")
    return PrefixMatch(len(tiers), tiers, answer.reason)


def prefetch_plan(session: Session, chain: PrefixChain, part: Part | None) -> Plan[int]:
    """Load stored leading blocks into the top tier."""
    check_keys(chain)
    answer = yield from ask_for(Prefetch(ChainRef(chain, part), server_timeout_us(session)), Count)
    return answer.count


def drop_plan(session: Session, chain: PrefixChain, part: Part | None) -> Plan[int]:
    """Forget every copy of these blocks that is not leased."""
    check_keys(chain)
    answer = yield from ask_for(Drop(ChainRef(chain, part), server_timeout_us(session)), Count)
    return answer.count


def demote_plan(session: Session, chain: PrefixChain, part: Part | None) -> Plan[int]:
    """Write blocks to a tier below and take them out of the top tier."""
    check_keys(chain)
    answer = yield from ask_for(Demote(ChainRef(chain, part), server_timeout_us(session)), Count)
    return answer.count


def why_plan(session: Session, chain: PrefixChain, part: Part | None) -> Plan[list[BlockReport]]:
    """Explain the blocks of a chain."""
    check_keys(chain)
    answer = yield from ask_for(Why(ChainRef(chain, part), server_timeout_us(session)), Report)
    try:
        return [BlockReport.from_dict(item) for item in load_list(answer.json)]
    except MALFORMED as error:
        raise ProtocolMismatch("answer: a block's report is malformed") from error


def change_policy_plan(text: str) -> Plan[str]:
    """Give tiers or namespaces other policies."""
    answer = yield from ask_for(ChangePolicy(text), Report)
    told = _load_json(answer.json)
    before = told.get("before") if isinstance(told, dict) else None
    if not isinstance(before, str):
        raise ProtocolMismatch("answer: the policy before is not named")
    return before


def advance_epoch_plan(model: str) -> Plan[int]:
    """End the present epoch of a model."""
    answer = yield from ask_for(AdvanceEpoch(model), Count)
    return answer.count


def namespaces_plan() -> Plan[list[Namespace]]:
    """Ask for the namespaces that clients opened."""
    answer = yield from ask_for(ListNamespaces(), Report)
    try:
        return [
            Namespace(**{**item, "layout": KVLayout(**item["layout"])}) for item in load_list(answer.json)
        ]
    except MALFORMED as error:
        raise ProtocolMismatch("answer: a namespace is malformed") from error


def erase_plan(tenant: TenantId | None, namespace: NamespaceDigest | None) -> Plan[EraseReport]:
    """Destroy the key of a tenant, or of that of an open namespace."""
    answer = yield from ask_for(Erase(tenant, namespace), Report)
    try:
        value = _load_json(answer.json)
        if not isinstance(value, dict):
            raise TypeError("not an object")
        return EraseReport.from_dict(value)
    except MALFORMED as error:
        raise ProtocolMismatch("answer: the report of an erasure is malformed") from error


def ping_plan() -> Plan[None]:
    """Ask whether the server answers."""
    yield from ask_for(Ping(), Done)


def arena_plan(session: Session) -> Plan[MappedArena]:
    """Make sure that the server answers, and return its arena."""
    yield from ask_for(Ping(), Done)
    return session.mapped_arena()


def flush_plan(session: Session) -> Plan[bool]:
    """Wait until what was put has been written through."""
    answer = yield from ask_for(Flush(server_timeout_us(session)), Count)
    return answer.count > 0


def stats_plan() -> Plan[dict[str, Any]]:
    """Ask for counters and occupancy."""
    answer = yield from ask_for(Stats(), Report)
    value = _load_json(answer.json)
    if not isinstance(value, dict):
        raise ProtocolMismatch("answer: stats are not a JSON object")
    return value


def size_curve_plan(namespace: NamespaceDigest | None) -> Plan[dict[str, Any]]:
    """Ask for hit rates by size."""
    answer = yield from ask_for(AskSizes(namespace), Report)
    value = _load_json(answer.json)
    if not isinstance(value, dict):
        raise ProtocolMismatch("answer: hit rates by size are not a JSON object")
    return value


def check_plan(session: Session, sample_blocks: int) -> Plan[list[str]]:
    """Have the server verify its invariants; one line per violation."""
    answer = yield from ask_for(Check(sample_blocks, server_timeout_us(session)), Report)
    value = _load_json(answer.json)
    if not isinstance(value, list) or not all(isinstance(line, str) for line in value):
        raise ProtocolMismatch("answer: check's lines are not a JSON list of texts")
    return value


class PutTally:
    """What a put has achieved so far; the rest counts as dropped."""

    def __init__(self, blocks: int) -> None:
        self._blocks = blocks
        self._stored = 0
        self._present = 0
        self._reason: MissReason | None = None
        self._is_certain = bytearray(blocks)

    def note_lent(self, start: int, blocks: int, lent: Lent) -> None:
        """Note what the server said of ``blocks`` blocks from position ``start``: how many are present.

        Slots are lent in chain order. So what is not lent before the last lent block is present; what comes
        after it only if there was room for every block that is missing.
        """
        self._present += lent.present
        if lent.reason is not None:
            self.note_reason(lent.reason)
        missing = [slot.position for slot in lent.slots]
        known = missing[-1] if missing else 0
        if len(missing) + lent.present == blocks:
            known = blocks
        for position in set(range(known)).difference(missing):
            self._is_certain[start + position] = 1

    def note_stored(self, start: int, written: Sequence[WrittenSlot], num_stored: int) -> None:
        """Note how many of the written blocks were stored; the others came too late."""
        self._stored += num_stored
        self._present += len(written) - num_stored
        if num_stored == len(written):
            for slot in written:
                self._is_certain[start + slot.position] = 1

    @property
    def present(self) -> int:
        """How many were stored before, as far as is known."""
        return self._present

    def note_outcomes(self, answer: Stored) -> None:
        """Note what became of the blocks of a put that was one request."""
        self._stored += answer.stored
        if answer.reason is not None:
            self.note_reason(answer.reason)
        if not answer.outcomes:
            self._is_certain = bytearray(b"\1") * self._blocks
            return
        self._present += answer.outcomes.count(StoreOutcome.PRESENT)
        self._is_certain = bytearray([outcome != StoreOutcome.DROPPED for outcome in answer.outcomes])

    def note_reason(self, reason: MissReason) -> None:
        """Note why a block was dropped; the first counts."""
        self._reason = self._reason or reason

    def result(self) -> PutResult:
        """Return the result of the call."""
        doubtful: tuple[int, ...] = ()
        if 0 in self._is_certain:
            doubtful = tuple([at for at, is_certain in enumerate(self._is_certain) if not is_certain])
        dropped = self._blocks - self._stored - self._present
        return PutResult(self._stored, self._present, dropped, doubtful, self._reason if dropped else None)


def hint_plan(session: Session, chain: PrefixChain, part: Part | None, hints: Hints) -> Plan[bool]:
    """Say more of the future of stored blocks."""
    check_keys(chain)
    yield from ask_for(NoteHints(ChainRef(chain, part), hints), Done)
    return True


def ask_for_slots(
    session: Session,
    about: ChainRef,
    start: int,
    tally: PutTally,
    hints: Hints | None,
    meanwhile: Callable[[], object] | None = None,
) -> Plan[Lent]:
    """Ask for slots for the blocks that are not stored; ``start`` is where the blocks are in the tally."""
    lent = yield from ask_for(Reserve(about, server_timeout_us(session), hints), Lent, meanwhile)
    room = len(about.chain) - lent.present
    if len(lent.slots) > room or (lent.slots and lent.slots[-1].position >= len(about.chain)):
        raise ProtocolMismatch("answer: lent slots do not fit the request")
    tally.note_lent(start, len(about.chain), lent)
    return lent


def why_unwritten(session: Session, expected: Sequence[int] | None) -> MissReason:
    """Return why the writing of slots ended early.

    The time was up, the lending or the connection ended, or a payload is not the ``expected`` one.
    """
    if session.remaining_s() <= 0:
        return MissReason.TIMED_OUT
    return MissReason.UNAVAILABLE if expected is None else MissReason.CORRUPT


def miss_reason(error: KVStoreError) -> MissReason:
    """Return the reason that a failure of the connection or the server is on the data path."""
    if isinstance(error, TimedOut):
        return MissReason.TIMED_OUT
    if isinstance(error, TierFull):
        return MissReason.NO_ROOM
    if isinstance(error, EpochEnded):
        return MissReason.OTHER_EPOCH
    return MissReason.CORRUPT if isinstance(error, CorruptBlock) else MissReason.UNAVAILABLE


def window_blocks(length_bytes: int) -> int:
    """Return how many blocks one request of a larger call is about."""
    return max(1, min(_MAX_WINDOW_BLOCKS, WINDOW_BYTES // max(1, length_bytes)))


def load_list(text: bytes) -> list[Any]:  # Any: JSON
    """Return the JSON list in a report. Raises ProtocolMismatch if it is none."""
    value = _load_json(text)
    if not isinstance(value, list):
        raise ProtocolMismatch("answer: not a JSON list")
    return value


def _load_json(data: bytes) -> object:
    if len(data) > _MAX_REPORT_JSON:
        raise ProtocolMismatch("answer: a report above its limit")
    try:
        value: object = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ProtocolMismatch("answer: a report is not JSON") from error
    return value
