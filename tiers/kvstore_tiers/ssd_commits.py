"""GroupCommits: index changes of one ssd folder, committed together with those of whoever else waits.

Also every use of a copy reaches the disk through here, a bounded number with each commit and from time to
time by itself: a kill costs the recency of the last seconds, and a busy reader costs the disk little. So do
the repairs of what an earlier commit failed to do. A commit of nothing changes nothing; the store takes the
occasion to look after its files.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence

from kvstore.tier import WriteStatus
from kvstore_tiers.jobs import Abandoned, Jobs
from kvstore_tiers.ssd_record import Change
from kvstore_tiers.ssd_repairs import Repairs
from kvstore_tiers.ssd_store import CommitOutcome

_log = logging.getLogger(__name__)

_RENEWALS_PER_COMMIT = 256
_RENEWALS_PER_INTERVAL = 1024
_REPAIRS_PER_COMMIT = 256


class GroupCommits:
    """One committer at a time. ``renewals`` gives up to so many changes of recency to take along."""

    def __init__(
        self,
        where: str,
        jobs: Jobs,
        *,
        commit: Callable[[Sequence[Change]], list[CommitOutcome]],
        renewals: Callable[[int], list[Change]],
        repairs: Repairs,
        interval_s: float,
    ) -> None:
        self._where = where
        self._jobs = jobs
        self._commit = commit
        self._renewals = renewals
        self._repairs = repairs
        self._interval_s = interval_s
        self._waiting: list[tuple[list[Change], asyncio.Future[list[CommitOutcome]]]] = []
        self._committer: asyncio.Task[None] | None = None
        self._renewer: asyncio.Task[None] | None = None
        self._is_wanted = asyncio.Event()
        self.num_commits = 0

    def start(self) -> None:
        """Begin to store uses from time to time, and to commit nothing when there are none."""
        self._renewer = asyncio.create_task(self._renew_forever(), name=f"{self._where}-renew")

    async def stop(self) -> None:
        """Store no more uses by itself; what waits is still committed. Idempotent."""
        renewer, self._renewer = self._renewer, None
        if renewer is not None:
            renewer.cancel()
            await asyncio.wait([renewer])

    def soon(self) -> None:
        """Do so now rather than when its time has come."""
        self._is_wanted.set()

    async def commit(self, changes: list[Change]) -> list[CommitOutcome]:
        """Commit changes; returns one outcome for each when all is on disk."""
        future: asyncio.Future[list[CommitOutcome]] = asyncio.get_running_loop().create_future()
        self._waiting.append((changes, future))
        if self._committer is None:
            self._committer = asyncio.create_task(self._commit_waiting(), name=f"{self._where}-commit")
        return await future

    async def _commit_waiting(self) -> None:
        while self._waiting:
            batch, self._waiting = self._waiting, []
            changes = [change for part, _ in batch for change in part]
            # Behind the changes: they undo what is older than those.
            repairs = self._repairs.take(_REPAIRS_PER_COMMIT)
            outcomes = await self._run([*changes, *repairs, *self._renewals(_RENEWALS_PER_COMMIT)])
            self._repairs.end(outcomes[len(changes) : len(changes) + len(repairs)])
            position = 0
            for part, future in batch:
                if not future.done():
                    future.set_result(outcomes[position : position + len(part)])
                position += len(part)
        self._committer = None

    async def _run(self, changes: Sequence[Change]) -> list[CommitOutcome]:
        self.num_commits += bool(changes)
        try:
            return await self._jobs.run(lambda: self._commit(changes))
        except Abandoned:
            return [CommitOutcome(WriteStatus.UNAVAILABLE, "a commit has not ended")] * len(changes)
        except Exception as error:
            _log.exception("%s: a commit died", self._where)
            return [CommitOutcome(WriteStatus.UNAVAILABLE, f"a commit died: {error}")] * len(changes)

    async def _renew_forever(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._interval_s):
                    await self._is_wanted.wait()
            self._is_wanted.clear()
            await self.commit(self._renewals(_RENEWALS_PER_INTERVAL))
