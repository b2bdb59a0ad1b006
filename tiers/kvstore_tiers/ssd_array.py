"""SsdArray: several ssd folders, one per disk, as one tier.

Each folder is an ``SsdTier`` with its own slab, index, lock, breaker and write budget, so a disk that fails
takes only its own blocks away. Capacity and write budget are per folder: adding a disk changes no other.

Placing. A block that is there is replaced where it is. A new one goes to the disk of the block before it in
its chain, so that a disk that is lost ends few chains early and leaves the others whole; but not where that
disk has no room, is down, or is fuller than the emptiest by more than a sixteenth of its size. Then, and at
the start of a chain, it goes to the disk with the most free bytes among those that are up. The blocks of a
disk that is down for a while stay filed and cannot be read; those of a folder that was deleted are absent,
and may be stored again on another disk.

Start. It opens if one folder can be opened; the others are named in the log and in ``health``, and tried
again every ``retry_interval_s`` seconds. Of two copies of a block, left by a disk that was down when the
block was stored again, the one that was used last stays; at a start that came late, the other disks' one.
Recency is numbered across all folders, so the order of a scan is that of use.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
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
from kvstore_tiers.ssd import SsdTier
from kvstore_tiers.ssd_copies import headers_by_use
from kvstore_tiers.ssd_placing import Placing

_log = logging.getLogger(__name__)

Write = Callable[[SsdTier, list[int]], Awaitable[None]]


class SsdArray:
    """A Tier over ``disks``, which it opens and closes. They share one name and one ``Numbers``."""

    def __init__(
        self, disks: Sequence[SsdTier], *, name: str = "ssd", retry_interval_s: float = 30.0
    ) -> None:
        assert disks, f"{name}: no folder"
        self._name = name
        self._all = tuple(disks)
        self._retry_interval_s = retry_interval_s
        self._disks: list[SsdTier] = []
        self._failed: dict[SsdTier, str] = {}
        self._retrying: asyncio.Task[None] | None = None
        self._found: list[SsdTier] = []
        self._mourned: set[SsdTier] = set()

    @property
    def name(self) -> str:
        """The tier's name in configuration, metrics and messages."""
        return self._name

    @property
    def medium(self) -> Medium:
        """Local disks."""
        return Medium.SSD

    @property
    def is_shared(self) -> bool:
        """False: the folders are locked."""
        return False

    @property
    def disks(self) -> tuple[SsdTier, ...]:
        """The folders that were opened."""
        return tuple(self._disks)

    @property
    def capacity_bytes(self) -> int:
        """Bytes of the slabs that are there (before it is open, of all of them)."""
        return sum(disk.capacity_bytes for disk in (self._present() if self._disks else self._all))

    @property
    def used_bytes(self) -> int:
        """Bytes of slots in use."""
        return sum(disk.used_bytes for disk in self._present())

    @property
    def folders(self) -> tuple[Path, ...]:
        """The folders that are open."""
        return tuple(folder for disk in self._present() for folder in disk.folders)

    @property
    def index_bytes(self) -> int:
        """Bytes on the disks beside the slabs, at most."""
        return sum(disk.index_bytes for disk in self._all)

    @property
    def counters(self) -> dict[str, int]:
        """Events since open, of all folders together."""
        total: Counter[str] = Counter()
        for disk in self._disks:
            total.update(disk.counters)
        return dict(total)

    @property
    def budget_left_bytes(self) -> int | None:
        """Bytes that may be written now, on all folders together; None without a budget."""
        left = [disk.budget_left_bytes for disk in self._disks]
        return sum(part or 0 for part in left) if any(part is not None for part in left) else None

    def health(self) -> TierHealth:
        """Up while one folder is; the reason names each that is not."""
        healths = [disk.health() for disk in self._disks]
        reasons = [*self._failed.values(), *(health.reason for health in healths if not health.is_up)]
        is_up = any(health.is_up for health in healths)
        return TierHealth(is_up, "; ".join(reasons) or ("" if is_up else "not open"))

    async def open(self) -> None:
        """Open the folders.

        Raises:
            TierUnavailable: none can be opened: the message of the first.
        """
        if self._disks:
            return
        results = await asyncio.gather(*(disk.open() for disk in self._all), return_exceptions=True)
        failures = {
            disk: result for disk, result in zip(self._all, results, strict=True) if result is not None
        }
        self._disks = [disk for disk in self._all if disk not in failures]
        strange = [failure for failure in failures.values() if not isinstance(failure, TierUnavailable)]
        if strange or not self._disks:
            await self.close()
            raise (strange or list(failures.values()))[0]
        self._failed = {disk: str(failure) for disk, failure in failures.items()}
        for reason in self._failed.values():
            _log.error("%s: going on without a folder: %s", self._name, reason)
        await self._drop_duplicates()
        if self._failed:
            self._retrying = asyncio.create_task(self._retry_forever(), name=f"{self._name}-retry")

    async def close(self) -> None:
        """Close every folder. Idempotent."""
        retrying, self._retrying = self._retrying, None
        if retrying is not None:
            retrying.cancel()
            await asyncio.wait([retrying])
        self._disks, self._failed, self._found = [], {}, []
        self._mourned.clear()
        await asyncio.gather(*(disk.close() for disk in self._all))

    async def scan(self) -> Sequence[BlockHeader]:
        """Return the header of every copy, least recently used first."""
        return headers_by_use([disk.copies for disk in self._present()])

    def take_news(self) -> TierNews:
        """Return the copies on folders that came late, those that went with a folder, and those let go of."""
        gone = [disk for disk in self._disks if disk.is_gone and disk not in self._mourned]
        found, self._found = [disk for disk in self._found if not disk.is_gone], []
        num_foreign = sum(disk.take_news().num_foreign for disk in self._disks)
        if not gone and not found:
            return TierNews(num_foreign=num_foreign)
        self._mourned.update(gone)
        lost = headers_by_use([disk.copies for disk in gone])
        return TierNews(
            headers_by_use([disk.copies for disk in found]),
            [header for header in lost if self._holder(header.block.storage_key) is None],
            num_foreign,
        )

    def open_namespace(self, namespace: Namespace) -> None:
        """Need not know: every record carries its layout."""

    async def probe(self, blocks: Sequence[BlockId], *, deadline_s: float) -> Probe:
        """For each block: this tier's name if a folder holds it. Answers from memory."""
        holders = [self._holder(block.storage_key) for block in blocks]
        tiers: list[str | None] = [None] * len(blocks)
        for index, (block, holder) in enumerate(zip(blocks, holders, strict=True)):
            if holder is not None:
                tiers[index] = (await holder.probe([block], deadline_s=deadline_s)).tiers[0]
        return Probe(tiers)

    async def read(self, requests: Sequence[ReadRequest], *, deadline_s: float) -> list[ReadOutcome]:
        """Read copies into the buffers, and verify them; each folder on its own."""
        outcomes = [ReadOutcome(ReadStatus.ABSENT)] * len(requests)
        if not self._disks:
            outcomes = [ReadOutcome(ReadStatus.UNAVAILABLE)] * len(requests)

        async def read_from(disk: SsdTier, indexes: list[int]) -> None:
            found = await disk.read([requests[i] for i in indexes], deadline_s=deadline_s)
            for index, outcome in zip(indexes, found, strict=True):
                outcomes[index] = outcome

        await self._on_each(read_from, [self._holder(request.block.storage_key) for request in requests])
        return outcomes

    async def write(self, requests: Sequence[WriteRequest], *, deadline_s: float) -> list[WriteStatus]:
        """Write copies; OK means durable. A present copy is replaced."""
        statuses = [WriteStatus.UNAVAILABLE] * len(requests)

        async def write_to(disk: SsdTier, indexes: list[int]) -> None:
            written = await disk.write([requests[i] for i in indexes], deadline_s=deadline_s)
            for index, status in zip(indexes, written, strict=True):
                statuses[index] = status
            stored = [requests[i].header.block for i in indexes if statuses[i] is WriteStatus.OK]
            for other in self._disks:
                if other is not disk:
                    await other.drop(stored)

        await self._on_each(write_to, self._places(requests))
        return statuses

    async def drop(self, blocks: Sequence[BlockId]) -> int:
        """Forget copies and give their slots back."""
        return sum(await asyncio.gather(*(disk.drop(blocks) for disk in self._disks)))

    async def touch(self, blocks: Sequence[BlockId]) -> None:
        """Make copies the most recently used; on disk soon."""
        for block in blocks:
            holder = self._holder(block.storage_key)
            if holder is not None:
                await holder.touch([block])

    def has_room(self, length_bytes: int, count: int = 1) -> bool:
        """Return whether ``count`` more copies of that length fit now, on the folders that are up."""
        left = count
        for disk in self._usable():
            left -= disk.room_blocks(length_bytes, left)
            if left <= 0:
                return True
        return False

    def check(self) -> list[str]:
        """Return one line per violated invariant of the slot bookkeeping."""
        return [problem for disk in self._disks for problem in disk.check()]

    def _present(self) -> list[SsdTier]:
        return [disk for disk in self._disks if not disk.is_gone]

    def _usable(self) -> list[SsdTier]:
        # With all of them down nothing is written, and nothing need leave for it.
        return [disk for disk in self._disks if disk.health().is_up] or self._disks

    def _holder(self, name: StorageKey) -> SsdTier | None:
        return next((disk for disk in self._present() if disk.holds(name)), None)

    def _places(self, requests: Sequence[WriteRequest]) -> list[SsdTier | None]:
        """Say for each block where it is written."""
        placing = Placing(self._usable(), self._holder)
        return [placing.place(request.header) for request in requests]

    async def _on_each(self, work: Write, places: Sequence[SsdTier | None]) -> None:
        """Run work once for each disk among the places, with the indexes it has there."""
        indexes: dict[SsdTier, list[int]] = {}
        for index, disk in enumerate(places):
            if disk is not None:
                indexes.setdefault(disk, []).append(index)
        await asyncio.gather(*(work(disk, part) for disk, part in indexes.items()))

    async def _drop_duplicates(self) -> None:
        """Of the copies of a block on several disks keep the one that was used last."""
        for index, disk in enumerate(self._disks):
            for other in self._disks[:index]:
                older: dict[SsdTier, list[BlockId]] = {}
                for name in disk.copies.names & other.copies.names:
                    one, two = disk.copies.get(name), other.copies.get(name)
                    assert one is not None
                    assert two is not None
                    stale = disk if one.record.recency < two.record.recency else other
                    older.setdefault(stale, []).append(one.record.header.block)
                for stale, blocks in older.items():
                    await stale.drop(blocks)

    async def _retry_forever(self) -> None:
        """Try to open the folders that could not be opened, until each is."""
        while self._failed:
            await asyncio.sleep(self._retry_interval_s)
            await asyncio.gather(*(self._retry(disk) for disk in list(self._failed)))

    async def _retry(self, disk: SsdTier) -> None:
        try:
            await disk.open()
        except TierUnavailable as error:
            self._failed[disk] = str(error)
            return
        except Exception:
            _log.exception("%s: opening a folder again failed; it is tried on", self._name)
            return
        others = list(self._disks)
        self._disks.append(disk)
        del self._failed[disk]
        names = {name for other in others for name in disk.copies.names & other.copies.names}
        copies = [copy for name in names if (copy := disk.copies.get(name)) is not None]
        await disk.drop([copy.record.header.block for copy in copies])
        self._found.append(disk)
        _log.info("%s: a folder is in use again: %d copies found", self._name, len(disk.copies))
