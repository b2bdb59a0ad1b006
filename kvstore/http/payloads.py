"""Payloads on their way between the network and slots of the top tier, without a copy of the whole.

Out: leased slots are compared with their checksums before an answer begins, so that damage is a miss. They
are summed again while they are sent, and the last bytes of a block leave only if all before were right and
the slot is still the leased one; else the connection ends before the answer is whole.

In: bytes go from the socket's buffer into a lent slot, and their own checksum is taken on the way. A slot
whose time is over, since its writer was slow, is never written to again.
"""

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import numpy as np
import xxhash
from aiohttp import web

from kvstore.checksum import checksum
from kvstore.http.body import Body
from kvstore.http.service import HttpService
from kvstore.keys import PrefixChain
from kvstore.layout import Part
from kvstore.results import FetchedBlock, Owner, ReservedSlot
from kvstore.tier import Slot

_STEP_BYTES = 256 << 10
"""Bytes handed to the socket, or taken from a body, at a time: the loop is busy for tens of microseconds."""

_INLINE_BYTES = 256 << 10
"""Up to here a checksum is taken on the loop's thread: a thread's hand-over takes longer."""


class Spoilt(ConnectionError):
    """A block changed while it was sent, so its answer ended early. Only this connection suffers."""


@dataclass(frozen=True, slots=True)
class ReadyPayload:
    """A leased block. ``view`` is its slot's bytes, read-only."""

    slot: Slot
    generation: int
    checksum: int
    view: memoryview


@asynccontextmanager
async def ready_payloads(
    service: HttpService, blocks: Sequence[FetchedBlock]
) -> AsyncIterator[list[ReadyPayload]]:
    """Yield leased blocks in place."""
    if not blocks:
        yield []
        return
    length_bytes = blocks[0].length_bytes
    async with service.top.reading([block.slot for block in blocks], length_bytes) as views:
        payloads: list[ReadyPayload] = []
        for block, view in zip(blocks, views, strict=True):
            assert block.checksum is not None, "a block in host memory has no checksum"
            payloads.append(ReadyPayload(block.slot, block.generation, block.checksum, view[:length_bytes]))
        yield payloads


async def count_whole(service: HttpService, payloads: Sequence[ReadyPayload]) -> int:
    """Return how many leading payloads have the right bytes."""
    stop = threading.Event()

    def count() -> int:
        for index, payload in enumerate(payloads):
            if stop.is_set() or checksum(payload.view) != payload.checksum:
                return index
        return len(payloads)

    if sum(len(payload.view) for payload in payloads) <= _INLINE_BYTES:
        num_whole = count()
    else:
        num_whole = await service.in_thread(count, stop=stop.set)
    service.counters.damaged_blocks += num_whole < len(payloads)
    return num_whole


async def send_payloads(
    service: HttpService,
    response: web.StreamResponse,
    payloads: Sequence[ReadyPayload],
    about: tuple[PrefixChain, Part],
) -> None:
    """Send the leading blocks of a chain as the rest of an answer.

    Raises:
        Spoilt: bytes changed, or a slot was taken back; the answer cannot be completed.
    """
    chain, part = about
    for index, payload in enumerate(payloads):
        try:
            await _send(service, response, payload)
        except Spoilt:
            await service.report_damage(chain[index : index + 1], part)
            raise
    await response.write_eof()


async def _send(service: HttpService, response: web.StreamResponse, payload: ReadyPayload) -> None:
    digest, length_bytes = xxhash.xxh3_64(), len(payload.view)
    for start in range(0, length_bytes, _STEP_BYTES):
        step = payload.view[start : start + _STEP_BYTES]
        if service.top.generation(payload.slot) != payload.generation:
            raise Spoilt("a block's lease ended before it was sent")
        digest.update(step)
        if start + len(step) == length_bytes and digest.intdigest() != payload.checksum:
            service.counters.damaged_blocks += 1
            raise Spoilt("a block changed while it was sent")
        await response.write(step)
        service.counters.sent_bytes += len(step)
        await asyncio.sleep(0)  # a fast reader must not keep the loop from others


class LentPayload:
    """A slot in the hands of one request, being written. Once its time is over it is given back, for good."""

    def __init__(self, service: HttpService, owner: Owner, lent: ReservedSlot, view: memoryview) -> None:
        self._service = service
        self._owner = owner
        self._view = view
        self._num_bytes = 0
        self._until_s = service.clock() + service.lease_s
        self._is_given_up = False
        self.position = lent.position
        self.slot = lent.slot
        self.generation = lent.generation

    @property
    def is_ours(self) -> bool:
        """Whether the slot may still be written to and published."""
        is_ours = not self._is_given_up and self._service.clock() < self._until_s
        return is_ours and self._service.top.generation(self.slot) == self.generation

    def take(self, piece: memoryview) -> None:
        """Write the next bytes, if the slot is still ours."""
        if self.is_ours:
            target = self._view[self._num_bytes : self._num_bytes + len(piece)]
            np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(piece, np.uint8))
        elif not self._is_given_up:
            self._is_given_up = True
            self._service.manager.return_slots([self.slot], owner=self._owner)
        self._num_bytes += len(piece)


async def receive_payload(body: Body, length_bytes: int, into: LentPayload | None) -> int:
    """Take one block from a body, into a slot or (None) nowhere; returns its checksum.

    Raises:
        Refused: the body ends before, is too slow, or breaks HTTP.
    """
    digest, left = xxhash.xxh3_64(), length_bytes
    while left:
        piece = await body.need_piece(min(left, _STEP_BYTES))
        digest.update(piece)
        if into is not None:
            into.take(piece)
        left -= len(piece)
    return digest.intdigest()
