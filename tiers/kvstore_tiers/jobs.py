"""Jobs: blocking work in a bounded number of own threads, which a cancelled caller still sees end.

Threads read from and write to buffers that the caller lent. So a caller may only get control back, also by
cancellation or by its deadline, when its threads are done with them. What no thread has begun is given up.

The threads are daemons: an operation that a dead disk never ends keeps neither ``close`` nor the end of the
process waiting, once it is abandoned.
"""

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar, cast

T = TypeVar("T")


class Abandoned(Exception):
    """The work was stuck when its jobs were closed; its thread may still be at it."""


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


@dataclass(eq=False, slots=True)
class _Job:
    """One call for a thread. Whoever holds ``lock`` decides whether it begins or is given up."""

    call: Callable[[], object]
    future: "asyncio.Future[object]"
    lock: threading.Lock = field(default_factory=threading.Lock)
    is_begun: bool = False
    is_given_up: bool = False

    def begin(self) -> bool:
        """Note that a thread starts on it; False if it was given up."""
        with self.lock:
            self.is_begun = not self.is_given_up
            return self.is_begun

    def give_up(self) -> bool:
        """Note that no thread may start on it any more; False if one has."""
        with self.lock:
            self.is_given_up = not self.is_begun
            return self.is_given_up


class Jobs:
    """Threads of one tier. The tasks awaited through ``outlive`` are waited for by ``close``."""

    def __init__(self, name: str, num_threads: int) -> None:
        self._name = name
        self._num_threads = num_threads
        self._queue: queue.SimpleQueue[_Job | None] | None = None
        self._threads: list[threading.Thread] = []
        self._pending: dict[asyncio.Future[object], _Job] = {}
        self._tasks: set[asyncio.Future[object]] = set()
        self._is_stuck = False
        self._is_abandoned = False

    @property
    def num_threads(self) -> int:
        """Most jobs that run at once."""
        return self._num_threads

    def start(self) -> None:
        """Make threads available. Idempotent."""
        if self._queue is not None:
            return
        self._queue = queue.SimpleQueue()
        self._is_abandoned = False
        for number in range(self._num_threads):
            thread = threading.Thread(
                target=_work, args=(self._queue,), name=f"kvstore-{self._name}-{number}", daemon=True
            )
            thread.start()
            self._threads.append(thread)

    async def run(self, call: Callable[[], T]) -> T:
        """Run one call in a thread; returns when it has ended.

        Raises:
            Abandoned: by ``abandon``, before it ended or before it was asked for.
        """
        job = self._submit(call)
        return await outlast(cast("asyncio.Future[T]", job.future))  # it holds what the call returns

    async def run_within(self, calls: Sequence[Callable[[], T]], patience_s: float) -> list[T | None]:
        """Run calls in threads, begun in order; returns when none is running.

        After ``patience_s`` seconds those that no thread has begun are given up: None.

        Raises:
            Abandoned: by ``abandon``, before they ended or before they were asked for.
        """
        jobs = [self._submit(call) for call in calls]
        if not jobs:
            return []
        every = asyncio.ensure_future(_settled([job.future for job in jobs]))
        giving_up = asyncio.get_running_loop().call_later(max(0.0, patience_s), _give_up, jobs)
        try:
            await outlast(every)
        finally:
            giving_up.cancel()
        return [
            None if job.future.cancelled() else job.future.result()  # type: ignore[misc]  # what the call returned
            for job in jobs
        ]

    async def outlive(self, work: "asyncio.Task[T]") -> T:
        """Await a task that goes on to its end when the caller is cancelled (and the caller with it)."""
        self._tasks.add(work)  # type: ignore[arg-type]  # only waited for, the result type does not matter
        work.add_done_callback(self._tasks.discard)
        return await outlast(work)

    async def drained(self, until_s: float | None = None) -> bool:
        """Wait until no task and no call is under way; False if that is not so at ``until_s`` (loop time)."""
        loop = asyncio.get_running_loop()
        while busy := {*self._tasks, *self._pending}:
            left_s = None if until_s is None else until_s - loop.time()
            if left_s is not None and left_s <= 0:
                return False
            await asyncio.wait(busy, timeout=left_s)
        return True

    def abandon(self) -> None:
        """Wait no more for what is under way, and begin nothing: whoever awaits that gets Abandoned."""
        self._is_abandoned = True
        for job in list(self._pending.values()):
            self._is_stuck |= not job.give_up()
            job.future.set_exception(Abandoned(f"{self._name}: an operation has not ended"))

    async def close(self) -> None:
        """Wait for every task and thread, but not for what was abandoned. Idempotent."""
        await self.drained()
        threads, self._threads = self._threads, []
        jobs, self._queue = self._queue, None
        if jobs is None:
            return
        for _ in threads:
            jobs.put(None)
        for thread in threads if not self._is_stuck else ():
            thread.join()

    def _submit(self, call: Callable[[], object]) -> _Job:
        assert self._queue is not None, f"{self._name}: not open"
        if self._is_abandoned:
            # Behind the stuck operation it would wait for ever, and its task would outlive the event loop.
            raise Abandoned(f"{self._name}: an operation has not ended")
        job = _Job(call, asyncio.get_running_loop().create_future())
        self._pending[job.future] = job
        job.future.add_done_callback(self._forget)
        self._queue.put(job)
        return job

    def _forget(self, future: asyncio.Future[object]) -> None:
        self._pending.pop(future, None)


def _give_up(jobs: Sequence[_Job]) -> None:
    for job in jobs:
        if not job.future.done() and job.give_up():
            job.future.cancel()


def _work(jobs: "queue.SimpleQueue[_Job | None]") -> None:
    """Run jobs until told to stop: the body of a thread."""
    while (job := jobs.get()) is not None:
        if not job.begin():
            continue
        result: object = None
        failure: BaseException | None = None
        try:
            result = job.call()
        except BaseException as error:  # handed to whoever awaits the job
            failure = error
        # The loop may have ended without this job, if it was abandoned.
        with contextlib.suppress(RuntimeError):
            job.future.get_loop().call_soon_threadsafe(_settle, job.future, result, failure)
        del job, result, failure


def _settle(future: "asyncio.Future[object]", result: object, failure: BaseException | None) -> None:
    if future.done():
        return
    if failure is not None:
        future.set_exception(failure)
    else:
        future.set_result(result)


async def _settled(futures: Sequence[asyncio.Future[object]]) -> None:
    await asyncio.wait(futures)
