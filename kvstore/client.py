"""KVStore: the blocking client of a store, safe in threads and across fork."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar, overload

import numpy as np
import numpy.typing as npt

from kvstore.calls import FetchResult
from kvstore.client_calls import Call, ClientCalls, only_block
from kvstore.client_state import AWAY, ClientState, ClientStats, Timeouts
from kvstore.errors import ProtocolMismatch, ServerUnavailable
from kvstore.held import Lease, LeasedMatch, Reservation
from kvstore.hints import Hints
from kvstore.keys import BlockKey, Namespace, NamespaceDigest, PrefixChain
from kvstore.layout import Part
from kvstore.link import Dial, Link, unix_dial
from kvstore.link_pool import LinkPool
from kvstore.record_calls import RecordCalls
from kvstore.record_clients import RecordMethods
from kvstore.results import BlockReport, EraseReport, PrefixMatch, PutResult
from kvstore.server_address import parse_address, parse_http_address, refuse_http_options
from kvstore.session import CallSession, follow
from kvstore.shared_link import SharedLink
from kvstore.transfer import Buffer

if TYPE_CHECKING:
    from kvstore.config import Config

T = TypeVar("T")


class KVStore(RecordMethods):
    """A blocking client of a store.

    Threads may share it: each call has a connection of its own while it lasts. After a fork the child opens
    its own connections; leases and reservations stay the parent's. On the data path (match, exists, lease,
    view, fetch_into, get, reserve, put, prefetch) a server that is absent, dying, restarted or too slow is a
    result, never an exception, and no call takes longer than its timeout; connections are remade by
    themselves. Control calls (ping, stats, check, flush, drop and the like) raise ServerUnavailable instead.

    Every call raises InvalidRequest for what no state of the store could serve: a namespace that is not
    open, buffers of wrong sizes, more than 10 000 keys, a negative timeout, a closed client, a change
    through a read-only client.
    """

    def __init__(
        self,
        dial: Dial,
        *,
        timeouts: Timeouts | None = None,
        is_read_only: bool = False,
        on_close: Callable[[], None] | None = None,
    ) -> None:
        self._state = ClientState(timeouts or Timeouts())
        self._calls = ClientCalls(self._state, is_read_only=is_read_only)
        self._record_calls = RecordCalls(self._state, is_read_only=is_read_only)
        self._dial = dial
        self._is_read_only = is_read_only
        self._on_close = on_close
        self._pool = LinkPool(dial, self._state, is_read_only=is_read_only)

    @classmethod
    def connect(
        cls,
        address: str | os.PathLike[str],
        *,
        timeout_s: float | None = None,
        timeouts: Timeouts | None = None,
        is_read_only: bool = False,
        api_key: str | None = None,
        tls_folder: str | os.PathLike[str] | None = None,
    ) -> "KVStore":
        """Return a client of the server at ``unix:/path`` (or a plain path), ``http://`` or ``https://host:port``.

        The server need not be there yet: until it is, everything is a miss. ``timeout_s`` is the time of
        every call of the data path; ``timeouts`` gives each kind its own. A client that ``is_read_only``
        can change nothing in the store, and has no writable mapping of its memory. Over HTTP ``api_key`` says
        who calls; ``tls_folder`` may hold ``ca.crt``, the authorities trusted (else the system's), and
        ``tls.crt`` and ``tls.key``, shown to a server that asks for a certificate.

        Raises:
            InvalidConfig: the address is malformed or too long, or a timeout is not positive.
        """
        times = (timeouts or Timeouts()).for_data(timeout_s)
        where = parse_http_address(address)
        if where is not None:
            # Imported here because that client is made of this one.
            from kvstore.http_client import HttpKVStore

            folder = None if tls_folder is None else Path(tls_folder)
            return HttpKVStore(
                where, api_key=api_key, tls_folder=folder, timeouts=times, is_read_only=is_read_only
            )
        path = parse_address(address)
        refuse_http_options(api_key, tls_folder)
        return cls(unix_dial(path), timeouts=times, is_read_only=is_read_only)

    @classmethod
    def local(cls, config: "Config", *, timeouts: Timeouts | None = None) -> Self:
        """Open a store inside this process, in a thread with its own event loop, and return its client.

        Raises:
            InvalidConfig, TierUnavailable: the store cannot be opened.
        """
        # Imported here because a client of a running server must not load the tiers' packages.
        from kvstore.running import LocalServer

        server = LocalServer.start(config)
        return cls(server.dial, timeouts=timeouts, on_close=server.stop)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections, and the store itself if it is local. Leases end. Idempotent."""
        self._pool.close()
        on_close, self._on_close = self._on_close, None
        if on_close is not None:
            on_close()

    def open_namespace(self, namespace: Namespace, *, is_public: bool = False) -> Namespace:
        """Make a namespace's chains usable, and return the namespace to make chains of.

        Here that is the one given; over a network the caller's tenant decides about its salt.
        ``is_public`` asks for the one that all tenants share. The server learns of it with the first call.

        Raises:
            InvalidRequest: a public namespace has a tenant salt.
        """
        return self._calls.open_namespace(namespace, is_public=is_public)

    @overload
    def match(
        self,
        chain: PrefixChain,
        *,
        lease: Literal[False] = False,
        part: Part | None = None,
        timeout_s: float | None = None,
    ) -> PrefixMatch: ...
    @overload
    def match(
        self,
        chain: PrefixChain,
        *,
        lease: Literal[True],
        part: Part | None = None,
        timeout_s: float | None = None,
    ) -> LeasedMatch[Lease]: ...
    def match(
        self,
        chain: PrefixChain,
        *,
        lease: bool = False,
        part: Part | None = None,
        timeout_s: float | None = None,
    ) -> PrefixMatch:
        """Count the leading blocks that are stored, and say where. No payload moves.

        With ``lease=True`` the result has a ``lease``, taken in the same round trip, on the leading blocks
        that are in shared memory (``dram``), up to the first that is elsewhere. Release it.
        """
        if not lease:
            return self._run(self._calls.match(chain, part=part, timeout_s=timeout_s))
        found, grant = self._run(self._calls.match_and_lease(chain, part=part, timeout_s=timeout_s))
        held = Lease(grant, self._calls, self._run)
        return LeasedMatch(found.blocks, found.tiers, found.reason, held)

    def exists(
        self,
        blocks: PrefixChain | Sequence[BlockKey],
        *,
        namespace: Namespace | None = None,
        part: Part | None = None,
        timeout_s: float | None = None,
    ) -> list[bool]:
        """Say for each of up to 10 000 blocks whether it is stored in any tier, in one round trip.

        ``blocks`` is a chain, or any keys of an open ``namespace`` in any order. A block that a slower tier
        does not find in time, or any block without a server, counts as not stored.
        """
        return self._run(self._calls.exists(blocks, namespace=namespace, part=part, timeout_s=timeout_s))

    def lease(
        self,
        chain: PrefixChain,
        *,
        part: Part | None = None,
        timeout_s: float | None = None,
        hints: Hints | None = None,
    ) -> Lease:
        """Bring the longest stored prefix into shared memory, as a fetch does, and keep it there.

        Use it as a context manager, or release it. It lasts for the store's ``lease_s`` (30 s unless
        configured) unless it is renewed. Without a server, or with nothing stored, it has no blocks.
        """
        grant = self._run(self._calls.lease(chain, part=part, timeout_s=timeout_s, hints=hints))
        return Lease(grant, self._calls, self._run)

    def view(self, lease: Lease, *, timeout_s: float | None = None) -> list[memoryview]:
        """Return the leased blocks in place, read-only, without a copy: one view per leading block.

        Checksum and generation of each are checked first; a block that fails ends the list, so that there
        may be fewer than ``lease.blocks``, and there are none once the lease has ended. When a lease ends,
        views of it stay readable, but the memory may be given to another block at any time. So after using
        the bytes ask ``lease.is_valid()``: if it says yes, they were right all along.
        """
        if not lease.is_valid():
            self._state.note_ended_lease()
            return []
        return self._run(self._calls.view(lease.grant, timeout_s=timeout_s))

    def reserve(
        self,
        chain: PrefixChain,
        *,
        part: Part | None = None,
        timeout_s: float | None = None,
        hints: Hints | None = None,
    ) -> Reservation:
        """Reserve memory of the store for those blocks of ``chain`` that are not stored, to write in place.

        Use it as a context manager: leaving it commits the blocks, an exception gives them back. It has as
        many blocks as there was room for; ``result`` says afterwards what became of all.
        """
        loan = self._run(self._calls.reserve(chain, part=part, timeout_s=timeout_s, hints=hints))
        return Reservation(loan, self._calls, self._run)

    def fetch_into(
        self,
        chain: PrefixChain,
        buffers: Buffer,
        *,
        part: Part | None = None,
        timeout_s: float | None = None,
        hints: Hints | None = None,
    ) -> FetchResult:
        """Copy the longest stored prefix into ``buffers``: one per block, or one that holds all in a row.

        Checksum and generation of every block are checked after the copy. Buffers behind the result's
        ``blocks`` may have been written to and hold nothing of value.
        """
        return self._run(self._calls.fetch_into(chain, buffers, part=part, timeout_s=timeout_s, hints=hints))

    def get(
        self,
        chain: PrefixChain,
        *,
        part: Part | None = None,
        timeout_s: float | None = None,
        hints: Hints | None = None,
    ) -> list[npt.NDArray[np.uint8]]:
        """Return the bytes of the longest stored prefix, one array ``[length_bytes]`` uint8 per block."""
        blocks: list[npt.NDArray[np.uint8]] = []
        result = self._run(self._calls.get(chain, blocks, part=part, timeout_s=timeout_s, hints=hints))
        return blocks[: result.blocks]

    def get_block(
        self, block: PrefixChain, *, part: Part | None = None, timeout_s: float | None = None
    ) -> npt.NDArray[np.uint8] | None:
        """Return the bytes of one block (``chain[n : n + 1]``), None if it is not served."""
        return next(iter(self.get(only_block(block), part=part, timeout_s=timeout_s)), None)

    def put(
        self,
        chain: PrefixChain,
        payloads: Buffer,
        *,
        part: Part | None = None,
        timeout_s: float | None = None,
        checksums: Sequence[int] | None = None,
        hints: Hints | None = None,
    ) -> PutResult:
        """Store the blocks of ``chain``: one payload per block, or one buffer that holds all in a row.

        Blocks that are present are not written again. What found no room, or no server, is dropped, and so
        is a payload whose xxh3-64 is not the one given in ``checksums``. ``doubtful`` names those blocks.
        ``hints`` say what is known of the blocks' future.
        """
        return self._run(
            self._calls.put(chain, payloads, part=part, timeout_s=timeout_s, checksums=checksums, hints=hints)
        )

    def put_block(
        self,
        block: PrefixChain,
        payload: Buffer,
        *,
        part: Part | None = None,
        timeout_s: float | None = None,
    ) -> bool:
        """Store one block (``chain[n : n + 1]``); True if it is stored now, by this call or before."""
        put = self.put(only_block(block), payload, part=part, timeout_s=timeout_s)
        return put.dropped == 0

    def hint(
        self,
        chain: PrefixChain,
        hints: Hints,
        *,
        part: Part | None = None,
        timeout_s: float | None = None,
    ) -> bool:
        """Say more of the future of stored blocks, as that their conversation is over. It is no use of them.

        For what is known only after their put or fetch. Returns whether the store heard it.
        """
        return self._run(self._calls.hint(chain, hints, part=part, timeout_s=timeout_s))

    def prefetch(
        self, chain: PrefixChain, *, part: Part | None = None, timeout_s: float | None = None
    ) -> int:
        """Load stored leading blocks into the top tier; returns how many are there (0 without a server)."""
        return self._run(self._calls.prefetch(chain, part=part, timeout_s=timeout_s))

    def drop(self, chain: PrefixChain, *, part: Part | None = None, timeout_s: float | None = None) -> int:
        """Forget every copy of these blocks that is not leased; returns how many blocks had one.

        Raises:
            ServerUnavailable: no server answers in time.
        """
        return self._run(self._calls.drop(chain, part=part, timeout_s=timeout_s))

    def demote(self, chain: PrefixChain, *, part: Part | None = None, timeout_s: float | None = None) -> int:
        """Write blocks to a tier below and take them out of shared memory; returns how many left it.

        Leased blocks, and those with a child there that is not among them, stay.

        Raises:
            ServerUnavailable: no server answers in time.
        """
        return self._run(self._calls.demote(chain, part=part, timeout_s=timeout_s))

    def why(
        self, chain: PrefixChain, *, part: Part | None = None, timeout_s: float | None = None
    ) -> list[BlockReport]:
        """Explain block by block (the first 1000) where it is stored, or why, since when and by whom not.

        Raises:
            ServerUnavailable: no server answers in time.
        """
        return self._run(self._calls.why(chain, part=part, timeout_s=timeout_s))

    def change_policy(self, policy: str, *, timeout_s: float | None = None) -> str:
        """Give the server's tiers another policy, and return what held before. Blocks and leases stay.

        ``policy`` is a name, for every tier and namespace, or ``PLACE=NAME``, or several of these with
        commas between: a place is a tier, a namespace's digest in hex, or ``DIGEST@TIER``. Until the server
        ends: its configuration says what holds at its next start.

        Raises:
            InvalidRequest: no policy has that name, or no place is so called.
            ServerUnavailable: no server answers in time.
        """
        return self._run(self._calls.change_policy(policy, timeout_s=timeout_s))

    def advance_epoch(self, model: str, *, timeout_s: float | None = None) -> int:
        """Make every block stored for a model so far unreachable, on all nodes; returns the new epoch.

        To be called when the weights change in place. Engines then use ``namespace.at_epoch(epoch)``.

        Raises:
            ServerUnavailable: no server answers in time.
        """
        return self._run(self._calls.advance_epoch(model, timeout_s=timeout_s))

    def erase_tenant(self, salt: bytes, *, timeout_s: float | None = None) -> EraseReport:
        """Destroy the key of the tenant with that salt, on all nodes, and forget its blocks.

        Nothing that was stored for it can be read again. What its ``problems`` name still has the key; that
        is tried again until it is gone. The salt itself is not sent.

        Raises:
            InvalidRequest: the store does not encrypt blocks.
            TierUnavailable: the store does not have the right master key.
            ServerUnavailable: no server answers in time.
        """
        return self._run(self._calls.erase_tenant(salt, timeout_s=timeout_s))

    def erase_tenant_of(self, namespace: NamespaceDigest, *, timeout_s: float | None = None) -> EraseReport:
        """As ``erase_tenant``, for the tenant of a namespace that is open in the store.

        Raises:
            InvalidRequest: the namespace is not open, or the store does not encrypt blocks.
            TierUnavailable: the store does not have the right master key.
            ServerUnavailable: no server answers in time.
        """
        return self._run(self._calls.erase_tenant_of(namespace, timeout_s=timeout_s))

    def namespaces(self, *, timeout_s: float | None = None) -> list[Namespace]:
        """Return the namespaces that clients of the server opened, without their salts.

        Raises:
            ServerUnavailable: no server answers in time.
        """
        return self._run(self._calls.namespaces(timeout_s=timeout_s))

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait until everything put has been written through; False if time ran out.

        Raises:
            ServerUnavailable: no server answers in time.
        """
        return self._run(self._calls.flush(timeout_s=timeout_s))

    def stats(self, *, timeout_s: float | None = None) -> dict[str, Any]:  # Any: JSON
        """Return the server's counters and occupancy.

        Raises:
            ServerUnavailable: no server answers in time.
        """
        return self._run(self._calls.stats(timeout_s=timeout_s))

    def size_curve(
        self, namespace: NamespaceDigest | None = None, *, timeout_s: float | None = None
    ) -> dict[str, Any]:  # Any: JSON
        """Return estimated hit rates by size: see docs/sizing.md.

        Of all lookups, or of those in one namespace. Over HTTP, callers with a key of a tenant are told
        of the namespaces of their own only.

        Raises:
            ServerUnavailable: no server answers in time.
        """
        return self._run(self._calls.size_curve(namespace, timeout_s=timeout_s))

    def check(self, sample_blocks: int = 64, *, timeout_s: float | None = None) -> list[str]:
        """Have the server verify its invariants and a sample of checksums; one line per violation.

        If that takes longer than the call may, a line says that it was cut.

        Raises:
            ServerUnavailable: no server answers in time.
        """
        return self._run(self._calls.check(sample_blocks, timeout_s=timeout_s))

    def ping(self, *, timeout_s: float | None = None) -> None:
        """Return if the server answers.

        Raises:
            ServerUnavailable: no server answers in time.
            ProtocolMismatch: it speaks another version of the protocol.
        """
        self._run(self._calls.ping(timeout_s=timeout_s))

    def register_with_cuda(self, *, timeout_s: float | None = None) -> str:
        """Pin the store's shared memory for the CUDA device of this process, so that copies need no staging.

        Returns ``registered``, or a clause that says why not; everything works without. It goes through
        PyTorch or CuPy if one of them is loaded, else through the CUDA runtime library. Call it again after
        a restart of the server (``client_stats().server_restarts``). Compiled and type-checked only where
        there is no GPU.

        Raises:
            ServerUnavailable: no server answers in time.
        """
        arena = self._run(self._calls.arena(timeout_s=timeout_s))
        return self._live_pool().arenas.register_with_cuda(arena)

    @property
    def timeouts(self) -> Timeouts:
        """Times of calls that are not given one."""
        return self._state.timeouts

    def client_stats(self) -> ClientStats:
        """Return what happened to this client since it was made."""
        return self._state.stats

    def _run(self, call: Call[T]) -> T:
        """Carry a call out; what it comes to when the store does not serve it is the call's affair."""
        try:
            return self._carry_out(call)
        except AWAY as error:
            if isinstance(error, ProtocolMismatch):
                self._state.note_protocol_error()
            return call.not_served(error)

    def _carry_out(self, call: Call[T]) -> T:
        pool = self._live_pool()
        if call.is_held:
            return self._follow_on(pool.shared(call.deadline_s, call.holder), call)
        link = pool.take(call.deadline_s, is_control=call.is_control)
        try:
            link.give_back_idle()
            if not link.is_clean:
                raise ServerUnavailable("server: connection lost")
            result = self._try_at_once(link, call) if call.namespace in link.opened else None
            return self._follow_on(link, call) if result is None else result
        finally:
            pool.give_back(link)

    def _try_at_once(self, link: Link, call: Call[T]) -> T | None:
        """Carry a call out without a plan's steps; None if that does not suffice."""
        result = None
        try:
            if call.direct is not None:
                result = call.direct(link)
            if result is None and call.at_once is not None:
                result = call.at_once(link)
        except ProtocolMismatch:
            link.close()  # as below
            raise
        return result

    def _follow_on(self, link: Link | SharedLink, call: Call[T]) -> T:
        namespace = None if call.namespace is None else self._state.namespace(call.namespace)
        session = CallSession(link, self._state, call.deadline_s, namespace)
        try:
            if call.namespace is not None and call.namespace not in link.opened:
                session.open_namespace()
            return follow(call.make_plan(session), session)
        except ProtocolMismatch:
            # The exchange was whole, but what it said is in doubt, and so is what it lent.
            link.close()
            raise

    def _live_pool(self) -> LinkPool:
        if self._pool.pid != os.getpid():
            # The parent's connections are its own; closing our copies of their descriptors ends nothing.
            inherited = self._pool
            self._pool = LinkPool(self._dial, self._state, is_read_only=self._is_read_only)
            inherited.forget()
        return self._pool
