"""BlockSupply and RequestBlocks: where a request's page slots come from, and what is reused and shared.

A request takes slots from the manager's top tier. If the tier cannot give one in time (everything in it is
leased, or waits to be written to a store that hangs), blocks go that are stored nowhere else; and if that
does not help either, it takes one of the spare pages, which belong to no tier: enough for one sequence of
full length, so that no state of the store can fail a request. Blocks in spare pages, and those after them,
are not shared.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvstore.errors import KVStoreError
from kvstore.hints import Hints
from kvstore.keys import PrefixChain
from kvstore.layout import Part
from kvstore.manager import BlockManager
from kvstore.miss import MissReason
from kvstore.pacing import WritePace
from kvstore.results import Fetched, Owner, PrefixMatch
from kvstore.tier import Slot
from kvstore_engine_adapter.load_policy import LoadPolicy

logger = logging.getLogger(__name__)

NO_STORE, NOT_WORTH_LOADING = "no_store", "not_worth_loading"
"""Miss reasons of the engine's own, beside those of MissReason."""

_GUARD_S = 0.25

_LATE = 2.0
"""A load that takes so many times what was expected is late: the request begins to prefill."""


@dataclass(frozen=True, slots=True)
class Waits:
    """How long a request waits for the store, at most, in seconds.

    ``write_s`` is the other way round: how long writes to the store are put off while passes run.
    """

    match_s: float = 0.1
    load_s: float = 2.0
    shortest_load_s: float = 0.05
    reserve_s: float = 0.1
    write_s: float = 1.0


@dataclass(frozen=True, slots=True)
class LoadedPrefix:
    """The leading blocks of a prompt that need no prefill.

    ``tiers`` names each block's tier of origin; ``found_blocks`` were stored, of which the last ones may
    have been skipped or late; ``reason`` says why not all of the prompt's blocks were loaded. It took
    ``seconds``, ``match_s`` of them to find out what is stored. ``late_tiers`` names the tiers of those
    behind, which were asked for and did not come in time: they may still come.
    """

    slots: tuple[Slot, ...] = ()
    tiers: tuple[str, ...] = ()
    found_blocks: int = 0
    reason: str | None = None
    seconds: float = 0.0
    match_s: float = 0.0
    late_tiers: tuple[str, ...] = ()


@dataclass(slots=True)
class BlockSupply:
    """Slots for requests: from a manager's top tier if there is one, else and in need from spare pages.

    ``holders`` counts, for each slot in use, the requests that have it. ``part`` is what of each block is in
    these slots; None: all of it. ``pace`` is that of the manager's writes to the store.
    """

    manager: BlockManager | None
    num_slots: int
    policy: LoadPolicy
    spare: list[Slot]
    waits: Waits = field(default_factory=Waits)
    clock: Callable[[], float] = time.monotonic
    faults: Counter[str] = field(default_factory=Counter)
    holders: Counter[Slot] = field(default_factory=Counter)
    part: Part | None = None
    pace: WritePace = field(init=False)

    def __post_init__(self) -> None:
        self.pace = WritePace(patience_s=self.waits.write_s, clock=self.clock)

    def free_blocks(self) -> int:
        """Return how many slots are free, or can be had by evicting; without a manager, the spare pages."""
        if self.manager is None:
            return len(self.spare)
        return self.num_slots - self.manager.num_kept_slots

    @property
    def rescue_blocks(self) -> int:
        """Pages that only a request without company may count on."""
        return 0 if self.manager is None else len(self.spare)

    def note_hints(self, chain: PrefixChain, hints: Hints) -> None:
        """Say what became known of the future of published blocks. Never raises."""
        if self.manager is None or not len(chain):
            return
        try:
            self.manager.note_hints(chain, hints, part=self.part)
        except KVStoreError as error:
            self.faults["hints"] += 1
            logger.warning("engine: hints about %d blocks were not taken: %s", len(chain), error)

    def begin(self) -> "RequestBlocks":
        """Return the blocks of a request that gets a seat; its ``end`` must be called."""
        return RequestBlocks(self, self.manager.new_owner() if self.manager else None)


class RequestBlocks:
    """The slots of one seated request, in chain order. All of them are given back by ``end``."""

    def __init__(self, supply: BlockSupply, owner: Owner | None) -> None:
        self._supply = supply
        self._owner = owner
        self._private: list[Slot] = []
        self.slots: list[Slot] = []

    @property
    def is_sharing(self) -> bool:
        """Whether blocks that fill up are still worth publishing."""
        return self._owner is not None and not self._private

    @property
    def num_releasable(self) -> int:
        """Slots that no other request has."""
        holders = self._supply.holders
        return sum(holders[slot] == 1 for slot in self.slots)

    async def load(self, chain: PrefixChain) -> LoadedPrefix:
        """Load the longest stored prefix that is worth it, within the waits allowed. Never raises."""
        supply, started_s = self._supply, self._supply.clock()
        if supply.manager is None or self._owner is None or not len(chain):
            return LoadedPrefix(reason=NO_STORE if supply.manager is None else None)
        match = await self._match(supply.manager, chain)
        worth = supply.policy.blocks_worth_loading(match.tiers)
        reason = None if match.reason is None else match.reason.value
        if worth < match.blocks:
            reason = NOT_WORTH_LOADING
        fetch_started_s = supply.clock()
        match_s = fetch_started_s - started_s
        if not worth:
            return LoadedPrefix((), (), match.blocks, reason, match_s, match_s)
        fetched = await self._fetch(supply.manager, self._owner, chain[:worth], match.tiers[:worth])
        now_s = supply.clock()
        tiers = tuple(block.origin for block in fetched.blocks)
        if fetched.reason is not None:
            reason = fetched.reason.value
            # What was loaded took all the time there was: charge it to what was asked for.
            tiers_asked = match.tiers[:worth]
            if fetched.reason is MissReason.TIMED_OUT:
                supply.policy.note_load(tiers_asked, now_s - fetch_started_s)
        else:
            supply.policy.note_load(tiers, now_s - fetch_started_s)
        slots = self._hold([block.slot for block in fetched.blocks])
        late_tiers = tuple(match.tiers[len(slots) : worth])
        return LoadedPrefix(tuple(slots), tiers, match.blocks, reason, now_s - started_s, match_s, late_tiers)

    def join(self, chain: PrefixChain) -> int:
        """Take the leading blocks of ``chain``, which follows the slots, that are in the top tier now."""
        supply = self._supply
        if supply.manager is None or self._owner is None or not self.is_sharing or not len(chain):
            return 0
        fetched = supply.manager.fetch_leading_at_once(chain, owner=self._owner, part=supply.part)
        return len(self._hold([block.slot for block in fetched.blocks]))

    def take(self, count: int, *, is_pressing: bool) -> list[Slot] | None:
        """Take ``count`` more slots to compute into; None if they are not to be had at once.

        If it ``is_pressing``, blocks that are stored nowhere else make room, and spare pages are used.
        """
        supply = self._supply
        if supply.manager is not None and self._owner is not None and not self._private:
            slots = supply.manager.reserve_unnamed_at_once(
                count, supply.policy.block_bytes, owner=self._owner, is_pressing=is_pressing
            )
            if slots is not None:
                return self._hold(slots)
            if not is_pressing:
                return None
            supply.faults["reserve_full"] += 1
        if count > len(supply.spare):
            return None
        taken = [supply.spare.pop() for _ in range(count)]
        self._private += taken
        return self._hold(taken)

    def publish(self, chain: PrefixChain, slots: Sequence[Slot]) -> None:
        """Share filled blocks; those stored already stay private to this request. Never raises."""
        supply = self._supply
        if supply.manager is None or self._owner is None or not len(chain):
            return
        private = set(self._private)
        count = next((i for i, slot in enumerate(slots) if slot in private), len(slots))
        try:
            supply.manager.commit(chain[:count], slots[:count], owner=self._owner, part=supply.part)
        except KVStoreError as error:
            supply.faults["commit"] += 1
            logger.warning("engine: publishing %d blocks failed: %s", count, error)

    def note_hints(self, chain: PrefixChain, hints: Hints) -> None:
        """Say what became known of the future of published blocks. Never raises."""
        if self._owner is not None:
            self._supply.note_hints(chain, hints)

    def end(self) -> None:
        """Give everything back. The request must not compute any more. Idempotent."""
        supply = self._supply
        if self._owner is not None and supply.manager is not None:
            supply.manager.release_owner(self._owner)
        supply.spare += self._private
        for slot in self.slots:
            supply.holders[slot] -= 1
            if not supply.holders[slot]:
                del supply.holders[slot]
        self._private, self._owner, self.slots = [], None, []

    def _hold(self, slots: list[Slot]) -> list[Slot]:
        self.slots += slots
        self._supply.holders.update(slots)
        return slots

    async def _match(self, manager: BlockManager, chain: PrefixChain) -> PrefixMatch:
        wait_s = self._supply.waits.match_s
        try:
            async with asyncio.timeout(wait_s + _GUARD_S):
                return await manager.match(chain, part=self._supply.part, timeout_s=wait_s)
        except TimeoutError:
            self._supply.faults["match_late"] += 1
            return PrefixMatch(0, (), MissReason.TIMED_OUT)
        except KVStoreError as error:
            self._supply.faults["match"] += 1
            logger.warning("engine: match failed: %s", error)
            return PrefixMatch(0, (), MissReason.UNAVAILABLE)

    async def _fetch(
        self, manager: BlockManager, owner: Owner, chain: PrefixChain, tiers: Sequence[str]
    ) -> Fetched:
        supply = self._supply
        # What comes later is still taken over, at the place that prefill has come to by then.
        wait_s = min(supply.waits.load_s, _LATE * supply.policy.expected_load_s(tiers))
        wait_s = max(wait_s, supply.waits.shortest_load_s)
        try:
            async with asyncio.timeout(wait_s + _GUARD_S):
                return await manager.fetch(chain, owner=owner, part=supply.part, timeout_s=wait_s)
        except TimeoutError:
            supply.faults["fetch_late"] += 1
            return Fetched((), None, MissReason.TIMED_OUT)
        except KVStoreError as error:
            supply.faults["fetch"] += 1
            logger.warning("engine: fetch failed: %s", error)
            return Fetched((), None, MissReason.UNAVAILABLE)
