"""Jobs: blocking work in a bounded number of own threads, which a cancelled caller still sees end.

Threads read from and write to buffers that the caller lent. So a caller may only get control back, also by
cancellation or by its deadline, when its threads are done with them. What no thread has begun is given up.
"""

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


async def outlast(future: asyncio.Future[T]) -> T:
    """Await a future; when cancelled, wait until it is done all the same, then raise CancelledError."""
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        while not future.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([future])
        if not future.cancelled():
            future.exception()
        raise


class Jobs:
    """Threads of one tier. The tasks awaited through ``outlive`` are waited for by ``close``."""

    def __init__(self, name: str, num_threads: int) -> None:
        self._name = name
        self._num_threads = num_threads
        self._executor: ThreadPoolExecutor | None = None
        self._tasks: set[asyncio.Future[object]] = set()

    @property
    def num_threads(self) -> int:
        """Most jobs that run at once."""
        return self._num_threads

    def start(self) -> None:
        """Make threads available."""
        self._executor = ThreadPoolExecutor(self._num_threads, thread_name_prefix=f"kvstore-{self._name}")

    async def run(self, call: Callable[[], T]) -> T:
        """Run one call in a thread; returns when it has ended."""
        assert self._executor is not None, f"{self._name}: not open"
        return await outlast(asyncio.get_running_loop().run_in_executor(self._executor, call))

    async def run_within(self, calls: Sequence[Callable[[], T]], patience_s: float) -> list[T | None]:
        """Run calls in threads, begun in order; returns when none is running.

        After ``patience_s`` seconds those that no thread has begun are given up: None.
        """
        assert self._executor is not None, f"{self._name}: not open"
        submitted = [self._executor.submit(call) for call in calls]
        waited = [asyncio.wrap_future(future) for future in submitted]
        every = asyncio.ensure_future(_settled(waited))
        giving_up = asyncio.get_running_loop().call_later(
            max(0.0, patience_s), lambda: [future.cancel() for future in submitted]
        )
        try:
            await outlast(every)
        finally:
            giving_up.cancel()
        return [None if future.cancelled() else future.result() for future in waited]

    async def outlive(self, work: "asyncio.Task[T]") -> T:
        """Await a task that goes on to its end when the caller is cancelled (and the caller with it)."""
        self._tasks.add(work)  # type: ignore[arg-type]  # only waited for, the result type does not matter
        work.add_done_callback(self._tasks.discard)
        return await outlast(work)

    async def close(self) -> None:
        """Wait for every task and thread. Idempotent."""
        while self._tasks:
            await asyncio.wait(set(self._tasks))
        executor, self._executor = self._executor, None
        if executor is not None:
            executor.shutdown(wait=True)


async def _settled(futures: Sequence[asyncio.Future[T]]) -> None:
    if futures:
        await asyncio.wait(futures)
