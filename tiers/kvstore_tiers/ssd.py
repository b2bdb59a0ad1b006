"""SsdTier: copies on a local disk, payloads in a slab and the index in LMDB.

Order of a write. Payload into a fresh slot, fdatasync, index commit, visible. Writers that come while a
commit runs share the next one. So a kill at any point leaves each block either whole or absent, and what was
answered OK is found after a restart.

Slots. A slot is given back only when no index record on disk names it (the delete or the replacement is
committed) and no read of it is under way. A copy that read back wrong is forgotten and its slot stays out of
use until a restart. What the disk holds is never more than the slab and the index, both preallocated.

Threads. All state lives on the event loop's thread; disk work runs in ``io_threads`` threads and one more
for commits. A cancelled call goes on to its end, and the caller is told after that.

Faults. After ``open`` a fault of the disk is a status. Three in a row make the tier unavailable for a while
(see breaker); a deleted folder does so for good.
"""

import asyncio
import errno
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from kvstore.checksum import checksum
from kvstore.errors import CorruptBlock
from kvstore.keys import Namespace
from kvstore.tier import (
    BlockHeader,
    BlockId,
    Medium,
    Probe,
    ReadOutcome,
    ReadRequest,
    ReadStatus,
    TierHealth,
    WriteRequest,
    WriteStatus,
)
from kvstore_tiers.breaker import CircuitBreaker
from kvstore_tiers.jobs import Jobs
from kvstore_tiers.slab import Slab
from kvstore_tiers.slots import SlotAllocator
from kvstore_tiers.ssd_index import Change, IndexRecord, map_size_bytes, max_records
from kvstore_tiers.ssd_store import CommitOutcome, SsdStore, garbage_collection_paused

_log = logging.getLogger(__name__)

_JOB_BYTES = 4 << 20
_RENEWALS_PER_COMMIT = 256
_STALLED_AFTER_S = 2.0


@dataclass(eq=False, slots=True)
class _Copy:
    """One copy. ``idle`` is set for a hidden copy that is still being read; a damaged one keeps its slot."""

    record: IndexRecord
    readers: int = 0
    is_damaged: bool = False
    idle: asyncio.Future[None] | None = None


@dataclass(frozen=True, slots=True)
class _DiskOutcome:
    """How one payload read or write ended; ``fault`` names what failed, for people."""

    status: ReadStatus | WriteStatus
    fault: str = ""


class SsdTier:
    """A Tier on a folder of a local disk. The folder belongs to one tier of one process at a time."""

    def __init__(
        self,
        folder: Path,
        *,
        capacity_bytes: int,
        io_threads: int = 4,
        check_timeout_s: float = 60.0,
        name: str = "ssd",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folder = folder
        self._name = name
        self._clock = clock
        self._check_timeout_s = check_timeout_s
        self._slots = SlotAllocator(capacity_bytes, name=name)
        self._breaker = CircuitBreaker(clock=clock)
        self._reads = Jobs(f"{name}-read", io_threads)
        self._writes = Jobs(f"{name}-write", max(1, io_threads // 2))
        self._commits = Jobs(f"{name}-commit", 1)
        self._store: SsdStore | None = None
        self._pid = -1
        self._down_for_good = "not open"
        self._copies: dict[bytes, _Copy] = {}
        self._unrenewed: dict[bytes, None] = {}
        self._next_number = 1
        self._waiting: list[tuple[list[Change], asyncio.Future[list[CommitOutcome]]]] = []
        self._committer: asyncio.Task[None] | None = None
        self._started_s: dict[object, float] = {}
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
    def index_bytes(self) -> int:
        """Bytes on disk beside the slab, at most (1/64 of the capacity, and 16 MiB)."""
        return map_size_bytes(self._slots.capacity_bytes)

    @property
    def counters(self) -> dict[str, int]:
        """Events since open: corrupt, quarantined_bytes, io_faults, commits, full."""
        return dict(self._counters)

    def health(self) -> TierHealth:
        """Return whether the disk is worth asking now."""
        if self._down_for_good:
            return TierHealth(is_up=False, reason=self._down_for_good)
        oldest_s = min(list(self._started_s.values()), default=None)
        if oldest_s is not None and self._clock() - oldest_s > _STALLED_AFTER_S:
            return TierHealth(
                is_up=False, reason=f"a disk operation has taken {self._clock() - oldest_s:.0f} s so far"
            )
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
        for jobs in self._all_jobs:
            jobs.start()
        try:
            self._store = await self._commits.run(self._open_store)
        except BaseException:
            await self._close_jobs(self._all_jobs)
            raise
        self._pid, self._down_for_good = os.getpid(), ""
        _log.info("%s: folder %s: %d copies found", self._name, self._folder, len(self._copies))

    async def close(self) -> None:
        """Finish what is under way, make it durable, and release the folder. Idempotent."""
        if self._store is None or self._pid != os.getpid():
            return
        self._down_for_good = "closed"
        await self._close_jobs([self._reads, self._writes])
        store, self._store = self._store, None
        if store is not None:
            renewals = self._take_renewals(len(self._unrenewed))
            await self._commits.run(lambda: store.close(renewals))
        await self._commits.close()
        self._copies.clear()

    async def scan(self) -> list[BlockHeader]:
        """Return the header of every copy, least recently used first."""
        return [copy.record.header for copy in self._copies.values()]

    def open_namespace(self, namespace: Namespace) -> None:
        """Need not know: every record carries its layout."""

    async def probe(self, blocks: Sequence[BlockId], *, deadline_s: float) -> Probe:
        """For each block: this tier's name if it holds it. Answers from memory."""
        return Probe([self._name if self._find(block) is not None else None for block in blocks])

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

    async def drop(self, blocks: Sequence[BlockId]) -> None:
        """Forget copies and give their slots back."""
        if self._store is None or self._pid != os.getpid():
            return
        found = [copy for block in blocks if (copy := self._find(block)) is not None]
        if found:
            for copy in found:
                self._hide(copy)
            await self._writes.outlive(asyncio.ensure_future(self._drop(found)))

    async def touch(self, blocks: Sequence[BlockId]) -> None:
        """Make copies the most recently used; on disk with one of the next commits."""
        for block in blocks:
            key = block.storage_key
            copy = self._copies.pop(key, None)
            if copy is not None:
                copy.record = replace(copy.record, recency=self._number())
                self._copies[key] = copy
                self._unrenewed[key] = None

    def has_room(self, length_bytes: int, count: int = 1) -> bool:
        """Return whether ``count`` more copies of that length, and their records, fit now."""
        is_indexable = self._slots.used_slots + count <= max_records(self._slots.capacity_bytes)
        return is_indexable and self._slots.has_room(length_bytes, count)

    def check(self) -> list[str]:
        """Return one line per violated invariant of the slot bookkeeping."""
        return self._slots.check()

    @garbage_collection_paused()
    def _open_store(self) -> SsdStore:
        store, records = SsdStore.open(
            self._folder,
            capacity_bytes=self._slots.capacity_bytes,
            name=self._name,
            check_timeout_s=self._check_timeout_s,
        )
        self._slots = SlotAllocator(self._slots.capacity_bytes, name=self._name)
        self._slots.restore((record.offset, record.slot_bytes) for record in records)
        self._copies = {record.header.block.storage_key: _Copy(record) for record in records}
        self._next_number = 1 + max((max(r.recency, r.generation) for r in records), default=0)
        return store

    def _number(self) -> int:
        self._next_number += 1
        return self._next_number

    def _find(self, block: BlockId) -> _Copy | None:
        copy = self._copies.get(block.storage_key)
        return copy if copy is not None and copy.record.header.block == block else None

    def _may_go(self) -> bool:
        return self._pid == os.getpid() and self.health().is_up and self._breaker.allows()

    def _judge(self, outcomes: Iterable[_DiskOutcome | CommitOutcome]) -> None:
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
        if self._breaker.failed(found[0]):
            _log.warning("%s: folder %s: not used for now: %s", self._name, self._folder, found[0])
        if self._store is not None and not self._store.is_present() and not self._down_for_good:
            self._down_for_good = f"folder {self._folder} was deleted: restart to begin anew"
            _log.error("%s: %s", self._name, self._down_for_good)

    # Reading

    async def _read(self, requests: Sequence[ReadRequest], deadline_s: float) -> list[ReadOutcome]:
        outcomes = [ReadOutcome(ReadStatus.ABSENT)] * len(requests)
        wanted: list[tuple[int, _Copy]] = []
        for index, request in enumerate(requests):
            copy = self._copies.get(request.block.storage_key)
            if copy is None:
                continue
            if not _agree(request, copy.record.header):
                outcomes[index] = ReadOutcome(ReadStatus.MISMATCH)
                continue
            assert request.buffer.nbytes >= request.length_bytes, f"{self._name}: the buffer is too short"
            copy.readers += 1
            wanted.append((index, copy))
        calls = [
            (copy.record.slot_bytes, self._reading(requests[index].buffer, copy.record, deadline_s))
            for index, copy in wanted
        ]
        ended = [
            outcome or _DiskOutcome(ReadStatus.TIMED_OUT)
            for outcome in await self._on_disk(self._reads, deadline_s, calls)
        ]
        for (index, copy), outcome in zip(wanted, ended, strict=True):
            assert isinstance(outcome.status, ReadStatus)
            is_ok = outcome.status is ReadStatus.OK
            outcomes[index] = ReadOutcome(
                outcome.status, copy.record.header if is_ok else None, self._name if is_ok else ""
            )
            if outcome.status is ReadStatus.CORRUPT:
                await self._quarantine(copy)
            self._end_reading(copy)
        self._judge(ended)
        return outcomes

    def _reading(
        self, buffer: memoryview, record: IndexRecord, deadline_s: float
    ) -> Callable[[], _DiskOutcome]:
        slab = self._slab

        def job() -> _DiskOutcome:
            if self._clock() >= deadline_s:
                return _DiskOutcome(ReadStatus.TIMED_OUT)
            length = record.header.length_bytes
            try:
                slab.read(record.offset, buffer, length)
            except CorruptBlock:
                return _DiskOutcome(ReadStatus.CORRUPT)
            except OSError as error:
                return _DiskOutcome(ReadStatus.UNAVAILABLE, f"reading failed: {error.strerror}")
            is_sound = checksum(buffer[:length]) == record.header.checksum
            return _DiskOutcome(ReadStatus.OK if is_sound else ReadStatus.CORRUPT)

        return job

    def _end_reading(self, copy: _Copy) -> None:
        copy.readers -= 1
        if not copy.readers and copy.idle is not None and not copy.idle.done():
            copy.idle.set_result(None)

    async def _quarantine(self, copy: _Copy) -> None:
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
        if self._hide(copy):
            await self._commit([Change.delete(copy.record)])

    # Writing

    async def _write(self, requests: Sequence[WriteRequest], deadline_s: float) -> list[WriteStatus]:
        statuses = [WriteStatus.FULL] * len(requests)
        records: list[tuple[int, IndexRecord]] = []
        for index, request in enumerate(requests):
            header = request.header
            assert request.buffer.nbytes >= header.length_bytes, f"{self._name}: the buffer is too short"
            if not self.has_room(header.length_bytes):
                self._counters["full"] += 1
                continue
            (offset,) = self._slots.allocate(header.length_bytes)
            size = self._slots.slot_bytes(offset)
            number = self._number()
            records.append((index, IndexRecord(header, offset, size, number, number)))
        calls = [
            (record.slot_bytes, self._writing(requests[index].buffer, record, deadline_s))
            for index, record in records
        ]
        ended = [
            outcome or _DiskOutcome(WriteStatus.TIMED_OUT)
            for outcome in await self._on_disk(self._writes, deadline_s, calls)
        ]
        written: list[tuple[int, IndexRecord]] = []
        for (index, record), outcome in zip(records, ended, strict=True):
            assert isinstance(outcome.status, WriteStatus)
            statuses[index] = outcome.status
            if outcome.status is WriteStatus.OK:
                written.append((index, record))
            else:
                self._slots.free([record.offset])
        committed = await self._publish(written, statuses)
        self._judge([*(outcome for outcome in ended if outcome.status is not WriteStatus.OK), *committed])
        return statuses

    def _writing(
        self, buffer: memoryview, record: IndexRecord, deadline_s: float
    ) -> Callable[[], _DiskOutcome]:
        slab = self._slab

        def job() -> _DiskOutcome:
            if self._clock() >= deadline_s:
                return _DiskOutcome(WriteStatus.TIMED_OUT)
            try:
                slab.write(record.offset, buffer, record.header.length_bytes)
            except OSError as error:
                if error.errno in (errno.ENOSPC, errno.EDQUOT):
                    return _DiskOutcome(WriteStatus.FULL)
                return _DiskOutcome(WriteStatus.UNAVAILABLE, f"writing failed: {error.strerror}")
            return _DiskOutcome(WriteStatus.OK)

        return job

    async def _publish(
        self, written: Sequence[tuple[int, IndexRecord]], statuses: list[WriteStatus]
    ) -> list[CommitOutcome]:
        """Commit records of written payloads and make them visible."""
        if not written:
            return []
        outcomes = await self._commit([Change.store(record) for _, record in written])
        replaced: list[_Copy] = []
        for (index, record), outcome in zip(written, outcomes, strict=True):
            statuses[index] = outcome.status
            if outcome.status is not WriteStatus.OK:
                self._slots.free([record.offset])
                continue
            key = record.header.block.storage_key
            old = self._copies.pop(key, None)
            self._unrenewed.pop(key, None)
            self._copies[key] = _Copy(record)
            if old is not None:
                replaced.append(old)
        for copy in replaced:
            await self._give_back(copy)
        return outcomes

    # Forgetting

    def _hide(self, copy: _Copy) -> bool:
        """Make a copy invisible; False if it was hidden or replaced before."""
        key = copy.record.header.block.storage_key
        if self._copies.get(key) is not copy:
            return False
        del self._copies[key]
        self._unrenewed.pop(key, None)
        return True

    async def _drop(self, copies: Sequence[_Copy]) -> None:
        await self._commit([Change.delete(copy.record) for copy in copies])
        for copy in copies:
            await self._give_back(copy)

    async def _give_back(self, copy: _Copy) -> None:
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

    async def _close_jobs(self, pools: Sequence[Jobs]) -> None:
        for jobs in pools:
            await jobs.close()

    @property
    def _slab(self) -> Slab:
        assert self._store is not None, f"{self._name}: not open"
        return self._store.slab

    async def _on_disk(
        self, jobs: Jobs, deadline_s: float, sized: Sequence[tuple[int, Callable[[], _DiskOutcome]]]
    ) -> list[_DiskOutcome | None]:
        """Run calls in threads, several small ones per turn, in order; None where time ran out before."""
        turns: list[list[Callable[[], _DiskOutcome]]] = []
        room = 0
        for size, call in sized:
            if not turns or room < size:
                turns.append([])
                room = _JOB_BYTES
            turns[-1].append(call)
            room -= size
        patience_s = deadline_s - self._clock()
        results = await jobs.run_within([self._turn(calls) for calls in turns], patience_s)
        outcomes: list[_DiskOutcome | None] = []
        for calls, result in zip(turns, results, strict=True):
            outcomes += result if result is not None else [None] * len(calls)
        return outcomes

    def _turn(self, jobs: Sequence[Callable[[], _DiskOutcome]]) -> Callable[[], list[_DiskOutcome]]:
        def turn() -> list[_DiskOutcome]:
            token = object()
            outcomes = []
            for job in jobs:
                self._started_s[token] = self._clock()
                outcomes.append(job())
            self._started_s.pop(token, None)
            return outcomes

        return turn

    async def _commit(self, changes: list[Change]) -> list[CommitOutcome]:
        """Commit changes together with those of whoever else waits."""
        future: asyncio.Future[list[CommitOutcome]] = asyncio.get_running_loop().create_future()
        self._waiting.append((changes, future))
        if self._committer is None:
            self._committer = asyncio.ensure_future(self._commit_waiting())
        return await future

    async def _commit_waiting(self) -> None:
        while self._waiting:
            batch, self._waiting = self._waiting, []
            changes = [change for part, _ in batch for change in part]
            renewals = self._take_renewals(_RENEWALS_PER_COMMIT)
            try:
                outcomes = await self._commits.run(self._committing([*changes, *renewals]))
            except Exception as error:
                _log.exception("%s: folder %s: a commit died", self._name, self._folder)
                outcomes = [CommitOutcome(WriteStatus.UNAVAILABLE, f"a commit died: {error}")] * len(changes)
            self._counters["commits"] += 1
            position = 0
            for part, future in batch:
                if not future.done():
                    future.set_result(outcomes[position : position + len(part)])
                position += len(part)
        self._committer = None

    def _committing(self, changes: Sequence[Change]) -> Callable[[], list[CommitOutcome]]:
        store = self._store
        assert store is not None, f"{self._name}: not open"

        def job() -> list[CommitOutcome]:
            self._started_s[store] = self._clock()
            outcomes = store.commit(changes)
            self._started_s.pop(store, None)
            return outcomes

        return job

    def _take_renewals(self, limit: int) -> list[Change]:
        keys = list(self._unrenewed)[:limit]
        for key in keys:
            del self._unrenewed[key]
        return [Change.renew(self._copies[key].record) for key in keys]


def _agree(request: ReadRequest, header: BlockHeader) -> bool:
    """Whether a stored header is exactly what is asked for."""
    return (
        header.block == request.block
        and header.layout == request.layout
        and header.length_bytes == request.length_bytes
    )
