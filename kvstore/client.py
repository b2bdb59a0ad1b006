"""KVStore: the blocking client of a store, safe in threads and across fork."""

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Self, TypeVar

import numpy as np
import numpy.typing as npt

from kvstore import calls
from kvstore.arena_link import ArenaCache
from kvstore.calls import Ask, FetchResult, FetchTally, Plan, PutTally, Session, Step, Tell
from kvstore.client_state import AWAY, ClientState, ClientStats, Timeouts
from kvstore.errors import InvalidRequest, ProtocolMismatch, ServerUnavailable, TimedOut
from kvstore.keys import Namespace, NamespaceDigest, PrefixChain
from kvstore.layout import Part
from kvstore.link import Dial, Link, unix_dial
from kvstore.messages import Answer, Failed, FailureCode, OpenNamespace, Request
from kvstore.results import BlockReport, EraseReport, PrefixMatch, PutResult
from kvstore.server_address import parse_address
from kvstore.tenant import tenant_of
from kvstore.transfer import Buffer, SlotReader, require_writable, split_buffers

if TYPE_CHECKING:
    from kvstore.config import Config

T = TypeVar("T")

MAX_LINKS = 16
"""Connections one client holds at most; further threads wait their turn, within their call's time."""

_LOOK_S = 0.001
"""How often a copy under way looks whether its connection still stands."""


class _CallSession:
    """One call on one connection."""

    def __init__(
        self, link: Link, state: ClientState, deadline_s: float, namespace: Namespace | None
    ) -> None:
        self._link = link
        self._namespace = namespace
        self._state = state
        self._deadline_s = deadline_s
        self._next_look_s = 0.0
        self._is_lost = False

    def remaining_s(self) -> float:
        return max(0.0, self._deadline_s - time.monotonic())

    def is_over(self) -> bool:
        """Whether a copy should stop: time is up, or the connection is lost (seen within 1 ms)."""
        now_s = time.monotonic()
        if now_s >= self._next_look_s:
            self._next_look_s = now_s + _LOOK_S
            self._is_lost = self._is_lost or self._link.is_lost
        return self._is_lost or now_s >= self._deadline_s

    def reading_arena(self) -> SlotReader:
        if self._link.arena is None:
            raise ServerUnavailable("server: it has no arena to fetch from")
        return self._link.arena.reading

    def writing_arena(self) -> SlotReader:
        if self._link.arena is None:
            raise ServerUnavailable("server: it has no arena to put into")
        return self._link.arena.writing

    def note_corrupt(self) -> None:
        self._state.note_corrupt()

    def carry_out(self, step: Step) -> Answer | object:
        """Do what a plan asks for, and return what it gets."""
        if isinstance(step, Ask):
            return self._ask(step.request)
        if isinstance(step, Tell):
            self._link.tell(step.message)
            return None
        return step.run(self.is_over)

    def open_namespace(self) -> None:
        """Tell the server of the call's namespace, if it has one."""
        if self._namespace is not None:
            answer = self._link.ask(OpenNamespace(self._namespace), self._deadline_s)
            if isinstance(answer, Failed):
                raise answer.to_error()
            self._link.opened.add(self._namespace.digest)

    def _ask(self, request: Request) -> Answer:
        """Ask, once more if the server has forgotten the namespace meanwhile."""
        answer = self._link.ask(request, self._deadline_s)
        if self._namespace is not None and _is_forgotten(answer):
            self.open_namespace()
            answer = self._link.ask(request, self._deadline_s)
            if _is_forgotten(answer):
                raise ServerUnavailable("server: it forgot the namespace again: too many are in use there")
        return answer


def _is_forgotten(answer: Answer) -> bool:
    return isinstance(answer, Failed) and answer.code is FailureCode.NAMESPACE_NOT_OPEN


class _LinkPool:
    """Connections of one process, each used by one call at a time."""

    def __init__(self, dial: Dial, state: ClientState) -> None:
        self.pid = os.getpid()
        self._dial = dial
        self._state = state
        self._arenas = ArenaCache()
        self._idle: list[Link] = []
        self._num_links = 0
        self._is_closed = False
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def lend(self, deadline_s: float, *, is_control: bool) -> Iterator[Link]:
        """Lend a connection for one call; one in doubt is closed afterwards."""
        link = self._take(deadline_s, is_control=is_control)
        try:
            yield link
        finally:
            self._give_back(link)

    def close(self) -> None:
        """Close every connection; one in use is closed when its call ends."""
        with self._changed:
            self._is_closed = True
            idle, self._idle = self._idle, []
            self._changed.notify_all()
        for link in idle:
            link.close()
        self._arenas.forget()

    def _take(self, deadline_s: float, *, is_control: bool) -> Link:
        while True:
            with self._changed:
                if self._is_closed:
                    raise InvalidRequest("client: it is closed")
                if self._idle:
                    link = self._idle.pop()
                elif self._num_links < MAX_LINKS:
                    if not is_control:
                        self._state.check_may_connect()
                    self._num_links += 1
                    break
                else:
                    if not self._changed.wait(max(0.0, deadline_s - time.monotonic())):
                        raise TimedOut(f"client: all {MAX_LINKS} connections are in use")
                    continue
            if link.is_usable:
                return link
            self._close(link)
        return self._connect(deadline_s)

    def _connect(self, deadline_s: float) -> Link:
        link: Link | None = None
        try:
            link = Link.open(self._dial, self._arenas, deadline_s)
        finally:
            if link is None:
                self._state.note_not_connected()
                with self._changed:
                    self._num_links -= 1
                    self._changed.notify()
        assert link is not None
        if self._is_closed:
            self._close(link)
            self._arenas.forget()
            raise ServerUnavailable("client: it was closed meanwhile")
        self._state.note_connected(link.welcome.instance)
        return link

    def _give_back(self, link: Link) -> None:
        with self._changed:
            if link.is_clean and not self._is_closed:
                self._idle.append(link)
                self._changed.notify()
                return
        self._close(link)

    def _close(self, link: Link) -> None:
        link.close()
        with self._changed:
            self._num_links -= 1
            self._changed.notify()


class KVStore:
    """A blocking client of a store.

    Threads may share it: each call has a connection of its own while it lasts. After a fork the child opens
    its own connections. On the data path (match, fetch_into, get, put, prefetch) a server that is absent,
    dying, restarted or too slow is a result, never an exception, and no call takes longer than its timeout;
    connections are remade by themselves. Control calls (ping, stats, check, flush, drop) raise
    ServerUnavailable instead.

    Every call raises InvalidRequest for what no state of the store could serve: a namespace that is not
    open, buffers of wrong sizes, more than 10 000 keys, a negative timeout, a closed client.
    """

    def __init__(
        self, dial: Dial, *, timeouts: Timeouts | None = None, on_close: Callable[[], None] | None = None
    ) -> None:
        self._state = ClientState(timeouts or Timeouts())
        self._dial = dial
        self._on_close = on_close
        self._pool = _LinkPool(dial, self._state)

    @classmethod
    def connect(
        cls,
        address: str | os.PathLike[str],
        *,
        timeout_s: float | None = None,
        timeouts: Timeouts | None = None,
    ) -> Self:
        """Return a client of the server at ``unix:/path`` (or a plain path).

        The server need not be there yet: until it is, everything is a miss. ``timeout_s`` is the time of
        every call of the data path; ``timeouts`` gives each kind its own.

        Raises:
            InvalidConfig: the address is malformed or too long, or a timeout is not positive.
        """
        path = parse_address(address)
        return cls(unix_dial(path), timeouts=(timeouts or Timeouts()).for_data(timeout_s))

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
        """Close the connections, and the store itself if it is local. Idempotent."""
        self._pool.close()
        on_close, self._on_close = self._on_close, None
        if on_close is not None:
            on_close()

    def open_namespace(self, namespace: Namespace) -> None:
        """Make a namespace's chains usable; the server learns of it with the first call about it.

        Raises:
            InvalidRequest: its digest is open with another layout.
        """
        self._state.open_namespace(namespace)

    def match(
        self, chain: PrefixChain, *, part: Part | None = None, timeout_s: float | None = None
    ) -> PrefixMatch:
        """Count the leading blocks that are stored, and say where. No payload moves."""
        self._state.length_bytes(chain, part)
        try:
            return self._run(
                lambda session: calls.match_plan(session, chain, part),
                deadline_s=self._state.deadline_s(timeout_s, self._state.timeouts.match_s),
                namespace=chain.namespace,
            )
        except AWAY as error:
            return PrefixMatch(0, (), self._state.note_away(error))

    def fetch_into(
        self, chain: PrefixChain, buffers: Buffer, *, part: Part | None = None, timeout_s: float | None = None
    ) -> FetchResult:
        """Copy the longest stored prefix into ``buffers``: one per block, or one that holds all in a row.

        Checksum and generation of every block are checked after the copy. Buffers behind the result's
        ``blocks`` may have been written to and hold nothing of value.
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

        Blocks that are present are not written again. What found no room, or no server, is dropped, and so
        is a payload whose xxh3-64 is not the one given in ``checksums``. ``doubtful`` names those blocks.
        """
        length_bytes = self._state.length_bytes(chain, part)
        views = split_buffers(payloads, length_bytes=length_bytes, count=len(chain), what="payloads")
        if checksums is not None and len(checksums) != len(chain):
            raise InvalidRequest(f"checksums: {len(checksums)} for {len(chain)} blocks")
        tally = PutTally(len(chain))
        with contextlib.suppress(*AWAY), self._counted():
            self._run(
                lambda session: calls.put_plan(
                    session,
                    chain,
                    views,
                    part=part,
                    length_bytes=length_bytes,
                    checksums=checksums,
                    tally=tally,
                ),
                deadline_s=self._state.deadline_s(timeout_s, self._state.timeouts.put_s),
                namespace=chain.namespace,
            )
        return tally.result()

    def prefetch(
        self, chain: PrefixChain, *, part: Part | None = None, timeout_s: float | None = None
    ) -> int:
        """Load stored leading blocks into the top tier; returns how many are there (0 without a server)."""
        self._state.length_bytes(chain, part)
        with contextlib.suppress(*AWAY), self._counted():
            return self._run(
                lambda session: calls.prefetch_plan(session, chain, part),
                deadline_s=self._state.deadline_s(timeout_s, self._state.timeouts.fetch_s),
                namespace=chain.namespace,
            )
        return 0

    def drop(self, chain: PrefixChain, *, part: Part | None = None, timeout_s: float | None = None) -> int:
        """Forget every copy of these blocks that is not leased; returns how many blocks had one.

        Raises:
            ServerUnavailable: no server answers in time.
        """
        self._state.length_bytes(chain, part)
        return self._control(
            lambda session: calls.drop_plan(session, chain, part), timeout_s, namespace=chain.namespace
        )

    def demote(self, chain: PrefixChain, *, part: Part | None = None, timeout_s: float | None = None) -> int:
        """Write blocks to a tier below and take them out of shared memory; returns how many left it.

        Leased blocks, and those with a child there that is not among them, stay.

        Raises:
            ServerUnavailable: no server answers in time.
        """
        self._state.length_bytes(chain, part)
        return self._control(
            lambda session: calls.demote_plan(session, chain, part), timeout_s, namespace=chain.namespace
        )

    def why(
        self, chain: PrefixChain, *, part: Part | None = None, timeout_s: float | None = None
    ) -> list[BlockReport]:
        """Explain block by block (the first 1000) where it is stored, or why, since when and by whom not.

        Raises:
            ServerUnavailable: no server answers in time.
        """
        self._state.length_bytes(chain, part)
        return self._control(
            lambda session: calls.why_plan(session, chain, part), timeout_s, namespace=chain.namespace
        )

    def advance_epoch(self, model: str, *, timeout_s: float | None = None) -> int:
        """Make every block stored for a model so far unreachable, on all nodes; returns the new epoch.

        To be called when the weights change in place. Engines then use ``namespace.at_epoch(epoch)``.

        Raises:
            ServerUnavailable: no server answers in time.
        """
        return self._control(lambda _: calls.advance_epoch_plan(model), timeout_s)

    def erase_tenant(self, salt: bytes, *, timeout_s: float | None = None) -> EraseReport:
        """Destroy the key of the tenant with that salt, on all nodes, and forget its blocks.

        Nothing that was stored for it can be read again. What its ``problems`` name still has the key; that
        is tried again until it is gone. The salt itself is not sent.

        Raises:
            InvalidRequest: the store does not encrypt blocks.
            TierUnavailable: the store does not have the right master key.
            ServerUnavailable: no server answers in time.
        """
        return self._control(lambda _: calls.erase_plan(tenant_of(salt), None), timeout_s)

    def erase_tenant_of(self, namespace: NamespaceDigest, *, timeout_s: float | None = None) -> EraseReport:
        """As ``erase_tenant``, for the tenant of a namespace that is open in the store.

        Raises:
            InvalidRequest: the namespace is not open, or the store does not encrypt blocks.
            TierUnavailable: the store does not have the right master key.
            ServerUnavailable: no server answers in time.
        """
        return self._control(lambda _: calls.erase_plan(None, namespace), timeout_s)

    def namespaces(self, *, timeout_s: float | None = None) -> list[Namespace]:
        """Return the namespaces that clients of the server opened, without their salts.

        Raises:
            ServerUnavailable: no server answers in time.
        """
        return self._control(lambda _: calls.namespaces_plan(), timeout_s)

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait until everything put has been written through; False if time ran out.

        Raises:
            ServerUnavailable: no server answers in time.
        """
        return self._control(calls.flush_plan, timeout_s)

    def stats(self, *, timeout_s: float | None = None) -> dict[str, Any]:  # Any: JSON
        """Return the server's counters and occupancy.

        Raises:
            ServerUnavailable: no server answers in time.
        """
        return self._control(lambda _: calls.stats_plan(), timeout_s)

    def check(self, sample_blocks: int = 64, *, timeout_s: float | None = None) -> list[str]:
        """Have the server verify its invariants and a sample of checksums; one line per violation.

        If that takes longer than the call may, a line says that it was cut.

        Raises:
            ServerUnavailable: no server answers in time.
        """
        return self._control(lambda session: calls.check_plan(session, sample_blocks), timeout_s)

    def ping(self, *, timeout_s: float | None = None) -> None:
        """Return if the server answers.

        Raises:
            ServerUnavailable: no server answers in time.
            ProtocolMismatch: it speaks another version of the protocol.
        """
        self._control(lambda _: calls.ping_plan(), timeout_s)

    @property
    def timeouts(self) -> Timeouts:
        """Times of calls that are not given one."""
        return self._state.timeouts

    def client_stats(self) -> ClientStats:
        """Return what happened to this client since it was made."""
        return self._state.stats

    def _fetch(
        self,
        chain: PrefixChain,
        buffers: calls.BufferSource,
        *,
        part: Part | None,
        timeout_s: float | None,
    ) -> FetchResult:
        tally = FetchTally()
        length_bytes = self._state.length_bytes(chain, part)
        try:
            reason = self._run(
                lambda session: calls.fetch_plan(
                    session, chain, part=part, length_bytes=length_bytes, buffers=buffers, tally=tally
                ),
                deadline_s=self._state.deadline_s(timeout_s, self._state.timeouts.fetch_s),
                namespace=chain.namespace,
            )
        except AWAY as error:
            reason = None if tally.blocks == len(chain) else self._state.note_away(error)
        return tally.result(reason)

    def _control(
        self,
        make_plan: Callable[[Session], Plan[T]],
        timeout_s: float | None,
        *,
        namespace: NamespaceDigest | None = None,
    ) -> T:
        deadline_s = self._state.deadline_s(timeout_s, self._state.timeouts.control_s)
        return self._run(make_plan, deadline_s=deadline_s, namespace=namespace, is_control=True)

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        try:
            yield
        except AWAY as error:
            self._state.note_away(error)
            raise

    def _run(
        self,
        make_plan: Callable[[Session], Plan[T]],
        *,
        deadline_s: float,
        namespace: NamespaceDigest | None = None,
        is_control: bool = False,
    ) -> T:
        try:
            with self._live_pool().lend(deadline_s, is_control=is_control) as link:
                space = None if namespace is None else self._state.namespace(namespace)
                session = _CallSession(link, self._state, deadline_s, space)
                try:
                    if namespace is not None and namespace not in link.opened:
                        session.open_namespace()
                    return _follow(make_plan(session), session)
                except ProtocolMismatch:
                    # The exchange was whole, but what it said is in doubt, and so is what it lent.
                    link.close()
                    raise
        except ProtocolMismatch:
            self._state.note_protocol_error()
            raise

    def _live_pool(self) -> _LinkPool:
        if self._pool.pid != os.getpid():
            # The parent's connections are its own; closing our copies of their descriptors ends nothing.
            inherited, self._pool = self._pool, _LinkPool(self._dial, self._state)
            for link in inherited._idle:
                link.close()
        return self._pool


def _follow(plan: Plan[T], session: _CallSession) -> T:
    """Carry out a plan's steps until it returns."""
    try:
        step = next(plan)
        while True:
            try:
                outcome = session.carry_out(step)
            except BaseException as error:  # whatever it is, the plan gives back what it holds and re-raises
                step = plan.throw(error)
            else:
                step = plan.send(outcome)
    except StopIteration as end:
        value: T = end.value
        return value
