"""SealedTier: any tier below memory, with every copy in it encrypted under its tenant's key.

Writes. Payloads are encrypted out of their slots into a bounded staging buffer, and written from there: the
inner tier sees ciphertext only, checksums it and knows nothing of keys. Reads. The inner tier reads and
verifies ciphertext in place; it is decrypted there, authenticated, and its plaintext's checksum compared.

What is not served. A copy in the clear or under a key that is not its tenant's is a MISMATCH; one that is not
what was sealed for that place is CORRUPT; one of a tenant that was erased is ABSENT, because of ERASED. From
a tier of our own such copies are dropped, from a shared one only those that no node can use.

Without keys (the master key is not the right one) the tier is down, as ``health`` says: it takes nothing and
serves nothing, and what it holds stays.

Threads. Encryption runs in ``num_threads`` threads. A cancelled call goes on to its end, and the caller is
told after that: nothing touches its buffers any more.
"""

import asyncio
import functools
import mmap
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from typing import Protocol, TypeVar

from kvstore.keys import Namespace, NamespaceDigest
from kvstore.miss import MissReason
from kvstore.tier import (
    BlockHeader,
    BlockId,
    ChangingTier,
    CountingTier,
    Medium,
    Probe,
    ReadOutcome,
    ReadRequest,
    ReadStatus,
    Tier,
    TierHealth,
    TierNews,
    WriteRequest,
    WriteStatus,
)
from kvstore_tiers.jobs import Jobs
from kvstore_tiers.sealing import (
    KEY_ID_BYTES,
    DataKey,
    KeyForgotten,
    open_payload,
    seal_payload,
    zero,
)
from kvstore_tiers.slots import padded

T = TypeVar("T")

_TURN_BYTES = 1 << 20
"""Payload bytes that a thread encrypts or decrypts at a time: a turn costs as much as some 32 KiB."""

_ERASED = ReadOutcome(ReadStatus.ABSENT, reason=MissReason.ERASED)
_FOREIGN = ReadOutcome(ReadStatus.MISMATCH)
_BROKEN = ReadOutcome(ReadStatus.CORRUPT)


class SealKeys(Protocol):
    """Who has the keys. Methods run on the event loop."""

    def health(self) -> TierHealth:
        """Return whether keys can be had at all, and if not, why."""

    async def sealing_key(self, namespace: NamespaceDigest, *, deadline_s: float) -> DataKey | None:
        """Return the key for a namespace's new copies, made if need be; None if there is none in time."""

    async def opening_key(
        self, namespace: NamespaceDigest, key_id: bytes, *, deadline_s: float
    ) -> DataKey | None:
        """Return the key of that id; None if it is not known, or not that of the namespace's tenant."""

    async def refresh(self) -> None:
        """Look again for keys on the disks that are there now."""

    def is_known(self, key_id: bytes) -> bool:
        """Return whether the key of that id can be had at once."""

    def is_erased(self, namespace: NamespaceDigest) -> bool:
        """Return whether the namespace's tenant was erased at some time."""

    def has_key(self, namespace: NamespaceDigest) -> bool:
        """Return whether the namespace's tenant has a key at present."""


class SealedTier:
    """A Tier over ``inner``, which it opens and closes.

    Records in the namespaces ``plain`` pass through as they are: those by which nodes share what is no
    block. ``staging_bytes`` bounds the ciphertext that waits to be written; a longer block has it to itself.
    """

    def __init__(
        self,
        inner: Tier,
        keys: SealKeys,
        *,
        plain: frozenset[NamespaceDigest] = frozenset(),
        num_threads: int = 1,
        staging_bytes: int = 32 << 20,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._inner = inner
        self._keys = keys
        self._plain = plain
        self._staging_bytes = staging_bytes
        self._staging: memoryview | None = None
        self._staging_lock = asyncio.Lock()
        self._clock = clock
        self._jobs = Jobs(f"{inner.name}-seal", num_threads)
        self._unlooked: list[BlockHeader] = []
        self._looking: asyncio.Task[list[BlockHeader]] | None = None
        self._counters = {"sealed": 0, "opened": 0, "broken_seals": 0, "unknown_keys": 0, "erased": 0}

    @property
    def name(self) -> str:
        """The inner tier's name."""
        return self._inner.name

    @property
    def medium(self) -> Medium:
        """What the inner tier is made of."""
        return self._inner.medium

    @property
    def is_shared(self) -> bool:
        """Whether the inner tier is shared."""
        return self._inner.is_shared

    @property
    def capacity_bytes(self) -> int:
        """The inner tier's capacity: encryption takes no space of it."""
        return self._inner.capacity_bytes

    @property
    def used_bytes(self) -> int:
        """The inner tier's bytes in use."""
        return self._inner.used_bytes

    @property
    def inner(self) -> Tier:
        """The tier that holds the ciphertext."""
        return self._inner

    @property
    def counters(self) -> dict[str, int]:
        """Events so far: sealed, opened, broken_seals, unknown_keys, erased; and the inner tier's."""
        inner = self._inner.counters if isinstance(self._inner, CountingTier) else {}
        return {**inner, **self._counters}

    def health(self) -> TierHealth:
        """Down without keys, else as the inner tier says."""
        keys = self._keys.health()
        return self._inner.health() if keys.is_up else keys

    async def open(self) -> None:
        """Open the inner tier. Raises what that raises."""
        self._jobs.start()
        try:
            await self._inner.open()
        except BaseException:
            await self._jobs.close()
            raise

    async def close(self) -> None:
        """Close the inner tier, and finish what is under way. Idempotent."""
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.wait([self._looking])
        await self._inner.close()
        await self._jobs.close()
        self._staging = None

    async def scan(self) -> list[BlockHeader]:
        """Return the copies that can be decrypted, least recently used first; the others are dropped.

        Without keys it returns nothing and drops nothing.
        """
        return await self._usable(await self._inner.scan()) if self._keys.health().is_up else []

    def take_news(self) -> TierNews:
        """Return what came to the inner tier, once it is known which of it can be decrypted, and what went.

        A disk that comes late may bring keys, and erasures, that the others do not know of.
        """
        news = self._inner.take_news() if isinstance(self._inner, ChangingTier) else TierNews()
        self._unlooked += news.found
        if self._unlooked and self._looking is None:
            headers, self._unlooked = self._unlooked, []
            self._looking = asyncio.create_task(self._look_at(headers), name=f"{self.name}-news")
            return replace(news, found=())
        if self._looking is None or not self._looking.done():
            return replace(news, found=())
        looking, self._looking = self._looking, None
        return replace(news, found=looking.result())

    async def _look_at(self, headers: Sequence[BlockHeader]) -> list[BlockHeader]:
        await self._keys.refresh()
        return await self._usable(headers) if self._keys.health().is_up else []

    async def _usable(self, headers: Sequence[BlockHeader]) -> list[BlockHeader]:
        """Return the headers of copies whose key is known, and drop the others."""
        usable: list[BlockHeader] = []
        useless: list[BlockId] = []
        for header in headers:
            if self._keys.is_known(header.seal[:KEY_ID_BYTES]):
                usable.append(header)
            else:
                useless.append(header.block)
        if useless:
            self._counters["unknown_keys"] += len(useless)
            await self._inner.drop(useless)
        return usable

    async def copies_under(self, key_ids: Collection[bytes]) -> list[BlockId]:
        """Return whose copies are encrypted under one of these keys, as far as the tier can list them."""
        headers = await self._inner.scan()
        return [header.block for header in headers if header.seal[:KEY_ID_BYTES] in key_ids]

    def open_namespace(self, namespace: Namespace) -> None:
        """Tell the inner tier."""
        self._inner.open_namespace(namespace)

    async def probe(self, blocks: Sequence[BlockId], *, deadline_s: float) -> Probe:
        """Ask the inner tier, unless nothing it holds could be decrypted."""
        nothing: list[str | None] = [None] * len(blocks)
        if not self._keys.health().is_up:
            return Probe(nothing, MissReason.UNAVAILABLE)
        namespaces = {block.namespace for block in blocks}
        if namespaces and all(self._keys.is_erased(n) and not self._keys.has_key(n) for n in namespaces):
            return Probe(nothing, MissReason.ERASED)
        return await self._inner.probe(blocks, deadline_s=deadline_s)

    async def read(self, requests: Sequence[ReadRequest], *, deadline_s: float) -> list[ReadOutcome]:
        """Read copies into the buffers, decrypted and verified."""
        if all(request.block.namespace in self._plain for request in requests):
            return await self._inner.read(requests, deadline_s=deadline_s)
        if not self._keys.health().is_up:
            return [ReadOutcome(ReadStatus.UNAVAILABLE)] * len(requests)
        outcomes, keys = await self._jobs.outlive(asyncio.ensure_future(self._read(requests, deadline_s)))
        for index, key in keys.items():
            if key.is_forgotten and outcomes[index].status is ReadStatus.OK:
                # Erased at the last moment: what was decrypted must not stay, nor be served.
                zero(requests[index].buffer[: requests[index].length_bytes])
                outcomes[index] = _ERASED
        return outcomes

    async def write(self, requests: Sequence[WriteRequest], *, deadline_s: float) -> list[WriteStatus]:
        """Write copies, encrypted; a present one is replaced."""
        if all(request.header.block.namespace in self._plain for request in requests):
            return await self._inner.write(requests, deadline_s=deadline_s)
        if not self.health().is_up:
            return [WriteStatus.UNAVAILABLE] * len(requests)
        return await self._jobs.outlive(asyncio.ensure_future(self._write(requests, deadline_s)))

    async def drop(self, blocks: Sequence[BlockId]) -> int:
        """Forget copies."""
        return await self._inner.drop(blocks)

    async def touch(self, blocks: Sequence[BlockId]) -> None:
        """Note a use of copies."""
        await self._inner.touch(blocks)

    def has_room(self, length_bytes: int, count: int = 1) -> bool:
        """Return what the inner tier says; True without keys: what is not written needs no room."""
        return not self._keys.health().is_up or self._inner.has_room(length_bytes, count)

    def check(self) -> list[str]:
        """Return one line per violated invariant of the inner tier."""
        found: list[str] = getattr(self._inner, "check", list)()
        return found

    # Reading

    async def _read(
        self, requests: Sequence[ReadRequest], deadline_s: float
    ) -> tuple[list[ReadOutcome], dict[int, DataKey]]:
        """Read a batch and then decrypt it; doing both at once was slower: the interpreter has one lock."""
        sealed = [replace(request, is_sealed=True) for request in requests]
        outcomes = await self._inner.read(sealed, deadline_s=deadline_s)
        calls: list[Callable[[], ReadOutcome]] = []
        keys: dict[int, DataKey] = {}
        for index, (request, outcome) in enumerate(zip(requests, outcomes, strict=True)):
            if outcome.status is not ReadStatus.OK or outcome.header is None:
                continue
            key = await self._opening_key(request, outcome.header, deadline_s)
            if key is None:
                outcomes[index] = self._without_key(request)
            else:
                calls.append(_opening(key, outcome.header, request.buffer, outcome.origin))
                keys[index] = key
        sizes = [requests[index].length_bytes for index in keys]
        opened = await self._run(calls, sizes, deadline_s)
        for index, result in zip(keys, opened, strict=True):
            outcomes[index] = result or ReadOutcome(ReadStatus.TIMED_OUT)
        self._count_opened(opened)
        await self._discard(requests, outcomes)
        return outcomes, keys

    async def _opening_key(
        self, request: ReadRequest, header: BlockHeader, deadline_s: float
    ) -> DataKey | None:
        key_id = header.seal[:KEY_ID_BYTES]
        return await self._keys.opening_key(request.block.namespace, key_id, deadline_s=deadline_s)

    def _without_key(self, request: ReadRequest) -> ReadOutcome:
        if self._keys.is_erased(request.block.namespace):
            self._counters["erased"] += 1
            return _ERASED
        self._counters["unknown_keys"] += 1
        return _FOREIGN

    def _count_opened(self, opened: Sequence[ReadOutcome | None]) -> None:
        for outcome in opened:
            if outcome is not None:
                name = {ReadStatus.OK: "opened", ReadStatus.CORRUPT: "broken_seals"}
                self._counters[name.get(outcome.status, "erased")] += 1

    async def _discard(self, requests: Sequence[ReadRequest], outcomes: Sequence[ReadOutcome]) -> None:
        """Drop what was found useless here."""
        useless = [
            request.block
            for request, outcome in zip(requests, outcomes, strict=True)
            if outcome is _ERASED or outcome is _BROKEN or (outcome is _FOREIGN and not self.is_shared)
        ]
        if useless:
            await self._inner.drop(useless)

    async def _run(
        self, calls: Sequence[Callable[[], T]], sizes: Sequence[int], deadline_s: float
    ) -> list[T | None]:
        """Run calls in threads, several small ones per turn; None for those that time was too short for."""
        cuts = list(_cut(sizes, _TURN_BYTES))

        def turn(start: int, stop: int) -> list[T | None]:
            return [call() if self._clock() < deadline_s else None for call in calls[start:stop]]

        turns = [functools.partial(turn, start, stop) for start, stop in cuts]
        ended = await self._jobs.run_within(turns, deadline_s - self._clock())
        results: list[T | None] = []
        for (start, stop), found in zip(cuts, ended, strict=True):
            results += found or [None] * (stop - start)
        return results

    # Writing

    async def _write(self, requests: Sequence[WriteRequest], deadline_s: float) -> list[WriteStatus]:
        keys: dict[NamespaceDigest, DataKey | None] = {}
        for namespace in {request.header.block.namespace for request in requests}:
            keys[namespace] = await self._keys.sealing_key(namespace, deadline_s=deadline_s)
        statuses = [WriteStatus.UNAVAILABLE] * len(requests)
        wanted = [
            (index, request, key)
            for index, request in enumerate(requests)
            if (key := keys[request.header.block.namespace]) is not None
        ]
        sizes = [padded(request.header.length_bytes) for _, request, _ in wanted]
        for start, stop in _cut(sizes, self._staging_bytes):
            async with self._staging_lock:
                await self._write_group(wanted[start:stop], statuses, deadline_s)
        return statuses

    async def _write_group(
        self,
        group: Sequence[tuple[int, WriteRequest, DataKey]],
        statuses: list[WriteStatus],
        deadline_s: float,
    ) -> None:
        """Encrypt what fits into the staging buffer, and write it from there."""
        targets = self._stage([padded(request.header.length_bytes) for _, request, _ in group])
        calls = [
            _sealing(key, request, target) for (_, request, key), target in zip(group, targets, strict=True)
        ]
        sealed = await self._run(calls, [len(target) for target in targets], deadline_s)
        requests: list[WriteRequest] = []
        places: list[int] = []
        for (index, _, _), result in zip(group, sealed, strict=True):
            if isinstance(result, WriteRequest):
                requests.append(result)
                places.append(index)
            else:
                statuses[index] = result or WriteStatus.TIMED_OUT
        if requests:
            written = await self._inner.write(requests, deadline_s=deadline_s)
            for index, status in zip(places, written, strict=True):
                statuses[index] = status
                self._counters["sealed"] += status is WriteStatus.OK

    def _stage(self, sizes: Sequence[int]) -> list[memoryview]:
        """Return room for payloads of these sizes in the staging buffer, aligned as slots are."""
        total = sum(sizes)
        if self._staging is None or len(self._staging) < total:
            self._staging = memoryview(mmap.mmap(-1, max(total, min(self._staging_bytes, 2 * total))))
        targets: list[memoryview] = []
        position = 0
        for size in sizes:
            targets.append(self._staging[position : position + size])
            position += size
        return targets


def _opening(key: DataKey, header: BlockHeader, buffer: memoryview, origin: str) -> Callable[[], ReadOutcome]:
    """Return the call that decrypts a copy in place."""

    def job() -> ReadOutcome:
        try:
            opened = open_payload(key, header, buffer)
        except KeyForgotten:
            return _ERASED
        return _BROKEN if opened is None else ReadOutcome(ReadStatus.OK, opened, origin)

    return job


def _sealing(
    key: DataKey, request: WriteRequest, target: memoryview
) -> Callable[[], WriteRequest | WriteStatus]:
    """Return the call that encrypts a copy into ``target``, whose padding is zeroed."""

    def job() -> WriteRequest | WriteStatus:
        length = request.header.length_bytes
        try:
            sealed = seal_payload(key, request.header, request.buffer, target)
        except KeyForgotten:
            return WriteStatus.REFUSED
        if sealed is None:
            return WriteStatus.REFUSED
        zero(target[length:])
        return WriteRequest(sealed, target)

    return job


def _cut(sizes: Sequence[int], limit: int) -> Iterator[tuple[int, int]]:
    """Cut items into runs, (start, stop) each, of at most ``limit`` together, or of one item."""
    start, total = 0, 0
    for index, size in enumerate(sizes):
        if index > start and total + size > limit:
            yield start, index
            start, total = index, 0
        total += size
    if start < len(sizes):
        yield start, len(sizes)
