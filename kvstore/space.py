"""Space: who leaves a tier when it fills, and where to.

Deciding is pure (`plan_departures`); doing is separate (`Space`). A block leaves the top tier at once if a
lower tier has a READY copy. Otherwise it is demoted first: the mover writes it down, and only then does it
leave. Children leave before parents, and nothing that is leased or held leaves at all.
"""

import asyncio
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvstore.directory import BlockEntry, CopyState, Shelf
from kvstore.keys import NamespaceDigest
from kvstore.miss import MissReason
from kvstore.policy import NamespacePolicies, Offer
from kvstore.state import State, WriteMode
from kvstore.tier import StorageKey, Tier, slot_bytes

_PLAN_BLOCKS = 16
"""Smallest plan: making room for one block at a time would walk the policy's order too often."""

_STEP_BLOCKS = 64
"""Most blocks planned for at once while others wait: about 1 ms of the loop. More take several plans."""

_DROP_BLOCKS = 256
"""Most copies dropped from a tier below at once: for each the tier has a task to do on its threads."""


@dataclass(frozen=True, slots=True)
class Departures:
    """A plan: entries whose copy may go now, and entries that must be demoted first.

    ``num_refused`` of the blocks that were offered, the last ones, are worth less than all that stays.
    """

    leaving: tuple[BlockEntry, ...]
    demoting: tuple[BlockEntry, ...]
    num_refused: int = 0

    @property
    def is_empty(self) -> bool:
        """Whether nothing in the tier may leave."""
        return not self.leaving and not self.demoting and not self.num_refused


def plan_departures(
    state: State,
    tier: str,
    *,
    wanted_blocks: int,
    must_demote: Callable[[BlockEntry], bool],
    only: NamespaceDigest | None = None,
    enough_bytes: float = math.inf,
    offer: Offer | None = None,
) -> Departures:
    """Name about ``wanted_blocks`` entries to leave a tier, in its policy's order, children first.

    Fewer if their payloads come to ``enough_bytes``. ``only`` restricts them to one namespace. What is
    offered competes: a block of it that comes before enough have left is refused, and counts like one.
    """
    offered = frozenset(offer.blocks) if offer is not None else frozenset[StorageKey]()
    num_refused = num_awaited = 0
    leaving: list[BlockEntry] = []
    demoting: list[BlockEntry] = []
    planned_children: dict[BlockEntry, int] = {}
    passed_over: set[BlockEntry] = set()
    planned_bytes = 0
    for name in _candidates(state, tier, only, offer):
        if name in offered and offer is not None:
            num_refused += 1
            planned_bytes += offer.size_bytes
        entry = None if name in offered else state.directory.find(name)
        if entry is not None and only is not None and entry.shelf.namespace != only:
            continue
        while entry is not None:
            children = entry.children.get(tier, 0) - planned_children.get(entry, 0)
            if not entry.is_ready(tier) or entry.is_kept or children > 0:
                passed_over.add(entry)
                if offer is not None and entry.holds and not entry.leases and entry.is_ready(tier):
                    # On its way down: what is offered waits for it rather than be refused.
                    num_awaited += 1
                    planned_bytes += entry.length_bytes
                break
            (demoting if must_demote(entry) else leaving).append(entry)
            planned_bytes += entry.length_bytes
            parent = _counting_parent(entry, tier)
            if parent is not None:
                planned_children[parent] = planned_children.get(parent, 0) + 1
            # A parent that came before its child in the order gets its turn as soon as the child is named;
            # of a long chain a step at most.
            is_long = len(leaving) + len(demoting) >= max(wanted_blocks, _STEP_BLOCKS)
            entry = parent if parent in passed_over and not is_long else None
        planned = len(leaving) + len(demoting) + num_refused + num_awaited
        if planned >= wanted_blocks or planned_bytes >= enough_bytes:
            break
    return Departures(tuple(leaving), tuple(demoting), num_refused)


def _candidates(
    state: State, tier: str, only: NamespaceDigest | None, offer: Offer | None
) -> Iterator[StorageKey]:
    policy = state.policies[tier]
    if only is not None and offer is None and isinstance(policy, NamespacePolicies):
        return policy.candidates_of(only, now_s=state.clock())
    return policy.candidates(now_s=state.clock(), offer=offer)


def _counting_parent(entry: BlockEntry, tier: str) -> BlockEntry | None:
    if entry.parent is None or not entry.copies[tier].is_counted:
        return None
    return entry.shelf.entries[entry.parent]


class Demoter(Protocol):
    """What makes room by writing blocks down: the mover."""

    @property
    def is_writing(self) -> bool:
        """Whether blocks are on their way down now, so that some may soon be free to leave."""

    def demote(self, entries: Sequence[BlockEntry]) -> None:
        """Write entries below soon, and take them out of the top tier afterwards."""


class Space:
    """Makes room in the tiers of one manager."""

    def __init__(self, state: State, demoter: Demoter) -> None:
        self._state = state
        self._demoter = demoter

    def has_room_now(self, length_bytes: int, count: int) -> bool:
        """Whether ``count`` slots of the top tier can be had as it is, whoever wants them."""
        state = self._state
        return state.settings.namespace_quota_ratio >= 1.0 and state.top.has_room(length_bytes, count)

    def make_room_at_once(self, length_bytes: int, count: int, *, is_pressing: bool) -> bool:
        """Evict until ``count`` slots are free in the top tier, waiting for nothing; False if they are not.

        Blocks that no tier below has yet stay, and are on their way down from now on. If it ``is_pressing``
        they go too, and are lost.
        """
        while not self._state.top.has_room(length_bytes, count):
            num_left, demoting, _ = self._leave_top(max(count, _PLAN_BLOCKS), spares_unsaved=not is_pressing)
            if not num_left:
                self._demoter.demote(demoting)
                return False
        return True

    async def make_room_on_top(
        self,
        length_bytes: int,
        count: int,
        *,
        deadline_s: float,
        by: NamespaceDigest | None = None,
        awaits_leases: bool = False,
    ) -> bool:
        """Evict until ``count`` slots are free in the top tier; False if they are not by the deadline.

        ``by`` is the namespace that needs them. Without ``awaits_leases`` nobody waits for leases to end.
        """
        state = self._state
        while not state.top.has_room(length_bytes, count):
            num_wanted = min(max(count, _PLAN_BLOCKS), _STEP_BLOCKS)
            num_left, demoting, _ = self._leave_top(num_wanted, by=by)
            if num_left:
                await asyncio.sleep(0)
                continue
            if not await self._wait_freed(demoting, deadline_s, awaits_leases=awaits_leases):
                return False
        return True

    async def make_room_for(self, offer: Offer, *, deadline_s: float, by: NamespaceDigest) -> int:
        """Make room in the top tier for blocks that compete with those stored; returns how many may come.

        The others, the last ones, are worth least. No more leave than must. What only a tier below finds
        worth its room comes too: it passes through memory, where it is the first to leave.
        """
        count = await self._make_room_for_best(offer, deadline_s=deadline_s, by=by)
        wanted = self._worth_below(offer, count)
        if wanted > count and await self.make_room_on_top(
            offer.size_bytes, wanted, deadline_s=deadline_s, by=by
        ):
            return wanted
        return count

    async def _make_room_for_best(self, offer: Offer, *, deadline_s: float, by: NamespaceDigest) -> int:
        state, length = self._state, offer.size_bytes
        count = len(offer.blocks)
        while count and not state.top.has_room(length, count):
            free_bytes = state.top.capacity_bytes - state.top.used_bytes
            num_left, demoting, num_refused = self._leave_top(
                min(count, _STEP_BLOCKS),
                by=by,
                enough_bytes=max(1, count * slot_bytes(length) - free_bytes),
                offer=offer._replace(blocks=offer.blocks[:count]),
            )
            count -= num_refused
            if num_left or num_refused:
                await asyncio.sleep(0)
            elif not await self._wait_freed(demoting, deadline_s):
                break
        return count

    def admit_below_high_water(self, offer: Offer, *, is_taken: bool = False) -> int:
        """Return how many of the offered blocks are worth more than what would leave for them.

        For blocks that there is room for, but only above the mark from where blocks leave in the background.
        ``is_taken``: that room is in use already.
        """
        state = self._state
        top, size_bytes = state.top, 0 if is_taken else offer.size_bytes * len(offer.blocks)
        high = state.settings.high_water_ratio * top.capacity_bytes
        if top.used_bytes + size_bytes <= high or not self._may_refuse:
            return len(offer.blocks)
        state.afterwards.settle()  # the policy has to know of the offer
        plan = plan_departures(
            state,
            top.name,
            wanted_blocks=len(offer.blocks),
            must_demote=lambda _: False,
            enough_bytes=top.used_bytes + size_bytes - high,
            offer=offer,
        )
        return self._worth_below(offer, len(offer.blocks) - plan.num_refused)

    def _worth_below(self, offer: Offer, worth: int) -> int:
        """Return how many of an offer, of which ``worth`` are worth room on top, some tier would keep."""
        state, count = self._state, len(offer.blocks)
        if worth == count or state.settings.write_mode is WriteMode.SECOND_HIT:
            return worth
        parent = offer.blocks[worth - 1] if worth else offer.parent
        rest = offer._replace(blocks=offer.blocks[worth:], parent=parent, is_use=False)
        up = [tier for tier in state.lower if tier.health().is_up]
        return max((count - self._refused_below(tier, rest) for tier in up), default=worth)

    def _refused_below(self, tier: Tier, offer: Offer) -> int:
        """Return how many of the blocks that come from above are worth less than all that a tier has."""
        if tier.name not in self._state.policies or tier.has_room(offer.size_bytes, len(offer.blocks)):
            return 0
        return plan_departures(
            self._state,
            tier.name,
            wanted_blocks=len(offer.blocks),
            must_demote=lambda _: False,
            offer=offer,
        ).num_refused

    @property
    def _may_refuse(self) -> bool:
        return getattr(self._state.policies[self._state.top.name], "may_refuse", False)

    async def fit_quota_on_top(self, shelf: Shelf, count: int, *, deadline_s: float) -> int:
        """Return how many of ``count`` more blocks a namespace may have in the top tier.

        A namespace at its quota evicts blocks of its own first.
        """
        state = self._state
        namespace, length = shelf.namespace, shelf.length_bytes
        quota = state.settings.namespace_quota_ratio * state.top.capacity_bytes
        if state.settings.namespace_quota_ratio >= 1.0:
            return count
        wanted = min(count, int(quota // length))
        while state.directory.used_bytes(state.top.name, namespace) + wanted * length > quota:
            num_left, demoting, _ = self._leave_top(min(wanted, _STEP_BLOCKS), by=namespace, only=namespace)
            if num_left:
                await asyncio.sleep(0)
                continue
            if not await self._wait_freed(demoting, deadline_s):
                break
        return self.within_quota_now(shelf, wanted)

    def within_quota_now(self, shelf: Shelf, count: int) -> int:
        """Return how many of ``count`` more blocks a namespace may have in the top tier as it is."""
        state = self._state
        if state.settings.namespace_quota_ratio >= 1.0:
            return count
        quota = state.settings.namespace_quota_ratio * state.top.capacity_bytes
        left = quota - state.directory.used_bytes(state.top.name, shelf.namespace)
        return max(0, min(count, int(left // shelf.length_bytes)))

    def room_below_high_water(self) -> int:
        """Return the bytes of the top tier that are free below its high-water mark."""
        top = self._state.top
        return int(self._state.settings.high_water_ratio * top.capacity_bytes) - top.used_bytes

    async def age(self) -> None:
        """Bring the top tier from above its high-water mark down to its low-water mark, as far as it goes."""
        state = self._state
        low = state.settings.low_water_ratio * state.top.capacity_bytes
        while state.top.used_bytes > low:
            num_left, demoting, _ = self._leave_top(_PLAN_BLOCKS, enough_bytes=state.top.used_bytes - low)
            if num_left:
                await asyncio.sleep(0)
                continue
            deadline_s = state.clock() + state.settings.write_timeout_s
            if not await self._wait_freed(demoting, deadline_s):
                return

    @property
    def is_above_high_water(self) -> bool:
        """Whether the top tier is fuller than its high-water mark."""
        top = self._state.top
        return top.used_bytes > self._state.settings.high_water_ratio * top.capacity_bytes

    async def make_room_below(
        self, tier: Tier, length_bytes: int, count: int, *, by: NamespaceDigest | None = None
    ) -> bool:
        """Drop copies from a lower tier until ``count`` more fit; False if they cannot."""
        state = self._state
        if tier.name in state.policies and by is not None:
            await self._fit_quota_below(tier, length_bytes * count, by)
        while not tier.has_room(length_bytes, count):
            if tier.name not in state.policies:
                return False
            plan = self._plan_below(tier, count)
            if plan.is_empty:
                return False
            await self._drop_below(tier, plan.leaving, by)
        return True

    async def _fit_quota_below(self, tier: Tier, more_bytes: int, namespace: NamespaceDigest) -> None:
        state = self._state
        if state.settings.namespace_quota_ratio >= 1.0:
            return
        quota = state.settings.namespace_quota_ratio * tier.capacity_bytes
        # Its copies that are about to be written are counted already.
        while state.directory.used_bytes(tier.name, namespace) > max(quota, more_bytes):
            plan = self._plan_below(tier, 1, only=namespace)
            if plan.is_empty:
                return
            await self._drop_below(tier, plan.leaving, namespace)

    def _plan_below(self, tier: Tier, count: int, *, only: NamespaceDigest | None = None) -> Departures:
        return plan_departures(
            self._state,
            tier.name,
            wanted_blocks=max(count, _PLAN_BLOCKS),
            must_demote=lambda _: False,
            only=only,
        )

    async def drop_copies(
        self,
        tier: Tier,
        entries: Sequence[BlockEntry],
        reason: MissReason,
        *,
        by: NamespaceDigest | None = None,
    ) -> None:
        """Forget READY copies in a lower tier, some at a time: DROPPING while the tier works on them."""
        for start in range(0, len(entries), _DROP_BLOCKS):
            await self._drop_some(tier, entries[start : start + _DROP_BLOCKS], reason, by)

    async def _drop_some(
        self, tier: Tier, entries: Sequence[BlockEntry], reason: MissReason, by: NamespaceDigest | None
    ) -> None:
        state = self._state
        dropping = [entry for entry in entries if entry.is_ready(tier.name)]
        for entry in dropping:
            state.directory.set_state(entry, tier.name, CopyState.DROPPING)
            entry.holds += 1
        try:
            await tier.drop([entry.block for entry in dropping])
        finally:
            for entry in dropping:
                state.forget_copy(entry, tier.name, reason, by=by)
                state.let_go(entry)

    async def _drop_below(
        self, tier: Tier, entries: Sequence[BlockEntry], by: NamespaceDigest | None
    ) -> None:
        await self.drop_copies(tier, entries, MissReason.EVICTED, by=by)
        self._state.counters.evictions[f"{tier.name}/space"] += len(entries)

    def _leave_top(
        self,
        wanted_blocks: int,
        *,
        by: NamespaceDigest | None = None,
        only: NamespaceDigest | None = None,
        enough_bytes: float = math.inf,
        spares_unsaved: bool = True,
        offer: Offer | None = None,
    ) -> tuple[int, tuple[BlockEntry, ...], int]:
        """Take blocks out of the top tier; returns how many went, and which must be demoted first.

        Without ``spares_unsaved`` none must. Last comes how many of the offer were refused.
        """
        state = self._state
        plan = plan_departures(
            state,
            state.top.name,
            wanted_blocks=wanted_blocks,
            must_demote=self._must_demote if spares_unsaved else lambda _: False,
            only=only,
            enough_bytes=enough_bytes,
            offer=offer,
        )
        num_left = 0
        for entry in plan.leaving:
            # A child that must be demoted first keeps its parent for a later round.
            if entry.may_leave(state.top.name):
                is_refused = state.settings.write_mode is WriteMode.SECOND_HIT or entry.refused_by
                reason = MissReason.NOT_ADMITTED if is_refused else MissReason.EVICTED
                state.forget_copy(entry, state.top.name, reason, by=by)
                num_left += 1
        state.counters.evictions[f"{state.top.name}/space"] += num_left
        return num_left, plan.demoting, plan.num_refused

    def _must_demote(self, entry: BlockEntry) -> bool:
        state = self._state
        if state.has_lower_copy(entry) or entry.shelf.is_stale:
            return False
        if state.settings.write_mode is WriteMode.SECOND_HIT:
            return False
        # What a tier's write budget has refused is not offered again: that would count as a second sight.
        return any(tier.health().is_up and tier.name not in entry.refused_by for tier in state.lower)

    async def _wait_freed(
        self, demoting: Sequence[BlockEntry], deadline_s: float, *, awaits_leases: bool = False
    ) -> bool:
        """Start demotions and wait until something was freed; False if nothing is, or not in time."""
        state = self._state
        is_leased = awaits_leases and state.leases.num_leases > 0
        if not demoting and not self._demoter.is_writing and not is_leased:
            return False
        state.freed.clear()
        self._demoter.demote(demoting)
        patience_s = deadline_s - state.clock()
        if patience_s <= 0:
            return False
        try:
            async with asyncio.timeout(patience_s):
                await state.freed.wait()
        except TimeoutError:
            return False
        return True
