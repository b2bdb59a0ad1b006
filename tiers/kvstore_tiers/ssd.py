"""SsdTier: copies on a local disk, payloads in a slab and the index in LMDB.

Order of a write. Payload into a fresh slot, fdatasync, index commit, visible. Writers that come while a
commit runs share the next one. So a kill at any point leaves each block either whole or absent, and what was
answered OK is found after a restart.

Slots. A slot is given back only when the delete or the replacement of its record was tried and no read of it
is under way. Where that commit failed, it is tried again with each later one (see ssd_repairs); if none
succeeds before the end, the stale record loses at the next start to the newer one over the same bytes, or its
checksum fails, or it brings back a whole copy that was dropped. A copy that read back wrong is forgotten and
its slot stays out of use until a restart; so does the slot of a copy whose commit failed, until a later
commit has made sure that no record of it is there. What the disk holds is never more than the slab and the
index, both preallocated.

Budget. With a limit of bytes per day (see write_budget) what is left of it is stored by the commit of each
write, so that no restart renews it.

Recency. A read or a touch makes a copy the most recently used. Uses reach the index in bounded batches: with
other commits, every ``renew_interval_s`` seconds, and all of them at close.

Threads. All state lives on the event loop's thread; disk work runs in ``io_threads`` threads and one more
for commits. A cancelled call goes on to its end, and the caller is told after that.

Faults. After ``open`` a fault of the disk is a status. Three in a row make the tier unavailable for a while
(see breaker). A folder, slab or index that was deleted or replaced does so for good: each commit looks, and a
commit of nothing after a fault and every ``renew_interval_s`` seconds. ``open`` gives up after
``open_timeout_s``; what it opens later is released at once. ``close`` waits ``close_timeout_s`` for an
operation that does not end; then its files stay open and locked until the process ends, and the next start
finds them unclean.
"""

import asyncio
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from kvstore.errors import TierUnavailable
from kvstore.keys import Namespace
from kvstore.tier import (
    BlockHeader,
    BlockId,
    Medium,
    Probe,
    ReadOutcome,
    ReadRequest,
    ReadStatus,
    StorageKey,
    TierHealth,
    TierNews,
    WriteRequest,
    WriteStatus,
)
from kvstore_tiers.breaker import CircuitBreaker
from kvstore_tiers.disk_io import DiskIO
from kvstore_tiers.disk_turns import DiskOutcome, DiskTurns
from kvstore_tiers.jobs import Jobs
from kvstore_tiers.payloads import Payloads
from kvstore_tiers.slab import Slab
from kvstore_tiers.slots import SlotAllocator, padded
from kvstore_tiers.ssd_commits import GroupCommits
from kvstore_tiers.ssd_copies import Copies, Copy, Numbers
from kvstore_tiers.ssd_index import map_size_bytes, max_records
from kvstore_tiers.ssd_opening import Opened, Opening
from kvstore_tiers.ssd_record import Change, IndexRecord
from kvstore_tiers.ssd_repairs import Repairs
from kvstore_tiers.ssd_store import CommitOutcome, SsdStore
from kvstore_tiers.write_budget import WriteBudget

_log = logging.getLogger(__name__)

_STALLED_AFTER_S = 2.0


class SsdTier:
    """A Tier on a folder of a local disk. The folder belongs to one tier of one process at a time.

    ``is_sealed`` says that all copies written to it are encrypted; what earlier runs wrote otherwise is
    removed at ``open``.
    """

    def __init__(
        self,
        folder: Path,
        *,
        capacity_bytes: int,
        io_threads: int = 4,
        write_budget_bytes_per_day: int = 0,
        is_sealed: bool = False,
        check_timeout_s: float = 60.0,
        open_timeout_s: float = 120.0,
        close_timeout_s: float = 3.0,
        renew_interval_s: float = 10.0,
        name: str = "ssd",
        clock: Callable[[], float] = time.monotonic,
        numbers: Numbers | None = None,
        io: DiskIO | None = None,
    ) -> None:
        self._folder = folder
        self._name = name
        self._clock = clock
        self._io = io
        self._is_sealed = is_sealed
        self._check_timeout_s = check_timeout_s
        self._open_timeout_s = open_timeout_s
        self._close_timeout_s = close_timeout_s
        self._budget = WriteBudget(write_budget_bytes_per_day, clock=clock)
        self._slots = SlotAllocator(capacity_bytes, name=name)
        self._breaker = CircuitBreaker(clock=clock)
        self._reads = Jobs(f"{name}-read", io_threads)
        self._writes = Jobs(f"{name}-write", max(1, io_threads // 2))
        self._commits = Jobs(f"{name}-commit", 1)
        self._opening: Opening | None = None
        self._store: SsdStore | None = None
        self._pid = -1
        self._not_open = "not open"
        self._copies = Copies()
        self._numbers = numbers or Numbers()
        self._repairs = Repairs(
            visible=lambda name: self._copies.get(name), free=lambda record: self._slots.free([record.offset])
        )
        self._num_foreign = 0
        self._index_changes = GroupCommits(
            f"{name}: folder {folder}",
            self._commits,
            commit=self._commit_now,
            renewals=lambda limit: self._copies.take_renewals(limit),
            repairs=self._repairs,
            interval_s=renew_interval_s,
        )
        self._turns = DiskTurns(clock)
        self._payloads = Payloads(clock, self._turns, reads=self._reads, writes=self._writes)
        self._counters: Counter[str] = Counter()

    @property
    def name(self) -> str:
        """The tier's name in configuration, metrics and messages."""
        return self._name

    @property
    def medium(self) -> Medium:
        """A local disk."""
        return Medium.SSD

    @property
    def is_shared(self) -> bool:
        """False: the folder is locked."""
        return False

    @property
    def capacity_bytes(self) -> int:
        """Bytes of the slab."""
        return self._slots.capacity_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes of slots in use: visible, being written, and quarantined."""
        return self._slots.used_bytes

    @property
    def folders(self) -> tuple[Path, ...]:
        """Its folder, while it is open."""
        return () if self._store is None or self.is_gone else (self._folder,)

    @property
    def index_bytes(self) -> int:
        """Bytes on disk beside the slab, at most (1/64 of the capacity, and 16 MiB)."""
        return map_size_bytes(self._slots.capacity_bytes)

    @property
    def counters(self) -> dict[str, int]:
        """Events so far: corrupt, quarantined_bytes, written_bytes (slot padding included), io_faults,
        breaker_opened, commits, full, not_admitted.
        """
        return {**self._counters, "commits": self._index_changes.num_commits}

    @property
    def budget_left_bytes(self) -> int | None:
        """Bytes that may be written now; None without a budget."""
        return self._budget.left_bytes if self._budget.is_limited else None

    def health(self) -> TierHealth:
        """Return whether the disk is worth asking now."""
        if self._not_open or self._store is None:
            return TierHealth(is_up=False, reason=self._not_open)
        if self._store.gone:
            reason = f"folder {self._folder}: {self._store.gone}: restart to begin anew"
            return TierHealth(is_up=False, reason=reason)
        oldest_s = self._turns.oldest_s()
        if oldest_s > _STALLED_AFTER_S:
            return TierHealth(is_up=False, reason=f"a disk operation has taken {oldest_s:.0f} s so far")
        if not self._breaker.is_up():
            return TierHealth(is_up=False, reason=self._breaker.reason)
        return TierHealth(is_up=True)

    async def open(self) -> None:
        """Lock the folder, reserve the space, and learn what earlier runs left.

        Raises:
            TierUnavailable: message with the folder, the cause and the remedy.
        """
        if self._store is not None:
            return
        where = f"{self._name}: folder {self._folder}"
        if self._opening is not None and not self._opening.has_ended:
            raise TierUnavailable(
                f"{where}: an earlier attempt to open it has not ended: the disk does not answer: check it"
            )
        for jobs in self._all_jobs:
            jobs.start()
        self._opening = Opening(self._open_store)
        try:
            opened = await self._opening.run(self._commits, timeout_s=self._open_timeout_s)
            if opened is None:
                raise TierUnavailable(
                    f"{where}: has not opened in {self._open_timeout_s:g} s: the disk does not answer, or "
                    "far too slowly: check it, or name another folder"
                )
        except BaseException:
            await self._close_jobs()
            raise
        self._take(opened)
        self._index_changes.start()
        _log.info("%s: folder %s: %d copies found", self._name, self._folder, len(self._copies))

    async def close(self) -> None:
        """Finish what is under way, make it durable, and release the folder. Idempotent."""
        if self._store is None or self._pid != os.getpid():
            return
        self._not_open = "closed"
        await self._index_changes.stop()
        until_s = asyncio.get_running_loop().time() + self._close_timeout_s
        is_done = all([await jobs.drained(until_s) for jobs in self._all_jobs])
        store, self._store = self._store, None
        closing: asyncio.Task[None] | None = None
        if store is not None and is_done:
            renewals = self._copies.take_renewals(self._copies.num_unrenewed)
            changes = [*self._repairs.changes(), *renewals, *self._budget_note()]
            closing = asyncio.create_task(self._commits.run(lambda: store.close(changes)))
            await asyncio.wait([closing], timeout=until_s - asyncio.get_running_loop().time())
            is_done = closing.done()
        if not is_done:
            self._abandon()
        await self._close_jobs()
        if closing is not None:
            await asyncio.wait([closing])
            if is_done:
                closing.result()
        self._copies.clear()

    def _abandon(self) -> None:
        self._turns.abandon()
        for jobs in self._all_jobs:
            jobs.abandon()
        _log.warning(
            "%s: folder %s: an operation has not ended in %g s: left to itself, the folder stays locked",
            *(self._name, self._folder, self._close_timeout_s),
        )

    async def _close_jobs(self) -> None:
        for jobs in self._all_jobs:
            await jobs.close()

    @property
    def is_gone(self) -> bool:
        """Whether its files were deleted or replaced while they were open: its copies are lost."""
        return self._store is not None and bool(self._store.gone)

    @property
    def copies(self) -> Copies:
        """What it holds, for those who look and change nothing."""
        return self._copies

    def holds(self, name: StorageKey) -> bool:
        """Return whether there is a copy under a storage key."""
        return name in self._copies.names

    async def scan(self) -> Sequence[BlockHeader]:
        """Return the header of every copy, least recently used first."""
        return self._copies.headers()

    def take_news(self) -> TierNews:
        """Return how many copies of another format were let go of at the start."""
        num_foreign, self._num_foreign = self._num_foreign, 0
        return TierNews(num_foreign=num_foreign)

    def open_namespace(self, namespace: Namespace) -> None:
        """Need not know: every record carries its layout."""

    async def probe(self, blocks: Sequence[BlockId], *, deadline_s: float) -> Probe:
        """For each block: this tier's name if it holds it. Answers from memory."""
        held = [self._copies.find(block) for block in blocks]
        return Probe([self._name if copy is not None else None for copy in held])

    async def read(self, requests: Sequence[ReadRequest], *, deadline_s: float) -> list[ReadOutcome]:
        """Read copies into the buffers, and verify them."""
        if not self._may_go():
            return [ReadOutcome(ReadStatus.UNAVAILABLE)] * len(requests)
        return await self._reads.outlive(asyncio.ensure_future(self._read(requests, deadline_s)))

    async def write(self, requests: Sequence[WriteRequest], *, deadline_s: float) -> list[WriteStatus]:
        """Write copies; OK means durable. A present copy is replaced."""
        if not self._may_go():
            return [WriteStatus.UNAVAILABLE] * len(requests)
        return await self._writes.outlive(asyncio.ensure_future(self._write(requests, deadline_s)))

    async def drop(self, blocks: Sequence[BlockId]) -> int:
        """Forget copies and give their slots back."""
        if self._store is None or self._pid != os.getpid():
            return 0
        found = [copy for block in blocks if (copy := self._copies.find(block)) is not None]
        if found:
            for copy in found:
                self._copies.hide(copy)
            await self._writes.outlive(asyncio.ensure_future(self._drop(found)))
        return len(found)

    async def touch(self, blocks: Sequence[BlockId]) -> None:
        """Make copies the most recently used; on disk with one of the next commits."""
        for block in blocks:
            copy = self._copies.get(block.storage_key)
            if copy is not None:
                self._copies.note_use(copy, self._numbers.take())

    def has_room(self, length_bytes: int, count: int = 1) -> bool:
        """Return whether ``count`` more copies of that length, and their records, fit now.

        Also while the write budget is used up: room for what will not be written need not be made.
        """
        if self._budget.is_limited and self._budget.left_bytes < padded(length_bytes):
            return True
        return self._fits(length_bytes, count)

    def room_blocks(self, length_bytes: int, limit: int) -> int:
        """Return how many more copies of that length fit now, up to ``limit``."""
        low, high = 0, limit
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.has_room(length_bytes, middle) else (low, middle - 1)
        return low

    def _fits(self, length_bytes: int, count: int) -> bool:
        is_indexable = self._slots.used_slots + count <= max_records(self._slots.capacity_bytes)
        return is_indexable and self._slots.has_room(length_bytes, count)

    def check(self) -> list[str]:
        """Return one line per violated invariant of the slot bookkeeping."""
        return self._slots.check()

    def _open_store(self) -> Opened:
        """Open the files, in a thread that changes nothing of this object."""
        capacity_bytes = self._slots.capacity_bytes
        store, records = SsdStore.open(
            self._folder,
            capacity_bytes=capacity_bytes,
            name=self._name,
            check_timeout_s=self._check_timeout_s,
            is_sealed=self._is_sealed,
            io=self._io,
        )
        slots = SlotAllocator(capacity_bytes, name=self._name)
        slots.restore(records.offsets, records.slot_bytes)
        return Opened(store, Copies(records), slots, records.highest_number, store.budget_left_bytes())

    def _take(self, opened: Opened) -> None:
        self._store, self._copies, self._slots = opened.store, opened.copies, opened.slots
        self._repairs.clear()
        self._num_foreign = opened.store.num_foreign
        self._numbers.learn(opened.highest_number)
        if opened.budget_left_bytes is not None:
            self._budget.restore(opened.budget_left_bytes)
        self._pid, self._not_open = os.getpid(), ""

    def _may_go(self) -> bool:
        return self._pid == os.getpid() and self.health().is_up and self._breaker.allows()

    def _judge(self, outcomes: Iterable[DiskOutcome | CommitOutcome]) -> None:
        """Tell the breaker how a call ended."""
        found: list[str] = []
        was_asked = False
        for outcome in outcomes:
            found += [outcome.fault] * bool(outcome.fault)
            was_asked |= outcome.status not in (ReadStatus.TIMED_OUT, WriteStatus.TIMED_OUT)
        if not found:
            (self._breaker.succeeded if was_asked else self._breaker.abandoned)()
            return
        self._counters["io_faults"] += len(found)
        self._index_changes.soon()
        if self._breaker.failed(found[0]):
            self._counters["breaker_opened"] += 1
            _log.warning("%s: folder %s: not used for now: %s", self._name, self._folder, found[0])

    # Reading

    async def _read(self, requests: Sequence[ReadRequest], deadline_s: float) -> list[ReadOutcome]:
        outcomes = [ReadOutcome(ReadStatus.ABSENT)] * len(requests)
        wanted: list[tuple[int, Copy]] = []
        for index, request in enumerate(requests):
            copy = self._copies.get(request.block.storage_key)
            if copy is None:
                continue
            if not request.wants(copy.record.header):
                outcomes[index] = ReadOutcome(ReadStatus.MISMATCH)
                continue
            assert request.buffer.nbytes >= request.length_bytes, f"{self._name}: the buffer is too short"
            copy.readers += 1
            wanted.append((index, copy))
        try:
            ended = await self._read_copies(requests, wanted, outcomes, deadline_s)
        finally:
            # Whatever happened: a copy that is thought to be read can never be dropped.
            for _, copy in wanted:
                self._end_reading(copy)
        self._judge(ended)
        return outcomes

    async def _read_copies(
        self,
        requests: Sequence[ReadRequest],
        wanted: Sequence[tuple[int, Copy]],
        outcomes: list[ReadOutcome],
        deadline_s: float,
    ) -> list[DiskOutcome]:
        """Read and verify copies, and note in ``outcomes`` how each ended."""
        places = [(requests[index].buffer, copy.record) for index, copy in wanted]
        ended = await self._payloads.read(self._slab, places, deadline_s)
        for (index, copy), outcome in zip(wanted, ended, strict=True):
            assert isinstance(outcome.status, ReadStatus)
            is_ok = outcome.status is ReadStatus.OK
            if is_ok:
                self._copies.note_use(copy, self._numbers.take())
            outcomes[index] = ReadOutcome(
                outcome.status, copy.record.header if is_ok else None, self._name if is_ok else ""
            )
            if outcome.status is ReadStatus.CORRUPT:
                await self._quarantine(copy)
        return ended

    def _end_reading(self, copy: Copy) -> None:
        copy.readers -= 1
        if not copy.readers and copy.idle is not None and not copy.idle.done():
            copy.idle.set_result(None)

    async def _quarantine(self, copy: Copy) -> None:
        """Forget a damaged copy and keep its slot out of use."""
        self._counters["corrupt"] += 1
        if copy.is_damaged:
            return
        copy.is_damaged = True
        self._counters["quarantined_bytes"] += copy.record.slot_bytes
        _log.warning(
            "%s: folder %s: a copy at slab offset %d does not match its checksum, its slot is not used "
            "again before a restart",
            *(self._name, self._folder, copy.record.offset),
        )
        if self._copies.hide(copy):
            await self._delete([copy])

    # Writing

    async def _write(self, requests: Sequence[WriteRequest], deadline_s: float) -> list[WriteStatus]:
        statuses = [WriteStatus.FULL] * len(requests)
        records: list[tuple[int, IndexRecord]] = []
        for index, request in enumerate(requests):
            header = request.header
            assert request.buffer.nbytes >= header.length_bytes, f"{self._name}: the buffer is too short"
            size = padded(header.length_bytes)
            if not self._budget.admit(header.block.storage_key, size):
                statuses[index] = WriteStatus.NOT_ADMITTED
                self._counters["not_admitted"] += 1
                continue
            if not self._fits(header.length_bytes, 1):
                self._budget.give_back(size)
                self._counters["full"] += 1
                continue
            (offset,) = self._slots.allocate(header.length_bytes)
            number = self._numbers.take()
            records.append((index, IndexRecord(header, offset, size, number, number)))
        places = [(requests[index].buffer, record) for index, record in records]
        ended = await self._payloads.write(self._slab, places, deadline_s)
        written: list[tuple[int, IndexRecord]] = []
        for (index, record), outcome in zip(records, ended, strict=True):
            assert isinstance(outcome.status, WriteStatus)
            statuses[index] = outcome.status
            if outcome.status is WriteStatus.OK:
                written.append((index, record))
                self._counters["written_bytes"] += record.slot_bytes
            else:
                self._slots.free([record.offset])
                if outcome.status is WriteStatus.TIMED_OUT:
                    self._budget.give_back(record.slot_bytes)
        committed = await self._publish(written, statuses)
        self._judge([*(outcome for outcome in ended if outcome.status is not WriteStatus.OK), *committed])
        return statuses

    async def _publish(
        self, written: Sequence[tuple[int, IndexRecord]], statuses: list[WriteStatus]
    ) -> list[CommitOutcome]:
        """Commit records of written payloads and make them visible."""
        if not written:
            return []
        changes = [Change.store(record) for _, record in written]
        outcomes = await self._index_changes.commit([*changes, *self._budget_note()])
        replaced: list[Copy] = []
        for (index, record), outcome in zip(written, outcomes, strict=False):
            statuses[index] = outcome.status
            if outcome.status is WriteStatus.UNAVAILABLE:
                self._repairs.note_stored(record)
                continue
            if outcome.status is not WriteStatus.OK:
                self._slots.free([record.offset])
                continue
            old = self._copies.publish(record)
            if old is not None:
                replaced.append(old)
        for copy in replaced:
            await self._give_back(copy)
        return outcomes[: len(written)]

    # Forgetting

    async def _drop(self, copies: Sequence[Copy]) -> None:
        await self._delete(copies)
        for copy in copies:
            await self._give_back(copy)

    async def _delete(self, copies: Sequence[Copy]) -> None:
        """Delete the records of hidden copies; where that fails, soon and with each commit that follows."""
        outcomes = await self._index_changes.commit([Change.delete(copy.record) for copy in copies])
        for copy, outcome in zip(copies, outcomes, strict=True):
            if outcome.status is not WriteStatus.OK:
                self._repairs.note_undeleted(copy.record)
                self._index_changes.soon()

    async def _give_back(self, copy: Copy) -> None:
        """Free the slot of a hidden copy, when the last read of it has ended."""
        if copy.readers:
            copy.idle = asyncio.get_running_loop().create_future()
            await copy.idle
        if not copy.is_damaged:
            self._slots.free([copy.record.offset])

    # Disk work

    @property
    def _all_jobs(self) -> list[Jobs]:
        return [self._reads, self._writes, self._commits]

    @property
    def _slab(self) -> Slab:
        assert self._store is not None, f"{self._name}: not open"
        return self._store.slab

    def _commit_now(self, changes: Sequence[Change]) -> list[CommitOutcome]:
        """Commit, in the thread for that."""
        store = self._store
        assert store is not None, f"{self._name}: not open"
        return self._turns.timed(lambda: store.commit(changes))

    def _budget_note(self) -> list[Change]:
        return [Change.note_budget(self._budget.left_bytes)] if self._budget.is_limited else []
