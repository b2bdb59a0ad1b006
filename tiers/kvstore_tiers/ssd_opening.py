"""Opening: one attempt to open the files of an ssd folder, in a thread that a dead disk may hold for ever."""

import asyncio
import threading
from collections.abc import Callable
from dataclasses import dataclass

from kvstore_tiers.jobs import Jobs
from kvstore_tiers.slots import SlotAllocator
from kvstore_tiers.ssd_copies import Copies
from kvstore_tiers.ssd_store import SsdStore


@dataclass(frozen=True, slots=True)
class Opened:
    """Files that are open and locked, and what an earlier run left in them."""

    store: SsdStore
    copies: Copies
    slots: SlotAllocator
    highest_number: int
    budget_left_bytes: int | None


class Opening:
    """Nobody need wait for it: given up, it releases by itself what it opens late."""

    def __init__(self, call: Callable[[], Opened]) -> None:
        self._call = call
        self._lock = threading.Lock()
        self._opened: Opened | None = None
        self._has_ended = False
        self._is_given_up = False

    @property
    def has_ended(self) -> bool:
        """Whether its thread is done with the folder."""
        return self._has_ended

    async def run(self, jobs: Jobs, *, timeout_s: float) -> Opened | None:
        """Run in a thread of ``jobs``; None if it has not ended in time, and then the jobs are abandoned.

        Raises:
            TierUnavailable: it cannot be opened.
        """
        work = asyncio.ensure_future(jobs.run(self._open))
        work.add_done_callback(lambda done: done.cancelled() or done.exception())
        is_awaited = False
        try:
            await asyncio.wait([work], timeout=timeout_s)
            is_awaited = work.done()
        finally:
            if not is_awaited:
                self._give_up()
                jobs.abandon()
        return work.result() if is_awaited else None

    def _open(self) -> Opened:
        """Body of the thread."""
        try:
            opened = self._call()
        except BaseException:
            self._has_ended = True
            raise
        with self._lock:
            self._opened = opened
            self._has_ended = not self._is_given_up
        if not self._has_ended:
            self._release(opened)
        return opened

    def _give_up(self) -> None:
        with self._lock:
            self._is_given_up = True
            opened = self._opened
            self._has_ended &= opened is None
        if opened is not None:
            threading.Thread(target=self._release, args=(opened,), daemon=True).start()

    def _release(self, opened: Opened) -> None:
        try:
            opened.store.close([])
        finally:
            self._has_ended = True
