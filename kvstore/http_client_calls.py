"""HttpClientCalls: the calls of a client, made over HTTP: the same checks, promises and results.

What needs shared memory (views, slots to write in place) raises InvalidRequest: over a network there is none.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NoReturn, TypeVar

from kvstore import calls, http_calls
from kvstore.arena_link import MappedArena
from kvstore.calls import FetchResult, Plan, Session
from kvstore.client_calls import Array, Call, ClientCalls
from kvstore.errors import InvalidRequest, KVStoreError
from kvstore.fetch_calls import BufferSource, allocate_blocks
from kvstore.hints import Hints
from kvstore.holding_calls import Grant, Loan
from kvstore.http_calls import Fetching, Putting
from kvstore.http_link import HttpAnswer, HttpRequest
from kvstore.http_session import HttpSession
from kvstore.keys import BlockKey, Namespace, NamespaceDigest, PrefixChain, require_model
from kvstore.layout import Part
from kvstore.miss import MissReason
from kvstore.results import BlockReport, EraseReport, PrefixMatch, PutResult
from kvstore.tenant import tenant_of
from kvstore.transfer import Buffer, Bytes, require_writable, split_buffers
from kvstore.wire import MAX_KEYS

T = TypeVar("T")

_MAX_WINDOW_BLOCKS = 1024
_MAX_WHY_BLOCKS = 1000
_SMALL_PUT_BYTES = 256 << 10
"""A put of fewer bytes is sent without asking first what is present."""


def _never(_: Session) -> NoReturn:
    raise AssertionError("a call over HTTP has no plan for a socket")


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpCall(Call[T], Generic[T]):
    """One call over HTTP: ``work`` makes it, blocking."""

    make_plan: Callable[[Session], Plan[T]] = _never
    work: Callable[[HttpSession], T]


class HttpClientCalls(ClientCalls):
    """Checks the arguments of calls, and makes calls over HTTP of them."""

    def match(
        self, chain: PrefixChain, *, part: Part | None, timeout_s: float | None
    ) -> HttpCall[PrefixMatch]:
        """Count the leading blocks that are stored."""
        self._require(chain, part)
        return self._about(
            chain,
            "/v1/match",
            http_calls.chain_values(chain, part),
            lambda answer: http_calls.read_match(chain, answer),
            self._deadline_s(timeout_s, self._state.timeouts.match_s),
            lambda error: PrefixMatch(0, (), self._state.note_away(error)),
        )

    def match_and_lease(
        self, chain: PrefixChain, *, part: Part | None, timeout_s: float | None
    ) -> HttpCall[tuple[PrefixMatch, Grant]]:
        """Count the leading blocks that are stored, and lease those that are in memory."""
        self._require(chain, part)
        now_s = self._state.clock()

        def nothing(error: KVStoreError) -> tuple[PrefixMatch, Grant]:
            reason = self._state.note_away(error)
            return PrefixMatch(0, (), reason), Grant(chain[:0], part, reason)

        return self._about(
            chain,
            "/v1/match",
            {**http_calls.chain_values(chain, part), "lease": True},
            lambda answer: http_calls.read_leased_match(chain, part, answer, now_s),
            self._deadline_s(timeout_s, self._state.timeouts.match_s),
            nothing,
        )

    def exists(
        self,
        blocks: PrefixChain | Sequence[BlockKey],
        *,
        namespace: Namespace | None,
        part: Part | None,
        timeout_s: float | None,
    ) -> HttpCall[list[bool]]:
        """Ask which of any blocks are stored."""
        digest, keys = self._named(blocks, namespace, part)
        if len(keys) > MAX_KEYS:
            raise InvalidRequest(f"keys: {len(keys)}, limit {MAX_KEYS}: split them")

        def none(error: KVStoreError) -> list[bool]:
            self._state.note_away(error)
            return [False] * len(keys)

        take = http_calls.read_flags("present", len(keys))
        values = http_calls.key_values(digest, keys, part)
        return HttpCall(
            deadline_s=self._deadline_s(timeout_s, self._state.timeouts.match_s),
            namespace=digest,
            when_away=none,
            work=lambda session: session.about(
                digest, lambda: session.ask_timed("POST", "/v1/exists", values, take)
            ),
        )

    def fetch_into(
        self,
        chain: PrefixChain,
        buffers: Buffer,
        *,
        part: Part | None,
        timeout_s: float | None,
        hints: Hints | None = None,
    ) -> HttpCall[FetchResult]:
        """Receive the longest stored prefix into buffers."""
        length_bytes = self._require(chain, part)
        views = split_buffers(buffers, length_bytes=length_bytes, count=len(chain), what="buffers")
        require_writable(views, "buffers")
        return self._receive(
            chain, lambda start, stop: views[start:stop], part=part, timeout_s=timeout_s, hints=hints
        )

    def get(
        self,
        chain: PrefixChain,
        blocks: list[Array],
        *,
        part: Part | None,
        timeout_s: float | None,
        hints: Hints | None = None,
    ) -> HttpCall[FetchResult]:
        """Receive the longest stored prefix into arrays made for it, which are appended to ``blocks``."""
        source = allocate_blocks(self._require(chain, part), blocks)
        return self._receive(chain, source, part=part, timeout_s=timeout_s, hints=hints)

    def put(
        self,
        chain: PrefixChain,
        payloads: Buffer,
        *,
        part: Part | None,
        timeout_s: float | None,
        checksums: Sequence[int] | None,
        hints: Hints | None = None,
    ) -> HttpCall[PutResult]:
        """Send blocks, but for leading ones that are stored already."""
        self._refuse_if_read_only()
        length_bytes = self._require(chain, part)
        views = split_buffers(payloads, length_bytes=length_bytes, count=len(chain), what="payloads")
        if checksums is not None and len(checksums) != len(chain):
            raise InvalidRequest(f"checksums: {len(checksums)} for {len(chain)} blocks")
        putting = Putting(len(chain))

        def stored_so_far(error: KVStoreError) -> PutResult:
            putting.note_reason(self._state.note_away(error))
            return putting.result()

        def work(session: HttpSession) -> PutResult:
            if len(chain) * length_bytes > _SMALL_PUT_BYTES:
                putting.note_present(_leading_present(session, chain, part))
            sending = _Sending(session, chain, part, views, checksums, hints)
            sending.send_to(putting, window=_window_blocks(length_bytes))
            return putting.result()

        return HttpCall(
            deadline_s=self._deadline_s(timeout_s, self._state.timeouts.put_s),
            namespace=chain.namespace,
            chain=chain,
            when_away=stored_so_far,
            work=work,
        )

    def hint(
        self, chain: PrefixChain, hints: Hints, *, part: Part | None, timeout_s: float | None
    ) -> HttpCall[bool]:
        """Say more of the future of stored blocks."""
        self._refuse_if_read_only()
        self._require(chain, part)
        return self._about(
            chain,
            "/v1/hints",
            http_calls.chain_values(chain, part, hints),
            http_calls.read_flag("noted"),
            self._deadline_s(timeout_s, self._state.timeouts.match_s),
            self._no,
        )

    def prefetch(self, chain: PrefixChain, *, part: Part | None, timeout_s: float | None) -> HttpCall[int]:
        """Load stored leading blocks into the top tier."""
        self._require(chain, part)

        def none(error: KVStoreError) -> int:
            self._state.note_away(error)
            return 0

        return self._about(
            chain,
            "/v1/prefetch",
            http_calls.chain_values(chain, part),
            http_calls.read_count("blocks"),
            self._deadline_s(timeout_s, self._state.timeouts.fetch_s),
            none,
        )

    def lease(
        self,
        chain: PrefixChain,
        *,
        part: Part | None,
        timeout_s: float | None,
        hints: Hints | None = None,
    ) -> HttpCall[Grant]:
        """Have the longest stored prefix loaded and leased."""
        self._require(chain, part)
        now_s = self._state.clock()
        return self._about(
            chain,
            "/v1/leases",
            http_calls.chain_values(chain, part, hints),
            lambda answer: http_calls.read_leased_match(chain, part, answer, now_s)[1],
            self._deadline_s(timeout_s, self._state.timeouts.fetch_s),
            lambda error: Grant(chain[:0], part, self._state.note_away(error)),
        )

    def renew(self, grant: Grant, lease: int, *, timeout_s: float | None) -> HttpCall[bool]:
        """Have a lease last its full time again."""
        now_s = self._state.clock()

        def renewed(session: HttpSession) -> bool:
            path = http_calls.lease_path(lease)
            lease_s = session.ask(HttpRequest("PUT", path), http_calls.read_seconds("lease_s"))
            grant.deadline_s = now_s + lease_s
            return True

        return HttpCall(
            deadline_s=self._deadline_s(timeout_s, self._state.timeouts.match_s),
            when_away=self._no,
            work=lambda session: http_calls.unless_ended(lambda: renewed(session), False),
        )

    def release(self, grant: Grant, lease: int) -> HttpCall[None]:
        """End a lease."""

        def untold(error: KVStoreError) -> None:
            self._state.note_away(error)

        def released(session: HttpSession) -> None:
            session.ask(HttpRequest("DELETE", http_calls.lease_path(lease)), HttpAnswer.json)

        return HttpCall(
            deadline_s=self._deadline_s(None, self._state.timeouts.match_s),
            when_away=untold,
            work=lambda session: http_calls.unless_ended(lambda: released(session), None),
        )

    def view(self, grant: Grant, *, timeout_s: float | None) -> NoReturn:
        """Refuse: there is nothing to look into."""
        raise InvalidRequest("view: over HTTP there is no shared memory: use get or fetch_into")

    def reserve(
        self,
        chain: PrefixChain,
        *,
        part: Part | None,
        timeout_s: float | None,
        hints: Hints | None = None,
    ) -> HttpCall[Loan]:
        """Refuse: there is nothing to write into."""
        raise InvalidRequest("reserve: over HTTP there is no shared memory: use put")

    def arena(self, *, timeout_s: float | None) -> HttpCall[MappedArena]:
        """Refuse: there is no arena here."""
        raise InvalidRequest("register_with_cuda: over HTTP there is no shared memory")

    def drop(self, chain: PrefixChain, *, part: Part | None, timeout_s: float | None) -> HttpCall[int]:
        """Forget every copy of the caller's own blocks that is not leased."""
        self._refuse_if_read_only()
        return self._control_about(chain, part, "/v1/drop", http_calls.read_count("dropped"), timeout_s)

    def demote(self, chain: PrefixChain, *, part: Part | None, timeout_s: float | None) -> HttpCall[int]:
        """Write blocks to a tier below and take them out of the top tier."""
        self._refuse_if_read_only()
        take = http_calls.read_count("demoted")
        return self._control_about(chain, part, "/v1/admin/demote", take, timeout_s)

    def why(
        self, chain: PrefixChain, *, part: Part | None, timeout_s: float | None
    ) -> HttpCall[list[BlockReport]]:
        """Explain the blocks of a chain."""
        chain = chain[:_MAX_WHY_BLOCKS]
        return self._control_about(chain, part, "/v1/why", http_calls.read_reports, timeout_s)

    def change_policy(self, text: str, *, timeout_s: float | None) -> HttpCall[str]:
        """Give tiers or namespaces other policies."""
        self._refuse_if_read_only()
        request = HttpRequest.of_json("POST", "/v1/admin/policy", {"policy": text})
        return self._whole(request, http_calls.read_text("before"), timeout_s)

    def advance_epoch(self, model: str, *, timeout_s: float | None) -> HttpCall[int]:
        """End the present epoch of a model."""
        self._refuse_if_read_only()
        require_model(model)
        request = HttpRequest.of_json("POST", "/v1/admin/epoch", {"model": model})
        return self._whole(request, http_calls.read_count("epoch"), timeout_s)

    def erase_tenant(self, salt: bytes, *, timeout_s: float | None) -> HttpCall[EraseReport]:
        """Destroy the key of the tenant with that salt."""
        return self._erase({"tenant_id": tenant_of(salt).hex()}, timeout_s)

    def erase_tenant_of(
        self, namespace: NamespaceDigest, *, timeout_s: float | None
    ) -> HttpCall[EraseReport]:
        """Destroy the key of the tenant of an open namespace."""
        return self._erase({"namespace": namespace.hex()}, timeout_s)

    def _erase(self, named: dict[str, str], timeout_s: float | None) -> HttpCall[EraseReport]:
        self._refuse_if_read_only()
        request = HttpRequest.of_json("POST", "/v1/admin/erase", named)
        return self._whole(request, http_calls.read_erasure, timeout_s)

    def namespaces(self, *, timeout_s: float | None) -> HttpCall[list[Namespace]]:
        """Ask for the namespaces that clients opened."""
        request = HttpRequest("GET", "/v1/admin/namespaces")
        return self._whole(request, http_calls.read_namespaces, timeout_s)

    def flush(self, *, timeout_s: float | None) -> HttpCall[bool]:
        """Wait until what was put has been written through."""
        return HttpCall(
            deadline_s=self._deadline_s(timeout_s, self._state.timeouts.control_s),
            work=lambda session: session.ask_timed(
                "POST", "/v1/admin/flush", {}, http_calls.read_flag("flushed")
            ),
        )

    def stats(self, *, timeout_s: float | None) -> HttpCall[dict[str, Any]]:  # Any: JSON
        """Ask for counters and occupancy."""
        return self._whole(HttpRequest("GET", "/v1/stats"), HttpAnswer.json, timeout_s)

    def size_curve(
        self, namespace: NamespaceDigest | None, *, timeout_s: float | None
    ) -> HttpCall[dict[str, Any]]:  # Any: JSON
        """Ask for hit rates by size."""
        query = "" if namespace is None else f"?namespace={namespace.hex()}"
        return self._whole(HttpRequest("GET", f"/v1/size{query}"), HttpAnswer.json, timeout_s)

    def check(self, sample_blocks: int, *, timeout_s: float | None) -> HttpCall[list[str]]:
        """Have the server verify its invariants."""
        values = {"sample_blocks": sample_blocks}
        return HttpCall(
            deadline_s=self._deadline_s(timeout_s, self._state.timeouts.control_s),
            work=lambda session: session.ask_timed(
                "POST", "/v1/admin/check", values, http_calls.read_texts("problems")
            ),
        )

    def ping(self, *, timeout_s: float | None) -> HttpCall[None]:
        """Ask whether the server answers, and knows this caller."""
        return self._whole(HttpRequest("GET", "/v1/identity"), http_calls.read_nothing, timeout_s)

    def opening(self, namespace: Namespace, *, is_public: bool) -> HttpCall[Namespace]:
        """Ask for the namespace as this caller must use it: with its tenant's salt."""
        return HttpCall(
            deadline_s=self._deadline_s(None, self._state.timeouts.control_s),
            work=lambda session: session.open_namespace(namespace, is_public=is_public),
        )

    def _receive(
        self,
        chain: PrefixChain,
        buffers: BufferSource,
        *,
        part: Part | None,
        timeout_s: float | None,
        hints: Hints | None,
    ) -> HttpCall[FetchResult]:
        length_bytes = self._state.length_bytes(chain, part)
        fetching = Fetching(self._state.note_corrupt, buffers, length_bytes)

        def work(session: HttpSession) -> FetchResult:
            window = _window_blocks(length_bytes)
            reason: MissReason | None = None
            for start in range(0, len(chain), window):
                wanted = chain[start : start + window]
                reason = _fetch_window(session, wanted, part, hints, fetching.take(wanted, start))
                if reason is not None:
                    break
            return fetching.result(reason)

        def received_so_far(error: KVStoreError) -> FetchResult:
            is_whole = fetching.blocks == len(chain)
            return fetching.result(None if is_whole else self._state.note_away(error))

        return HttpCall(
            deadline_s=self._deadline_s(timeout_s, self._state.timeouts.fetch_s),
            namespace=chain.namespace,
            chain=chain,
            when_away=received_so_far,
            work=work,
        )

    def _about(
        self,
        chain: PrefixChain,
        path: str,
        values: Mapping[str, Any],
        take: Callable[[HttpAnswer], T],
        deadline_s: float,
        when_away: Callable[[KVStoreError], T] | None = None,
    ) -> HttpCall[T]:
        return HttpCall(
            deadline_s=deadline_s,
            namespace=chain.namespace,
            chain=chain,
            when_away=when_away,
            work=lambda session: session.about(
                chain.namespace, lambda: session.ask_timed("POST", path, values, take)
            ),
        )

    def _control_about(
        self,
        chain: PrefixChain,
        part: Part | None,
        path: str,
        take: Callable[[HttpAnswer], T],
        timeout_s: float | None,
    ) -> HttpCall[T]:
        self._require(chain, part)
        deadline_s = self._deadline_s(timeout_s, self._state.timeouts.control_s)
        return self._about(chain, path, http_calls.chain_values(chain, part), take, deadline_s)

    def _whole(
        self, request: HttpRequest, take: Callable[[HttpAnswer], T], timeout_s: float | None
    ) -> HttpCall[T]:
        return HttpCall(
            deadline_s=self._deadline_s(timeout_s, self._state.timeouts.control_s),
            work=lambda session: session.ask(request, take),
        )

    def _require(self, chain: PrefixChain, part: Part | None) -> int:
        """Return the bytes of each block; raises InvalidRequest for a chain that no request may name."""
        length_bytes = super()._require(chain, part)
        calls.check_keys(chain)
        return length_bytes


class _Sending:
    """The payloads of one put on their way."""

    def __init__(
        self,
        session: HttpSession,
        chain: PrefixChain,
        part: Part | None,
        payloads: Sequence[Bytes],
        checksums: Sequence[int] | None,
        hints: Hints | None,
    ) -> None:
        self._session = session
        self._chain = chain
        self._part = part
        self._payloads = payloads
        self._checksums = checksums
        self._hints = hints

    def send_to(self, putting: Putting, *, window: int) -> None:
        """Send what is not known to be there, window by window, until one has no room."""
        for start in range(putting.num_known, len(self._chain), window):
            stop = min(start + window, len(self._chain))
            expected = None if self._checksums is None else self._checksums[start:stop]
            sums = http_calls.sums_until_wrong(self._payloads[start:stop], expected)
            if sums:
                putting.note(self._send(start, sums), len(sums))
            if len(sums) < stop - start:
                putting.note_reason(MissReason.CORRUPT)  # a payload is not the one that its caller means
            if len(sums) < stop - start or putting.has_dropped:
                return
            if self._session.remaining_s() <= 0:
                putting.note_reason(MissReason.TIMED_OUT)
                return

    def _send(self, start: int, sums: Sequence[int]) -> PutResult:
        session, stop = self._session, start + len(sums)
        chain, payloads = self._chain[start:stop], self._payloads[start:stop]
        take = http_calls.read_put(len(chain))

        def ask() -> PutResult:
            request = http_calls.store_request(
                chain,
                payloads,
                sums,
                part=self._part,
                remaining_s=session.remaining_s(),
                hints=self._hints,
            )
            return session.ask(request, take)

        return session.about(chain.namespace, ask)


def _leading_present(session: HttpSession, chain: PrefixChain, part: Part | None) -> int:
    """Return how many leading blocks need not be sent."""
    values = http_calls.key_values(chain.namespace, chain.keys, part)
    take = http_calls.read_flags("present", len(chain))
    present = session.about(chain.namespace, lambda: session.ask_timed("POST", "/v1/exists", values, take))
    return present.index(False) if False in present else len(chain)


def _fetch_window(
    session: HttpSession,
    wanted: PrefixChain,
    part: Part | None,
    hints: Hints | None,
    take: Callable[[HttpAnswer], MissReason | None],
) -> MissReason | None:
    values = http_calls.chain_values(wanted, part, hints)
    return session.about(wanted.namespace, lambda: session.ask_timed("POST", "/v1/fetch", values, take))


def _window_blocks(length_bytes: int) -> int:
    return max(1, min(_MAX_WINDOW_BLOCKS, calls.WINDOW_BYTES // max(1, length_bytes)))
