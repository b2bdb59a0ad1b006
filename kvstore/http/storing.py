"""Storing: the blocks of one request on their way from its body into slots, window by window."""

from collections.abc import Iterator, Sequence
from itertools import groupby

from kvstore.hints import Hints
from kvstore.http.payloads import LentPayload, receive_payload
from kvstore.http.refusal import ErrorCode, Refused
from kvstore.http.service import Call
from kvstore.keys import PrefixChain
from kvstore.layout import Part
from kvstore.miss import MissReason
from kvstore.results import Owner, Reserved

_WINDOW_BLOCKS = 64
_WINDOW_BYTES = 32 << 20
"""Slots that a request has in its hands at a time: a slow client keeps no more than these from others."""


class Storing:
    """Takes blocks of a chain from a request's body, and stores those whose bytes are right.

    Once a window found no room for all of its blocks, the rest is taken in and dropped: blocks behind a gap
    are of no use. What is not known to be stored is doubtful.
    """

    def __init__(
        self,
        call: Call,
        chain: PrefixChain,
        part: Part,
        *,
        length_bytes: int,
        checksums: Sequence[int] | None,
        hints: Hints | None = None,
    ) -> None:
        self._call = call
        self._chain = chain
        self._part = part
        self._length_bytes = length_bytes
        self._checksums = checksums
        self._hints = hints
        self._has_room = True
        self._stored = 0
        self._present = 0
        self._doubtful: list[int] = []
        self._reason: MissReason | None = None

    def outcome(self) -> dict[str, object]:
        """Return how the blocks ended; what is neither stored nor present was dropped."""
        dropped = len(self._chain) - self._stored - self._present
        return {
            "stored": self._stored,
            "present": self._present,
            "dropped": dropped,
            "doubtful": sorted(self._doubtful),
            "reason": self._reason.value if dropped and self._reason is not None else None,
        }

    def _note_reason(self, reason: MissReason | None) -> None:
        """Note why a block was dropped; the first counts."""
        self._reason = self._reason or reason

    async def take_all(self, *, timeout_s: float | None) -> list[int]:
        """Take every block, and the end of the body; returns the checksums of what came.

        Raises:
            Refused: a checksum is not the one that was named, or the body is not what it should be. Windows
                before are stored.
        """
        sums: list[int] = []
        window = max(1, min(_WINDOW_BLOCKS, _WINDOW_BYTES // self._length_bytes))
        for start in range(0, len(self._chain), window):
            sums += await self._take_window(start, self._chain[start : start + window], timeout_s=timeout_s)
        if not self._chain.keys:
            await self._call.body.require_end()
        return sums

    async def _take_window(self, start: int, chain: PrefixChain, *, timeout_s: float | None) -> list[int]:
        service = self._call.service
        await self._call.body.begin()
        async with self._call.owner() as owner:
            reserved = Reserved((), 0)
            if self._has_room:
                reserved = await service.manager.reserve(
                    chain, owner=owner, part=self._part, timeout_s=timeout_s, hints=self._hints
                )
            self._note_reserved(start, len(chain), reserved)
            slots = [at.slot for at in reserved.slots]
            async with service.top.writing(slots, self._length_bytes) as views:
                lent = {
                    at.position: LentPayload(service, owner, at, view)
                    for at, view in zip(reserved.slots, views, strict=True)
                }
                sums = [await self._take(start + at, lent.get(at)) for at in range(len(chain))]
            if start + len(chain) == len(self._chain):
                await self._call.body.require_end()
            self._publish(start, list(lent.values()), sums, owner=owner)
        return sums

    async def _take(self, position: int, into: LentPayload | None) -> int:
        found = await receive_payload(self._call.body, self._length_bytes, into)
        if self._checksums is not None and self._checksums[position] != found:
            raise Refused(
                ErrorCode.CHECKSUM_MISMATCH,
                f"body: block {position} has checksum {found:016x}, the request says another",
            )
        return found

    def _note_reserved(self, start: int, blocks: int, reserved: Reserved) -> None:
        """Note what is known of blocks without a slot: slots are lent in chain order, as far as room goes."""
        lent = {at.position for at in reserved.slots}
        self._note_reason(reserved.reason)
        self._present += reserved.present
        self._has_room = self._has_room and reserved.present + len(lent) == blocks
        known = blocks if self._has_room else max(lent, default=0)
        self._doubtful += [start + at for at in range(known, blocks) if at not in lent]

    def _publish(self, start: int, lent: Sequence[LentPayload], sums: Sequence[int], *, owner: Owner) -> None:
        """Publish what was written in time; a block that another writer stored meanwhile is present."""
        late = [start + at.position for at in lent if not at.is_ours]
        self._doubtful += late
        self._note_reason(MissReason.TIMED_OUT if late else None)
        for run in _runs([at for at in lent if at.is_ours]):
            first, last = run[0].position, run[-1].position
            results = self._call.service.manager.commit(
                self._chain[start + first : start + last + 1],
                [at.slot for at in run],
                owner=owner,
                checksums=sums[first : last + 1],
                part=self._part,
            )
            self._stored += sum(results)
            if self._call.service.manager.has_ended(self._chain.namespace):
                self._note_reason(MissReason.OTHER_EPOCH)
            else:
                self._present += len(results) - sum(results)
            self._doubtful += [
                start + at.position for at, is_new in zip(run, results, strict=True) if not is_new
            ]


def _runs(lent: Sequence[LentPayload]) -> Iterator[Sequence[LentPayload]]:
    """Cut slots with growing positions into runs without gaps."""
    for _, group in groupby(enumerate(lent), lambda item: item[1].position - item[0]):
        yield [slot for _, slot in group]
