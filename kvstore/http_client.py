"""HttpKVStore: the blocking client of a store on another machine, over HTTP."""

import logging
import ssl
import time
from collections.abc import Callable, Sequence
from typing import Any, Self, TypeVar

import numpy as np
import numpy.typing as npt

from kvstore import calls, http_calls
from kvstore.calls import WINDOW_BYTES, FetchResult
from kvstore.client_state import AWAY, ClientState, ClientStats, Timeouts
from kvstore.errors import (
    Forbidden,
    InvalidRequest,
    KVStoreError,
    NamespaceNotOpen,
    ServerUnavailable,
    Unauthorized,
)
from kvstore.http_link import HttpAnswer, HttpRequest
from kvstore.http_transport import HttpTransport
from kvstore.keys import Namespace, NamespaceDigest, PrefixChain
from kvstore.layout import Part
from kvstore.log_limit import LimitedWarning
from kvstore.miss import MissReason
from kvstore.results import BlockReport, PrefixMatch, PutResult
from kvstore.server_address import HttpAddress
from kvstore.transfer import Buffer, Bytes, require_writable, split_buffers
from kvstore.wire import MAX_KEYS

logger = logging.getLogger(__name__)

T = TypeVar("T")

_MAX_WINDOW_BLOCKS = 1024
_MAX_WHY_BLOCKS = 1000
_SMALL_PUT_BYTES = 256 << 10
_EXISTS = "/v1/exists"
_NOT_SERVED = (*AWAY, Unauthorized, Forbidden)
"""Failures that are results on the data path; a key that is withdrawn must not end an engine's requests."""


class HttpKVStore:
    """A blocking client over HTTP, with the calls, promises and results of ``KVStore``.

    Every block's checksum is checked after it arrived. Calls that the server does not allow (a key without
    the scope, or that was withdrawn) raise Unauthorized or Forbidden; on the data path they are misses, with
    a warning in the log and a count in ``client_stats``.
    """

    def __init__(
        self,
        address: HttpAddress,
        *,
        api_key: str | None = None,
        tls: ssl.SSLContext | None = None,
        timeouts: Timeouts | None = None,
    ) -> None:
        self._state = ClientState(timeouts or Timeouts())
        self._transport = HttpTransport(address, self._state, api_key=api_key, tls=tls)
        self._refusals = LimitedWarning(logger)
        self._public: set[NamespaceDigest] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections. Idempotent."""
        self._transport.close()

    def open_namespace(self, namespace: Namespace, *, is_public: bool = False) -> Namespace:
        """Open a namespace, and return it as it must be used: with the salt of the caller's tenant.

        One that carries a salt already is taken as it is, and the server learns of it with the first call
        about it. ``is_public`` asks for the model's namespace that tenants share.

        Raises:
            ServerUnavailable: no server answers in time, so the salt is not known.
            Unauthorized: the server does not know the API key.
            Forbidden: the model has no shared namespace.
        """
        opened = namespace
        if not namespace.tenant_salt:
            deadline_s = self._state.deadline_s(None, self._state.timeouts.control_s)
            opened = self._tell_namespace(namespace, is_public=is_public, deadline_s=deadline_s)
        if is_public:
            self._public.add(opened.digest)
        self._state.open_namespace(opened)
        return opened

    def match(
        self, chain: PrefixChain, *, part: Part | None = None, timeout_s: float | None = None
    ) -> PrefixMatch:
        """Count the leading blocks that are stored, and say where. No payload moves."""
        self._require(chain, part)
        deadline_s = self._state.deadline_s(timeout_s, self._state.timeouts.match_s)
        try:
            return self._ask_about(
                chain, "/v1/match", part, lambda answer: http_calls.read_match(chain, answer), deadline_s
            )
        except _NOT_SERVED as error:
            return PrefixMatch(0, (), self._note(error))

    def exists(
        self, chain: PrefixChain, *, part: Part | None = None, timeout_s: float | None = None
    ) -> list[bool]:
        """Say of each block whether it is stored, whatever is stored of those before it."""
        self._require(chain, part)
        deadline_s = self._state.deadline_s(timeout_s, self._state.timeouts.match_s)
        take = http_calls.read_flags("present", len(chain))
        try:
            return self._ask_about(chain, _EXISTS, part, take, deadline_s)
        except _NOT_SERVED as error:
            self._note(error)
            return [False] * len(chain)

    def fetch_into(
        self, chain: PrefixChain, buffers: Buffer, *, part: Part | None = None, timeout_s: float | None = None
    ) -> FetchResult:
        """Receive the longest stored prefix into ``buffers``: one per block, or one that holds all in a row.

        Buffers behind the result's ``blocks`` may have been written to and hold nothing of value.
        """
        length_bytes = self._state.length_bytes(chain, part)
        views = split_buffers(buffers, length_bytes=length_bytes, count=len(chain), what="buffers")
        require_writable(views, "buffers")
        return self._fetch(chain, lambda start, stop: views[start:stop], part=part, timeout_s=timeout_s)

    def get(
        self, chain: PrefixChain, *, part: Part | None = None, timeout_s: float | None = None
    ) -> list[npt.NDArray[np.uint8]]:
        """Return the bytes of the longest stored prefix, one array ``[length_bytes]`` uint8 per block."""
        blocks: list[npt.NDArray[np.uint8]] = []
        source = calls.allocate_blocks(self._state.length_bytes(chain, part), blocks)
        result = self._fetch(chain, source, part=part, timeout_s=timeout_s)
        return blocks[: result.blocks]

    def put(
        self,
        chain: PrefixChain,
        payloads: Buffer,
        *,
        part: Part | None = None,
        timeout_s: float | None = None,
        checksums: Sequence[int] | None = None,
    ) -> PutResult:
        """Store the blocks of ``chain``: one payload per block, or one buffer that holds all in a row.

        Leading blocks that are present are not sent. What found no room, or no server, is dropped, and so is
        a payload whose xxh3-64 is not the one given in ``checksums``. ``doubtful`` names those blocks.
        """
        length_bytes = self._require(chain, part)
        views = split_buffers(payloads, length_bytes=length_bytes, count=len(chain), what="payloads")
        if checksums is not None and len(checksums) != len(chain):
            raise InvalidRequest(f"checksums: {len(checksums)} for {len(chain)} blocks")
        deadline_s = self._state.deadline_s(timeout_s, self._state.timeouts.put_s)
        putting = http_calls.Putting(len(chain))
        try:
            putting.note_present(self._leading_present(chain, part, deadline_s))
            self._put(chain, views, checksums, part=part, deadline_s=deadline_s, into=putting)
        except _NOT_SERVED as error:
            self._note(error)
        return putting.result()

    def prefetch(
        self, chain: PrefixChain, *, part: Part | None = None, timeout_s: float | None = None
    ) -> int:
        """Load stored leading blocks into the top tier; returns how many are there (0 without a server)."""
        self._require(chain, part)
        deadline_s = self._state.deadline_s(timeout_s, self._state.timeouts.fetch_s)
        try:
            return self._ask_about(chain, "/v1/prefetch", part, http_calls.read_count("blocks"), deadline_s)
        except _NOT_SERVED as error:
            self._note(error)
            return 0

    def drop(self, chain: PrefixChain, *, part: Part | None = None, timeout_s: float | None = None) -> int:
        """Forget every copy of these blocks that is not leased; returns how many blocks had one.

        Raises:
            ServerUnavailable: no server answers in time.
            Unauthorized, Forbidden: the server does not allow it.
        """
        return self._control_about(chain, "/v1/drop", part, http_calls.read_count("dropped"), timeout_s)

    def demote(self, chain: PrefixChain, *, part: Part | None = None, timeout_s: float | None = None) -> int:
        """Write blocks to a tier below and take them out of shared memory; returns how many left it.

        Raises:
            ServerUnavailable: no server answers in time.
            Unauthorized, Forbidden: the server does not allow it.
        """
        take = http_calls.read_count("demoted")
        return self._control_about(chain, "/v1/admin/demote", part, take, timeout_s)

    def why(
        self, chain: PrefixChain, *, part: Part | None = None, timeout_s: float | None = None
    ) -> list[BlockReport]:
        """Explain block by block (the first 1000) where it is stored, or why, since when and by whom not.

        Raises:
            ServerUnavailable: no server answers in time.
            Unauthorized, Forbidden: the server does not allow it.
        """
        self._require(chain, part)
        take = http_calls.read_reports
        return self._control_about(chain[:_MAX_WHY_BLOCKS], "/v1/why", part, take, timeout_s)

    def advance_epoch(self, model: str, *, timeout_s: float | None = None) -> int:
        """Make every block stored for a model so far unreachable, on all nodes; returns the new epoch.

        Raises:
            ServerUnavailable: no server answers in time.
            Unauthorized, Forbidden: the server does not allow it.
        """
        request = HttpRequest.of_json("POST", "/v1/admin/epoch", {"model": model})
        return self._control(request, http_calls.read_count("epoch"), timeout_s)

    def namespaces(self, *, timeout_s: float | None = None) -> list[Namespace]:
        """Return the namespaces that clients of the server opened, without their salts.

        Raises:
            ServerUnavailable: no server answers in time.
            Unauthorized, Forbidden: the server does not allow it.
        """
        return self._control(
            HttpRequest("GET", "/v1/admin/namespaces"), http_calls.read_namespaces, timeout_s
        )

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait until everything put has been written through; False if time ran out.

        Raises:
            ServerUnavailable: no server answers in time.
            Unauthorized, Forbidden: the server does not allow it.
        """
        deadline_s = self._state.deadline_s(timeout_s, self._state.timeouts.control_s)
        values = http_calls.timed({}, deadline_s - time.monotonic())
        request = HttpRequest.of_json("POST", "/v1/admin/flush", values)
        return self._transport.call(
            request, http_calls.read_flag("flushed"), deadline_s=deadline_s, is_control=True
        )

    def stats(self, *, timeout_s: float | None = None) -> dict[str, Any]:  # Any: JSON
        """Return the server's counters and occupancy.

        Raises:
            ServerUnavailable: no server answers in time.
            Unauthorized, Forbidden: the server does not allow it.
        """
        return self._control(HttpRequest("GET", "/v1/stats"), HttpAnswer.json, timeout_s)

    def check(self, sample_blocks: int = 64, *, timeout_s: float | None = None) -> list[str]:
        """Have the server verify its invariants and a sample of checksums; one line per violation.

        Raises:
            ServerUnavailable: no server answers in time.
            Unauthorized, Forbidden: the server does not allow it.
        """
        deadline_s = self._state.deadline_s(timeout_s, self._state.timeouts.control_s)
        values = http_calls.timed({"sample_blocks": sample_blocks}, deadline_s - time.monotonic())
        request = HttpRequest.of_json("POST", "/v1/admin/check", values)
        return self._transport.call(
            request, http_calls.read_texts("problems"), deadline_s=deadline_s, is_control=True
        )

    def ping(self, *, timeout_s: float | None = None) -> None:
        """Return if the server answers and knows this caller.

        Raises:
            ServerUnavailable: no server answers in time.
            Unauthorized: the server does not know the API key.
        """
        self._control(HttpRequest("GET", "/v1/identity"), HttpAnswer.json, timeout_s)

    @property
    def timeouts(self) -> Timeouts:
        """Times of calls that are not given one."""
        return self._state.timeouts

    def client_stats(self) -> ClientStats:
        """Return what happened to this client since it was made."""
        return self._state.stats

    def _require(self, chain: PrefixChain, part: Part | None) -> int:
        """Return the bytes of each block; raises InvalidRequest for a chain that no request may name."""
        length_bytes = self._state.length_bytes(chain, part)
        if len(chain) > MAX_KEYS:
            raise InvalidRequest(f"chain: {len(chain)} keys, limit {MAX_KEYS}: split it")
        return length_bytes

    def _fetch(
        self,
        chain: PrefixChain,
        buffers: calls.BufferSource,
        *,
        part: Part | None,
        timeout_s: float | None,
    ) -> FetchResult:
        length_bytes = self._require(chain, part)
        deadline_s = self._state.deadline_s(timeout_s, self._state.timeouts.fetch_s)
        fetching = http_calls.Fetching(self._state.note_corrupt, buffers, length_bytes)
        reason: MissReason | None = None
        try:
            for start in range(0, len(chain), window := _window_blocks(length_bytes)):
                wanted = chain[start : start + window]
                reason = self._ask_about(wanted, "/v1/fetch", part, fetching.take(wanted, start), deadline_s)
                if reason is not None:
                    break
        except _NOT_SERVED as error:
            reason = None if fetching.blocks == len(chain) else self._note(error)
        return fetching.result(reason)

    def _leading_present(self, chain: PrefixChain, part: Part | None, deadline_s: float) -> int:
        """Return how many leading blocks need not be sent; asked only where that saves more than it costs."""
        if len(chain) * self._state.length_bytes(chain, part) <= _SMALL_PUT_BYTES:
            return 0
        take = http_calls.read_flags("present", len(chain))
        present = self._ask_about(chain, _EXISTS, part, take, deadline_s)
        return present.index(False) if False in present else len(chain)

    def _put(
        self,
        chain: PrefixChain,
        payloads: Sequence[Bytes],
        checksums: Sequence[int] | None,
        *,
        part: Part | None,
        deadline_s: float,
        into: http_calls.Putting,
    ) -> None:
        window = _window_blocks(self._state.length_bytes(chain, part))
        for start in range(into.num_known, len(chain), window):
            stop = min(start + window, len(chain))
            expected = None if checksums is None else checksums[start:stop]
            sums = http_calls.sums_until_wrong(payloads[start:stop], expected)
            sent = chain[start : start + len(sums)]
            if len(sent):
                result = self._store(
                    sent, payloads[start : start + len(sent)], sums, part=part, deadline_s=deadline_s
                )
                into.note(result, len(sent))
            if len(sums) < stop - start or into.has_dropped or time.monotonic() >= deadline_s:
                return

    def _store(
        self,
        chain: PrefixChain,
        payloads: Sequence[Bytes],
        sums: Sequence[int],
        *,
        part: Part | None,
        deadline_s: float,
    ) -> PutResult:
        take = http_calls.read_put(len(chain))

        def ask() -> PutResult:
            left_s = deadline_s - time.monotonic()
            request = http_calls.store_request(chain, payloads, sums, part=part, remaining_s=left_s)
            return self._transport.call(request, take, deadline_s=deadline_s)

        return self._reopening(chain.namespace, ask, deadline_s)

    def _ask_about(
        self,
        chain: PrefixChain,
        path: str,
        part: Part | None,
        take: Callable[[HttpAnswer], T],
        deadline_s: float,
        *,
        is_control: bool = False,
    ) -> T:
        def ask() -> T:
            values = http_calls.chain_values(chain, part, is_placed=path != _EXISTS)
            request = HttpRequest.of_json(
                "POST", path, http_calls.timed(values, deadline_s - time.monotonic())
            )
            return self._transport.call(request, take, deadline_s=deadline_s, is_control=is_control)

        return self._reopening(chain.namespace, ask, deadline_s)

    def _reopening(self, digest: NamespaceDigest, ask: Callable[[], T], deadline_s: float) -> T:
        """Ask, once more if the server does not know the namespace (any more)."""
        namespace = self._state.namespace(digest)
        try:
            return ask()
        except NamespaceNotOpen:
            self._tell_namespace(namespace, is_public=digest in self._public, deadline_s=deadline_s)
        try:
            return ask()
        except NamespaceNotOpen as error:
            raise ServerUnavailable(
                "server: it forgot the namespace again: too many are in use there"
            ) from error

    def _tell_namespace(self, namespace: Namespace, *, is_public: bool, deadline_s: float) -> Namespace:
        return self._transport.call(
            http_calls.open_request(namespace, is_public=is_public),
            lambda answer: http_calls.opened_namespace(namespace, answer),
            deadline_s=deadline_s,
            is_control=True,
        )

    def _control_about(
        self,
        chain: PrefixChain,
        path: str,
        part: Part | None,
        take: Callable[[HttpAnswer], T],
        timeout_s: float | None,
    ) -> T:
        self._require(chain, part)
        deadline_s = self._state.deadline_s(timeout_s, self._state.timeouts.control_s)
        return self._ask_about(chain, path, part, take, deadline_s, is_control=True)

    def _control(self, request: HttpRequest, take: Callable[[HttpAnswer], T], timeout_s: float | None) -> T:
        deadline_s = self._state.deadline_s(timeout_s, self._state.timeouts.control_s)
        return self._transport.call(request, take, deadline_s=deadline_s, is_control=True)

    def _note(self, error: KVStoreError) -> MissReason:
        if isinstance(error, (Unauthorized, Forbidden)):
            self._state.note_refused()
            self._refusals.warn("client: not served: %s", error)
            return MissReason.UNAVAILABLE
        return self._state.note_away(error)


def _window_blocks(length_bytes: int) -> int:
    return max(1, min(_MAX_WINDOW_BLOCKS, WINDOW_BYTES // max(1, length_bytes)))
