"""LateWork: operations that their caller stops waiting for, and that go on to their end.

An operation that waits for a hung disk cannot be stopped: its thread is in the kernel. So its caller is let
go in time, and the number of operations that go on without one is bounded.
"""

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, TypeVar

from kvstore.errors import KVStoreError, TimedOut

logger = logging.getLogger(__name__)

T = TypeVar("T")
_CANCELLED_S = 1.0


class LateWork:
    """Operations of one server. One event loop's thread."""

    def __init__(self, *, max_late: int = 64) -> None:
        self._max_late = max_late
        self._late: set[asyncio.Task[Any]] = set()  # Any: results of late work are dropped

    @property
    def num_late(self) -> int:
        """Operations under way that nobody waits for any more."""
        return len(self._late)

    async def within(self, work: "Coroutine[Any, Any, T]", limit_s: float, what: str) -> T:
        """Return the work's result if it comes within ``limit_s`` seconds; later, or cancelled, it goes on.

        Raises:
            TimedOut: it takes longer, or too many earlier ones are still under way.
        """
        if len(self._late) >= self._max_late:
            work.close()
            raise TimedOut(f"server: {len(self._late)} operations have not ended in time, {what} has to wait")
        task = asyncio.create_task(work)
        try:
            done, _ = await asyncio.wait([task], timeout=limit_s)
        except asyncio.CancelledError:
            self._outlive(task)
            raise
        if not done:
            self._outlive(task)
            raise TimedOut(f"server: {what} did not end within {limit_s:g} s, it goes on")
        return task.result()

    async def close(self, *, patience_s: float) -> None:
        """Wait for what is under way, up to ``patience_s`` seconds, and then cancel it."""
        for limit_s in (patience_s, _CANCELLED_S):
            if self._late:
                await asyncio.wait(set(self._late), timeout=limit_s)
            for task in self._late:
                task.cancel()
        if self._late:
            logger.error("server: %d operations do not end", len(self._late))

    def _outlive(self, task: "asyncio.Task[Any]") -> None:
        self._late.add(task)
        task.add_done_callback(self._note_end)

    def _note_end(self, task: "asyncio.Task[Any]") -> None:
        self._late.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, KVStoreError):
            logger.error("server: an operation that nobody waited for failed", exc_info=error)
