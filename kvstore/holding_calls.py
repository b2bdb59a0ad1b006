"""Plans of the calls that leave something with the client: leases, views of leased blocks, reserved slots.

A `Grant` and a `Loan` are what such a call brings: they name the connection that they belong to, and end with
it. Everything a later call needs to use them is in them, so they hold no reference to a client.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from kvstore.calls import (
    Connection,
    Plan,
    PutTally,
    Session,
    Tell,
    Work,
    ask_for,
    ask_for_slots,
    check_keys,
    miss_reason,
    server_timeout_us,
    why_unwritten,
)
from kvstore.errors import InvalidRequest, ProtocolMismatch, TierFull, TierUnavailable
from kvstore.hints import Hints
from kvstore.in_place import are_current, require_slots, sum_slots, verify_slots
from kvstore.keys import BlockKey, NamespaceDigest, PrefixChain
from kvstore.layout import Part
from kvstore.messages import (
    ChainRef,
    Commit,
    Count,
    Exists,
    KeySet,
    LeaseChain,
    Leased,
    LentSlot,
    MatchAndLease,
    Presence,
    ReadySlot,
    Release,
    Renew,
    Renewed,
    ReportDamage,
    ReturnSlots,
    UnusedSlot,
    WrittenSlot,
)
from kvstore.miss import MissReason
from kvstore.results import PrefixMatch, PutResult
from kvstore.transfer import ReadEnd, SlotReader
from kvstore.wire import MAX_KEYS


@dataclass(slots=True)
class Grant:
    """Leading blocks of a chain under one lease, and where they are.

    ``deadline_s`` (monotonic) is counted from before the server was asked, so it is never later than the
    server's own. ``lease`` None: nothing is leased, or it has ended.
    """

    chain: PrefixChain
    part: Part | None
    reason: MissReason | None
    lease: int | None = None
    length_bytes: int = 0
    slots: tuple[ReadySlot, ...] = ()
    tiers: tuple[str, ...] = ()
    deadline_s: float = 0.0
    arena: SlotReader | None = None
    connection: Connection | None = None

    def is_valid(self, now_s: float) -> bool:
        """Whether the lease lasts: no byte of the blocks can have changed since it was granted."""
        if self.lease is None or self.arena is None or self.connection is None:
            return False
        if now_s >= self.deadline_s or self.connection.is_lost:
            return False
        return are_current(self.arena, self.slots)


@dataclass(slots=True)
class Loan:
    """Slots lent for those blocks of a chain that are not stored. Empty once they were given back."""

    chain: PrefixChain
    part: Part | None
    length_bytes: int
    tally: PutTally
    slots: tuple[LentSlot, ...] = ()
    arena: SlotReader | None = None
    connection: Connection | None = None


def exists_plan(
    session: Session, namespace: NamespaceDigest, keys: Sequence[BlockKey], part: Part | None
) -> Plan[list[bool]]:
    """Ask which of any blocks are stored."""
    if len(keys) > MAX_KEYS:
        raise InvalidRequest(f"keys: {len(keys)}, limit {MAX_KEYS}: split them")
    about = KeySet(namespace, tuple(keys), part)
    answer = yield from ask_for(Exists(about, server_timeout_us(session)), Presence)
    if len(answer.bits) != -(-len(keys) // 8):
        raise ProtocolMismatch(f"answer: {len(answer.bits)} bytes of presence for {len(keys)} keys")
    bits = np.unpackbits(np.frombuffer(answer.bits, np.uint8), count=len(keys), bitorder="little")
    present: list[bool] = bits.view(np.bool_).tolist()
    return present


def lease_plan(
    session: Session,
    chain: PrefixChain,
    *,
    part: Part | None,
    length_bytes: int,
    now_s: float,
    hints: Hints | None = None,
) -> Plan[Grant]:
    """Have the longest stored prefix made ready and leased."""
    check_keys(chain)
    session.reading_arena()
    request = LeaseChain(ChainRef(chain, part), server_timeout_us(session), hints)
    answer = yield from ask_for(request, Leased)
    if len(answer.slots) != len(answer.tiers.indices):
        raise ProtocolMismatch("answer: blocks were made ready that are not leased")
    return _grant(session, request.about, answer, length_bytes=length_bytes, now_s=now_s)


def match_and_lease_plan(
    session: Session, chain: PrefixChain, *, part: Part | None, length_bytes: int, now_s: float
) -> Plan[tuple[PrefixMatch, Grant]]:
    """Count the leading blocks that are stored, and lease those that are in the arena."""
    check_keys(chain)
    request = MatchAndLease(ChainRef(chain, part), server_timeout_us(session))
    answer = yield from ask_for(request, Leased)
    grant = _grant(session, request.about, answer, length_bytes=length_bytes, now_s=now_s)
    tiers = answer.tiers.expand()
    return PrefixMatch(len(tiers), tiers, answer.reason), grant


def _grant(session: Session, about: ChainRef, answer: Leased, *, length_bytes: int, now_s: float) -> Grant:
    if len(answer.tiers.indices) > len(about.chain) or len(answer.slots) > len(answer.tiers.indices):
        raise ProtocolMismatch("answer: more blocks than were asked for")
    if answer.slots and answer.length_bytes != length_bytes:
        raise ProtocolMismatch(f"answer: blocks of {answer.length_bytes} bytes, expected {length_bytes}")
    leased = len(answer.slots)
    grant = Grant(about.chain[:leased], about.part, answer.lease_reason or answer.reason)
    if answer.lease is not None:
        grant.lease, grant.length_bytes, grant.slots = answer.lease, length_bytes, answer.slots
        grant.tiers = answer.tiers.expand()[:leased]
        grant.deadline_s = now_s + answer.lease_us / 1e6
        arena = session.reading_arena()
        require_slots(arena, [slot.offset for slot in answer.slots], length_bytes)
        grant.arena, grant.connection = arena, session.connection
    return grant


def renew_plan(grant: Grant, lease: int, now_s: float) -> Plan[bool]:
    """Have a lease last its full time again."""
    answer = yield from ask_for(Renew(lease), Renewed)
    if answer.lease_us:
        grant.deadline_s = now_s + answer.lease_us / 1e6
    return answer.lease_us > 0


def release_plan(lease: int) -> Plan[None]:
    """End a lease."""
    yield Tell(Release(lease))


def view_plan(session: Session, grant: Grant) -> Plan[list[memoryview]]:
    """Verify leased blocks in place, and return them up to the first that is not right."""
    arena = grant.arena
    assert arena is not None, "a lease has an arena"
    slots, length_bytes = grant.slots, grant.length_bytes

    def verify(should_stop: Callable[[], bool]) -> tuple[int, ReadEnd]:
        return verify_slots(arena, slots, length_bytes, should_stop)

    end: ReadEnd
    good, end = yield Work(verify, len(slots) * length_bytes)
    if end in (ReadEnd.STALE, ReadEnd.DAMAGED):
        session.note_corrupt()
    if end is ReadEnd.DAMAGED:
        yield Tell(ReportDamage(ChainRef(grant.chain[good : good + 1], grant.part)))
    return [arena.slot(slot.offset, length_bytes).toreadonly() for slot in slots[:good]]


def reserve_plan(
    session: Session,
    chain: PrefixChain,
    *,
    part: Part | None,
    length_bytes: int,
    hints: Hints | None = None,
) -> Plan[Loan]:
    """Have slots lent for the blocks that are not stored."""
    check_keys(chain)
    loan = Loan(chain, part, length_bytes, PutTally(len(chain)))
    arena = session.writing_arena()
    try:
        lent = yield from ask_for_slots(session, ChainRef(chain, part), 0, loan.tally, hints)
    except (TierFull, TierUnavailable) as error:
        loan.tally.note_reason(miss_reason(error))
        return loan
    require_slots(arena, [slot.offset for slot in lent.slots], length_bytes)
    loan.slots, loan.arena, loan.connection = lent.slots, arena, session.connection
    return loan


def commit_plan(session: Session, loan: Loan) -> Plan[PutResult]:
    """Sum what was written into lent slots where it lies, and publish it."""
    slots, loan.slots = loan.slots, ()
    unused = slots
    try:
        arena, length_bytes = loan.arena, loan.length_bytes
        assert arena is not None, "lent slots lie in an arena"

        def add_up(should_stop: Callable[[], bool]) -> list[WrittenSlot]:
            return sum_slots(arena, slots, length_bytes, should_stop)

        written: list[WrittenSlot] = yield Work(add_up, len(slots) * length_bytes)
        if written:
            stored = yield from ask_for(Commit(ChainRef(loan.chain, loan.part), tuple(written)), Count)
            if stored.count > len(written):
                raise ProtocolMismatch("answer: more blocks stored than were committed")
            loan.tally.note_stored(0, written, stored.count)
        unused = slots[len(written) :]
        if unused:
            loan.tally.note_reason(why_unwritten(session, None))
    finally:
        if unused:
            yield Tell(return_of(unused))
    return loan.tally.result()


def abandon_plan(loan: Loan) -> Plan[None]:
    """Give lent slots back unwritten."""
    slots, loan.slots = loan.slots, ()
    if slots:
        yield Tell(return_of(slots))


def return_of(slots: Sequence[LentSlot]) -> ReturnSlots:
    """Return the message that gives slots back."""
    return ReturnSlots(tuple([UnusedSlot(slot.offset, slot.generation) for slot in slots]))
