"""LocalRecords: the records of one node, in an environment on disk or, without a folder, in memory only.

What is there is known in memory (all but the values on disk). A put is visible when its commit has returned;
commits of whoever waits share one sync. While the disk fails nothing is served or taken, since what a failed
commit changed is in doubt: the environment is opened anew, and what it holds is the truth.

Time. A record's time runs by the monotonic clock. Across a restart it is what the wall clock says is left of
it, but never more than it was given: a clock that was set back makes no record older than its time.

Threads. All state lives on the event loop's thread; disk work runs in one thread for commits, one for reads.
"""

import asyncio
import enum
import heapq
import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

from kvstore.errors import CorruptBlock, TierUnavailable
from kvstore.log_limit import LimitedWarning
from kvstore.records import RecordAbsence
from kvstore.tenant import TenantId
from kvstore_tiers.jobs import Abandoned, Jobs
from kvstore_tiers.record_change import Change, DiskFault, DiskFull, Found, KeptOnDisk
from kvstore_tiers.record_format import TENANT_BYTES, RecordHead, StoredRecord, charge_bytes

_log = logging.getLogger(__name__)

_BATCH_BYTES = 8 << 20
_BATCH_CHANGES = 256
_REOPEN_S = 0.25
_REOPEN_MAX_S = 5.0
_MAX_GONE = 65_536
_SCRUB_S = 10.0


class Kept(enum.Enum):
    """How an attempt to keep or forget records ended. UNAVAILABLE: what it changed is in doubt."""

    OK = "ok"
    FULL = "full"
    UNAVAILABLE = "unavailable"


@dataclass(eq=False, slots=True)
class LocalRecord:
    """What is known of a record: all but its body, which is given only where it is not on disk."""

    key: bytes
    head: RecordHead
    name: bytes
    deadline_s: float
    body: bytes | None = None

    @property
    def tenant(self) -> TenantId:
        """Whose it is."""
        return TenantId(self.key[:TENANT_BYTES])

    @property
    def entry(self) -> bytes:
        """Head and name part, as on disk."""
        return self.head.pack() + self.name

    @property
    def charge_bytes(self) -> int:
        """What it counts for."""
        return charge_bytes(self.head.stored_bytes)


class LocalRecords:
    """Records under keys: tenant and digest. ``open_disk`` None: in memory.

    ``open_disk`` blocks, and returns the disk with what it holds, or raises TierUnavailable. ``where`` names
    it in messages. ``wall_s`` is the wall clock, in seconds of Unix time.
    """

    def __init__(
        self,
        open_disk: Callable[[], tuple[KeptOnDisk, Found]] | None,
        *,
        where: str = "memory",
        capacity_bytes: int,
        clock: Callable[[], float],
        wall_s: Callable[[], float],
        close_timeout_s: float = 3.0,
    ) -> None:
        self._open_now = open_disk
        self._where = where
        self._capacity_bytes = capacity_bytes
        self._clock = clock
        self._wall_s = wall_s
        self._close_timeout_s = close_timeout_s
        self._commits = Jobs("records-commit", 1)
        self._reads = Jobs("records-read", 1)
        self._disk: KeptOnDisk | None = None
        self._records: dict[bytes, LocalRecord] = {}
        self._by_tenant: dict[TenantId, dict[bytes, LocalRecord]] = {}
        self._used: Counter[TenantId] = Counter()
        self._clear: set[bytes] = set()
        self._deadlines: list[tuple[float, bytes]] = []
        self._storing: Counter[bytes] = Counter()
        self._gone: OrderedDict[bytes, RecordAbsence] = OrderedDict()
        self._waiting: list[tuple[list[Change], asyncio.Future[Kept]]] = []
        self._committer: asyncio.Task[None] | None = None
        self._opening: asyncio.Task[bool] | None = None
        self._reopen_at_s = 0.0
        self._scrub_at_s = float("-inf")
        self._pause_s = _REOPEN_S
        self._trouble = "" if open_disk is None else "not open"
        self._is_closed = True
        self._faults = LimitedWarning(_log, clock=clock)
        self.counters: Counter[str] = Counter()

    @property
    def is_on_disk(self) -> bool:
        """Whether records survive the process."""
        return self._open_now is not None

    @property
    def trouble(self) -> str:
        """Why nothing is served now, a clause for people; empty if it is."""
        return self._trouble

    @property
    def used_bytes(self) -> int:
        """What all records count for."""
        return self._used.total()

    def __len__(self) -> int:
        return len(self._records)

    def used_by(self, tenant: TenantId) -> int:
        """Return what a tenant's records count for."""
        return self._used[tenant]

    async def open(self) -> None:
        """Read what earlier runs left. A disk that cannot be used is tried again, see ``trouble``."""
        self._is_closed = False
        if self._open_now is not None:
            self._commits.start()
            self._reads.start()
            await self.ready()

    async def close(self) -> None:
        """Finish what is under way and release the folder; what does not end in time is left. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._open_now is None:
            return
        until_s = asyncio.get_running_loop().time() + self._close_timeout_s
        is_done = all([await jobs.drained(until_s) for jobs in (self._commits, self._reads)])
        disk, self._disk = self._disk, None
        if not is_done:
            for jobs in (self._commits, self._reads):
                jobs.abandon()
            _log.warning("records: %s: an operation has not ended: left to itself", self._where)
        elif disk is not None:
            is_clean = not self._trouble
            closing = asyncio.ensure_future(self._commits.run(lambda: disk.close(is_clean=is_clean)))
            await asyncio.wait([closing], timeout=self._close_timeout_s)
            if not closing.done():
                self._commits.abandon()
            await asyncio.gather(closing, return_exceptions=True)
        for jobs in (self._commits, self._reads):
            await jobs.close()
        self._trouble = "closed"

    async def ready(self) -> bool:
        """Return whether records can be served, after another attempt to open the disk if it is time."""
        if not self._trouble:
            return True
        if self._is_closed or self._clock() < self._reopen_at_s:
            return False
        if self._opening is None:
            self._opening = asyncio.create_task(self._open_disk(), name="records-open")
            self._opening.add_done_callback(self._opened)
        return await asyncio.shield(self._opening)

    # What is there

    def find(self, key: bytes) -> LocalRecord | None:
        """Return what is known of a record whose time is not over."""
        record = self._records.get(key)
        return record if record is not None and record.deadline_s > self._clock() else None

    def absence(self, key: bytes) -> RecordAbsence:
        """Return why there is no record under a key."""
        if key in self._records:
            return RecordAbsence.EXPIRED
        return self._gone.get(key, RecordAbsence.NEVER_SEEN)

    def of_tenant(self, tenant: TenantId) -> list[LocalRecord]:
        """Return a tenant's records, also those whose time is over."""
        return list(self._by_tenant.get(tenant, {}).values())

    def all(self) -> list[LocalRecord]:
        """Return every record, those of a tenant together."""
        return [record for theirs in self._by_tenant.values() for record in theirs.values()]

    def in_the_clear(self, count: int) -> list[LocalRecord]:
        """Return some of the records that are not encrypted, at most ``count``."""
        return [self._records[key] for key in islice(self._clear, count)]

    @property
    def num_clear(self) -> int:
        """How many are not encrypted."""
        return len(self._clear)

    @property
    def over_bytes(self) -> int:
        """What the records count for beyond their capacity."""
        return max(0, self.used_bytes - self._capacity_bytes)

    def oldest(self, room_bytes: int) -> list[LocalRecord]:
        """Return the records that were kept first and count for that much together."""
        chosen: list[LocalRecord] = []
        for record in self._records.values():
            if room_bytes <= 0:
                break
            chosen.append(record)
            room_bytes -= record.charge_bytes
        return chosen

    async def read(self, record: LocalRecord, *, is_alone: bool = True) -> StoredRecord | None:
        """Return a whole record; None if it is not what it was, or damaged.

        It is counted as damaged only if ``is_alone``: no put of it is under way.

        Raises:
            TierUnavailable: the disk failed.
        """
        if record.body is not None:
            return StoredRecord(record.head, record.name, record.body)
        disk = self._disk
        if disk is None:
            raise TierUnavailable(f"records: {self._trouble}")
        try:
            data = await self._reads.run(lambda: disk.read(record.key))
        except (DiskFault, Abandoned) as error:
            self._note_fault(str(error))
            raise TierUnavailable(f"records: the disk failed: {error}") from error
        try:
            return None if data is None else StoredRecord.unpack(data, record.head.id)
        except CorruptBlock as error:
            if is_alone:
                self.counters["corrupt"] += 1
                self._faults.warn("records: %s: a record is damaged: %s", self._where, error)
            return None

    # Changes

    async def keep(self, key: bytes, record: StoredRecord, *, ttl_s: float) -> Kept:
        """Store a record in place of any under that key."""
        deadline_s = self._clock() + ttl_s
        self._storing[key] += 1
        try:
            status = await self._commit([Change(key, record)])
            if status is Kept.OK:
                body = None if self.is_on_disk else record.body
                self._take(LocalRecord(key, record.head, record.name, deadline_s, body))
            return status
        finally:
            self._storing[key] -= 1
            if not self._storing[key]:
                del self._storing[key]

    async def scrub(self) -> None:
        """Have the disk rid of what is left of records in the clear, if none is there any more."""
        disk = self._disk
        if disk is None or self._trouble or self._clear or self._clock() < self._scrub_at_s:
            return
        self._scrub_at_s = self._clock() + _SCRUB_S
        if not disk.may_hold_clear:
            return
        try:
            await self._commits.run(disk.scrub)
        except DiskFull as error:
            self._faults.warn("%s; it is tried again", error)
        except (DiskFault, Abandoned) as error:
            self._note_fault(f"the disk failed: {error}")
        else:
            _log.info("records: %s: all are encrypted, and nothing is left in the clear", self._where)

    def is_storing(self, start: bytes) -> bool:
        """Whether a record whose key starts so is on its way: what is found is then the one before it."""
        return start in self._storing or any(key.startswith(start) for key in self._storing)

    async def forget_seen(self, records: Iterable[LocalRecord], reason: RecordAbsence | None) -> Kept:
        """As ``forget``, but only what is still as it was seen, and is not about to be replaced."""
        seen = [at.key for at in records if self._records.get(at.key) is at and at.key not in self._storing]
        return await self.forget(seen, reason)

    async def forget(self, keys: Iterable[bytes], reason: RecordAbsence | None) -> Kept:
        """Forget records, for a reason that is remembered; None: they are not gone, only not here.

        One that takes the place of one of these meanwhile stays. What is CORRUPT may have any bytes on disk:
        that is forgotten whatever it is, so no put of it may be under way.
        """
        known = [self._records[key] for key in keys if key in self._records]
        if not known:
            return Kept.OK
        is_any = reason is RecordAbsence.CORRUPT
        status = await self._commit([Change(at.key, None, None if is_any else at.entry) for at in known])
        if status is Kept.OK:
            for record in known:
                if self._records.get(record.key) is record:
                    self._lose(record.key, reason)
        return status

    async def expire(self) -> int:
        """Forget records whose time is over; returns how many."""
        now_s = self._clock()
        over: list[bytes] = []
        replaced: list[bytes] = []
        while self._deadlines and self._deadlines[0][0] <= now_s and len(over) < _BATCH_CHANGES:
            _, key = heapq.heappop(self._deadlines)
            record = self._records.get(key)
            if record is not None and record.deadline_s <= now_s:
                # The new record of a put that is under way must not go with the old one.
                (replaced if key in self._storing else over).append(key)
        for key in replaced:
            heapq.heappush(self._deadlines, (now_s, key))
        if over and await self.forget(dict.fromkeys(over), RecordAbsence.EXPIRED) is not Kept.OK:
            for key in over:
                heapq.heappush(self._deadlines, (now_s, key))
            return 0
        self.counters["expired"] += len(over)
        return len(over)

    def _take(self, record: LocalRecord) -> None:
        self._lose(record.key, None)
        tenant = record.tenant
        self._records[record.key] = record
        if not record.head.is_sealed:
            self._clear.add(record.key)
        self._by_tenant.setdefault(tenant, {})[record.key] = record
        self._used[tenant] += record.charge_bytes
        self._gone.pop(record.key, None)
        heapq.heappush(self._deadlines, (record.deadline_s, record.key))
        if len(self._deadlines) > 2 * len(self._records) + 64:
            self._deadlines = [(at.deadline_s, at.key) for at in self._records.values()]
            heapq.heapify(self._deadlines)

    def _lose(self, key: bytes, reason: RecordAbsence | None) -> None:
        record = self._records.pop(key, None)
        if record is None:
            return
        self._clear.discard(key)
        tenant = record.tenant
        self._used[tenant] -= record.charge_bytes
        theirs = self._by_tenant[tenant]
        del theirs[key]
        if not theirs:
            del self._by_tenant[tenant], self._used[tenant]
        if reason is not None:
            self.note_gone(key, reason)

    def note_gone(self, key: bytes, reason: RecordAbsence) -> None:
        """Remember why there is no record under a key; of the oldest such keys it is forgotten."""
        self._gone[key] = reason
        self._gone.move_to_end(key)
        while len(self._gone) > _MAX_GONE:
            self._gone.popitem(last=False)

    # Disk

    async def _commit(self, changes: list[Change]) -> Kept:
        """Commit changes together with those of whoever else waits."""
        if self._open_now is None:
            return Kept.OK
        if self._trouble:
            return Kept.UNAVAILABLE
        future: asyncio.Future[Kept] = asyncio.get_running_loop().create_future()
        self._waiting.append((changes, future))
        if self._committer is None:
            self._committer = asyncio.create_task(self._commit_waiting(), name="records-commit")
        return await future

    async def _commit_waiting(self) -> None:
        try:
            while self._waiting:
                batch = self._next_batch()
                status = await self._run([change for part, _ in batch for change in part])
                for part, future in batch:
                    # A full disk may have room for some of those who asked together.
                    own = await self._run(part) if status is Kept.FULL and len(batch) > 1 else status
                    if not future.done():
                        future.set_result(own)
        finally:
            self._committer = None

    def _next_batch(self) -> list[tuple[list[Change], "asyncio.Future[Kept]"]]:
        batch: list[tuple[list[Change], asyncio.Future[Kept]]] = []
        num_bytes = num_changes = 0
        while self._waiting and num_bytes < _BATCH_BYTES and num_changes < _BATCH_CHANGES:
            changes, future = self._waiting.pop(0)
            batch.append((changes, future))
            num_changes += len(changes)
            num_bytes += sum(0 if at.record is None else at.record.head.stored_bytes for at in changes)
        return batch

    async def _run(self, changes: Sequence[Change]) -> Kept:
        disk = self._disk
        if disk is None or self._trouble:
            return Kept.UNAVAILABLE
        try:
            await self._commits.run(lambda: disk.commit(changes))
        except DiskFull as error:
            self._faults.warn("%s", error)
            return Kept.FULL
        except (DiskFault, Abandoned) as error:
            self._note_fault(f"the disk failed: {error}")
            return Kept.UNAVAILABLE
        except Exception:
            _log.exception("records: %s: a commit died", self._where)
            self._note_fault("a commit died")
            return Kept.UNAVAILABLE
        self.counters["commits"] += 1
        return Kept.OK

    def _note_fault(self, reason: str) -> None:
        self.counters["faults"] += 1
        self._faults.warn("records: %s: not used for now: %s", self._where, reason)
        if not self._trouble and not self._is_closed:
            self._trouble = reason
            self._reopen_at_s, self._pause_s = self._clock() + _REOPEN_S, _REOPEN_S

    async def _open_disk(self) -> bool:
        """Open the environment, anew if there was one, and learn what it holds."""
        open_now, old = self._open_now, self._disk
        assert open_now is not None, "records in memory are always open"
        self._disk = None

        def job() -> tuple[KeptOnDisk, Found]:
            if old is not None:
                old.close(is_clean=False)
            return open_now()

        try:
            # Reads of the old one must have ended.
            await self._reads.run(lambda: None)
            disk, found = await self._commits.run(job)
        except (TierUnavailable, Abandoned) as error:
            self._trouble = str(error)
            self._faults.warn("%s", error)
            self._reopen_at_s = self._clock() + self._pause_s
            self._pause_s = min(2 * self._pause_s, _REOPEN_MAX_S)
            return False
        self._disk = disk
        self._learn(found)
        self._trouble, self._pause_s = "", _REOPEN_S
        _log.info("records: %s: %d records", self._where, len(self._records))
        if self.over_bytes:
            _log.warning(
                "records: %s: they count for %d bytes, over the %d of records_bytes: none is removed, and no"
                " more are taken until they count for less",
                *(self._where, self.used_bytes, self._capacity_bytes),
            )
        return True

    def _opened(self, task: "asyncio.Task[bool]") -> None:
        self._opening = None
        if not task.cancelled() and task.exception() is not None:
            _log.error("records: %s: opening it failed", self._where, exc_info=task.exception())

    def _learn(self, found: Found) -> None:
        """Take in what an environment holds; what was known before keeps its time."""
        known, self._records = self._records, {}
        self._by_tenant.clear()
        self._clear.clear()
        self._used.clear()
        self._deadlines.clear()
        self.counters["corrupt"] += found.num_damaged
        now_s, wall_ms = self._clock(), int(self._wall_s() * 1000)
        for key, head, name in sorted(found.entries, key=lambda entry: entry[1].expires_ms - entry[1].ttl_ms):
            before = known.get(key)
            left_s = min(head.expires_ms - wall_ms, head.ttl_ms) / 1000
            is_same = before is not None and before.head == head
            deadline_s = before.deadline_s if before is not None and is_same else now_s + left_s
            self._take(LocalRecord(key, head, name, deadline_s))

    async def check(self, *, sample_records: int) -> list[str]:
        """Verify the bookkeeping, and that a sample of records can be read; one line per violation."""
        lines: list[str] = []
        for tenant, theirs in self._by_tenant.items():
            if self._used[tenant] != sum(record.charge_bytes for record in theirs.values()):
                lines.append("records: what a tenant's count for does not add up")
        if sum(map(len, self._by_tenant.values())) != len(self._records) or set(self._used) != set(
            self._by_tenant
        ):
            lines.append("records: those of the tenants are not all records")
        if self._trouble:
            return [*lines, f"records: {self._trouble}"]
        for record in list(self._records.values())[:sample_records]:
            if await self.read(record) is None and self._records.get(record.key) is record:
                lines.append("records: one cannot be read")
        return lines

    def stats(self) -> dict[str, object]:
        """Return what there is, ready for JSON."""
        return {
            "records": len(self._records),
            "sealed_records": len(self._records) - len(self._clear),
            "used_bytes": self.used_bytes,
            "over_bytes": self.over_bytes,
            "capacity_bytes": self._capacity_bytes,
            "is_up": not self._trouble,
            "reason": self._trouble,
        }
