"""ClientCalls: the calls of a client, decided but not made, so that every client decides them alike.

A `Call` says what to ask (a plan), until when, and what comes back when no server serves it. `KVStore` and
`AsyncKVStore` differ only in how they carry one out.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from kvstore import calls, holding_calls
from kvstore.arena_link import MappedArena
from kvstore.at_once import Link
from kvstore.calls import Connection, FetchResult, Plan, PutTally, Session
from kvstore.client_state import ClientState
from kvstore.direct_reads import DirectLink, is_direct, read_directly
from kvstore.errors import InvalidRequest, KVStoreError, RejectedRequest
from kvstore.fetch_calls import (
    BufferSource,
    FetchTally,
    allocate_blocks,
    fetch_at_once,
    fetch_plan,
    is_peeked,
)
from kvstore.hints import Hints
from kvstore.holding_calls import Grant, Loan
from kvstore.keys import (
    BlockKey,
    Namespace,
    NamespaceDigest,
    PrefixChain,
    require_key_lengths,
    require_model,
)
from kvstore.layout import Part
from kvstore.messages import ChainRef
from kvstore.put_calls import Put, put_at_once, put_plan
from kvstore.results import BlockReport, EraseReport, PrefixMatch, PutResult
from kvstore.tenant import tenant_of
from kvstore.transfer import Buffer, require_writable, split_buffers

T = TypeVar("T")
Array = npt.NDArray[np.uint8]

_MAX_SAMPLE_BLOCKS = 1_000_000
_FEW_KEYS = 64
_TELL_S = 0.05
"""How long a message that nobody waits for may take to be sent."""


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """One call of a client.

    ``when_away`` makes the result when the store does not serve it; without one the failure is raised.
    ``is_held``: what it brings outlives it, so it goes over the connection that is kept for such things.
    ``at_once`` tries it on a connection that knows the namespace, without the steps of a plan, where the
    caller may be blocked; None if that does not suffice: then the plan goes on.
    ``direct`` tries it before that without asking anybody, on a connection that knows the namespace, copying
    ``direct_bytes`` on the caller's thread; None if the server has to be asked.
    ``holder``: the connection that what the call is about belongs to; over another it makes no sense.
    ``chain``: the blocks that a call of the data path is about.
    """

    make_plan: Callable[[Session], Plan[T]]
    deadline_s: float
    namespace: NamespaceDigest | None = None
    when_away: Callable[[KVStoreError], T] | None = None
    is_held: bool = False
    holder: Connection | None = None
    at_once: Callable[[Link], T | None] | None = None
    direct: Callable[[DirectLink], T | None] | None = None
    direct_bytes: int = 0
    chain: PrefixChain | None = None

    def not_served(self, error: KVStoreError) -> T:
        """Return what the call comes to when the store does not serve it; a control call raises the error.

        Raises:
            InvalidRequest: its chain names a block twice, or has a key of another length. To look for that
                before each call costs as much as the call: it is looked for when the server says that the
                request is invalid, for lengths also when there is no server to say it.
        """
        if self.chain is not None:
            self.chain.require_key_lengths()
        if isinstance(error, RejectedRequest) and self.chain is not None:
            self.chain.require_distinct()
        if self.when_away is None:
            raise error
        return self.when_away(error)

    @property
    def is_control(self) -> bool:
        """Whether it may try to connect at once, however lately that failed."""
        return self.when_away is None


class ClientCalls:
    """Checks the arguments of calls, and makes calls of them."""

    def __init__(self, state: ClientState, *, is_read_only: bool = False) -> None:
        self._state = state
        self._is_read_only = is_read_only

    def open_namespace(self, namespace: Namespace, *, is_public: bool) -> Namespace:
        """Make a namespace's chains usable, and return it."""
        if is_public and namespace.tenant_salt:
            raise InvalidRequest("namespace: a public one has no tenant_salt")
        self._state.open_namespace(namespace)
        return namespace

    def match(self, chain: PrefixChain, *, part: Part | None, timeout_s: float | None) -> Call[PrefixMatch]:
        """Count the leading blocks that are stored."""
        self._require_few(chain, part)
        return Call(
            lambda session: calls.match_plan(session, chain, part),
            self._deadline_s(timeout_s, self._state.timeouts.match_s),
            chain.namespace,
            lambda error: PrefixMatch(0, (), self._state.note_away(error)),
            chain=chain,
        )

    def match_and_lease(
        self, chain: PrefixChain, *, part: Part | None, timeout_s: float | None
    ) -> Call[tuple[PrefixMatch, Grant]]:
        """Count the leading blocks that are stored, and lease those that are in the arena."""
        length_bytes = self._require_few(chain, part)
        now_s = self._state.clock()

        def nothing(error: KVStoreError) -> tuple[PrefixMatch, Grant]:
            reason = self._state.note_away(error)
            return PrefixMatch(0, (), reason), Grant(chain[:0], part, reason)

        return Call(
            lambda session: holding_calls.match_and_lease_plan(
                session, chain, part=part, length_bytes=length_bytes, now_s=now_s
            ),
            self._deadline_s(timeout_s, self._state.timeouts.match_s),
            chain.namespace,
            nothing,
            is_held=True,
            chain=chain,
        )

    def exists(
        self,
        blocks: PrefixChain | Sequence[BlockKey],
        *,
        namespace: Namespace | None,
        part: Part | None,
        timeout_s: float | None,
    ) -> Call[list[bool]]:
        """Ask which of any blocks are stored."""
        digest, keys = self._named(blocks, namespace, part)

        def none(error: KVStoreError) -> list[bool]:
            self._state.note_away(error)
            return [False] * len(keys)

        return Call(
            lambda session: holding_calls.exists_plan(session, digest, keys, part),
            self._deadline_s(timeout_s, self._state.timeouts.match_s),
            digest,
            none,
        )

    def _named(
        self, blocks: PrefixChain | Sequence[BlockKey], namespace: Namespace | None, part: Part | None
    ) -> tuple[NamespaceDigest, tuple[BlockKey, ...]]:
        """Return the namespace and the keys that an ``exists`` is about."""
        if isinstance(blocks, PrefixChain):
            self._require(blocks, part)
            return blocks.namespace, blocks.keys
        if namespace is None:
            raise InvalidRequest("exists: keys that are no chain need the namespace they are of")
        keys = tuple(blocks)
        require_key_lengths(keys, "exists")
        layout = self._state.namespace(namespace.digest).layout
        if part is not None:
            layout.part_bytes(part)
        return namespace.digest, keys

    def fetch_into(
        self,
        chain: PrefixChain,
        buffers: Buffer,
        *,
        part: Part | None,
        timeout_s: float | None,
        hints: Hints | None = None,
    ) -> Call[FetchResult]:
        """Copy the longest stored prefix into buffers."""
        length_bytes = self._require(chain, part)
        views = split_buffers(buffers, length_bytes=length_bytes, count=len(chain), what="buffers")
        require_writable(views, "buffers")
        return self._fetch(
            ChainRef(chain, part),
            lambda start, stop: views[start:stop],
            length_bytes=length_bytes,
            timeout_s=timeout_s,
            hints=hints,
        )

    def get(
        self,
        chain: PrefixChain,
        blocks: list[Array],
        *,
        part: Part | None,
        timeout_s: float | None,
        hints: Hints | None = None,
    ) -> Call[FetchResult]:
        """Copy the longest stored prefix into arrays made for it, which are appended to ``blocks``."""
        length_bytes = self._require(chain, part)
        return self._fetch(
            ChainRef(chain, part),
            allocate_blocks(length_bytes, blocks),
            length_bytes=length_bytes,
            timeout_s=timeout_s,
            hints=hints,
        )

    def _fetch(
        self,
        about: ChainRef,
        buffers: BufferSource,
        *,
        length_bytes: int,
        timeout_s: float | None,
        hints: Hints | None,
    ) -> Call[FetchResult]:
        chain, tally = about.chain, FetchTally()
        deadline_s = self._deadline_s(timeout_s, self._state.timeouts.fetch_s)

        def copied_so_far(error: KVStoreError) -> FetchResult:
            is_whole = tally.blocks == len(chain)
            return tally.result(None if is_whole else self._state.note_away(error))

        def at_once(link: Link) -> FetchResult | None:
            return fetch_at_once(
                link,
                about,
                buffers,
                length_bytes=length_bytes,
                deadline_s=deadline_s,
                tally=tally,
                hints=hints,
            )

        def direct(link: DirectLink) -> FetchResult | None:
            return read_directly(
                link,
                self._state,
                about,
                buffers,
                length_bytes=length_bytes,
                deadline_s=deadline_s,
                hints=hints,
            )

        is_few = is_peeked(chain, length_bytes)
        return Call(
            lambda session: fetch_plan(
                session,
                chain,
                part=about.part,
                length_bytes=length_bytes,
                buffers=buffers,
                tally=tally,
                hints=hints,
            ),
            deadline_s,
            chain.namespace,
            copied_so_far,
            at_once=at_once if is_few else None,
            direct=direct if is_few and is_direct(len(chain.keys)) else None,
            direct_bytes=len(chain.keys) * length_bytes,
            chain=chain,
        )

    def put(
        self,
        chain: PrefixChain,
        payloads: Buffer,
        *,
        part: Part | None,
        timeout_s: float | None,
        checksums: Sequence[int] | None,
        hints: Hints | None = None,
    ) -> Call[PutResult]:
        """Store blocks that are not stored yet."""
        self._refuse_if_read_only()
        length_bytes = self._require(chain, part)
        views = split_buffers(payloads, length_bytes=length_bytes, count=len(chain), what="payloads")
        if checksums is not None and len(checksums) != len(chain):
            raise InvalidRequest(f"checksums: {len(checksums)} for {len(chain)} blocks")
        put, tally = Put(ChainRef(chain, part), views, length_bytes, checksums, hints), PutTally(len(chain))

        def plan(session: Session) -> Plan[PutResult]:
            yield from put_plan(session, put, tally)
            return tally.result()

        deadline_s = self._deadline_s(timeout_s, self._state.timeouts.put_s)

        def at_once(link: Link) -> PutResult | None:
            return tally.result() if put_at_once(link, put, tally, deadline_s) else None

        return Call(
            plan,
            deadline_s,
            chain.namespace,
            self._stored_so_far(tally),
            at_once=at_once,
            chain=chain,
        )

    def hint(
        self, chain: PrefixChain, hints: Hints, *, part: Part | None, timeout_s: float | None
    ) -> Call[bool]:
        """Say more of the future of stored blocks."""
        self._refuse_if_read_only()
        self._require(chain, part)
        return Call(
            lambda session: calls.hint_plan(session, chain, part, hints),
            self._deadline_s(timeout_s, self._state.timeouts.match_s),
            chain.namespace,
            self._no,
            chain=chain,
        )

    def prefetch(self, chain: PrefixChain, *, part: Part | None, timeout_s: float | None) -> Call[int]:
        """Load stored leading blocks into the top tier."""
        self._require(chain, part)

        def none(error: KVStoreError) -> int:
            self._state.note_away(error)
            return 0

        return Call(
            lambda session: calls.prefetch_plan(session, chain, part),
            self._deadline_s(timeout_s, self._state.timeouts.fetch_s),
            chain.namespace,
            none,
            chain=chain,
        )

    def lease(
        self,
        chain: PrefixChain,
        *,
        part: Part | None,
        timeout_s: float | None,
        hints: Hints | None = None,
    ) -> Call[Grant]:
        """Have the longest stored prefix made ready and leased."""
        length_bytes = self._require(chain, part)
        now_s = self._state.clock()
        return Call(
            lambda session: holding_calls.lease_plan(
                session, chain, part=part, length_bytes=length_bytes, now_s=now_s, hints=hints
            ),
            self._deadline_s(timeout_s, self._state.timeouts.fetch_s),
            chain.namespace,
            lambda error: Grant(chain[:0], part, self._state.note_away(error)),
            is_held=True,
            chain=chain,
        )

    def renew(self, grant: Grant, lease: int, *, timeout_s: float | None) -> Call[bool]:
        """Have a lease last its full time again."""
        now_s = self._state.clock()
        return Call(
            lambda _: holding_calls.renew_plan(grant, lease, now_s),
            self._deadline_s(timeout_s, self._state.timeouts.match_s),
            None,
            self._no,
            is_held=True,
            holder=grant.connection,
        )

    def release(self, grant: Grant, lease: int) -> Call[None]:
        """End a lease."""
        return Call(
            lambda _: holding_calls.release_plan(lease),
            self._state.clock() + _TELL_S,
            None,
            lambda _: None,
            is_held=True,
            holder=grant.connection,
        )

    def view(self, grant: Grant, *, timeout_s: float | None) -> Call[list[memoryview]]:
        """Verify leased blocks in place."""

        def nothing(error: KVStoreError) -> list[memoryview]:
            self._state.note_away(error)
            return []

        return Call(
            lambda session: holding_calls.view_plan(session, grant),
            self._deadline_s(timeout_s, self._state.timeouts.fetch_s),
            None,
            nothing,
            is_held=True,
            holder=grant.connection,
        )

    def reserve(
        self,
        chain: PrefixChain,
        *,
        part: Part | None,
        timeout_s: float | None,
        hints: Hints | None = None,
    ) -> Call[Loan]:
        """Have slots lent for the blocks that are not stored."""
        self._refuse_if_read_only()
        length_bytes = self._require(chain, part)

        def nothing(error: KVStoreError) -> Loan:
            tally = PutTally(len(chain))
            tally.note_reason(self._state.note_away(error))
            return Loan(chain, part, length_bytes, tally)

        return Call(
            lambda session: holding_calls.reserve_plan(
                session, chain, part=part, length_bytes=length_bytes, hints=hints
            ),
            self._deadline_s(timeout_s, self._state.timeouts.put_s),
            chain.namespace,
            nothing,
            is_held=True,
            chain=chain,
        )

    def commit(self, loan: Loan, *, timeout_s: float | None) -> Call[PutResult]:
        """Publish what was written into lent slots."""
        return Call(
            lambda session: holding_calls.commit_plan(session, loan),
            self._deadline_s(timeout_s, self._state.timeouts.put_s),
            None,
            self._stored_so_far(loan.tally),
            is_held=True,
            holder=loan.connection,
        )

    def abandon(self, loan: Loan) -> Call[None]:
        """Give lent slots back unwritten."""
        return Call(
            lambda _: holding_calls.abandon_plan(loan),
            self._state.clock() + _TELL_S,
            None,
            lambda _: None,
            is_held=True,
            holder=loan.connection,
        )

    def drop(self, chain: PrefixChain, *, part: Part | None, timeout_s: float | None) -> Call[int]:
        """Forget every copy of blocks that is not leased."""
        self._refuse_if_read_only()
        self._require(chain, part)
        return self._control(
            lambda session: calls.drop_plan(session, chain, part), timeout_s, chain.namespace
        )

    def demote(self, chain: PrefixChain, *, part: Part | None, timeout_s: float | None) -> Call[int]:
        """Write blocks to a tier below and take them out of the top tier."""
        self._refuse_if_read_only()
        self._require(chain, part)
        return self._control(
            lambda session: calls.demote_plan(session, chain, part), timeout_s, chain.namespace
        )

    def why(
        self, chain: PrefixChain, *, part: Part | None, timeout_s: float | None
    ) -> Call[list[BlockReport]]:
        """Explain the blocks of a chain."""
        self._require(chain, part)
        return self._control(lambda session: calls.why_plan(session, chain, part), timeout_s, chain.namespace)

    def change_policy(self, text: str, *, timeout_s: float | None) -> Call[str]:
        """Give tiers or namespaces other policies."""
        self._refuse_if_read_only()
        return self._control(lambda _: calls.change_policy_plan(text), timeout_s)

    def advance_epoch(self, model: str, *, timeout_s: float | None) -> Call[int]:
        """End the present epoch of a model."""
        self._refuse_if_read_only()
        require_model(model)
        return self._control(lambda _: calls.advance_epoch_plan(model), timeout_s)

    def erase_tenant(self, salt: bytes, *, timeout_s: float | None) -> Call[EraseReport]:
        """Destroy the key of the tenant with that salt."""
        self._refuse_if_read_only()
        return self._control(lambda _: calls.erase_plan(tenant_of(salt), None), timeout_s)

    def erase_tenant_of(self, namespace: NamespaceDigest, *, timeout_s: float | None) -> Call[EraseReport]:
        """Destroy the key of the tenant of an open namespace."""
        self._refuse_if_read_only()
        return self._control(lambda _: calls.erase_plan(None, namespace), timeout_s)

    def namespaces(self, *, timeout_s: float | None) -> Call[list[Namespace]]:
        """Ask for the namespaces that clients opened."""
        return self._control(lambda _: calls.namespaces_plan(), timeout_s)

    def flush(self, *, timeout_s: float | None) -> Call[bool]:
        """Wait until what was put has been written through."""
        return self._control(calls.flush_plan, timeout_s)

    def stats(self, *, timeout_s: float | None) -> Call[dict[str, Any]]:  # Any: JSON
        """Ask for counters and occupancy."""
        return self._control(lambda _: calls.stats_plan(), timeout_s)

    def size_curve(
        self, namespace: NamespaceDigest | None, *, timeout_s: float | None
    ) -> Call[dict[str, Any]]:  # Any: JSON
        """Ask for hit rates by size."""
        return self._control(lambda _: calls.size_curve_plan(namespace), timeout_s)

    def check(self, sample_blocks: int, *, timeout_s: float | None) -> Call[list[str]]:
        """Have the server verify its invariants."""
        if not 0 <= sample_blocks <= _MAX_SAMPLE_BLOCKS:
            raise InvalidRequest(f"check: {sample_blocks} blocks, expected 0 to {_MAX_SAMPLE_BLOCKS}")
        return self._control(lambda session: calls.check_plan(session, sample_blocks), timeout_s)

    def arena(self, *, timeout_s: float | None) -> Call[MappedArena]:
        """Return the server's arena as it is mapped here."""
        return self._control(calls.arena_plan, timeout_s)

    def ping(self, *, timeout_s: float | None) -> Call[None]:
        """Ask whether the server answers."""
        return self._control(lambda _: calls.ping_plan(), timeout_s)

    def _control(
        self,
        make_plan: Callable[[Session], Plan[T]],
        timeout_s: float | None,
        namespace: NamespaceDigest | None = None,
    ) -> Call[T]:
        return Call(make_plan, self._deadline_s(timeout_s, self._state.timeouts.control_s), namespace)

    def _require(self, chain: PrefixChain, part: Part | None) -> int:
        """Return the bytes of each block. Raises InvalidRequest for what cannot be a chain of a namespace."""
        chain.require_key_lengths()
        return self._state.length_bytes(chain, part)

    def _require_few(self, chain: PrefixChain, part: Part | None) -> int:
        """As ``_require``, but each key of a few only: for calls that take little longer than to look.

        Of more keys it is seen for nothing when they are sent whether they have as many bytes as they should.
        """
        return (self._require if len(chain) <= _FEW_KEYS else self._state.length_bytes)(chain, part)

    def _deadline_s(self, timeout_s: float | None, default_s: float) -> float:
        return self._state.deadline_s(timeout_s, default_s)

    def _stored_so_far(self, tally: PutTally) -> Callable[[KVStoreError], PutResult]:
        def result(error: KVStoreError) -> PutResult:
            tally.note_reason(self._state.note_away(error))
            return tally.result()

        return result

    def _no(self, error: KVStoreError) -> bool:
        self._state.note_away(error)
        return False

    def _refuse_if_read_only(self) -> None:
        if self._is_read_only:
            raise InvalidRequest("client: it is read-only: connect without is_read_only to change the store")


def only_block(chain: PrefixChain) -> PrefixChain:
    """Return a chain of one block. Raises InvalidRequest for any other."""
    if len(chain) != 1:
        raise InvalidRequest(f"chain: {len(chain)} blocks, one is expected: chain[n : n + 1]")
    return chain
