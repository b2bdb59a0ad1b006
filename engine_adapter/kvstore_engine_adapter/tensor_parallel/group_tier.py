"""GroupTier: the store as all ranks together see it; LentSlots and GroupVramTier: which page a buffer is.

Rank 0's manager is the only owner of state. A slot is a page of every rank, a block in it a part on each.
So a block is stored when every rank finds its part, loaded when every rank has read its part, and written
when every rank has written its part.
"""

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from typing import TypeVar

import numpy as np

from kvstore.hints import Hints
from kvstore.keys import BlockKey, Namespace, PrefixChain
from kvstore.layout import Part
from kvstore.miss import MissReason
from kvstore.outlasting import outlast
from kvstore.tier import (
    BlockHeader,
    BlockId,
    HintedTier,
    Medium,
    Probe,
    ReadOutcome,
    ReadRequest,
    ReadStatus,
    Slot,
    SummingTier,
    Tier,
    TierHealth,
    WriteRequest,
    WriteStatus,
)
from kvstore_engine_adapter.tensor_parallel import messages
from kvstore_engine_adapter.tensor_parallel.rank_group import RankGroup, RankLost
from kvstore_engine_adapter.tensor_parallel.wire import Message
from kvstore_tiers.vram import PageMemory, VramTier

_R = TypeVar("_R")
_SPEEDS = ("vram", "dram", "ssd", "remote")
"""Tiers, the slowest last."""


class LentSlots:
    """Which slot each host buffer stands for that the top tier has lent; one event loop's thread."""

    def __init__(self) -> None:
        self._slots: dict[int, tuple[Slot, int]] = {}

    @contextlib.contextmanager
    def noting(self, slots: Sequence[Slot], buffers: Sequence[memoryview]) -> Iterator[None]:
        """Remember buffers for as long as they are lent; a page may be lent several times."""
        addresses = [_address(buffer) for buffer in buffers]
        for address, slot in zip(addresses, slots, strict=True):
            _, count = self._slots.get(address, (slot, 0))
            self._slots[address] = slot, count + 1
        try:
            yield
        finally:
            for address in addresses:
                slot, count = self._slots.pop(address)
                if count > 1:
                    self._slots[address] = slot, count - 1

    def slot_of(self, buffer: memoryview) -> Slot:
        """Return the slot. Raises KeyError if the buffer is not lent."""
        return self._slots[_address(buffer)][0]


class GroupVramTier(VramTier):
    """A VramTier over rank 0's pages that says which slots its buffers stand for."""

    def __init__(self, memory: PageMemory, num_slots: int, *, lent: LentSlots) -> None:
        super().__init__(memory, num_slots)
        self._lent = lent

    @contextlib.asynccontextmanager
    async def writing(self, slots: Sequence[Slot], length_bytes: int) -> AsyncIterator[list[memoryview]]:
        """Lend a writable host buffer per slot; on leaving, their bytes are in the slots."""
        async with super().writing(slots, length_bytes) as buffers:
            with self._lent.noting(slots, buffers):
                yield buffers

    @contextlib.asynccontextmanager
    async def reading(self, slots: Sequence[Slot], length_bytes: int) -> AsyncIterator[list[memoryview]]:
        """Lend a read-only host buffer per slot that holds the slot's bytes."""
        async with super().reading(slots, length_bytes) as buffers:
            with self._lent.noting(slots, buffers):
                yield buffers


class GroupTier:
    """A Tier: rank 0's own ``tier``, and the same of every follower, each for its part.

    The followers are asked beside rank 0's own call, with what is left of its time. A follower that does not
    answer holds up nobody but the load or write it is part of, whose pages it may still touch: requests give
    up by their own deadlines.
    """

    def __init__(
        self,
        tier: Tier,
        group: RankGroup,
        lent: LentSlots,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tier = tier
        self._group = group
        self._lent = lent
        self._clock = clock

    @property
    def name(self) -> str:
        """The tier's name in configuration, metrics and messages."""
        return self._tier.name

    @property
    def medium(self) -> Medium:
        """What it is made of."""
        return self._tier.medium

    @property
    def is_shared(self) -> bool:
        """Others change its content."""
        return self._tier.is_shared

    @property
    def sums_payloads(self) -> bool:
        """Whether rank 0's tier does; the followers sum their own parts."""
        return isinstance(self._tier, SummingTier) and self._tier.sums_payloads

    @property
    def capacity_bytes(self) -> int:
        """Payload bytes it may hold."""
        return self._tier.capacity_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes of its capacity in use."""
        return self._tier.used_bytes

    def health(self) -> TierHealth:
        """Return whether rank 0's tier is worth asking: the ranks have one server."""
        return self._tier.health()

    async def open(self) -> None:
        """Open rank 0's tier; the followers opened theirs when they got their pages.

        Raises:
            InvalidConfig: the address is malformed or too long.
        """
        await self._tier.open()

    async def close(self) -> None:
        """Close rank 0's tier. Idempotent."""
        await self._tier.close()

    async def scan(self) -> Sequence[BlockHeader]:
        """Return what rank 0's tier says: nothing, it is shared."""
        return await self._tier.scan()

    def open_namespace(self, namespace: Namespace) -> None:
        """Learn of a namespace; the followers are told before they are asked for its blocks."""
        self._tier.open_namespace(namespace)
        self._group.tell(messages.KnowNamespace.of(namespace))

    async def probe(self, blocks: Sequence[BlockId], *, deadline_s: float) -> Probe:
        """Say which leading blocks every rank finds its part of; the tier is the slowest of the parts'."""
        message = messages.Probe(
            [block.namespace for block in blocks],
            [block.key for block in blocks],
            self._patience_s(deadline_s),
        )
        try:
            own, answers = await asyncio.gather(
                self._tier.probe(blocks, deadline_s=deadline_s), self._group.ask(message, messages.Probed)
            )
        except RankLost:
            return Probe([None] * len(blocks), MissReason.UNAVAILABLE)
        found = [_leading(own.tiers)]
        reasons = [own.reason]
        for answer in answers:
            found.append([str(name) for name in answer.tiers[: len(blocks)]])
            reasons.append(MissReason(answer.reason) if answer.reason else None)
        least = min(range(len(found)), key=lambda rank: len(found[rank]))
        count = len(found[least])
        names: list[str | None] = [_slowest([tiers[at] for tiers in found]) for at in range(count)]
        is_all = count == len(blocks)
        return Probe(
            names + [None] * (len(blocks) - count),
            None if is_all else reasons[least],
            num_known=None if is_all else count + 1,
        )

    async def read(self, requests: Sequence[ReadRequest], *, deadline_s: float) -> list[ReadOutcome]:
        """Have every rank read its part; a block is OK if all of them are."""
        try:
            slots = [self._lent.slot_of(request.buffer) for request in requests]
            message = messages.Read(
                *_places([request.block for request in requests]),
                [request.parent or BlockKey(request.block.namespace) for request in requests],
                [request.depth for request in requests],
                slots,
                self._patience_s(deadline_s),
            )
            own, answers = await self._by_all(self._tier.read(requests, deadline_s=deadline_s), message)
        except (RankLost, KeyError):
            return [ReadOutcome(ReadStatus.UNAVAILABLE)] * len(requests)
        outcomes = list(own)
        for answer in answers:
            for at, (status, reason) in enumerate(zip(answer.statuses, answer.reasons, strict=True)):
                if outcomes[at].status is ReadStatus.OK and status != ReadStatus.OK.value:
                    why = MissReason(reason) if reason else None
                    outcomes[at] = ReadOutcome(ReadStatus(status), reason=why)
        return outcomes

    async def write(self, requests: Sequence[WriteRequest], *, deadline_s: float) -> list[WriteStatus]:
        """Have every rank write its part; a block is OK if all of them are."""
        try:
            headers = [request.header for request in requests]
            message = messages.Write(
                *_places([header.block for header in headers]),
                [header.parent for header in headers],
                [header.depth for header in headers],
                [self._lent.slot_of(request.buffer) for request in requests],
                self._patience_s(deadline_s),
            )
            own, answers = await self._by_all(self._tier.write(requests, deadline_s=deadline_s), message)
        except (RankLost, KeyError):
            return [WriteStatus.UNAVAILABLE] * len(requests)
        statuses = list(own)
        for answer in answers:
            for at, status in enumerate(answer.statuses):
                if statuses[at] is WriteStatus.OK:
                    statuses[at] = WriteStatus(status)
        return statuses

    async def drop(self, blocks: Sequence[BlockId]) -> int:
        """Ask the store to forget every rank's part; returns how many of rank 0's it had."""
        message = messages.Drop(*_places(blocks))
        try:
            dropped, _ = await asyncio.gather(
                self._tier.drop(blocks), self._group.ask(message, messages.Done)
            )
        except RankLost:
            return 0
        return dropped

    async def touch(self, blocks: Sequence[BlockId]) -> None:
        """Note a use of rank 0's parts; the store notes its own uses."""
        await self._tier.touch(blocks)

    async def note_hints(self, chain: PrefixChain, hints: Hints, *, part: Part | None = None) -> bool:
        """Say more of the future of blocks, of every rank's part; rank 0's tier tells the one store."""
        if part is None or not isinstance(self._tier, HintedTier):
            return False
        width = part.head_stop - part.head_start
        for first in range(0, width * self._group.size, width):
            of_rank = part._replace(head_start=first, head_stop=first + width)
            if not await self._tier.note_hints(chain, hints, part=of_rank):
                return False
        return True

    def has_room(self, length_bytes: int, count: int = 1) -> bool:
        """Return whether rank 0's tier has room; parts are equally large."""
        return self._tier.has_room(length_bytes, count)

    async def _by_all(
        self, own: Coroutine[None, None, Sequence[_R]], message: Message
    ) -> tuple[list[_R], list[messages.Outcomes]]:
        """Wait for every rank, also when cancelled: the pages are in use until all of them have ended."""
        answers = self._group.ask(message, messages.Outcomes)
        return await outlast(asyncio.ensure_future(_both(own, answers)))

    def _patience_s(self, deadline_s: float) -> float:
        return max(0.0, deadline_s - self._clock())


async def _both(
    own: Coroutine[None, None, Sequence[_R]], answers: Coroutine[None, None, list[messages.Outcomes]]
) -> tuple[list[_R], list[messages.Outcomes]]:
    asked = asyncio.ensure_future(answers)
    try:
        mine = await own
    finally:
        await asyncio.wait([asked])
    return list(mine), asked.result()


def _address(buffer: memoryview) -> int:
    return int(np.frombuffer(buffer, dtype=np.uint8).ctypes.data)


def _places(blocks: Sequence[BlockId]) -> tuple[list[bytes], list[bytes]]:
    return [block.namespace for block in blocks], [block.key for block in blocks]


def _leading(tiers: Sequence[str | None]) -> list[str]:
    return [name for name in itertools.takewhile(lambda name: name is not None, tiers) if name is not None]


def _slowest(names: Sequence[str]) -> str:
    """Return the tier that the last part to come will come from; of unknown ones the first."""
    return max(names, key=lambda name: _SPEEDS.index(name) if name in _SPEEDS else len(_SPEEDS))
