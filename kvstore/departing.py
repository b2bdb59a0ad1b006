"""Departure: blocks that leave on purpose: dropped, demoted, or drained before the end."""

import asyncio
import logging
from collections.abc import Sequence

from kvstore.directory import BlockEntry
from kvstore.keys import BlockKey, PrefixChain
from kvstore.layout import Part
from kvstore.miss import MissReason
from kvstore.mover import Mover
from kvstore.space import Space
from kvstore.state import State, WriteMode

logger = logging.getLogger(__name__)

_HOLD_PATIENCE_S = 1.0
_STEP_BLOCKS = 64
"""Blocks that leave between two turns of others."""


class Departure:
    """Drops, demotions and the drain of one manager."""

    def __init__(self, state: State, space: Space, mover: Mover) -> None:
        self._state = state
        self._space = space
        self._mover = mover

    async def drop(self, chain: PrefixChain, *, part: Part | None = None) -> int:
        """Forget every copy of these blocks that is not leased; returns how many blocks lost one.

        Also of blocks that only a shared tier has, and of which nothing is known here. A shared tier that
        does not answer keeps its copies. A block on its way between tiers is waited for, up to a second, and
        stays if that is not enough.

        Raises:
            InvalidRequest: the namespace is not open.
        """
        state = self._state
        shelf = state.directory.shelf(chain.namespace, part)
        entries = [shelf.entries[key] for key in reversed(chain.keys) if key in shelf.entries]
        dropped: set[BlockKey] = set()
        num_others = 0
        await self._wait_for_holds(entries)
        for number, entry in enumerate(entries, 1):
            if entry.is_ready(state.top.name) and not entry.is_kept:
                state.forget_copy(entry, state.top.name, MissReason.DROPPED)
                dropped.add(entry.key)
            if number % _STEP_BLOCKS == 0:
                await asyncio.sleep(0)
        for tier in state.lower:
            going = [entry for entry in entries if entry.is_ready(tier.name) and not entry.is_kept]
            await self._space.drop_copies(tier, going, MissReason.DROPPED)
            dropped.update(entry.key for entry in going)
            for entry in entries:
                if tier.is_shared and not entry.is_kept:
                    state.forget_belief(entry.name, tier.name)
            if tier.is_shared:
                leased = {entry.key for entry in entries if entry.is_kept}
                going_there = [key for key in chain.keys if key not in leased]
                await tier.drop([shelf.block(key) for key in going_there if key in dropped])
                num_others += await tier.drop([shelf.block(key) for key in going_there if key not in dropped])
        return len(dropped) + num_others

    async def _wait_for_holds(self, entries: Sequence[BlockEntry]) -> None:
        """Give transfers of these blocks a moment to end, so that they do not keep them from leaving."""
        state = self._state
        try:
            async with asyncio.timeout(_HOLD_PATIENCE_S):
                while any(entry.holds and not entry.leases for entry in entries):
                    state.freed.clear()
                    await state.freed.wait()
        except TimeoutError:
            return

    async def demote(self, chain: PrefixChain, *, part: Part | None = None, timeout_s: float = 10.0) -> int:
        """Write blocks to a tier below and take them out of the top tier; returns how many left it.

        Leased blocks, and those with a child there that is not among them, stay.

        Raises:
            InvalidRequest: the namespace is not open.
        """
        state = self._state
        shelf = state.directory.shelf(chain.namespace, part)
        entries = [shelf.entries[key] for key in reversed(chain.keys) if key in shelf.entries]
        going = [entry for entry in entries if entry.is_ready(state.top.name) and not entry.is_kept]
        missing_below = [entry for entry in going if not state.has_lower_copy(entry)]
        self._mover.write_through(missing_below)
        await self._mover.flush(timeout_s=timeout_s)
        num_left = 0
        for number, entry in enumerate(going, 1):
            if entry.may_leave(state.top.name) and state.has_lower_copy(entry):
                state.forget_copy(entry, state.top.name, MissReason.EVICTED)
                num_left += 1
            if number % _STEP_BLOCKS == 0:
                await asyncio.sleep(0)
        return num_left

    async def drain(self, *, timeout_s: float) -> int:
        """Write down what only the top tier has; returns how many are left over."""
        num_left, _ = await self._write_down(timeout_s)
        if num_left:
            logger.warning(
                "drain: %d blocks are in %s alone: not written down in %.1f s, or refused below",
                num_left,
                self._state.top.name,
                timeout_s,
            )
        return num_left

    async def flush(self, *, timeout_s: float) -> bool:
        """Write down what is queued, and under ``back`` what would be only later; False if time ran out."""
        if self._state.settings.write_mode is not WriteMode.BACK:
            return await self._mover.flush(timeout_s=timeout_s)
        _, is_done = await self._write_down(timeout_s)
        return is_done

    async def _write_down(self, timeout_s: float) -> tuple[int, bool]:
        state = self._state
        deadline_s = state.clock() + timeout_s
        if not state.lower or state.settings.write_mode is WriteMode.SECOND_HIT:
            return 0, await self._mover.flush(timeout_s=timeout_s)
        # One pass: in a tier below that is smaller, the last of them push out the first again.
        alone = [entry for entry in state.directory.entries() if self._is_only_on_top(entry)]
        step, is_done = state.settings.write_queue_blocks, True
        for start in range(0, max(1, len(alone)), step):
            self._mover.write_through(alone[start : start + step])
            is_done = await self._mover.flush(timeout_s=max(0.0, deadline_s - state.clock()))
            if not is_done:
                break
        return sum(self._is_only_on_top(entry) for entry in alone), is_done

    def _is_only_on_top(self, entry: BlockEntry) -> bool:
        is_there = entry.is_ready(self._state.top.name) and not entry.shelf.is_stale
        return is_there and not self._state.has_lower_copy(entry)
