"""Operations on many blocks with their payloads: ``POST /v1/fetch`` and ``POST /v1/store``.

Both frame them alike: the length of a JSON head as u32, little-endian; the head; the payloads back to back.
"""

import json
import struct
from collections.abc import Iterator, Sequence
from itertools import groupby

from aiohttp import web

from kvstore.http.blocks import PAYLOAD_TYPE, begin_answer, payload_answer
from kvstore.http.payloads import (
    LentPayload,
    ReadyPayload,
    count_whole,
    ready_payloads,
    receive_payload,
    send_payloads,
)
from kvstore.http.refusal import ErrorCode, Refused
from kvstore.http.schema import check, parse_json
from kvstore.http.schemas import STORE_HEAD
from kvstore.http.service import Call, json_answer
from kvstore.http.values import Values
from kvstore.keys import PrefixChain
from kvstore.layout import Part
from kvstore.miss import MissReason
from kvstore.results import Fetched, Owner, Reserved, ReservedSlot

HEAD_LENGTH = struct.Struct("<I")

_WINDOW_BLOCKS = 64
_WINDOW_BYTES = 32 << 20
"""Slots that a store has in its hands at a time: a slow client keeps no more than these from others."""


async def fetch(call: Call) -> web.StreamResponse:
    """Send the longest stored prefix from its slots."""
    service, namespace = call.service, call.namespace()
    chain, part = call.chain(namespace), call.part(namespace)
    _require_batch(call, len(chain), namespace.layout.part_bytes(part))
    async with call.owner() as owner:
        fetched = await service.manager.fetch(chain, owner=owner, part=part, timeout_s=call.timeout_s)
        async with ready_payloads(service, fetched.blocks) as payloads:
            reason, num_whole = fetched.reason, await count_whole(service, payloads)
            if num_whole < len(payloads):
                reason = MissReason.CORRUPT
                await service.report_damage(chain[num_whole : num_whole + 1], part)
            head = _fetch_head(
                fetched, payloads[:num_whole], reason, length_bytes=namespace.layout.part_bytes(part)
            )
            length_bytes = num_whole * namespace.layout.part_bytes(part)
            response = payload_answer({}, len(head) + length_bytes)
            await begin_answer(call, response)
            await response.write(head)
            await send_payloads(service, response, payloads[:num_whole], (chain, part))
            return response


def _fetch_head(
    fetched: Fetched, payloads: Sequence[ReadyPayload], reason: MissReason | None, *, length_bytes: int
) -> bytes:
    origins = [block.origin for block in fetched.blocks[: len(payloads)]]
    head = {
        "blocks": len(payloads),
        "length_bytes": length_bytes,
        "checksums": [f"{payload.checksum:016x}" for payload in payloads],
        "origins": origins,
        "reason": None if reason is None else reason.value,
    }
    data = json.dumps(head).encode()
    return HEAD_LENGTH.pack(len(data)) + data


async def store(call: Call) -> web.StreamResponse:
    """Take blocks into slots, window by window, and store those whose bytes are right."""
    call.body.require_plain(PAYLOAD_TYPE)
    head = await _read_head(call)
    namespace = call.namespace(head)
    chain, part = call.chain(namespace, head), call.part(namespace, head)
    length_bytes = namespace.layout.part_bytes(part)
    _require_batch(call, len(chain), length_bytes)
    given_bytes = head.integer("length_bytes")
    if given_bytes is not None and given_bytes != length_bytes:
        raise Refused(ErrorCode.BAD_REQUEST, f"head: length_bytes {given_bytes}, a block has {length_bytes}")
    checksums = head.texts("checksums")
    if checksums is not None and len(checksums) != len(chain):
        raise Refused(ErrorCode.BAD_REQUEST, f"head: {len(checksums)} checksums for {len(chain)} blocks")
    storing = _Storing(call, chain, part, length_bytes=length_bytes, checksums=checksums)
    window = max(1, min(_WINDOW_BLOCKS, _WINDOW_BYTES // length_bytes))
    for start in range(0, len(chain), window):
        await storing.take_window(start, min(start + window, len(chain)), timeout_s=head.number("timeout_s"))
    await call.body.require_end()
    return json_answer(storing.outcome())


class _Storing:
    """One store on its way.

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
        checksums: Sequence[str] | None,
    ) -> None:
        self._call = call
        self._chain = chain
        self._part = part
        self._length_bytes = length_bytes
        self._checksums = None if checksums is None else [int(text, 16) for text in checksums]
        self._has_room = True
        self._stored = 0
        self._present = 0
        self._doubtful: list[int] = []

    def outcome(self) -> dict[str, object]:
        """Return the answer."""
        return {
            "stored": self._stored,
            "present": self._present,
            "dropped": len(self._chain) - self._stored - self._present,
            "doubtful": sorted(self._doubtful),
        }

    async def take_window(self, start: int, stop: int, *, timeout_s: float | None) -> None:
        """Take the blocks at positions ``start`` to ``stop`` of the chain.

        Raises:
            Refused: a checksum is not the one that was named, or the body is not what its head says.
        """
        service, chain = self._call.service, self._chain[start:stop]
        async with self._call.owner() as owner:
            reserved = Reserved((), 0)
            if self._has_room:
                reserved = await service.manager.reserve(
                    chain, owner=owner, part=self._part, timeout_s=timeout_s
                )
            self._note_reserved(start, stop, reserved)
            slots = [at.slot for at in reserved.slots]
            async with service.top.writing(slots, self._length_bytes) as views:
                lent = {
                    at.index: LentPayload(service, at, view)
                    for at, view in zip(reserved.slots, views, strict=True)
                }
                sums = [await self._take(start + at, lent.get(at)) for at in range(len(chain))]
            for run in _runs(reserved.slots):
                self._commit(start, run, sums, owner=owner)

    async def _take(self, position: int, into: LentPayload | None) -> int:
        found = await receive_payload(self._call.body, self._length_bytes, into)
        if self._checksums is not None and self._checksums[position] != found:
            raise Refused(
                ErrorCode.CHECKSUM_MISMATCH,
                f"body: block {position} has checksum {found:016x}, the head says another",
            )
        return found

    def _note_reserved(self, start: int, stop: int, reserved: Reserved) -> None:
        """Note what is known of blocks without a slot: slots are lent in chain order, as far as room goes."""
        lent = {at.index for at in reserved.slots}
        self._present += reserved.present
        self._has_room = self._has_room and reserved.present + len(lent) == stop - start
        known = stop - start if self._has_room else max(lent, default=0)
        self._doubtful += [start + at for at in range(known, stop - start) if at not in lent]

    def _commit(self, start: int, run: Sequence[ReservedSlot], sums: Sequence[int], *, owner: Owner) -> None:
        first, last = run[0].index, run[-1].index
        results = self._call.service.manager.commit(
            self._chain[start + first : start + last + 1],
            [at.slot for at in run],
            owner=owner,
            checksums=sums[first : last + 1],
            part=self._part,
        )
        self._stored += sum(results)
        self._present += len(results) - sum(results)
        self._doubtful += [start + at.index for at, is_new in zip(run, results, strict=True) if not is_new]


def _runs(slots: Sequence[ReservedSlot]) -> Iterator[Sequence[ReservedSlot]]:
    """Cut slots with growing positions into runs without gaps."""
    for _, group in groupby(enumerate(slots), lambda item: item[1].index - item[0]):
        yield [slot for _, slot in group]


async def _read_head(call: Call) -> Values:
    (length,) = HEAD_LENGTH.unpack(await call.body.exactly(HEAD_LENGTH.size))
    if length > call.service.limits.max_json_bytes:
        raise Refused(
            ErrorCode.TOO_LARGE, f"head: {length} bytes, at most {call.service.limits.max_json_bytes}"
        )
    head = parse_json(await call.body.exactly(length))
    check(STORE_HEAD, head, "head")
    assert isinstance(head, dict), "the schema allows only an object"
    return Values(head)


def _require_batch(call: Call, blocks: int, length_bytes: int) -> None:
    limit = call.service.limits.max_batch_bytes
    if blocks * length_bytes > limit:
        raise Refused(
            ErrorCode.TOO_LARGE,
            f"{blocks} blocks of {length_bytes} bytes: at most {limit} bytes: split the chain",
        )
