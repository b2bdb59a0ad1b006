"""The call that fetches: a plan, and a shorter way for few blocks that are in shared memory.

Blocks are read under a lease, or, if they are few, without one: a lease costs a second message. Either way
checksum and generation are checked after the copy. What changed meanwhile is fetched again, under a lease.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeAlias

import numpy as np

from kvstore.at_once import Link, copy_limit
from kvstore.calls import (
    Ask,
    FetchResult,
    Plan,
    Session,
    Tell,
    Work,
    ask_for,
    check_keys,
    server_timeout_us,
    time_for_server_us,
    window_blocks,
)
from kvstore.errors import ProtocolMismatch
from kvstore.hints import Hints
from kvstore.keys import PrefixChain
from kvstore.layout import Part
from kvstore.messages import Answer, ChainRef, Failed, Fetch, Peek, Ready, ReadySlot, Release, Seen
from kvstore.miss import MissReason
from kvstore.transfer import Bytes, ReadEnd, read_slots

PEEK_BYTES = 4 << 20
"""Up to here blocks are copied without a lease: they hardly leave meanwhile."""


class FetchTally:
    """What a fetch has copied so far; kept outside the plan, so that a lost server does not lose it.

    ``peeked`` is the answer to a Peek for the first window, if there has been one.
    """

    def __init__(self) -> None:
        self._slots: list[ReadySlot] = []
        self._origins: list[str] = []
        self.peeked: Answer | None = None

    @property
    def blocks(self) -> int:
        """Leading blocks copied and verified."""
        return len(self._slots)

    def add(self, slots: Sequence[ReadySlot], origins: Sequence[str]) -> None:
        """Note verified blocks."""
        self._slots.extend(slots)
        self._origins.extend(origins)

    def result(self, reason: MissReason | None) -> FetchResult:
        """Return the result of the call."""
        checksums = tuple([slot.checksum for slot in self._slots])
        return FetchResult(len(self._slots), tuple(self._origins), checksums, reason)


BufferSource: TypeAlias = Callable[[int, int], Sequence[Bytes]]
"""Gives the buffers of blocks start to stop of the chain; called when they are known to be stored."""


def is_peeked(chain: PrefixChain, length_bytes: int) -> bool:
    """Whether a chain's blocks are few enough to be read without a lease."""
    return len(chain.keys) * length_bytes <= PEEK_BYTES


def fetch_at_once(
    link: Link,
    about: ChainRef,
    buffers: BufferSource,
    *,
    length_bytes: int,
    deadline_s: float,
    tally: FetchTally,
    hints: Hints | None = None,
) -> FetchResult | None:
    """Fetch few blocks by one exchange and one copy on the caller's thread; None if that does not suffice.

    Then ``fetch_plan`` goes on with what the tally keeps of it.
    """
    remaining_s = max(0.0, deadline_s - time.monotonic())
    answer = link.ask(Peek(about, time_for_server_us(remaining_s), hints), deadline_s)
    if not isinstance(answer, Seen) or link.arena is None:
        tally.peeked = None if isinstance(answer, Failed) else answer
        return None
    slots, count = answer.slots, len(answer.slots)
    _check_peeked(answer, about, length_bytes)
    good, end = read_slots(link.arena.reading, slots, buffers(0, count), copy_limit(link, deadline_s))
    if end is ReadEnd.STALE or end is ReadEnd.DAMAGED:
        return None
    return copied(slots[:good], answer.tier, end, deadline_s)


def copied(slots: Sequence[ReadySlot], tier: str, end: ReadEnd, deadline_s: float) -> FetchResult:
    """Return the result of a copy of these leading blocks out of one tier."""
    reason = None
    if end is ReadEnd.STOPPED:
        reason = MissReason.TIMED_OUT if time.monotonic() >= deadline_s else MissReason.UNAVAILABLE
    return FetchResult(len(slots), (tier,) * len(slots), tuple([slot[2] for slot in slots]), reason)


def fetch_plan(
    session: Session,
    chain: PrefixChain,
    *,
    part: Part | None,
    length_bytes: int,
    buffers: BufferSource,
    tally: FetchTally,
    hints: Hints | None = None,
) -> Plan[FetchResult]:
    """Copy the longest stored prefix into buffers."""
    reason = yield from _fetch_windows(
        session, chain, part=part, length_bytes=length_bytes, buffers=buffers, tally=tally, hints=hints
    )
    return tally.result(reason)


def _fetch_windows(
    session: Session,
    chain: PrefixChain,
    *,
    part: Part | None,
    length_bytes: int,
    buffers: BufferSource,
    tally: FetchTally,
    hints: Hints | None,
) -> Plan[MissReason | None]:
    """Copy window by window; returns why it ended early."""
    check_keys(chain)
    window = window_blocks(length_bytes)
    for start in range(0, len(chain), window):
        about = ChainRef(chain if window >= len(chain) else chain[start : start + window], part)
        if is_peeked(about.chain, length_bytes):
            peeked, tally.peeked = tally.peeked, None
            if peeked is None:
                peeked = yield Ask(Peek(about, server_timeout_us(session), hints))
            answer = _check_peeked(peeked, about, length_bytes)
            if isinstance(answer, Seen):
                end = yield from _copy_seen(session, answer, buffers=buffers, start=start, tally=tally)
                if end is ReadEnd.ALL:
                    continue
                if end is ReadEnd.STOPPED:
                    return _why_stopped(session)
                answer = yield from _ask_fetch(session, about, length_bytes, hints)
        else:
            answer = yield from _ask_fetch(session, about, length_bytes, hints)
        reason = yield from _copy_out(session, about, answer, buffers=buffers, start=start, tally=tally)
        if reason is not None:
            return reason
        if len(answer.slots) < len(about.chain):
            return answer.reason or MissReason.UNAVAILABLE
    return None


def _ask_fetch(session: Session, about: ChainRef, length_bytes: int, hints: Hints | None) -> Plan[Ready]:
    answer = yield from ask_for(Fetch(about, server_timeout_us(session), hints), Ready)
    return _fitting(answer, about, length_bytes)


def _check_peeked(answer: Answer, about: ChainRef, length_bytes: int) -> Seen | Ready:
    """Return an answer to Peek that fits it.

    Raises:
        KVStoreError: the error that the server answered with.
        ProtocolMismatch: it does not fit.
    """
    if isinstance(answer, Seen):
        if len(answer.slots) != len(about.chain.keys) or answer.length_bytes != length_bytes:
            raise ProtocolMismatch("answer: seen blocks do not fit the request")
        return answer
    if isinstance(answer, Failed):
        raise answer.to_error()
    if not isinstance(answer, Ready):
        raise ProtocolMismatch(f"answer: {type(answer).__name__} to Peek")
    return _fitting(answer, about, length_bytes)


def _fitting(answer: Ready, about: ChainRef, length_bytes: int) -> Ready:
    if len(answer.slots) > len(about.chain) or (answer.slots and answer.length_bytes != length_bytes):
        raise ProtocolMismatch("answer: fetched blocks do not fit the request")
    return answer


def _why_stopped(session: Session) -> MissReason:
    return MissReason.UNAVAILABLE if session.remaining_s() > 0 else MissReason.TIMED_OUT


def _copy_seen(
    session: Session, seen: Seen, *, buffers: BufferSource, start: int, tally: FetchTally
) -> Plan[ReadEnd]:
    """Copy blocks that are not leased; if they changed meanwhile, nothing was noted."""
    arena, slots = session.reading_arena(), seen.slots
    targets = buffers(start, start + len(slots))
    end: ReadEnd
    good, end = yield Work(partial(read_slots, arena, slots, targets), len(slots) * seen.length_bytes)
    if end is ReadEnd.ALL or end is ReadEnd.STOPPED:
        tally.add(slots[:good], (seen.tier,) * good)
    return end


def _copy_out(
    session: Session,
    about: ChainRef,
    answer: Ready,
    *,
    buffers: BufferSource,
    start: int,
    tally: FetchTally,
) -> Plan[MissReason | None]:
    if answer.lease is None:
        return None
    corrupt: ChainRef | None = None
    try:
        arena = session.reading_arena()
        targets = buffers(start, start + len(answer.slots))
        copy = partial(read_slots, arena, answer.slots, targets)
        end: ReadEnd
        good, end = yield Work(copy, len(targets) * answer.length_bytes)
        tally.add(answer.slots[:good], answer.origins.expand()[:good])
        if end is ReadEnd.ALL:
            return None
        if end is ReadEnd.STOPPED:
            return _why_stopped(session)
        session.note_corrupt()
        if end is ReadEnd.DAMAGED:
            corrupt = ChainRef(about.chain[good : good + 1], about.part)
        return MissReason.CORRUPT
    finally:
        yield Tell(Release(answer.lease, corrupt))


def allocate_blocks(length_bytes: int, into: list[Bytes]) -> BufferSource:
    """Return a source that makes one array per block when it is needed, and collects them in ``into``."""

    def make(start: int, stop: int) -> Sequence[Bytes]:
        into.extend(np.empty(length_bytes, np.uint8) for _ in range(stop - len(into)))
        return into[start:stop]

    return make
