"""Eraser: makes a tenant's blocks unreadable for good by destroying its key, and forgets them."""

import asyncio
import logging
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from kvstore.directory import BlockEntry, CopyState
from kvstore.miss import MissReason
from kvstore.results import EraseReport
from kvstore.space import Space
from kvstore.state import State
from kvstore.tenant import TenantId, tenant_of
from kvstore.tier import BlockId, Slot

if TYPE_CHECKING:  # a store without encryption needs none of its package
    from kvstore.vault import Vault

logger = logging.getLogger(__name__)

POLL_S = 0.5
"""How often other nodes' erasures are asked for."""

_PATIENCE_S = 2.0
_PAUSE_S = 0.05


class OverwritableSlots(Protocol):
    """The top tier, as far as it can overwrite what it held."""

    def overwrite(self, slots: Sequence[Slot]) -> None:
        """Overwrite the bytes of slots that are allocated."""

    async def overwrite_free(self) -> None:
        """Overwrite all bytes that are in no slot."""


class ErasableRecords(Protocol):
    """The records beside the blocks."""

    async def erase(self, tenant: TenantId, key_ids: Collection[bytes]) -> tuple[int, list[str]]:
        """Forget those whose key is gone, ``key_ids`` being erased ones.

        Returns how many, and what is tried again.
        """


class SealedCopies(Protocol):
    """A tier of encrypted copies."""

    async def copies_under(self, key_ids: Collection[bytes]) -> list[BlockId]:
        """Return whose copies are encrypted under one of these keys, as far as the tier can list them."""


@dataclass(frozen=True, slots=True)
class Encryption:
    """What a manager needs to erase tenants: the keys, the tiers that blocks lie in, and the records."""

    vault: "Vault"
    memory: OverwritableSlots
    sealed: Sequence[SealedCopies]
    records: ErasableRecords | None = None


class Eraser:
    """Erases tenants from one manager's tiers, on its own account and on that of other nodes.

    The key goes first, so nothing comes up from below any more. Then the tenant's blocks leave: those in
    memory are overwritten before their slots are free, also when a lease keeps them until later; and so is
    all that is free now, where blocks that left earlier have been. Until all that was on its way between
    tiers has arrived and left, the tenant gets no new key, or such a block would be stored under it.
    """

    def __init__(self, state: State, space: Space, encryption: Encryption) -> None:
        self._state = state
        self._space = space
        self._vault = encryption.vault
        self._memory = encryption.memory
        self._sealed = encryption.sealed
        self._records = encryption.records
        state.overwrite = encryption.memory.overwrite
        self._clearing: set[asyncio.Task[None]] = set()

    async def open(self) -> None:
        """Read the keys. To be called when the tiers are open, before they are scanned."""
        self._vault.follow(self._state.directory.namespace, self.clear)
        await self._vault.open()

    async def close(self) -> None:
        """Let what is under way end; what waits for a transfer that does not end is given up."""
        for task in self._clearing:
            task.cancel()
        await asyncio.gather(*self._clearing, return_exceptions=True)
        await self._vault.close()

    async def poll_forever(self) -> None:
        """Follow other nodes, until cancelled."""
        while True:
            await asyncio.sleep(POLL_S)
            try:
                await self._vault.poll()
            except Exception:
                logger.exception("following the erasures of other nodes failed; it is tried again")

    async def erase(self, tenant: TenantId) -> EraseReport:
        """Destroy a tenant's key everywhere, and forget its blocks here.

        Raises:
            TierUnavailable: the master key is not the right one.
        """
        key_ids = self._vault.forget(tenant)
        problems, report = await asyncio.gather(
            self._vault.spread_erasure(tenant), self.clear(tenant, key_ids)
        )
        problems += report.problems
        logger.info("a tenant was erased: %d keys, %s", len(key_ids), "; ".join(problems) or "everywhere")
        return replace(report, keys=len(key_ids), problems=tuple(problems))

    async def clear(self, tenant: TenantId, key_ids: Collection[bytes]) -> EraseReport:
        """Forget a tenant's records and blocks, also blocks under its keys whose namespace is not open.

        What is on its way between tiers for longer than two seconds is forgotten later.
        """
        self._state.doomed.update(self._state.leases.unnamed_slots())
        dropped: Counter[str] = Counter()
        task = asyncio.create_task(self._clear(tenant, key_ids, dropped), name="eraser-clear")
        self._clearing.add(task)
        task.add_done_callback(self._end)
        num_records, problems = (
            (0, []) if self._records is None else await self._records.erase(tenant, key_ids)
        )
        await asyncio.wait([task], timeout=_PATIENCE_S)
        if not task.done():
            problems = [*problems, "blocks are still on their way between tiers: forgotten when they arrive"]
        return EraseReport(0, dict(dropped), self._num_leased(tenant), tuple(problems), num_records)

    async def _clear(self, tenant: TenantId, key_ids: Collection[bytes], dropped: Counter[str]) -> None:
        try:
            entries = await self._entries(tenant, key_ids)
            while entries:
                await self._clear_top(entries, dropped)
                await self._clear_below(entries, dropped)
                entries = [entry for entry in entries if _is_left(entry)]
                if entries:
                    await asyncio.sleep(_PAUSE_S)
            await self._memory.overwrite_free()
        finally:
            self._vault.reopen(tenant)

    def _end(self, task: "asyncio.Task[None]") -> None:
        self._clearing.discard(task)
        if not task.cancelled() and task.exception() is not None:
            logger.error("forgetting the blocks of an erased tenant failed", exc_info=task.exception())

    def stats(self) -> dict[str, object]:
        """Return the state of the keys, ready for JSON."""
        return self._vault.stats()

    async def _entries(self, tenant: TenantId, key_ids: Collection[bytes]) -> list[BlockEntry]:
        found = dict.fromkeys(self._entries_of(tenant))
        for tier in self._sealed if key_ids else ():
            for block in await tier.copies_under(key_ids):
                entry = self._state.directory.find(block.storage_key)
                if entry is not None:
                    found[entry] = None
        return list(found)

    def _entries_of(self, tenant: TenantId) -> list[BlockEntry]:
        return self._state.directory.entries_of(lambda space: tenant_of(space.tenant_salt) == tenant)

    async def _clear_top(self, entries: Sequence[BlockEntry], dropped: Counter[str]) -> None:
        """Take blocks out of the top tier; the slot of one that is kept is overwritten later."""
        state = self._state
        top = state.top.name
        for entry in entries:
            slot = entry.copies[top].slot if entry.is_ready(top) else None
            if slot is None:
                continue
            state.doomed.add(slot)
            state.quarantine_top(entry, MissReason.ERASED)
            dropped[top] += 1
            # Overwriting a slot takes a fraction of a millisecond: others get their turn between two.
            await asyncio.sleep(0)

    async def _clear_below(self, entries: Sequence[BlockEntry], dropped: Counter[str]) -> None:
        state = self._state
        for tier in state.lower:
            # Nobody lists a shared tier; these are the copies that this node knows to be there.
            believed = [entry for entry in entries if entry.name in state.beliefs.get(tier.name, ())]
            for entry in believed:
                state.forget_belief(entry.name, tier.name)
            if believed:
                dropped[tier.name] += len(believed)
            going = [entry for entry in entries if entry.is_ready(tier.name) and not entry.holds]
            if going:
                await self._space.drop_copies(tier, going, MissReason.ERASED)
                dropped[tier.name] += len(going)

    def _num_leased(self, tenant: TenantId) -> int:
        top = self._state.top.name
        copies = [entry.copies.get(top) for entry in self._entries_of(tenant)]
        return sum(copy is not None and copy.state is CopyState.DROPPING for copy in copies)


def _is_left(entry: BlockEntry) -> bool:
    """Whether an entry still has a copy that is used, or is on its way between tiers."""
    is_moving = entry.holds > 0 or entry.loading is not None
    return is_moving or any(copy.state is not CopyState.DROPPING for copy in entry.copies.values())
