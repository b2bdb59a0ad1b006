"""EpochKeeper: ends the epochs of models, keeps that across restarts, and shares it with other nodes.

Ending an epoch makes every block of the model's older namespaces unreachable at once, in all tiers, since no
lookup of such a namespace is answered any more. Their space is reclaimed bit by bit afterwards. Nodes that
share a tier which can hold epochs (Redis) learn of it there, within POLL_S while that tier answers.
"""

import asyncio
import logging

from kvstore.directory import BlockEntry
from kvstore.epoch_file import EpochFile
from kvstore.errors import CorruptBlock
from kvstore.miss import MissReason
from kvstore.space import Space
from kvstore.state import State
from kvstore.tier import SharesEpochs

logger = logging.getLogger(__name__)

POLL_S = 0.25
"""How often epochs of other nodes are asked for, and stale blocks reclaimed."""

_RECLAIM_BLOCKS = 64
_SHARE_TIMEOUT_S = 1.0


class EpochKeeper:
    """Epochs of one manager. ``file`` None: nothing survives a restart, as nothing else does."""

    def __init__(self, state: State, space: Space, file: EpochFile | None) -> None:
        self._state = state
        self._space = space
        self._file = file

    async def open(self) -> bool:
        """Read the epochs of earlier runs; False if they are lost, so that nothing stored can be trusted."""
        if self._file is None:
            return True
        try:
            epochs = await asyncio.to_thread(self._file.read)
        except CorruptBlock as error:
            logger.error("epochs: %s: what earlier runs stored is dropped", error)
            return False
        for model, epoch in epochs.items():
            self._state.directory.raise_epoch(model, epoch)
        return True

    async def advance(self, model: str) -> int:
        """End the model's epoch on this node now and on others as soon as they hear; return the new one.

        Raises:
            TierUnavailable: it cannot be kept across a restart; it has ended until then all the same.
        """
        directory = self._state.directory
        directory.raise_epoch(model, directory.epoch(model) + 1)
        await self._share()
        await self._keep()
        return directory.epoch(model)

    async def poll_forever(self) -> None:
        """Follow other nodes and reclaim the space of stale blocks, until cancelled."""
        while True:
            await asyncio.sleep(POLL_S)
            try:
                await self._follow()
                await self.reclaim()
            except Exception:
                logger.exception("following epochs failed; it is tried again")

    async def _follow(self) -> None:
        before = self._state.directory.epochs()
        await self._share()
        if self._state.directory.epochs() != before:
            await self._keep()

    async def _share(self) -> None:
        """Exchange epochs with every tier that can hold them: the higher one wins on both sides."""
        directory = self._state.directory
        for tier in self._state.lower:
            if not isinstance(tier, SharesEpochs) or not tier.health().is_up:
                continue
            models = {space.model for space in directory.namespaces()} | set(directory.epochs())
            known = {model: directory.epoch(model) for model in models}
            deadline_s = self._state.clock() + _SHARE_TIMEOUT_S
            for model, epoch in (await tier.exchange_epochs(known, deadline_s=deadline_s)).items():
                directory.raise_epoch(model, epoch)

    async def _keep(self) -> None:
        if self._file is not None:
            await asyncio.to_thread(self._file.write, self._state.directory.epochs())

    async def reclaim(self) -> None:
        """Drop one batch of blocks of ended epochs from all tiers."""
        state = self._state
        entries = state.directory.stale_entries(_RECLAIM_BLOCKS)
        for entry in entries:
            if entry.is_ready(state.top.name) and not entry.is_kept:
                state.forget_copy(entry, state.top.name, MissReason.OTHER_EPOCH)
                state.counters.evictions[f"{state.top.name}/epoch"] += 1
        for tier in state.lower:
            going = [entry for entry in entries if self._may_go(entry, tier.name)]
            if going:
                await self._space.drop_copies(tier, going, MissReason.OTHER_EPOCH)
                state.counters.evictions[f"{tier.name}/epoch"] += len(going)

    def _may_go(self, entry: BlockEntry, tier: str) -> bool:
        return entry.is_ready(tier) and not entry.is_kept
