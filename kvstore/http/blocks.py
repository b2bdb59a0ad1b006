"""Operations on one block: GET, HEAD, PUT and DELETE of ``/v1/blocks/{namespace}/{key}``."""

from aiohttp import web

from kvstore.http.payloads import count_whole, ready_payloads, send_payloads
from kvstore.http.refusal import ErrorCode, Refused
from kvstore.http.service import (
    CHECKSUM_HEADER,
    COMMON_HEADERS,
    Call,
    chain_of_keys,
    json_answer,
    name_answer,
    named_digest,
)
from kvstore.http.storing import Storing
from kvstore.http.values import Values
from kvstore.keys import Namespace, PrefixChain
from kvstore.layout import Part
from kvstore.miss import MissReason

PAYLOAD_TYPE = "application/octet-stream"
ORIGIN_HEADER = "KVStore-Origin"
REASON_HEADER = "KVStore-Reason"

_COALESCED_BYTES = 64 << 10


async def get_block(call: Call) -> web.StreamResponse:
    """Send a block from its slot."""
    service, (chain, part) = call.service, _chain_and_part(call, call.namespace())
    async with call.owner() as owner:
        fetched = await service.manager.fetch(chain, owner=owner, part=part, timeout_s=call.timeout_s)
        async with ready_payloads(service, fetched.blocks) as payloads:
            if not payloads:
                raise _miss(fetched.reason)
            if not await count_whole(service, payloads):
                await service.report_damage(chain, part)
                raise _miss(MissReason.CORRUPT)
            (payload,) = payloads
            headers = {CHECKSUM_HEADER: f"{payload.checksum:016x}", ORIGIN_HEADER: fetched.blocks[0].origin}
            response = payload_answer(headers, len(payload.view))
            await begin_answer(call, response)
            await send_payloads(service, response, payloads, (chain, part))
            return response


async def head_block(call: Call) -> web.StreamResponse:
    """Say where a block is stored, without moving it."""
    namespace = call.namespace()
    chain, part = _chain_and_part(call, namespace)
    match = await call.service.manager.match(chain, part=part, timeout_s=call.timeout_s)
    if not match.blocks:
        raise _miss(match.reason)
    return payload_answer({ORIGIN_HEADER: match.tiers[0]}, namespace.layout.part_bytes(part))


async def put_block(call: Call) -> web.StreamResponse:
    """Take a block into a slot, and store it if its bytes are right."""
    namespace = call.namespace()
    chain, part = _chain_and_part(call, namespace)
    length_bytes = namespace.layout.part_bytes(part)
    call.body.require_plain(PAYLOAD_TYPE)
    call.body.require_length(length_bytes)
    expected = call.checksum_header()
    storing = Storing(
        call, chain, part, length_bytes=length_bytes, checksums=None if expected is None else [expected]
    )
    (found,) = await storing.take_all(timeout_s=call.timeout_s)
    outcome = storing.outcome()
    status = 201 if outcome["stored"] else 200
    return json_answer(outcome, status=status, headers={CHECKSUM_HEADER: f"{found:016x}"})


async def delete_block(call: Call) -> web.StreamResponse:
    """Forget every copy of a block of the caller's own."""
    namespace = call.own_namespace()
    chain, part = _chain_and_part(call, namespace)
    work = call.service.manager.drop(chain, part=part)
    dropped = await call.service.late_work.within(work, call.patience_s, "a drop")
    return json_answer({"dropped": dropped})


async def drop_blocks(call: Call) -> web.StreamResponse:
    """Forget every copy of the caller's own blocks that nothing keeps."""
    namespace = call.own_namespace()
    work = call.service.manager.drop(call.chain(namespace), part=call.part(namespace))
    return json_answer({"dropped": await call.service.late_work.within(work, call.patience_s, "a drop")})


def payload_answer(headers: dict[str, str], length_bytes: int) -> web.StreamResponse:
    """Return the head of an answer that consists of payload bytes."""
    return web.StreamResponse(
        headers={
            **COMMON_HEADERS,
            "Content-Type": PAYLOAD_TYPE,
            "Content-Length": str(length_bytes),
            **headers,
        }
    )


async def begin_answer(call: Call, response: web.StreamResponse) -> None:
    """Send the head of an answer that is streamed."""
    name_answer(call.request, response)
    await response.prepare(call.request)
    if (response.content_length or 0) > _COALESCED_BYTES:
        await response.write(b"")  # on its own: aiohttp joins head and first bytes by a copy


def _chain_and_part(call: Call, namespace: Namespace) -> tuple[PrefixChain, Part]:
    values = call.values
    chain = chain_of_keys(
        named_digest(values),
        [values.need_text("key")],
        block_tokens=namespace.block_tokens,
        start=values.integer("start") or 0,
        parent=values.text("parent"),
    )
    text = values.text("part")
    numbers = Values({"part": None if text is None else [int(digits) for digits in text.split(",")]})
    return chain, call.part(namespace, numbers)


def _miss(reason: MissReason | None) -> Refused:
    word = (reason or MissReason.NEVER_SEEN).value
    return Refused(
        ErrorCode.MISS,
        f"block: not served: {word}",
        headers={REASON_HEADER: word},
        details={"reason": word},
    )
