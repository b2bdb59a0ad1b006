"""ClosingTime: lets the requests under way finish, and ends those that have not in time."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator

from kvstore_engine_adapter.generation import EngineClosed

_LAST_WORDS_S = 0.5


class ClosingTime:
    """The requests of one server while it is open, and their end. One event loop's.

    Once it is closing, new requests are refused, and those under way go on for the time it is given. After
    that every ``step`` that still waits raises EngineClosed, so that each request can tell its client.
    """

    def __init__(self) -> None:
        self._is_closing = False
        self._is_over = False
        self._num_requests = 0
        self._steps: set[asyncio.Timeout] = set()
        self._none_left = asyncio.Event()

    @contextlib.contextmanager
    def request(self) -> Iterator[None]:
        """Be under way inside the block.

        Raises:
            EngineClosed: no new requests are taken.
        """
        if self._is_closing:
            raise EngineClosed("engine: it is stopping and takes no more requests: ask another one")
        self._num_requests += 1
        try:
            yield
        finally:
            self._num_requests -= 1
            if not self._num_requests:
                self._none_left.set()

    @contextlib.asynccontextmanager
    async def step(self) -> AsyncIterator[None]:
        """Wait for something inside the block, at most until the end.

        Raises:
            EngineClosed: the end came.
        """
        patience = asyncio.timeout(0 if self._is_over else None)
        try:
            async with patience:
                self._steps.add(patience)
                try:
                    yield
                finally:
                    self._steps.discard(patience)
        except TimeoutError as error:
            if not patience.expired():
                raise
            raise EngineClosed("engine: it is stopping, and the answer was not finished in time") from error

    async def close(self, *, grace_s: float) -> None:
        """Wait until no request is left, at most ``grace_s`` seconds, then end those that are. Idempotent."""
        self._is_closing = True
        await self._wait_until_none_is_left(grace_s)
        self._is_over = True
        for patience in list(self._steps):
            patience.reschedule(asyncio.get_running_loop().time())
        await self._wait_until_none_is_left(_LAST_WORDS_S)

    async def _wait_until_none_is_left(self, timeout_s: float) -> None:
        if not self._num_requests:
            return
        self._none_left.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._none_left.wait()
