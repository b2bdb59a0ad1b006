"""ClientSlots: the slots that one client has lent, and what it wrote into them."""

import asyncio
import contextlib
import math
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain as chained
from itertools import pairwise
from typing import TypeAlias, cast

from kvstore.errors import EpochEnded, TimedOut
from kvstore.keys import NamespaceDigest, PrefixChain
from kvstore.layout import Part
from kvstore.manager import BlockManager
from kvstore.message_fields import MAX_TIMEOUT_US, timeout_us
from kvstore.messages import (
    ChainRef,
    Commit,
    Count,
    Lent,
    LentSlot,
    ReturnSlots,
    Store,
    Stored,
    StoreOutcome,
    WrittenSlot,
)
from kvstore.miss import MissReason
from kvstore.results import Admitted, Owner, Published, Reserved
from kvstore.tier import Slot

COMMIT_SLICE_BLOCKS = 256
"""Most blocks published at once: about 2 ms of the loop."""

_NEW_SLICE_BLOCKS = 1024
"""Most of those at once of which none is known, as of most puts: they are filed as a run, which the client
need not wait for, in 2 to 3 ms of the loop; with the answer before it, some 4 ms (measured: 2 cores).
"""

_AGAIN_S = 1.0
"""How long slots are kept at hand for a put like the last two: by then it has come, or is not expected."""

_YOUNG_PART = 0.25
"""The part of the time slots are lent for in which they may be at hand: the client is to have the rest."""

_Piece: TypeAlias = tuple[int, tuple[Slot, ...], tuple[int, ...]]
"""What is published at once: the first one's position in the chain, and slots and checksums of a run."""


@dataclass(frozen=True, slots=True)
class _Lot:
    """Slots lent ahead, in their generations: which puts they are for, and when they were lent."""

    about: tuple[NamespaceDigest, Part | None]
    slots: list[tuple[Slot, int]]
    lent_s: float


class ClientSlots:
    """Knows each slot in the generation that the client was told: in no other is it taken from it.

    Of a client whose puts are alike, what its next answer brings is lent behind this one: ``_at_hand``. The
    client does not know of it yet.
    """

    def __init__(self, manager: BlockManager, owner: Owner) -> None:
        self._manager = manager
        self._putter = manager.putter
        self._ahead = self._putter.ahead
        self._afterwards = manager.afterwards
        self._owner = owner
        self._lent: dict[int, int] = {}
        self._at_hand: _Lot | None = None
        self._last_wanted: tuple[object, int] | None = None

    def lend(self, reserved: Reserved) -> Lent:
        """Note what was reserved for the client, and return what tells it so."""
        slots = tuple(map(LentSlot._make, reserved.slots))
        self._lent.update([slot[1:] for slot in slots])
        return Lent(slots, reserved.present, reserved.reason)

    def publish_at_once(self, request: Commit | Store) -> Count | Stored | None:
        """Answer the one as ``commit_at_once``, the other as ``store_at_once``."""
        return self.commit_at_once(request) if isinstance(request, Commit) else self.store_at_once(request)

    def commit_at_once(self, request: Commit) -> Count | Stored | None:
        """As ``commit``, but None where that would take several slices.

        Raises:
            EpochEnded, TimedOut: it was too late for that.
            InvalidRequest: the namespace is not open.
        """
        if len(request.slots) > COMMIT_SLICE_BLOCKS:
            return None
        published = _last(self._publish(request.about, _pieces(self._take_all(request))))
        return self._committed(request, published)

    async def commit(self, request: Commit) -> Count | Stored:
        """Publish what the client wrote; every slot that it names is lent no more.

        A slice after the other: what is published of it may be matched before the rest is.

        Raises:
            EpochEnded, TimedOut: it was too late for that.
            InvalidRequest: the namespace is not open.
        """
        steps = self._publish(request.about, _pieces(self._take_all(request)))
        published = await _last_in_turns(steps)
        return self._committed(request, published)

    def _committed(self, request: Commit, published: Published) -> Count | Stored:
        stored = self._outcome(request.about, published)
        if not request.ahead:
            return Count(stored)
        slots, lent_us = self._lend_for_next(request.about, request.ahead)
        return Stored(stored, slots=slots, lent_us=lent_us)

    def store_at_once(self, request: Store) -> Stored | None:
        """As ``store``, but None where that would take several slices."""
        about = request.about
        if not self._is_one_slice(about.chain, about.part):
            return None
        found, pieces = self._admit(request)
        if len(pieces) != 1:
            return self._stored(request, found, _last(self._publish(about, pieces)))
        ((first, slots, checksums),) = pieces
        chain = about.chain if len(slots) == len(request.slots) else about.chain[first : first + len(slots)]
        published = self._putter.publish_soon(
            chain, slots, owner=self._owner, checksums=checksums, part=about.part, names=found.names
        )
        answer = self._stored(request, found, published)
        wanted = (_lot_of(about), request.ahead)
        if answer.slots and wanted == self._last_wanted:
            self._afterwards.do(partial(self._have_at_hand, about, request.ahead))
        self._last_wanted = wanted
        return answer

    def _is_one_slice(self, chain: PrefixChain, part: Part | None) -> bool:
        """Whether all blocks of a Store may be published at once."""
        num_blocks = len(chain.keys)
        if num_blocks <= COMMIT_SLICE_BLOCKS:
            return True
        return num_blocks <= _NEW_SLICE_BLOCKS and self._ahead.are_new(chain, part)

    async def store(self, request: Store) -> Stored:
        """Store what the client wrote into slots lent ahead, as far as it is not stored and worth its room.

        Of slots that are not all lent for such blocks none is stored, and those that are stay lent, as where
        the namespace is not open. Else none stays lent. As of ``commit``, what is published of it may be
        matched before the rest is.

        Raises:
            EpochEnded, TimedOut: it was too late for that.
            InvalidRequest: the namespace is not open.
        """
        found, pieces = self._admit(request)
        steps = self._publish(request.about, [*chained.from_iterable(map(_slices_of, pieces))])
        return self._stored(request, found, await _last_in_turns(steps))

    def _admit(self, request: Store) -> tuple[Admitted, list[_Piece]]:
        """Take the slots over; those of blocks that are not to be published are free then."""
        about, putter, lent = request.about, self._putter, self._lent
        slots, checksums = cast("tuple[Slot, ...]", request.slots.offsets), request.slots.checksums
        is_ours = tuple(map(lent.get, slots)) == request.slots.generations
        if not self._ahead.are_lent_for(about.chain, about.part, slots, owner=self._owner) or not is_ours:
            raise TimedOut("server: the slots are not lent to this client any more")
        found = putter.admit_written(about.chain, part=about.part, hints=request.hints)
        self._afterwards.do(partial(_forget, lent, slots))
        if found.num_admitted == len(slots):
            return found, [(0, slots, checksums)] if slots else []
        admitted = found.missing[: found.num_admitted]
        unused = set(range(len(slots))).difference(admitted)
        self._putter.return_slots([slots[at] for at in unused], owner=self._owner)
        generations = request.slots.generations
        written = [WrittenSlot(at, slots[at], generations[at], checksums[at]) for at in admitted]
        return found, _pieces(written)

    def _stored(self, request: Store, found: Admitted, published: Published) -> Stored:
        num_stored = 0
        if found.reason is MissReason.OTHER_EPOCH:
            outcomes = bytes([StoreOutcome.DROPPED]) * len(request.slots)
        else:
            num_stored = self._outcome(request.about, published)
            outcomes = _outcomes(found, len(request.slots), num_stored)
        slots, lent_us = self._lend_for_next(request.about, request.ahead)
        return Stored(num_stored, outcomes, found.reason, slots, lent_us)

    def _lend_for_next(self, about: ChainRef, count: int) -> tuple[tuple[tuple[Slot, int], ...], int]:
        """Lend slots for the client's next put, if they can be spared; returns them, and for how long."""
        now_s = self._ahead.now_s()
        lot = self._take_at_hand(about, count, now_s) or self._lend_ahead(about, count, now_s)
        if not lot.slots:
            return (), 0
        self._afterwards.do(partial(self._lent.update, lot.slots))
        left_s = self._manager.lease_s - (now_s - lot.lent_s)
        return tuple(lot.slots), timeout_us(left_s) if left_s < math.inf else MAX_TIMEOUT_US

    def _lend_ahead(self, about: ChainRef, count: int, now_s: float) -> _Lot:
        lent = self._putter.lend_ahead(about.chain, about.part, count, owner=self._owner)
        return _Lot(_lot_of(about), lent, now_s)

    def _have_at_hand(self, about: ChainRef, count: int) -> None:
        """Lend what the answer to the next put like this one brings."""
        self._return_at_hand()
        lot = self._lend_ahead(about, count, self._ahead.now_s())
        self._at_hand = lot if lot.slots else None

    def _take_at_hand(self, about: ChainRef, count: int, now_s: float) -> _Lot | None:
        """Return what is at hand if it is what is wanted; else it is given back."""
        lot = self._at_hand
        if lot is None:
            return None
        is_young = now_s - lot.lent_s < min(_AGAIN_S, _YOUNG_PART * self._manager.lease_s)
        is_wanted = lot.about == _lot_of(about) and len(lot.slots) == count
        if not is_young or not is_wanted or self._putter.is_draining:
            self._return_at_hand()
            return None
        self._at_hand = None
        return lot

    def _return_at_hand(self) -> None:
        lot, self._at_hand = self._at_hand, None
        if lot is not None:
            self._putter.return_slots([slot for slot, _ in lot.slots], owner=self._owner)

    def _publish(self, about: ChainRef, pieces: Sequence[_Piece]) -> Generator[Published, None, None]:
        """Publish piece by piece, and say what has come of it after each; others may have turns between."""
        owner, num_stored, num_late, left = self._owner, 0, 0, deque(pieces)
        try:
            while left:
                first, slots, checksums = left[0]
                is_all = not first and len(slots) == len(about.chain.keys)
                published = self._putter.publish(
                    about.chain if is_all else about.chain[first : first + len(slots)],
                    slots,
                    owner=owner,
                    checksums=checksums,
                    part=about.part,
                )
                left.popleft()
                num_stored += published.stored
                num_late += published.late
                yield Published(num_stored, num_late)
        finally:
            # What an owner had that has ended was given back with it.
            if left and self._manager.has_anything(owner):
                rest = [slot for _, slots, _ in left for slot in slots]
                self._putter.return_slots(rest, owner=owner)

    def _outcome(self, about: ChainRef, published: Published) -> int:
        if self._manager.has_ended(about.chain.namespace):
            raise EpochEnded("server: the epoch of the namespace ended before its blocks were committed")
        if published.late:
            raise TimedOut("server: the slots were lent for less time than the writing took")
        return published.stored

    @property
    def are_all_ahead(self) -> bool:
        """Whether all that the client holds, if anything, are slots lent ahead."""
        return self._ahead.are_all(self._owner)

    @property
    def ahead_bytes(self) -> int:
        """Bytes of the slots lent ahead, which the client writes into for its next put."""
        return self._ahead.lent_bytes(self._owner)

    def _take_all(self, request: Commit) -> list[WrittenSlot]:
        """Return those slots of a Commit that are lent to this client; they are not from then on."""
        return [slot for slot in request.slots if self._take(slot.offset, slot.generation)]

    def take_back(self, request: ReturnSlots) -> None:
        """Take slots back that the client did not write into: it puts no more for now."""
        self._return_at_hand()
        ours = [Slot(offset) for offset, generation in request.slots if self._take(offset, generation)]
        self._putter.return_slots(ours, owner=self._owner)

    def _take(self, offset: int, generation: int) -> bool:
        """Whether a slot is lent to this client in that very generation; it is not from then on."""
        if self._lent.get(offset) != generation:
            return False
        del self._lent[offset]
        return True


def _forget(lent: dict[int, int], slots: Iterable[int]) -> None:
    for slot in slots:
        del lent[slot]


def _lot_of(about: ChainRef) -> tuple[NamespaceDigest, Part | None]:
    return about.chain.namespace, about.part


def _last(steps: Iterable[Published]) -> Published:
    """Publish all in one turn."""
    total = Published(0, 0)
    for so_far in steps:
        total = so_far
    return total


async def _last_in_turns(steps: Generator[Published, None, None]) -> Published:
    """Publish slice by slice, each in a turn of its own."""
    total = Published(0, 0)
    with contextlib.closing(steps):
        for so_far in steps:
            total = so_far
            await asyncio.sleep(0)
    return total


def _pieces(written: Sequence[WrittenSlot]) -> list[_Piece]:
    """Put written slots, whose positions grow, together into what is published at once."""
    pieces: list[_Piece] = []
    for run in _slices(_contiguous_runs(written)):
        positions, offsets, _, checksums = zip(*run, strict=True)
        pieces.append((positions[0], cast("tuple[Slot, ...]", offsets), checksums))
    return pieces


def _slices_of(piece: _Piece) -> Iterator[_Piece]:
    """Cut a long piece."""
    first, slots, checksums = piece
    step = COMMIT_SLICE_BLOCKS
    for at in range(0, len(slots), step):
        yield first + at, slots[at : at + step], checksums[at : at + step]


def _outcomes(found: Admitted, num_blocks: int, num_stored: int) -> bytes:
    """Return the outcome of each block of a Store, of which ``num_stored`` were stored; empty if all were."""
    if num_stored == num_blocks:
        return b""
    outcomes = bytearray([StoreOutcome.PRESENT]) * num_blocks
    for at in found.missing[found.num_admitted :]:
        outcomes[at] = StoreOutcome.DROPPED
    # Where others were first with some, between two slices, which of them are present is not said.
    for at in found.missing[:num_stored]:
        outcomes[at] = StoreOutcome.STORED
    return bytes(outcomes)


def _contiguous_runs(slots: Sequence[WrittenSlot]) -> Iterator[Sequence[WrittenSlot]]:
    """Cut slots with growing positions into runs without gaps."""
    if not slots:
        return
    cuts = [
        at + 1 for at, (first, second) in enumerate(pairwise(slots)) if second.position != first.position + 1
    ]
    for start, stop in pairwise([0, *cuts, len(slots)]):
        yield slots[start:stop]


def _slices(runs: Iterable[Sequence[WrittenSlot]]) -> Iterator[Sequence[WrittenSlot]]:
    """Cut long runs."""
    for run in runs:
        for start in range(0, len(run), COMMIT_SLICE_BLOCKS):
            yield run[start : start + COMMIT_SLICE_BLOCKS]
