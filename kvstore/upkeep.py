"""Upkeep: what a manager does by itself now and then: end leases, make room, hear what tiers have to tell."""

import asyncio
import logging
from collections.abc import Callable, Coroutine

from kvstore.learning import Learner
from kvstore.recency import Uses
from kvstore.space import Space
from kvstore.state import State

logger = logging.getLogger(__name__)

_SWEEP_S = 0.25
"""How often expired leases are looked for when no call does it."""


class Upkeep:
    """The loops of one manager's event loop; a failure in one is logged, and the loop goes on.

    ``expire`` ends the leases that are past their deadline.
    """

    def __init__(
        self, state: State, space: Space, uses: Uses, learner: Learner, expire: Callable[[], None]
    ) -> None:
        self._state = state
        self._space = space
        self._uses = uses
        self._learner = learner
        self._expire = expire
        self._needs_aging = asyncio.Event()

    def note_fill(self) -> None:
        """Have room made in the background if the top tier is above its high-water mark."""
        if self._space.is_above_high_water:
            self._needs_aging.set()

    def loops(self) -> list[Coroutine[None, None, None]]:
        """Return what is to run as long as the manager is open."""
        watching = (self._state.size_curve, self._state.branches)
        loops = [watcher.run_forever() for watcher in watching if watcher is not None]
        return [self.sweep_forever(), self.age_forever(), *loops]

    async def age_forever(self) -> None:
        """Make room whenever the top tier was filled above its mark."""
        while True:
            await self._needs_aging.wait()
            self._needs_aging.clear()
            try:
                await self._space.age()
            except Exception:
                logger.exception("%s: making room in the background failed", self._state.top.name)

    async def sweep_forever(self) -> None:
        """End expired leases, tell tiers of uses, and hear what they have to tell, several times a second."""
        while True:
            await asyncio.sleep(_SWEEP_S)
            try:
                self._expire()
                self.doubt_tiers_that_are_down()
                await self._uses.tell()
                await self._learner.take_news()
            except Exception:
                logger.exception("ending expired leases, or an exchange with the tiers, failed")

    def doubt_tiers_that_are_down(self) -> None:
        """Believe nothing of a shared tier that may have lost everything meanwhile."""
        for tier in self._state.lower:
            if tier.name in self._state.beliefs and not tier.health().is_up:
                self._state.beliefs[tier.name].clear()
