"""The scheduler: which requests have a seat, and which tokens the next pass computes. Pure: it only decides.

Order. Requests come first that arrived first; one of a less urgent class counts as if it had arrived
``ageing_s`` later for each class in use above its own. So an urgent request overtakes, but only those less
urgent ones that have not waited much longer: whatever else arrives, only so many requests are ever before a
given one, and it gets its turn.

Seats. ``max_seated`` requests are loaded, prefilled and decoded at a time. A waiting request is seated if the
blocks of all its tokens are to be had besides those the seated ones still need; if the first in the order
cannot be, no other is. A request of a more urgent class takes seat and blocks of the last in the order.

Passes. Each pass computes at most ``step_tokens`` tokens: one of every request that decodes, and with the
rest of the budget the next tokens of those that prefill, in order. A request whose next block another one
computes in this pass waits for it. If blocks run out, the last in the order loses its seat, never one before
the request that needs them; the first is never without blocks: the engine has enough for one of any length.
"""

import enum
import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass


class Phase(enum.Enum):
    """Where a request is: without a seat, or seated and loading stored blocks, or seated and computing."""

    WAITING = "waiting"
    LOADING = "loading"
    RUNNING = "running"


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """How much is done at once; ``ageing_s`` is what one class of urgency is worth, in seconds of waiting."""

    max_seated: int
    step_tokens: int
    block_tokens: int
    ageing_s: float = 30.0


@dataclass(frozen=True, slots=True)
class RequestView:
    """What the scheduler knows of a request.

    ``number`` counts arrivals. ``known_tokens`` are those of prompt and answer so far, of which
    ``computed_tokens`` are in its ``held_blocks``; ``releasable_blocks`` of these are nobody else's. If it
    waits, it needs ``missing_blocks`` more to hold all it knows and one token more. Requests with an equal
    ``next_work``, other than None, would compute the same tokens of the same sequence next.
    """

    number: int
    priority: int
    arrived_s: float
    phase: Phase
    known_tokens: int
    computed_tokens: int = 0
    held_blocks: int = 0
    releasable_blocks: int = 0
    missing_blocks: int = 0
    next_work: Hashable | None = None

    @property
    def is_decoding(self) -> bool:
        """Whether all but the last token is computed."""
        return self.known_tokens - self.computed_tokens == 1


@dataclass(frozen=True, slots=True)
class Admissions:
    """Requests, by number, that lose their seat, and those that get one, in order."""

    preempted: tuple[int, ...]
    seated: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Span:
    """The next ``tokens`` tokens of a request."""

    number: int
    tokens: int


@dataclass(frozen=True, slots=True)
class PassPlan:
    """Requests that lose their seat, what is computed, and those that get nothing for want of blocks."""

    preempted: tuple[int, ...]
    spans: tuple[Span, ...]
    stalled: tuple[int, ...]


def in_order(views: Sequence[RequestView], limits: SchedulerLimits) -> list[RequestView]:
    """Return requests in the order they come first in."""
    classes = {priority: rank for rank, priority in enumerate(sorted({view.priority for view in views}))}

    def key(view: RequestView) -> tuple[float, int]:
        return view.arrived_s + limits.ageing_s * classes[view.priority], view.number

    return sorted(views, key=key)


def plan_admissions(views: Sequence[RequestView], limits: SchedulerLimits, *, free_blocks: int) -> Admissions:
    """Decide who gets a seat; ``views`` are all live requests."""
    order = in_order(views, limits)
    place = {view.number: index for index, view in enumerate(order)}
    seated = [view for view in order if view.phase is not Phase.WAITING]
    needs = {view.number: _still_needed(view, limits) for view in seated}
    room = free_blocks - sum(needs.values())
    preempted: list[int] = []
    admitted: list[int] = []
    for view in order:
        if view.phase is not Phase.WAITING:
            continue
        kept, room_then, leaving = list(seated), room, list[int]()
        while kept and not _fits(view, kept, room_then, limits):
            last = kept[-1]
            if last.priority <= view.priority or place[last.number] < place[view.number]:
                break
            kept.pop()
            leaving.append(last.number)
            room_then += last.releasable_blocks + needs[last.number]
        if not _fits(view, kept, room_then, limits):
            break
        needs[view.number] = view.missing_blocks
        seated = sorted([*kept, view], key=lambda other: place[other.number])
        room = room_then - view.missing_blocks
        preempted += leaving
        admitted.append(view.number)
    return Admissions(tuple(preempted), tuple(admitted))


def _fits(view: RequestView, seated: Sequence[RequestView], room: int, limits: SchedulerLimits) -> bool:
    if not seated:
        return True
    # Each seated request will want a block more before long.
    return len(seated) < limits.max_seated and view.missing_blocks + len(seated) <= room


def _still_needed(view: RequestView, limits: SchedulerLimits) -> int:
    return max(0, math.ceil((view.known_tokens + 1) / limits.block_tokens) - view.held_blocks)


def plan_pass(views: Sequence[RequestView], limits: SchedulerLimits, *, free_blocks: int) -> PassPlan:
    """Decide what the next pass computes; ``views`` are all live requests."""
    seated = [view for view in in_order(views, limits) if view.phase is not Phase.WAITING]
    return _PassPlanner(seated, limits, free_blocks).plan()


class _PassPlanner:
    """One decision of ``plan_pass``: seated requests are looked at in order, victims come from the end."""

    def __init__(self, seated: list[RequestView], limits: SchedulerLimits, free_blocks: int) -> None:
        self._seated = seated
        self._limits = limits
        self._free = free_blocks
        self._budget = limits.step_tokens
        self._preempted: list[int] = []
        self._spans: list[Span] = []
        self._stalled: list[int] = []
        self._under_way: set[Hashable] = set()

    def plan(self) -> PassPlan:
        at = 0
        while at < len(self._seated):
            view = self._seated[at]
            at += 1
            if view.phase is Phase.RUNNING and view.next_work not in self._under_way:
                self._take(view, at)
        return PassPlan(tuple(self._preempted), tuple(self._spans), tuple(self._stalled))

    def _take(self, view: RequestView, later: int) -> None:
        tokens = 1 if view.is_decoding else self._prefill_tokens(view, later)
        if min(tokens, self._budget) <= 0:
            return
        while self._blocks_for(view, tokens) > self._free and len(self._seated) > later:
            victim = self._seated.pop()
            self._preempted.append(victim.number)
            self._free += victim.releasable_blocks
        within = (view.held_blocks + max(0, self._free)) * self._limits.block_tokens - view.computed_tokens
        tokens = min(tokens, within)
        if tokens <= 0:
            self._stalled.append(view.number)
            return
        self._free -= self._blocks_for(view, tokens)
        self._budget -= tokens
        self._spans.append(Span(view.number, tokens))
        if view.next_work is not None:
            self._under_way.add(view.next_work)

    def _prefill_tokens(self, view: RequestView, later: int) -> int:
        """Leave a token each to the requests after this one that decode."""
        decoding = sum(other.is_decoding and other.phase is Phase.RUNNING for other in self._seated[later:])
        return min(view.known_tokens - view.computed_tokens, self._budget - decoding)

    def _blocks_for(self, view: RequestView, tokens: int) -> int:
        wanted = math.ceil((view.computed_tokens + tokens) / self._limits.block_tokens)
        return max(0, wanted - view.held_blocks)
