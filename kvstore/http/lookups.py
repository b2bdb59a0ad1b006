"""Operations without payloads: who am I, open, match, exists, prefetch, why, leases."""

from dataclasses import fields

from aiohttp import web

from kvstore.access_log import Access
from kvstore.http.refusal import ErrorCode, Refused
from kvstore.http.schemas import MAX_WHY_BLOCKS
from kvstore.http.service import Call, json_answer, send_whole
from kvstore.http.values import Values
from kvstore.keys import BlockKey, Namespace, PrefixChain
from kvstore.layout import KVLayout, Part
from kvstore.miss import MissReason
from kvstore.results import BlockReport, LeaseId, PrefixMatch

_LAYOUT_NAMES = tuple(field.name for field in fields(KVLayout))
_TEXT_NAMES = ("weights", "tokenizer", "adapter", "rope")


async def identity(call: Call) -> web.StreamResponse:
    """Say who the caller is."""
    who = call.identity
    return json_answer(
        {"name": who.name, "tenant": who.tenant, "scopes": sorted(scope.value for scope in who.scopes)}
    )


async def open_namespace(call: Call) -> web.StreamResponse:
    """Make a namespace usable, with the caller's own salt."""
    values = call.values
    described = Namespace(
        model=values.need_text("model"),
        layout=_layout(values.nested("layout")),
        tenant_salt=bytes.fromhex(values.text("tenant_salt") or ""),
        epoch=values.integer("epoch") or 0,
        **{name: values.text(name) or "" for name in _TEXT_NAMES},
    )
    namespace = call.service.tenancy.claim(call.identity, described, is_public=values.flag("public"))
    digest = call.service.manager.open_namespace(namespace)
    return json_answer(
        {
            "namespace": digest.hex(),
            "tenant_salt": namespace.tenant_salt.hex(),
            "block_bytes": namespace.layout.block_bytes,
        }
    )


async def match(call: Call) -> web.StreamResponse:
    """Count the leading blocks that are stored, and lease them if that is wanted."""
    chain, part = call.chain_and_part()
    call.note_access(Access.LOOK, chain, part)
    if call.values.flag("lease"):
        return await _match_and_lease(call, chain, part)
    found = await call.service.manager.match(chain, part=part, timeout_s=call.timeout_s)
    return json_answer(_matched(found))


async def lease(call: Call) -> web.StreamResponse:
    """Load the leading blocks that are stored into memory, and lease them there."""
    chain, part = call.chain_and_part()
    call.note_access(Access.TAKE, chain, part)
    manager = call.service.manager
    with call.caller.place_for_lease() as owner:
        if owner is None:
            return _answer_unleased(call, PrefixMatch(0, (), MissReason.QUOTA))
        fetched = await manager.fetch(
            chain, owner=owner, part=part, timeout_s=call.timeout_s, hints=call.values.hints()
        )
        origins = tuple([block.origin for block in fetched.blocks])
        found = PrefixMatch(len(origins), origins, fetched.reason)
        return await _answer_leased(call, found, fetched.lease, len(origins))


async def _match_and_lease(call: Call, chain: PrefixChain, part: Part) -> web.StreamResponse:
    manager = call.service.manager
    with call.caller.place_for_lease() as owner:
        if owner is None:
            return _answer_unleased(call, await manager.match(chain, part=part, timeout_s=call.timeout_s))
        leased = await manager.match_and_lease(chain, owner=owner, part=part, timeout_s=call.timeout_s)
        return await _answer_leased(
            call, leased.match, leased.lease, len(leased.blocks), reason=leased.lease_reason
        )


def _answer_unleased(call: Call, found: PrefixMatch) -> web.StreamResponse:
    """Say what is stored, and that the caller may have no further lease."""
    call.service.counters.refused_leases += 1
    return json_answer(
        {**_matched(found), "lease": None, "leased": 0, "lease_reason": MissReason.QUOTA.value}
    )


async def _answer_leased(
    call: Call, found: PrefixMatch, lease: LeaseId | None, leased: int, *, reason: MissReason | None = None
) -> web.StreamResponse:
    """Say what is leased. A lease that its client does not learn of ends at once."""
    answer = {**_matched(found), "lease": None, "leased": leased, "lease_reason": _word(reason)}
    if lease is None:
        return json_answer(answer)
    wanted_s, lease_s = call.values.number("lease_s"), call.service.lease_s
    for_s = lease_s if wanted_s is None else min(wanted_s, lease_s)
    name = call.caller.keep(lease, for_s=for_s)

    def undo() -> None:
        call.service.counters.unread_leases += call.caller.end_lease(name)

    response = json_answer({**answer, "lease": name, "lease_s": for_s})
    try:
        await send_whole(call, response)
    except BaseException:  # a cancellation too: whatever it is, nobody knows of the lease
        undo()
        raise
    call.peer.undo_if_unread(undo)
    return response


def _matched(found: PrefixMatch) -> dict[str, object]:
    return {"blocks": found.blocks, "tiers": found.tiers, "reason": _word(found.reason)}


async def renew(call: Call) -> web.StreamResponse:
    """Have a lease of the caller's last its full time from now."""
    lease_s = call.service.lease_s
    if not call.caller.renew(call.values.need_text("lease"), for_s=lease_s):
        raise Refused(ErrorCode.UNKNOWN_LEASE, "lease: it has ended, or is not the caller's")
    return json_answer({"lease_s": lease_s})


async def release(call: Call) -> web.StreamResponse:
    """End a lease of the caller's."""
    if not call.caller.end_lease(call.values.need_text("lease")):
        raise Refused(ErrorCode.UNKNOWN_LEASE, "lease: it has ended, or is not the caller's")
    return json_answer({"released": True})


async def exists(call: Call) -> web.StreamResponse:
    """Say of each key on its own whether it is stored."""
    namespace = call.namespace()
    keys = [BlockKey(bytes.fromhex(key)) for key in call.values.texts("keys") or []]
    present = await call.service.manager.exists(
        namespace.digest, keys, part=call.part(namespace), timeout_s=call.timeout_s
    )
    return json_answer({"present": present})


async def prefetch(call: Call) -> web.StreamResponse:
    """Load the leading blocks that are stored into memory, without a lease."""
    chain, part = call.chain_and_part()
    blocks = await call.service.manager.prefetch(chain, part=part, timeout_s=call.timeout_s)
    return json_answer({"blocks": blocks})


async def note_hints(call: Call) -> web.StreamResponse:
    """Learn more of the future of stored blocks; it is no use of them."""
    namespace = call.own_namespace()
    chain, part = call.chain(namespace), call.part(namespace)
    hints = call.values.hints()
    assert hints is not None, "the schema requires hints"
    call.service.manager.note_hints(chain, hints, part=part)
    return json_answer({"noted": True})


async def why(call: Call) -> web.StreamResponse:
    """Report on every block of a chain."""
    chain, part = call.chain_and_part()
    work = call.service.manager.why(chain[:MAX_WHY_BLOCKS], part=part, timeout_s=call.timeout_s)
    reports = await call.service.late_work.within(work, call.patience_s, "why")
    return json_answer({"blocks": [_told(call, chain, report) for report in reports]})


def _told(call: Call, chain: PrefixChain, report: BlockReport) -> dict[str, object]:
    """Return a report as its caller may read it: which other namespace pressed is no tenant's business."""
    told = report.as_dict()
    if not call.identity.is_operator and report.pressed_by not in ("", chain.namespace.hex()[:12]):
        told["pressed_by"] = "others"
    return told


def _layout(values: Values) -> KVLayout:
    texts = {name: values.text(name) for name in ("dtype", "order")}
    given = texts | {name: values.integer(name) for name in _LAYOUT_NAMES if name not in texts}
    # The schema gives each member the type of its field.
    return KVLayout(**{name: value for name, value in given.items() if value is not None})  # type: ignore[arg-type]


def _word(reason: MissReason | None) -> str | None:
    return None if reason is None else reason.value
