"""StoreTier: a sidecar's whole store, seen as one lower tier of an engine's manager."""

import asyncio
import os
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import TypeVar

from kvstore.async_client import AsyncKVStore
from kvstore.errors import KVStoreError
from kvstore.hints import Hints
from kvstore.keys import BlockKey, Namespace, NamespaceDigest, PrefixChain
from kvstore.layout import KVLayout, Part
from kvstore.miss import MissReason
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
from kvstore.wire import MAX_KEYS

_R = TypeVar("_R")
_READ_STATUS = {
    MissReason.CORRUPT: ReadStatus.CORRUPT,
    MissReason.TIMED_OUT: ReadStatus.TIMED_OUT,
    MissReason.NO_ROOM: ReadStatus.UNAVAILABLE,
    MissReason.BREAKER_OPEN: ReadStatus.UNAVAILABLE,
    MissReason.UNAVAILABLE: ReadStatus.UNAVAILABLE,
}
"""What a shortened fetch means for the block it stopped at; any other reason: it is not stored."""


class StoreTier:
    """A Tier over an AsyncKVStore.

    Shared: other engines and the sidecar itself change what it holds. Opens also when no server is there
    and heals by itself. Layouts of namespaces are told to it by ``open_namespace``, since the requests of a
    tier carry only their fingerprints; blocks of a namespace it was not told of are absent.
    """

    def __init__(
        self,
        address: str | os.PathLike[str],
        *,
        name: str = "store",
        drop_timeout_s: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._address = address
        self._name = name
        self._drop_timeout_s = drop_timeout_s
        self._clock = clock
        self._namespaces: dict[NamespaceDigest, Namespace] = {}
        self._client: AsyncKVStore | None = None
        self._opened: set[NamespaceDigest] = set()

    @property
    def name(self) -> str:
        """The tier's name in configuration, metrics and messages."""
        return self._name

    @property
    def medium(self) -> Medium:
        """A store of its own."""
        return Medium.STORE

    @property
    def is_shared(self) -> bool:
        """Others change its content."""
        return True

    @property
    def sums_payloads(self) -> bool:
        """Its client sums what it copies into the store's memory."""
        return True

    @property
    def capacity_bytes(self) -> int:
        """It bounds itself."""
        return 0

    @property
    def used_bytes(self) -> int:
        """It accounts for itself."""
        return 0

    def open_namespace(self, namespace: Namespace) -> None:
        """Make a namespace's blocks storable; before or after ``open``."""
        self._namespaces[namespace.digest] = namespace

    def health(self) -> TierHealth:
        """Return whether the server answered when it was last asked, or that is long enough ago."""
        if self._client is None:
            return TierHealth(is_up=False, reason="not open")
        is_up = self._client.is_reachable
        return TierHealth(is_up, "" if is_up else f"no server answers at {self._address}")

    async def open(self) -> None:
        """Make the tier usable; the server need not be there.

        Raises:
            InvalidConfig: the address is malformed or too long.
        """
        if self._client is None:
            self._client = await AsyncKVStore.connect(self._address)
            self._opened.clear()

    async def close(self) -> None:
        """Close the connection. Idempotent."""
        client, self._client = self._client, None
        if client is not None:
            await client.close()

    async def scan(self) -> list[BlockHeader]:
        """Return nothing: what a shared tier holds is asked by ``probe``."""
        return []

    async def probe(self, blocks: Sequence[BlockId], *, deadline_s: float) -> Probe:
        """For each block the name of the store's own tier that holds it, up to the first that is absent."""
        names: list[str | None] = []
        reason: MissReason | None = None
        for chain, group in self._chains(blocks):
            client = await self._client_of(chain.namespace, deadline_s)
            if client is None:
                reason = MissReason.UNAVAILABLE
                break
            found = await client.match(chain, part=group[0].part, timeout_s=self._patience_s(deadline_s))
            names.extend(found.tiers)
            if found.blocks < len(group):
                reason = found.reason
                break
        num_known = None if len(names) == len(blocks) else len(names) + 1
        return Probe(names + [None] * (len(blocks) - len(names)), reason, num_known=num_known)

    async def read(self, requests: Sequence[ReadRequest], *, deadline_s: float) -> list[ReadOutcome]:
        """Copy blocks into the buffers, each verified; behind the first miss of a chain nothing is read."""
        outcomes: list[ReadOutcome] = []
        for run in _runs(requests, _is_read_next):
            outcomes += await self._read_run(run, deadline_s)
        return outcomes

    async def write(self, requests: Sequence[WriteRequest], *, deadline_s: float) -> list[WriteStatus]:
        """Put blocks; those the store has already count as written."""
        statuses: list[WriteStatus] = []
        for run in _runs(requests, _is_written_next):
            statuses += await self._write_run(run, deadline_s)
        return statuses

    async def drop(self, blocks: Sequence[BlockId]) -> int:
        """Ask the store to forget its copies. Without a server nothing is dropped."""
        num_dropped = 0
        for chain, group in self._chains(blocks):
            client = await self._client_of(chain.namespace, self._clock() + self._drop_timeout_s)
            if client is None:
                break
            try:
                part = group[0].part
                num_dropped += await client.drop(chain, part=part, timeout_s=self._drop_timeout_s)
            except KVStoreError:
                break
        return num_dropped

    async def touch(self, blocks: Sequence[BlockId]) -> None:
        """Do nothing: matching and fetching are uses that the store notes itself."""

    async def note_hints(self, chain: PrefixChain, hints: Hints, *, part: Part | None = None) -> bool:
        """Pass hints on to the store; False if it did not hear them."""
        client = await self._client_of(chain.namespace, self._clock() + self._drop_timeout_s)
        return client is not None and await client.hint(chain, hints, part=part)

    def has_room(self, length_bytes: int, count: int = 1) -> bool:
        """Return True: the store makes room itself, or refuses a write."""
        return True

    async def _read_run(self, batch: Sequence[ReadRequest], deadline_s: float) -> list[ReadOutcome]:
        first = batch[0]
        layout = self._layout(first.block.namespace)
        if self._client is not None and (layout is None or any(not _fits(layout, at) for at in batch)):
            return [ReadOutcome(ReadStatus.MISMATCH)] * len(batch)
        client = await self._client_of(first.block.namespace, deadline_s)
        if client is None or layout is None:
            return [ReadOutcome(ReadStatus.UNAVAILABLE)] * len(batch)
        chain = PrefixChain(
            first.block.namespace,
            tuple(request.block.key for request in batch),
            layout.block_tokens,
            first.depth,
            None if first.depth == 0 else first.parent,
        )
        buffers = [request.buffer[: request.length_bytes] for request in batch]
        result = await client.fetch_into(
            chain, buffers, part=batch[0].block.part, timeout_s=self._patience_s(deadline_s)
        )
        outcomes = [
            ReadOutcome(ReadStatus.OK, _header(chain, index, request, checksum), origin)
            for index, (request, checksum, origin) in enumerate(
                zip(batch, result.checksums, result.origins, strict=False)
            )
        ]
        if result.blocks < len(batch) and result.reason is not None:
            status = _READ_STATUS.get(result.reason, ReadStatus.ABSENT)
            outcomes.append(ReadOutcome(status, reason=result.reason))
        # Blocks behind a miss were not looked at, so nothing is said about them.
        return outcomes + [ReadOutcome(ReadStatus.UNAVAILABLE)] * (len(batch) - len(outcomes))

    async def _write_run(self, run: Sequence[WriteRequest], deadline_s: float) -> list[WriteStatus]:
        first = run[0].header
        layout = self._layout(first.block.namespace)
        if self._client is not None and (
            layout is None or any(not _fits_header(layout, at.header) for at in run)
        ):
            return [WriteStatus.REFUSED] * len(run)
        client = await self._client_of(first.block.namespace, deadline_s)
        if client is None or layout is None:
            return [WriteStatus.UNAVAILABLE] * len(run)
        chain = PrefixChain(
            first.block.namespace,
            tuple(request.header.block.key for request in run),
            layout.block_tokens,
            first.depth,
            None if first.depth == 0 else first.parent,
        )
        result = await client.put(
            chain,
            [request.buffer[: request.header.length_bytes] for request in run],
            part=first.block.part,
            timeout_s=self._patience_s(deadline_s),
            checksums=[request.header.checksum for request in run] if run[0].is_summed else None,
        )
        doubtful = set(result.doubtful)
        if len(doubtful) > result.dropped:
            # Somebody else may have stored them meanwhile; what is matched is stored.
            found = await client.match(chain, part=first.block.part, timeout_s=self._patience_s(deadline_s))
            doubtful.difference_update(range(found.blocks))
        why = self._why_dropped(deadline_s)
        return [why if index in doubtful else WriteStatus.OK for index in range(len(run))]

    async def _client_of(self, namespace: NamespaceDigest, deadline_s: float) -> AsyncKVStore | None:
        """Return the client, which knows the namespace then.

        None if the tier is not open or was not told of the namespace; over HTTP also if no server says by
        the deadline that its blocks go by these names there.
        """
        client, known = self._client, self._namespaces.get(namespace)
        if client is None or known is None:
            return None
        if namespace not in self._opened:
            try:
                async with asyncio.timeout(self._patience_s(deadline_s)):
                    opened = await client.open_namespace(known)
            except (KVStoreError, TimeoutError):
                return None
            if opened.digest != namespace:
                return None
            self._opened.add(namespace)
        return client

    def _why_dropped(self, deadline_s: float) -> WriteStatus:
        if self._client is None or not self._client.is_reachable:
            return WriteStatus.UNAVAILABLE
        return WriteStatus.TIMED_OUT if self._clock() >= deadline_s else WriteStatus.FULL

    def _chains(self, blocks: Sequence[BlockId]) -> Iterator[tuple[PrefixChain, list[BlockId]]]:
        """Group consecutive blocks of one namespace and part into chains to look up.

        A lookup needs no parents, so each chain is given as if it began its sequence.
        """
        for (namespace, _), members in groupby(blocks, key=lambda block: (block.namespace, block.part)):
            layout = self._layout(namespace)
            tokens = 1 if layout is None else layout.block_tokens
            whole = list(members)
            for start in range(0, len(whole), MAX_KEYS):
                group = whole[start : start + MAX_KEYS]
                yield PrefixChain(namespace, tuple(block.key for block in group), tokens), group

    def _layout(self, digest: NamespaceDigest) -> KVLayout | None:
        namespace = self._namespaces.get(digest)
        return None if namespace is None else namespace.layout

    def _patience_s(self, deadline_s: float) -> float:
        return max(0.0, deadline_s - self._clock())


def _fits(layout: KVLayout, request: ReadRequest) -> bool:
    return (
        layout.fingerprint == request.layout and layout.part_bytes(request.block.part) == request.length_bytes
    )


def _fits_header(layout: KVLayout, header: BlockHeader) -> bool:
    return layout.fingerprint == header.layout and layout.part_bytes(header.block.part) == header.length_bytes


def _header(chain: PrefixChain, index: int, request: ReadRequest, checksum: int) -> BlockHeader:
    before = chain.keys[index - 1] if index else chain.parent or BlockKey(chain.namespace)
    depth = chain.start + index
    return BlockHeader(request.block, before, depth, request.layout, request.length_bytes, checksum)


def _runs(requests: Sequence[_R], is_next: Callable[[_R, _R], bool]) -> Iterator[Sequence[_R]]:
    """Cut requests into runs of consecutive blocks of one chain."""
    start = 0
    for at in range(1, len(requests) + 1):
        if at == len(requests) or at - start == MAX_KEYS or not is_next(requests[at - 1], requests[at]):
            yield requests[start:at]
            start = at


def _is_written_next(first: WriteRequest, second: WriteRequest) -> bool:
    one, other = first.header, second.header
    is_same_place = (one.block.namespace, one.block.part) == (other.block.namespace, other.block.part)
    is_same_place = is_same_place and first.is_summed == second.is_summed
    return is_same_place and other.parent == one.block.key and other.depth == one.depth + 1


def _is_read_next(first: ReadRequest, second: ReadRequest) -> bool:
    one, other = first.block, second.block
    is_same_place = (one.namespace, one.part) == (other.namespace, other.part)
    return is_same_place and second.parent == one.key and second.depth == first.depth + 1
