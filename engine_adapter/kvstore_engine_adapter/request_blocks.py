"""BlockSupply and RequestBlocks: where a request's page slots come from, and what is reused and shared.

A request takes slots from the manager's top tier. If the tier cannot give one in time (everything in it is
leased, or waits to be written to a store that hangs), it takes one of the spare pages, which belong to no
tier: enough for one sequence of full length, so that no state of the store can fail a request. Blocks in
spare pages, and those after them, are not shared.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvstore.errors import KVStoreError, TierFull
from kvstore.keys import PrefixChain
from kvstore.manager import BlockManager
from kvstore.miss import MissReason
from kvstore.results import Fetched, Owner, PrefixMatch
from kvstore.tier import Slot
from kvstore_engine_adapter.load_policy import LoadPolicy

logger = logging.getLogger(__name__)

NO_STORE, NOT_WORTH_LOADING = "no_store", "not_worth_loading"
"""Miss reasons of the engine's own, beside those of MissReason."""

_GUARD_S = 0.25


@dataclass(frozen=True, slots=True)
class Waits:
    """How long a request waits for the store, at most, in seconds."""

    match_s: float = 0.1
    load_s: float = 2.0
    shortest_load_s: float = 0.05
    reserve_s: float = 0.1


@dataclass(frozen=True, slots=True)
class LoadedPrefix:
    """The leading blocks of a prompt that need no prefill.

    ``tiers`` names each block's tier of origin; ``found_blocks`` were stored, of which the last ones may
    have been skipped or late; ``reason`` says why not all of the prompt's blocks were loaded.
    """

    slots: tuple[Slot, ...] = ()
    tiers: tuple[str, ...] = ()
    found_blocks: int = 0
    reason: str | None = None
    seconds: float = 0.0


@dataclass(slots=True)
class BlockSupply:
    """Slots for requests: from a manager's top tier if there is one, else and in need from spare pages."""

    manager: BlockManager | None
    policy: LoadPolicy
    spare: list[Slot]
    waits: Waits = field(default_factory=Waits)
    clock: Callable[[], float] = time.monotonic
    faults: Counter[str] = field(default_factory=Counter)

    def begin(self) -> "RequestBlocks":
        """Return the blocks of a new request; its ``end`` must be called."""
        return RequestBlocks(self, self.manager.new_owner() if self.manager else None)


class RequestBlocks:
    """The slots of one request, in chain order after ``load`` and ``take``."""

    def __init__(self, supply: BlockSupply, owner: Owner | None) -> None:
        self._supply = supply
        self._owner = owner
        self._private: list[Slot] = []

    @property
    def is_sharing(self) -> bool:
        """Whether blocks that fill up are still worth publishing."""
        return self._owner is not None and not self._private

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
        if not worth:
            return LoadedPrefix((), (), match.blocks, reason, supply.clock() - started_s)
        fetch_started_s = supply.clock()
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
        slots = tuple(block.slot for block in fetched.blocks)
        return LoadedPrefix(slots, tiers, match.blocks, reason, now_s - started_s)

    async def take(self, count: int) -> list[Slot]:
        """Return ``count`` slots to compute into.

        Raises:
            TierFull: the spare pages are used up too: more tokens than the engine was made for.
        """
        supply = self._supply
        if supply.manager is not None and self._owner is not None and not self._private:
            try:
                return await supply.manager.reserve_unnamed(
                    count, supply.policy.block_bytes, owner=self._owner, timeout_s=supply.waits.reserve_s
                )
            except TierFull:
                supply.faults["reserve_full"] += 1
        if count > len(supply.spare):
            raise TierFull(f"engine: {count} spare pages wanted, {len(supply.spare)} free")
        taken = [supply.spare.pop() for _ in range(count)]
        self._private += taken
        return taken

    def publish(self, chain: PrefixChain, slots: Sequence[Slot]) -> None:
        """Share filled blocks; those stored already stay private to this request. Never raises."""
        supply = self._supply
        if supply.manager is None or self._owner is None or not len(chain):
            return
        private = set(self._private)
        count = next((i for i, slot in enumerate(slots) if slot in private), len(slots))
        try:
            supply.manager.commit(chain[:count], slots[:count], owner=self._owner)
        except KVStoreError as error:
            supply.faults["commit"] += 1
            logger.warning("engine: publishing %d blocks failed: %s", count, error)

    def end(self) -> None:
        """Give everything back. The request must not compute any more. Idempotent."""
        if self._owner is not None and self._supply.manager is not None:
            self._supply.manager.release_owner(self._owner)
        self._supply.spare += self._private
        self._private, self._owner = [], None

    async def _match(self, manager: BlockManager, chain: PrefixChain) -> PrefixMatch:
        wait_s = self._supply.waits.match_s
        try:
            async with asyncio.timeout(wait_s + _GUARD_S):
                return await manager.match(chain, timeout_s=wait_s)
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
        # Waiting longer than a prefill takes is never worth it.
        wait_s = min(supply.waits.load_s, supply.policy.expected_prefill_s(len(tiers)))
        wait_s = max(wait_s, supply.waits.shortest_load_s)
        try:
            async with asyncio.timeout(wait_s + _GUARD_S):
                return await manager.fetch(chain, owner=owner, timeout_s=wait_s)
        except TimeoutError:
            supply.faults["fetch_late"] += 1
            return Fetched((), None, MissReason.TIMED_OUT)
        except KVStoreError as error:
            supply.faults["fetch"] += 1
            logger.warning("engine: fetch failed: %s", error)
            return Fetched((), None, MissReason.UNAVAILABLE)
