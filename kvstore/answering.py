"""Answers about presence, leases, namespaces and erasures, made of what the manager says."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import cast

import numpy as np

from kvstore.errors import NamespaceNotOpen
from kvstore.granting import ReadyCopies
from kvstore.keys import NamespaceDigest
from kvstore.manager import BlockManager
from kvstore.messages import (
    Demote,
    Drop,
    Erase,
    Exists,
    Fetch,
    Flush,
    LeaseChain,
    Leased,
    Match,
    MatchAndLease,
    Matched,
    Presence,
    Ready,
    ReadySlot,
    Renew,
    Renewed,
    Report,
    Request,
    Seen,
    TierNames,
    Why,
    timeout_us,
)
from kvstore.record_store import RecordStore
from kvstore.results import FetchedBlock, LeaseId, Owner
from kvstore.server_counters import ServerCounters
from kvstore.tenant import tenant_of

UNTIMED_S = 10.0
"""How long an operation is waited for whose request gives no time."""

_MAX_LISTED_NAMESPACES = 256
_GRACE_S = 0.25
"""How much longer than its time an operation that ends by itself in time is waited for."""


def answer_ready(found: ReadyCopies) -> Ready:
    """Say where leased copies of a whole chain are."""
    slots = _copy_slots(found)
    return Ready(found.lease, found.length_bytes, slots, TierNames((found.origin,), bytes(len(slots))), None)


def answer_seen(found: ReadyCopies) -> Seen:
    """Say where copies of a whole chain are that are not leased."""
    return Seen(found.length_bytes, _copy_slots(found), found.origin)


def _copy_slots(found: ReadyCopies) -> tuple[ReadySlot, ...]:
    slots = [(copy.slot, copy.generation, copy.checksum) for copy in found.copies]
    assert all(None not in slot for slot in slots), "a READY copy in the arena lacks slot or checksum"
    # Plain tuples do as well on their way to the wire, at a third of the time.
    return cast("tuple[ReadySlot, ...]", tuple(slots))


async def answer_erase(manager: BlockManager, request: Erase) -> Report:
    """Erase a tenant, and report what came of it.

    Raises:
        NamespaceNotOpen: it is named by a namespace that is not open.
    """
    tenant = request.tenant
    if tenant is None:
        assert request.namespace is not None, "the message names one of the two"
        known = manager.namespace(request.namespace)
        if known is None:
            digest = request.namespace.hex()[:12]
            raise NamespaceNotOpen(f"namespace {digest} is not open: name its tenant by the salt")
        tenant = tenant_of(known.tenant_salt)
    return Report(json.dumps((await manager.erase(tenant)).as_dict()).encode())


def answer_sizes(manager: BlockManager, namespace: NamespaceDigest | None) -> Report:
    """Say what the hit rate would be at other sizes."""
    told = manager.size_curve(None if namespace is None else [namespace])
    return Report(json.dumps(told).encode())


def answer_namespaces(manager: BlockManager) -> Report:
    """List the namespaces that clients opened, the latest ones, without the salts of tenants."""
    listed = []
    for space in manager.namespaces()[-_MAX_LISTED_NAMESPACES:]:
        fields = asdict(space)
        del fields["tenant_salt"]
        listed.append(fields)
    return Report(json.dumps(listed).encode())


def answer_lookup_at_once(
    manager: BlockManager, owner: Owner, request: Fetch | Match | Exists
) -> Ready | Matched | Presence | None:
    """Answer from what is known and on top; None where that does not do: a tier below has to be asked."""
    match request:
        case Fetch(about, _, hints):
            found = manager.fetch_at_once(about.chain, owner=owner, part=about.part, hints=hints)
            return None if found is None else answer_ready(found)
        case Match(about, _):
            matched = manager.match_at_once(about.chain, part=about.part)
            return None if matched is None else Matched(TierNames.of(matched.tiers), matched.reason)
        case Exists(asked, _):
            present = manager.exists_at_once(asked.namespace, asked.keys, part=asked.part)
            return None if present is None else _presence(present)


async def answer_exists(manager: BlockManager, request: Exists) -> Presence:
    """Say which blocks are stored."""
    about = request.about
    present = await manager.exists(
        about.namespace, about.keys, part=about.part, timeout_s=request.timeout_us / 1e6
    )
    return _presence(present)


def _presence(present: Sequence[bool]) -> Presence:
    bits = np.frombuffer(bytes(present), np.bool_)  # a tenth of the time of an array made of a list
    return Presence(np.packbits(bits, bitorder="little").tobytes())


async def answer_lease(manager: BlockManager, owner: Owner, request: LeaseChain) -> Leased:
    """Make the stored prefix ready in slots and lease it."""
    about = request.about
    fetched = await manager.fetch(
        about.chain,
        owner=owner,
        part=about.part,
        timeout_s=request.timeout_us / 1e6,
        hints=request.hints,
    )
    return Leased(
        lease=fetched.lease,
        lease_us=timeout_us(manager.lease_s),
        length_bytes=fetched.blocks[0].length_bytes if fetched.blocks else 0,
        slots=ready_slots(fetched.blocks),
        tiers=TierNames.of([block.origin for block in fetched.blocks]),
        reason=fetched.reason,
    )


async def answer_match_and_lease(manager: BlockManager, owner: Owner, request: MatchAndLease) -> Leased:
    """Match a chain, and lease what of it is in slots already."""
    about = request.about
    found = await manager.match_and_lease(
        about.chain, owner=owner, part=about.part, timeout_s=request.timeout_us / 1e6
    )
    return Leased(
        lease=found.lease,
        lease_us=timeout_us(manager.lease_s),
        length_bytes=found.blocks[0].length_bytes if found.blocks else 0,
        slots=ready_slots(found.blocks),
        tiers=TierNames.of(found.match.tiers),
        reason=found.match.reason,
        lease_reason=found.lease_reason,
    )


def answer_renew(manager: BlockManager, owner: Owner, request: Renew) -> Renewed:
    """Have a lease last its full time again."""
    return Renewed(timeout_us(manager.renew(LeaseId(request.lease), owner=owner)))


def ready_slots(blocks: Sequence[FetchedBlock]) -> tuple[ReadySlot, ...]:
    """Return where leased blocks are."""
    slots: list[ReadySlot] = []
    for block in blocks:
        assert block.checksum is not None, "an arena block has no checksum"
        slots.append(ReadySlot(block.slot, block.generation, block.checksum))
    return tuple(slots)


def control_limit_s(request: Request) -> float:
    """Return how long the answer to a control request is waited for."""
    match request:
        case Drop(_, timeout):
            return timeout / 1e6
        case Demote(_, timeout) | Why(_, timeout) | Flush(timeout):
            return timeout / 1e6 + _GRACE_S
        case _:
            return UNTIMED_S


def answer_stats(manager: BlockManager, records: RecordStore, counters: ServerCounters) -> Report:
    """Tell all counters and the occupancy, as JSON."""
    stats = {**manager.stats(), "records": records.stats(), "server": counters.as_dict()}
    return Report(json.dumps(stats).encode())
