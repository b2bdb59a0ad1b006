"""Operations on many blocks with their payloads: ``POST /v1/fetch`` and ``POST /v1/store``.

Both frame them alike: the length of a JSON head as u32, little-endian; the head; the payloads back to back.
"""

import json
import struct
from collections.abc import Sequence

from aiohttp import web

from kvstore.access_log import Access
from kvstore.http.blocks import PAYLOAD_TYPE, begin_answer, payload_answer
from kvstore.http.payloads import (
    ReadyPayload,
    count_whole,
    ready_payloads,
    send_payloads,
)
from kvstore.http.refusal import ErrorCode, Refused
from kvstore.http.schema import check, parse_json
from kvstore.http.schemas import STORE_HEAD
from kvstore.http.service import Call, json_answer
from kvstore.http.storing import Storing
from kvstore.http.values import Values
from kvstore.miss import MissReason
from kvstore.results import Fetched

HEAD_LENGTH = struct.Struct("<I")


async def fetch(call: Call) -> web.StreamResponse:
    """Send the longest stored prefix from its slots."""
    service, namespace = call.service, call.namespace()
    chain, part = call.chain(namespace), call.part(namespace)
    call.note_access(Access.TAKE, chain, part)
    _require_batch(call, len(chain), namespace.layout.part_bytes(part))
    async with call.owner() as owner:
        fetched = await service.manager.fetch(
            chain, owner=owner, part=part, timeout_s=call.timeout_s, hints=call.values.hints()
        )
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
    call.note_access(Access.STORE, chain, part)
    length_bytes = namespace.layout.part_bytes(part)
    _require_batch(call, len(chain), length_bytes)
    given_bytes = head.integer("length_bytes")
    if given_bytes is not None and given_bytes != length_bytes:
        raise Refused(ErrorCode.BAD_REQUEST, f"head: length_bytes {given_bytes}, a block has {length_bytes}")
    checksums = _checksums(head)
    if checksums is not None and len(checksums) != len(chain):
        raise Refused(ErrorCode.BAD_REQUEST, f"head: {len(checksums)} checksums for {len(chain)} blocks")
    storing = Storing(call, chain, part, length_bytes=length_bytes, checksums=checksums, hints=head.hints())
    await storing.take_all(timeout_s=head.number("timeout_s"))
    return json_answer(storing.outcome())


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


def _checksums(head: Values) -> list[int] | None:
    texts = head.texts("checksums")
    return None if texts is None else [int(text, 16) for text in texts]


def _require_batch(call: Call, blocks: int, length_bytes: int) -> None:
    limit = call.service.limits.max_batch_bytes
    if blocks * length_bytes > limit:
        raise Refused(
            ErrorCode.TOO_LARGE,
            f"{blocks} blocks of {length_bytes} bytes: at most {limit} bytes: split the chain",
        )
