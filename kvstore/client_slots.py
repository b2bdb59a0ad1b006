"""ClientSlots: the slots that one client has lent, and what it wrote into them."""

import asyncio
import contextlib
from collections.abc import Generator, Iterable, Iterator, Sequence
from itertools import pairwise

from kvstore.errors import EpochEnded, TimedOut
from kvstore.manager import BlockManager
from kvstore.messages import Commit, Count, Lent, LentSlot, ReturnSlots, WrittenSlot
from kvstore.results import Owner, Published, Reserved
from kvstore.tier import Slot

COMMIT_SLICE_BLOCKS = 256
"""Most blocks published at once: about 2 ms of the loop."""


class ClientSlots:
    """Knows each slot in the generation that the client was told: in no other is it taken from it."""

    def __init__(self, manager: BlockManager, owner: Owner) -> None:
        self._manager = manager
        self._owner = owner
        self._lent: dict[int, int] = {}

    def lend(self, reserved: Reserved) -> Lent:
        """Note what was reserved for the client, and return what tells it so."""
        slots = tuple(map(LentSlot._make, reserved.slots))
        self._lent.update([slot[1:] for slot in slots])
        return Lent(slots, reserved.present, reserved.reason)

    def commit_at_once(self, request: Commit) -> Count | None:
        """As ``commit``, but None where that would take several slices.

        Raises:
            EpochEnded, TimedOut: it was too late for that.
            InvalidRequest: the namespace is not open.
        """
        if len(request.slots) > COMMIT_SLICE_BLOCKS:
            return None
        tally = Published(0, 0)
        for step in self._publish(request):
            tally = step
        return self._outcome(request, tally)

    async def commit(self, request: Commit) -> Count:
        """Publish what the client wrote; every slot that it names is lent no more.

        A slice after the other: what is published of it may be matched before the rest is.

        Raises:
            EpochEnded, TimedOut: it was too late for that.
            InvalidRequest: the namespace is not open.
        """
        tally = Published(0, 0)
        with contextlib.closing(self._publish(request)) as steps:
            for step in steps:
                tally = step
                await asyncio.sleep(0)
        return self._outcome(request, tally)

    def _publish(self, request: Commit) -> Generator[Published, None, None]:
        """Publish slice by slice, and say what has come of it after each; others may have turns between."""
        about, owner = request.about, self._owner
        num_stored = num_late = num_done = 0
        ours = [slot for slot in request.slots if self._take(slot.offset, slot.generation)]
        try:
            for run in _slices(_contiguous_runs(ours)):
                first, stop = run[0].position, run[-1].position + 1
                is_all = first == 0 and stop == len(about.chain.keys)
                published = self._manager.publish(
                    about.chain if is_all else about.chain[first:stop],
                    [Slot(slot.offset) for slot in run],
                    owner=owner,
                    checksums=[slot.checksum for slot in run],
                    part=about.part,
                )
                num_stored += published.stored
                num_late += published.late
                num_done += len(run)
                yield Published(num_stored, num_late)
        finally:
            # What an owner had that has ended was given back with it.
            if num_done < len(ours) and self._manager.has_anything(owner):
                self._manager.return_slots([Slot(slot.offset) for slot in ours[num_done:]], owner=owner)

    def _outcome(self, request: Commit, published: Published) -> Count:
        if self._manager.has_ended(request.about.chain.namespace):
            raise EpochEnded("server: the epoch of the namespace ended before its blocks were committed")
        if published.late:
            raise TimedOut("server: the slots were lent for less time than the writing took")
        return Count(published.stored)

    def take_back(self, request: ReturnSlots) -> None:
        """Take slots back that the client did not write into."""
        ours = [Slot(at.offset) for at in request.slots if self._take(at.offset, at.generation)]
        self._manager.return_slots(ours, owner=self._owner)

    def _take(self, offset: int, generation: int) -> bool:
        """Whether a slot is lent to this client in that very generation; it is not from then on."""
        if self._lent.get(offset) != generation:
            return False
        del self._lent[offset]
        return True


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
