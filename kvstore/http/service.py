"""HttpService: what the operations of the HTTP face work with; Call: one request on its way to an answer."""

import asyncio
import contextlib
import json
import re
import time
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from aiohttp import web

from kvstore.access_log import Access, AccessLog
from kvstore.auth import Identity, Tenancy
from kvstore.errors import TimedOut
from kvstore.event_feed import EventFeed
from kvstore.http.body import Body, BodyRoom
from kvstore.http.callers import Caller, Callers
from kvstore.http.counters import HttpCounters
from kvstore.http.limits import MAX_KEYS, Limits
from kvstore.http.refusal import ErrorCode, Refused, unknown_namespace
from kvstore.http.schema import check
from kvstore.http.schemas import CHECKSUM
from kvstore.http.values import Values
from kvstore.http_link import REQUEST_HEADER
from kvstore.keys import BlockKey, Namespace, NamespaceDigest, PrefixChain
from kvstore.late_work import LateWork
from kvstore.layout import Part
from kvstore.manager import BlockManager
from kvstore.outlasting import outlast
from kvstore.record_store import RecordStore
from kvstore.results import Owner
from kvstore.tier import SlotTier

T = TypeVar("T")

CHECKSUM_HEADER = "KVStore-Checksum"
"""xxh3-64 of a payload, 16 hex digits."""

COMMON_HEADERS: Mapping[str, str] = {
    "Server": "kvstore",
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
}
"""What every answer carries."""

_REQUEST_NAME = re.compile("[0-9a-f]{1,32}")
_DAMAGE_S = 10.0
_UNTIMED_S = 10.0
_GRACE_S = 0.25


class Peer(Protocol):
    """The other side of a connection, as operations see it."""

    def note_admitted(self) -> None:
        """Note that a request came from it whose sender may send it."""

    def undo_if_unread(self, undo: Callable[[], None]) -> None:
        """Call ``undo`` if it goes away before it has read what was sent to it until now."""


@dataclass(slots=True)
class HttpService:
    """One HTTP face's store, limits and bookkeeping. ``lease_s`` is the longest time a lease lasts."""

    manager: BlockManager
    top: SlotTier
    tenancy: Tenancy
    limits: Limits
    lease_s: float
    server_stats: Callable[[], Mapping[str, object]]
    gate_stats: Callable[[], Mapping[str, object]]
    feed: EventFeed
    records: RecordStore = field(default_factory=lambda: RecordStore(None))
    access_log: AccessLog | None = None
    clock: Callable[[], float] = time.monotonic
    counters: HttpCounters = field(default_factory=HttpCounters)
    late_work: LateWork = field(default_factory=LateWork)
    callers: Callers = field(init=False)
    body_room: BodyRoom = field(init=False)
    pool: ThreadPoolExecutor = field(init=False)
    document: Mapping[str, Any] = field(default_factory=dict)  # Any: JSON
    page: Mapping[str, bytes] = field(default_factory=dict)
    is_open: bool = False
    is_draining: bool = False

    def __post_init__(self) -> None:
        self.callers = Callers(self.manager, self.limits, self.clock)
        self.body_room = BodyRoom(self.limits.max_pending_body_bytes, self.counters)
        self.pool = ThreadPoolExecutor(max_workers=2, thread_name_prefix="kvstore-http")

    def stats(self) -> dict[str, object]:
        """Return what the store and its listeners count."""
        return {
            **self.manager.stats(),
            "records": self.records.stats(),
            "server": self.server_stats(),
            "http": {
                **self.counters.as_dict(),
                "pending_body_bytes": self.body_room.used_bytes,
                "gate": self.gate_stats(),
            },
        }

    async def report_damage(self, chain: PrefixChain, part: Part) -> None:
        """Look at blocks whose bytes were found wrong; the damaged ones are forgotten."""
        work = self.manager.report_damage(chain, part=part)
        with contextlib.suppress(TimedOut):
            await self.late_work.within(work, _DAMAGE_S, "looking at a damaged block")

    async def in_thread(self, work: Callable[[], T], *, stop: Callable[[], None]) -> T:
        """Run work that touches slots on a thread; a caller that is cancelled waits until it has ended."""
        running = asyncio.get_running_loop().run_in_executor(self.pool, work)
        return await outlast(running, when_cancelled=stop)


@dataclass(slots=True)
class Call:
    """One admitted request. ``values`` are its path's, its query's and its JSON body's, all checked.

    ``is_admitted`` says whether its key is still known: for answers without end.
    """

    service: HttpService
    request: web.BaseRequest
    caller: Caller
    values: Values
    body: Body
    peer: Peer
    is_admitted: Callable[[], bool]

    @property
    def identity(self) -> Identity:
        """Who asks."""
        return self.caller.identity

    @property
    def timeout_s(self) -> float | None:
        """How long the store may take; None: its default."""
        return self.values.number("timeout_s")

    @property
    def patience_s(self) -> float:
        """How long an operation is waited for that may not end in time by itself."""
        return _UNTIMED_S if self.timeout_s is None else self.timeout_s + _GRACE_S

    def note_access(self, access: Access, chain: PrefixChain, part: Part) -> None:
        """Tell the access log, if there is one, what is done with a chain."""
        if self.service.access_log is not None:
            self.service.access_log.note(id(self.caller), access, chain, part)

    def checksum_header(self) -> int | None:
        """Return the checksum that the client says its payload has.

        Raises:
            Refused: it is no checksum.
        """
        text = self.request.headers.get(CHECKSUM_HEADER)
        if text is None:
            return None
        check(CHECKSUM, text, CHECKSUM_HEADER)
        return int(text, 16)

    @contextlib.asynccontextmanager
    async def owner(self) -> AsyncIterator[Owner]:
        """Yield an owner of this request alone: what it leases and borrows ends with it."""
        owner = self.service.manager.new_owner()
        try:
            yield owner
        finally:
            self.service.manager.release_owner(owner)

    def namespace(self, values: Values | None = None) -> Namespace:
        """Return the namespace that is named.

        Raises:
            Refused: it is unknown or not the caller's: both are the same to the caller.
        """
        namespace = self.service.manager.namespace(named_digest(values or self.values))
        admits = self.service.tenancy.admits(self.identity, namespace)
        if namespace is None or not admits:
            raise unknown_namespace()
        return namespace

    def own_namespace(self) -> Namespace:
        """Return the namespace that is named, if its blocks are the caller's alone.

        Raises:
            Refused: as ``namespace``, or others share it.
        """
        namespace = self.namespace()
        if not self.identity.is_operator and namespace.tenant_salt != self.identity.salt:
            raise Refused(
                ErrorCode.FORBIDDEN, "namespace: others share it: its blocks are not the caller's own"
            )
        return namespace

    def chain(self, namespace: Namespace, values: Values | None = None) -> PrefixChain:
        """Return the chain of blocks that keys, or tokens, name; to be called once.

        Tokens are let go of: as integers they take many times the bytes of the body.

        Raises:
            Refused: tokens do not begin at block 0, or there are too many blocks.
            InvalidRequest: the keys are no chain.
        """
        values = values or self.values
        tokens, keys = values.taken_integers("tokens"), values.texts("keys")
        parent, start = values.text("parent"), values.integer("start") or 0
        if tokens is not None:
            if parent is not None or start:
                raise Refused(ErrorCode.BAD_REQUEST, "body: tokens begin at block 0: no start, no parent")
            chain = namespace.chain(tokens)
        else:
            digest = named_digest(values)
            chain = chain_of_keys(
                digest, keys or [], block_tokens=namespace.block_tokens, start=start, parent=parent
            )
        if len(chain) > MAX_KEYS:
            raise Refused(
                ErrorCode.TOO_LARGE, f"body: {len(chain)} blocks, at most {MAX_KEYS}: split the chain"
            )
        return chain

    def part(self, namespace: Namespace, values: Values | None = None) -> Part:
        """Return the part of each block that is named; the whole block if none is.

        Raises:
            InvalidLayout: it does not fit the namespace's layout.
        """
        numbers = (values or self.values).integers("part")
        part = namespace.layout.whole if numbers is None else Part(*numbers)
        namespace.layout.part_bytes(part)
        return part

    def chain_and_part(self) -> tuple[PrefixChain, Part]:
        """Return the blocks a JSON body is about.

        Raises:
            Refused, InvalidRequest, InvalidLayout: as ``namespace``, ``chain`` and ``part``.
        """
        namespace = self.namespace()
        return self.chain(namespace), self.part(namespace)


def named_digest(values: Values) -> NamespaceDigest:
    """Return the digest of the namespace that a request names: to compute it anew costs 20 us."""
    return NamespaceDigest(bytes.fromhex(values.need_text("namespace")))


def chain_of_keys(
    namespace: NamespaceDigest, keys: list[str], *, block_tokens: int, start: int, parent: str | None
) -> PrefixChain:
    """Return the chain of keys in hex.

    Raises:
        InvalidRequest: a parent without a start, or the other way round, or of another length; a key twice.
    """
    chain = PrefixChain(
        namespace,
        tuple([BlockKey(bytes.fromhex(key)) for key in keys]),
        block_tokens,
        start,
        None if parent is None else BlockKey(bytes.fromhex(parent)),
    )
    chain.require_distinct()
    return chain


def name_answer(request: web.BaseRequest, response: web.StreamResponse) -> None:
    """Give an answer the name that its request has, so that nobody takes it for another's."""
    name = request.headers.get(REQUEST_HEADER, "")
    if _REQUEST_NAME.fullmatch(name):
        response.headers[REQUEST_HEADER] = name


async def send_whole(call: Call, response: web.StreamResponse) -> None:
    """Hand an answer to the connection now, rather than when the operation has returned.

    Raises:
        ConnectionError: the connection has ended.
    """
    name_answer(call.request, response)
    await response.prepare(call.request)
    await response.write_eof()


def json_answer(
    value: Mapping[str, Any], *, status: int = 200, headers: Mapping[str, str] | None = None
) -> web.Response:
    """Return an answer in JSON. Any: JSON."""
    return web.Response(
        body=json.dumps(value).encode(),
        status=status,
        headers={**COMMON_HEADERS, "Content-Type": "application/json", **(headers or {})},
    )
