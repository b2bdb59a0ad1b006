"""Learner: files what tiers hold from earlier runs, and what they find or lose while the store runs."""

import asyncio
import logging
from collections.abc import Iterator, Sequence

from kvstore.epochs import EpochKeeper
from kvstore.garbage import garbage_collection_paused
from kvstore.miss import MissReason
from kvstore.policy_keeping import adopt
from kvstore.state import State
from kvstore.tier import BlockHeader, ChangingTier, Tier

logger = logging.getLogger(__name__)

_BATCH_BLOCKS = 512
"""Blocks filed at once while the store serves: about a millisecond."""


class Learner:
    """Keeps the directory of one manager in step with tiers whose content it did not write itself."""

    def __init__(self, state: State, epochs: EpochKeeper) -> None:
        self._state = state
        self._epochs = epochs

    async def learn(self) -> None:
        """File what the tiers hold at a start; what contradicts the directory is dropped.

        Where the epochs of earlier runs are lost, nothing stored can be trusted and all of it is dropped.
        """
        is_trusted = await self._epochs.open()
        for tier in self._state.lower:
            headers = await tier.scan()
            if not is_trusted:
                await tier.drop([header.block for header in headers])
            else:
                await self._file(tier, headers)

    async def take_news(self) -> None:
        """File what came to light in a tier meanwhile, and forget what it lost."""
        state = self._state
        for tier in state.lower:
            if not isinstance(tier, ChangingTier):
                continue
            news = tier.take_news()
            if news.num_foreign:
                state.counters.evictions[f"{tier.name}/format"] += news.num_foreign
            for part in _batches(news.lost):
                self._forget(tier, part)
                await asyncio.sleep(0)
            if not news.found:
                continue
            # The disk may know of epochs that ended while it was in use and the others were not.
            is_trusted = await self._epochs.open()
            for part in _batches(news.found):
                if not is_trusted:
                    await tier.drop([header.block for header in part])
                else:
                    await self._file(tier, part)
                await asyncio.sleep(0)
            logger.info("%s: %d blocks found, %d lost", tier.name, len(news.found), len(news.lost))
            await self._epochs.keep()

    async def _file(self, tier: Tier, headers: Sequence[BlockHeader]) -> None:
        state = self._state
        with garbage_collection_paused():
            names, strangers = state.directory.adopt(headers, tier.name)
            if names:
                adopt(state, state.policies[tier.name], tier.name, names)
        if strangers:
            logger.warning("%s: %d blocks contradict their namespace: dropped", tier.name, len(strangers))
            await tier.drop(strangers)

    def _forget(self, tier: Tier, headers: Sequence[BlockHeader]) -> None:
        state = self._state
        for header in headers:
            entry = state.directory.find(header.block.storage_key)
            if entry is not None and entry.is_ready(tier.name):
                state.forget_copy(entry, tier.name, MissReason.UNAVAILABLE)
                state.counters.evictions[f"{tier.name}/lost"] += 1


def _batches(headers: Sequence[BlockHeader]) -> Iterator[Sequence[BlockHeader]]:
    for start in range(0, len(headers), _BATCH_BLOCKS):
        yield headers[start : start + _BATCH_BLOCKS]
