"""The plan of a put: in one exchange where there are slots lent ahead, else slots are asked for first.

Either way payloads are written into lent slots, checksum in the same pass, before the server publishes them.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from kvstore.at_once import Link, copy_limit
from kvstore.calls import (
    Plan,
    PutTally,
    Session,
    Tell,
    Work,
    answer_of,
    ask_for,
    ask_for_slots,
    check_keys,
    miss_reason,
    why_unwritten,
    window_blocks,
)
from kvstore.errors import ProtocolMismatch, TierFull, TierUnavailable
from kvstore.hints import Hints
from kvstore.messages import (
    ChainRef,
    Commit,
    Count,
    Failed,
    FailureCode,
    FilledSlots,
    LentSlot,
    ReturnSlots,
    Store,
    Stored,
    UnusedSlot,
    WrittenSlot,
)
from kvstore.miss import MissReason
from kvstore.stock import Stock
from kvstore.transfer import Bytes, SumsAhead, fill_slots, write_slots
from kvstore.wire import MAX_KEYS


@dataclass(frozen=True, slots=True)
class Put:
    """What is to be put: one payload per block of the chain, and its checksum if that is known."""

    about: ChainRef
    payloads: Sequence[Bytes]
    length_bytes: int
    checksums: Sequence[int] | None
    hints: Hints | None = None

    def part_of(self, start: int, count: int) -> "Put":
        """Return the put of ``count`` blocks from one on."""
        if not start and count >= len(self.about.chain):
            return self
        stop = start + count
        about = ChainRef(self.about.chain[start:stop], self.about.part)
        checksums = None if self.checksums is None else self.checksums[start:stop]
        return Put(about, self.payloads[start:stop], self.length_bytes, checksums, self.hints)


def put_at_once(link: Link, put: Put, tally: PutTally, deadline_s: float) -> bool:
    """Put into slots lent ahead by one exchange, and copy on the caller's thread; False if that does not do.

    Then ``put_plan`` goes on, as if nothing had been tried.
    """
    stock, arena, count = link.stock, link.arena, len(put.about.chain.keys)
    if stock is None or arena is None or arena.writing is None or not 0 < count <= MAX_KEYS:
        return False
    if time.monotonic() >= deadline_s or not stock.has_slots(put.length_bytes, count):
        return False
    slots = stock.begin_put(put.length_bytes, count)
    unused = slots
    try:
        should_stop = copy_limit(link, deadline_s)
        filled = fill_slots(arena.writing, slots, put.payloads, should_stop, expected=put.checksums)
        if len(filled) < count:
            return False
        ahead, asked_s = stock.wanted(put.length_bytes, count), stock.clock()
        answer = link.ask(Store(put.about, filled, ahead, put.hints), deadline_s)
        if isinstance(answer, Failed) and answer.code is FailureCode.NAMESPACE_NOT_OPEN:
            return False
        stored = answer_of(answer, Store, Stored)
        unused = []
        _note_stored(stock, put, stored, tally, ahead=ahead, asked_s=asked_s)
        return True
    finally:
        if unused:
            link.tell(ReturnSlots(tuple(unused)))


def put_plan(session: Session, put: Put, tally: PutTally) -> Plan[None]:
    """Store blocks that are not stored yet."""
    check_keys(put.about.chain)
    stock = session.stock
    if stock is not None:
        slots = stock.begin_put(put.length_bytes, len(put.about.chain))
        if slots and (yield from _put_at_once(session, stock, slots, put, tally)):
            return
    window = window_blocks(put.length_bytes)
    for start in range(0, len(put.about.chain), window):
        is_done = yield from _put_window(session, stock, put.part_of(start, window), start, tally)
        if not is_done:
            return
        if session.remaining_s() <= 0:
            tally.note_reason(MissReason.TIMED_OUT)
            return


def _put_at_once(
    session: Session, stock: Stock, slots: list[tuple[int, int]], put: Put, tally: PutTally
) -> Plan[bool]:
    """Write blocks into slots lent ahead, and have them stored; False if they could not all be written."""
    unused = slots
    try:
        copy = partial(fill_slots, session.writing_arena(), slots, put.payloads, expected=put.checksums)
        filled: FilledSlots = yield Work(copy, put.length_bytes * len(slots))
        if len(filled) < len(slots):
            if session.remaining_s() <= 0:
                tally.note_reason(MissReason.TIMED_OUT)
                return True
            return False
        ahead, asked_s = stock.wanted(put.length_bytes, len(slots)), stock.clock()
        answer = yield from ask_for(Store(put.about, filled, ahead, put.hints), Stored)
        unused = []
        _note_stored(stock, put, answer, tally, ahead=ahead, asked_s=asked_s)
        return True
    finally:
        if unused:
            yield Tell(ReturnSlots(tuple(unused)))


def _note_stored(
    stock: Stock, put: Put, answer: Stored, tally: PutTally, *, ahead: int, asked_s: float
) -> None:
    """Note what became of a put's blocks, and the slots for the next, of which ``ahead`` were asked for.

    Raises:
        ProtocolMismatch: the answer does not fit.
    """
    count = len(put.payloads)
    if len(answer.outcomes) not in (0, count) or len(answer.slots) not in (0, ahead):
        raise ProtocolMismatch("answer: outcomes or slots do not fit the request")
    if not answer.outcomes and answer.stored != count:
        raise ProtocolMismatch("answer: what became of the blocks is not said")
    tally.note_outcomes(answer)
    stock.note_present(tally.present)
    stock.add(put.length_bytes, answer, asked_s)


def _put_window(session: Session, stock: Stock | None, put: Put, start: int, tally: PutTally) -> Plan[bool]:
    """Have slots lent for some blocks, from ``start`` in the tally; False if some were not to be had."""
    about, sums = put.about, SumsAhead(put.payloads)
    try:
        lent = yield from ask_for_slots(session, about, start, tally, put.hints, sums.begin)
    except (TierFull, TierUnavailable) as error:
        tally.note_reason(miss_reason(error))
        return False
    if stock is not None:
        stock.note_present(lent.present)
    if lent.slots:
        yield from _write_and_commit(session, stock, put, lent.slots, start=start, sums=sums, tally=tally)
    return len(lent.slots) == len(about.chain) - lent.present


def _write_and_commit(
    session: Session,
    stock: Stock | None,
    put: Put,
    slots: tuple[LentSlot, ...],
    *,
    start: int,
    sums: SumsAhead,
    tally: PutTally,
) -> Plan[None]:
    unused = slots
    try:
        arena = session.writing_arena()
        sources = [put.payloads[slot.position] for slot in slots]
        expected = None if put.checksums is None else [put.checksums[slot.position] for slot in slots]

        def copy(should_stop: Callable[[], bool]) -> list[WrittenSlot]:
            return write_slots(arena, slots, sources, should_stop, expected=expected, ahead=sums)

        written: list[WrittenSlot] = yield Work(copy, put.length_bytes * len(sources))
        if written:
            num_stored = yield from _commit(stock, put, tuple(written))
            if num_stored > len(written):
                raise ProtocolMismatch("answer: more blocks stored than were committed")
            tally.note_stored(start, written, num_stored)
        unused = slots[len(written) :]
        if unused:
            tally.note_reason(why_unwritten(session, expected))
    finally:
        if unused:
            yield Tell(ReturnSlots(tuple([UnusedSlot(slot.offset, slot.generation) for slot in unused])))


def _commit(stock: Stock | None, put: Put, written: tuple[WrittenSlot, ...]) -> Plan[int]:
    """Have written slots published, and others lent for the next put; returns how many blocks are new."""
    ahead = 0 if stock is None else stock.wanted(put.length_bytes, len(put.about.chain))
    if stock is None or not ahead:
        count = yield from ask_for(Commit(put.about, written), Count)
        return count.count
    others = stock.make_room(put.length_bytes, ahead)
    if others:
        yield Tell(ReturnSlots(tuple(others)))
    asked_s = stock.clock()
    answer = yield from ask_for(Commit(put.about, written, ahead), Stored)
    if len(answer.slots) not in (0, ahead) or answer.outcomes:
        raise ProtocolMismatch("answer: slots do not fit the request")
    stock.add(put.length_bytes, answer, asked_s)
    return answer.stored
