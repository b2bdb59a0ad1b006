"""Fakes for tests of whatever stands on tiers: a clock, a tier in memory, and a tier with scripted faults."""

import asyncio
from collections import deque
from collections.abc import Sequence

import numpy as np

from kvstore.checksum import as_bytes_array, checksum
from kvstore.keys import Namespace
from kvstore.miss import MissReason
from kvstore.tier import (
    ALIGNMENT_BYTES,
    BlockHeader,
    BlockId,
    Medium,
    Probe,
    ReadOutcome,
    ReadRequest,
    ReadStatus,
    Tier,
    TierHealth,
    WriteRequest,
    WriteStatus,
)


class FakeClock:
    """A monotonic clock that moves only when told to: pass the object where a clock is wanted."""

    def __init__(self, now_s: float = 1000.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        """Return the time, in seconds."""
        return self.now_s

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        assert seconds >= 0, "a monotonic clock does not go back"
        self.now_s += seconds


class MemoryTier:
    """A Tier in a dict, with a capacity and the same verification as the real ones.

    ``stored`` maps storage keys to (header, payload) and may be changed by a test, to plant damage.
    """

    def __init__(
        self,
        *,
        capacity_bytes: int = 64 << 20,
        name: str = "memory",
        medium: Medium = Medium.SSD,
        is_shared: bool = False,
    ) -> None:
        self._name = name
        self._medium = medium
        self._is_shared = is_shared
        self._capacity_bytes = capacity_bytes
        self._is_open = False
        self.stored: dict[bytes, tuple[BlockHeader, bytes]] = {}

    @property
    def name(self) -> str:
        """The tier's name."""
        return self._name

    @property
    def medium(self) -> Medium:
        """What it pretends to be made of."""
        return self._medium

    @property
    def is_shared(self) -> bool:
        """Whether it pretends that others change its content."""
        return self._is_shared

    @property
    def capacity_bytes(self) -> int:
        """Bytes it may hold; 0 for a shared one."""
        return 0 if self._is_shared else self._capacity_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes in use, padded to slots; 0 for a shared one."""
        return 0 if self._is_shared else self._held_bytes()

    def health(self) -> TierHealth:
        """Up between ``open`` and ``close``."""
        return TierHealth(self._is_open, "" if self._is_open else "not open")

    async def open(self) -> None:
        """Make it usable; content of an earlier use is still there."""
        self._is_open = True

    async def close(self) -> None:
        """Make it unusable. Idempotent."""
        self._is_open = False

    async def scan(self) -> Sequence[BlockHeader]:
        """Return the headers of all copies, least recently used first; nothing for a shared tier."""
        return [] if self._is_shared else [header for header, _ in self.stored.values()]

    def open_namespace(self, namespace: Namespace) -> None:
        """Need not know."""

    async def probe(self, blocks: Sequence[BlockId], *, deadline_s: float) -> Probe:
        """For each block: this tier's name if it holds it."""
        return Probe([self._name if self._is_open and b.storage_key in self.stored else None for b in blocks])

    async def read(self, requests: Sequence[ReadRequest], *, deadline_s: float) -> list[ReadOutcome]:
        """Read copies, verified."""
        await asyncio.sleep(0)
        return [self._read(request) for request in requests]

    async def write(self, requests: Sequence[WriteRequest], *, deadline_s: float) -> list[WriteStatus]:
        """Write copies; a present one is replaced."""
        await asyncio.sleep(0)
        return [self._write(request) for request in requests]

    async def drop(self, blocks: Sequence[BlockId]) -> int:
        """Forget copies."""
        return sum(self.stored.pop(block.storage_key, None) is not None for block in blocks)

    async def touch(self, blocks: Sequence[BlockId]) -> None:
        """Make copies the most recently used."""
        for block in blocks:
            held = self.stored.pop(block.storage_key, None)
            if held is not None:
                self.stored[block.storage_key] = held

    def has_room(self, length_bytes: int, count: int = 1) -> bool:
        """Return whether ``count`` more copies of that length fit."""
        return self._held_bytes() + count * _padded(length_bytes) <= self._capacity_bytes

    def _held_bytes(self) -> int:
        return sum(_padded(len(data)) for _, data in self.stored.values())

    def _read(self, request: ReadRequest) -> ReadOutcome:
        held = self.stored.get(request.block.storage_key)
        if not self._is_open:
            return ReadOutcome(ReadStatus.UNAVAILABLE)
        if held is None:
            return ReadOutcome(ReadStatus.ABSENT)
        header, data = held
        if not request.wants(header):
            return ReadOutcome(ReadStatus.MISMATCH)
        if len(data) != header.length_bytes or checksum(data) != header.checksum:
            del self.stored[request.block.storage_key]
            return ReadOutcome(ReadStatus.CORRUPT)
        np.copyto(as_bytes_array(request.buffer)[: len(data)], as_bytes_array(data))
        return ReadOutcome(ReadStatus.OK, header, self._name)

    def _write(self, request: WriteRequest) -> WriteStatus:
        if not self._is_open:
            return WriteStatus.UNAVAILABLE
        length = request.header.length_bytes
        if not self.has_room(length):
            return WriteStatus.FULL
        key = request.header.block.storage_key
        if request.only_if_absent and key in self.stored:
            return WriteStatus.REFUSED
        self.stored.pop(key, None)
        self.stored[key] = (request.header, request.buffer[:length].tobytes())
        return WriteStatus.OK


def _padded(length_bytes: int) -> int:
    return -(-length_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


class FaultyTier:
    """Any Tier, with faults of its own on request.

    ``fail_reads``/``fail_writes`` script the coming calls: each answers with that status for every block and
    does not reach the inner tier. ``hold`` stops calls before they do anything until ``let_go``.
    ``is_down`` makes ``health`` report a fault and every call answer UNAVAILABLE.
    """

    def __init__(self, inner: Tier) -> None:
        self.inner = inner
        self.is_down = False
        self.calls: list[str] = []
        self._read_faults: deque[ReadStatus] = deque()
        self._write_faults: deque[WriteStatus] = deque()
        self._gate = asyncio.Event()
        self._gate.set()

    def fail_reads(self, *statuses: ReadStatus) -> None:
        """Let the next reads end like this, one status per call."""
        self._read_faults.extend(statuses)

    def fail_writes(self, *statuses: WriteStatus) -> None:
        """Let the next writes end like this, one status per call."""
        self._write_faults.extend(statuses)

    def hold(self) -> None:
        """Let calls wait until ``let_go``."""
        self._gate.clear()

    def let_go(self) -> None:
        """Let held calls go on."""
        self._gate.set()

    @property
    def name(self) -> str:
        """The inner tier's name."""
        return self.inner.name

    @property
    def medium(self) -> Medium:
        """What the inner tier is made of."""
        return self.inner.medium

    @property
    def is_shared(self) -> bool:
        """Whether the inner tier is shared."""
        return self.inner.is_shared

    @property
    def capacity_bytes(self) -> int:
        """The inner tier's capacity."""
        return self.inner.capacity_bytes

    @property
    def used_bytes(self) -> int:
        """The inner tier's bytes in use."""
        return self.inner.used_bytes

    def health(self) -> TierHealth:
        """Down while ``is_down``, else as the inner tier says."""
        return TierHealth(is_up=False, reason="made to fail") if self.is_down else self.inner.health()

    async def open(self) -> None:
        """Open the inner tier."""
        await self.inner.open()

    async def close(self) -> None:
        """Close the inner tier."""
        await self.inner.close()

    async def scan(self) -> Sequence[BlockHeader]:
        """Scan the inner tier."""
        return await self.inner.scan()

    def open_namespace(self, namespace: Namespace) -> None:
        """Tell the inner tier."""
        self.inner.open_namespace(namespace)

    async def probe(self, blocks: Sequence[BlockId], *, deadline_s: float) -> Probe:
        """Probe the inner tier, or nothing while down."""
        await self._enter("probe")
        if self.is_down:
            return Probe([None] * len(blocks), MissReason.UNAVAILABLE)
        return await self.inner.probe(blocks, deadline_s=deadline_s)

    async def read(self, requests: Sequence[ReadRequest], *, deadline_s: float) -> list[ReadOutcome]:
        """Read, or fail as scripted."""
        await self._enter("read")
        if self.is_down:
            return [ReadOutcome(ReadStatus.UNAVAILABLE)] * len(requests)
        if self._read_faults:
            return [ReadOutcome(self._read_faults.popleft())] * len(requests)
        return await self.inner.read(requests, deadline_s=deadline_s)

    async def write(self, requests: Sequence[WriteRequest], *, deadline_s: float) -> list[WriteStatus]:
        """Write, or fail as scripted."""
        await self._enter("write")
        if self.is_down:
            return [WriteStatus.UNAVAILABLE] * len(requests)
        if self._write_faults:
            return [self._write_faults.popleft()] * len(requests)
        return await self.inner.write(requests, deadline_s=deadline_s)

    async def drop(self, blocks: Sequence[BlockId]) -> int:
        """Drop from the inner tier, unless down."""
        await self._enter("drop")
        return 0 if self.is_down else await self.inner.drop(blocks)

    async def touch(self, blocks: Sequence[BlockId]) -> None:
        """Touch in the inner tier, unless down."""
        if not self.is_down:
            await self.inner.touch(blocks)

    def has_room(self, length_bytes: int, count: int = 1) -> bool:
        """Return what the inner tier says."""
        return self.inner.has_room(length_bytes, count)

    async def _enter(self, call: str) -> None:
        self.calls.append(call)
        await self._gate.wait()
