"""StoreWatch: says in the log when the store behind an engine stops answering, and when it is back."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from kvstore.async_client import AsyncKVStore
from kvstore.errors import KVStoreError

logger = logging.getLogger(__name__)

_INTERVAL_S = 1.0
_PATIENCE_S = 1.0
_REPEAT_S = 60.0
_PINGS_TO_FAIL = 2


class StoreWatch:
    """Asks a store now and then whether it answers, over a connection of its own.

    The requests' own calls cannot say: they are too short to tell a slow store from a stopped one, and an
    idle engine makes none. A store that has answered counts as away when it does not twice in a row. The
    warning is repeated once a minute, and a store that comes and goes is not warned of more often.
    """

    def __init__(
        self,
        address: str,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._address = address
        self._clock = clock
        self._sleep = sleep
        self._failed_pings = 0
        self._warned_at_s: float | None = None
        self._is_warned = False
        self._has_answered = False
        self._away_since_s = clock()

    async def run(self) -> None:
        """Watch until cancelled."""
        client = await AsyncKVStore.connect(self._address)
        try:
            while True:
                await self._ask(client)
                await self._sleep(_INTERVAL_S)
        finally:
            await client.close()

    async def _ask(self, client: AsyncKVStore) -> None:
        try:
            await client.ping(timeout_s=_PATIENCE_S)
        except KVStoreError as error:
            self.note_failure(error)
        else:
            self.note_answer()

    def note_failure(self, error: KVStoreError) -> None:
        """The store has not answered."""
        now_s = self._clock()
        self._failed_pings += 1
        if self._failed_pings == 1:
            self._away_since_s = now_s
        if self._has_answered and self._failed_pings < _PINGS_TO_FAIL:
            return
        if self._warned_at_s is not None and now_s - self._warned_at_s < _REPEAT_S:
            return
        self._warned_at_s, self._is_warned = now_s, True
        logger.warning(
            "store: no answer, so nothing is shared and only vram is reused: %s (repeated once a minute)",
            error,
        )

    def note_answer(self) -> None:
        """The store has answered."""
        if self._is_warned:
            logger.info("store: it answers again after %.0f s", self._clock() - self._away_since_s)
        self._failed_pings, self._is_warned, self._has_answered = 0, False, True
