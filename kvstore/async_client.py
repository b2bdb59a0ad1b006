"""AsyncKVStore: the asyncio client of a store."""

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self, TypeVar

import numpy as np
import numpy.typing as npt

from kvstore import calls
from kvstore.arena_link import ArenaCache
from kvstore.async_link import AsyncLink
from kvstore.calls import Ask, FetchResult, FetchTally, Plan, PutTally, Session, Step, Tell, Work
from kvstore.client_state import AWAY, ClientState, ClientStats, Timeouts
from kvstore.errors import InvalidRequest, ProtocolMismatch, ServerUnavailable, TimedOut
from kvstore.keys import Namespace, NamespaceDigest, PrefixChain
from kvstore.layout import Part
from kvstore.messages import Answer, Failed, FailureCode, OpenNamespace, Request
from kvstore.outlasting import outlast
from kvstore.results import BlockReport, EraseReport, PrefixMatch, PutResult
from kvstore.server_address import parse_address
from kvstore.tenant import tenant_of
from kvstore.transfer import Buffer, SlotReader, require_writable, split_buffers

T = TypeVar("T")

_INLINE_BYTES = 256 << 10
"""Copies up to this size run on the loop's thread: a thread switch would cost more than the copy."""

_COPY_THREADS = 2


class _CallSession:
    """One call on the connection."""

    def __init__(
        self,
        link: AsyncLink,
        state: ClientState,
        copiers: ThreadPoolExecutor,
        deadline_s: float,
        namespace: Namespace | None,
    ) -> None:
        self._link = link
        self._namespace = namespace
        self._state = state
        self._copiers = copiers
        self._deadline_s = deadline_s

    def remaining_s(self) -> float:
        return max(0.0, self._deadline_s - time.monotonic())

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

    async def carry_out(self, step: Step) -> Answer | object:
        """Do what a plan asks for, and return what it gets."""
        if isinstance(step, Ask):
            return await self._ask(step.request)
        if isinstance(step, Tell):
            self._link.tell(step.message)
            return None
        return await self._copy(step)

    async def open_namespace(self) -> None:
        """Tell the server of the call's namespace, if it has one."""
        if self._namespace is not None:
            answer = await self._link.ask(OpenNamespace(self._namespace), self._deadline_s)
            if isinstance(answer, Failed):
                raise answer.to_error()
            self._link.opened.add(self._namespace.digest)

    async def _ask(self, request: Request) -> Answer:
        """Ask, once more if the server has forgotten the namespace meanwhile."""
        answer = await self._link.ask(request, self._deadline_s)
        if self._namespace is not None and _is_forgotten(answer):
            await self.open_namespace()
            answer = await self._link.ask(request, self._deadline_s)
            if _is_forgotten(answer):
                raise ServerUnavailable("server: it forgot the namespace again: too many are in use there")
        return answer

    async def _copy(self, work: Work) -> object:
        """Run a copy; when the caller is cancelled, stop it and wait until it touches no buffer any more.

        A lost connection stops it too: what its slots were lent for has ended.
        """
        link, is_abandoned = self._link, threading.Event()
        if link.is_lost:
            raise ServerUnavailable("server: connection lost")

        def should_stop() -> bool:
            return is_abandoned.is_set() or link.is_lost or time.monotonic() >= self._deadline_s

        if work.size_bytes <= _INLINE_BYTES:
            return work.run(should_stop)
        running = asyncio.get_running_loop().run_in_executor(self._copiers, work.run, should_stop)
        return await outlast(running, when_cancelled=is_abandoned.set)


def _is_forgotten(answer: Answer) -> bool:
    return isinstance(answer, Failed) and answer.code is FailureCode.NAMESPACE_NOT_OPEN


class AsyncKVStore:
    """A client of a store for one event loop, with one connection on which many requests may be under way.

    On the data path (match, fetch_into, get, put, prefetch) a server that is absent, dying, restarted or too
    slow is a result, never an exception, and no call takes longer than its timeout; the connection is remade
    by itself. Control calls (ping, stats, check, flush, drop) raise ServerUnavailable instead. Every call
    may be cancelled: it returns only when nothing touches the caller's buffers any more, and what it had
    leased or reserved is given back.

    Every call raises InvalidRequest for what no state of the store could serve: a namespace that is not
    open, buffers of wrong sizes, more than 10 000 keys, a negative timeout, a closed client.
    """

    def __init__(self, path: Path, *, timeouts: Timeouts | None = None) -> None:
        self._path = path
        self._state = ClientState(timeouts or Timeouts())
        self._arenas = ArenaCache()
        self._link: AsyncLink | None = None
        self._connecting = asyncio.Lock()
        self._attempt: asyncio.Task[AsyncLink] | None = None
        self._copiers = ThreadPoolExecutor(_COPY_THREADS, thread_name_prefix="kvstore-copy")
        self._is_closed = False

    @classmethod
    async def connect(
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
        return cls(parse_address(address), timeouts=(timeouts or Timeouts()).for_data(timeout_s))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connection. Calls under way end as misses. Idempotent."""
        self._is_closed = True
        attempt = self._attempt
        if attempt is not None:
            attempt.cancel()
            await asyncio.wait([attempt])
            if not attempt.cancelled() and attempt.exception() is None:
                await attempt.result().close()
        link, self._link = self._link, None
        if link is not None:
            await link.close()
        self._copiers.shutdown(wait=True)
        self._arenas.forget()

    def open_namespace(self, namespace: Namespace) -> None:
        """Make a namespace's chains usable; the server learns of it with the first call about it.

        Raises:
            InvalidRequest: its digest is open with another layout.
        """
        self._state.open_namespace(namespace)

    async def match(
        self, chain: PrefixChain, *, part: Part | None = None, timeout_s: float | None = None
    ) -> PrefixMatch:
        """Count the leading blocks that are stored, and say where. No payload moves."""
        self._state.length_bytes(chain, part)
        try:
            return await self._run(
                lambda session: calls.match_plan(session, chain, part),
                deadline_s=self._state.deadline_s(timeout_s, self._state.timeouts.match_s),
                namespace=chain.namespace,
            )
        except AWAY as error:
            return PrefixMatch(0, (), self._state.note_away(error))

    async def fetch_into(
        self, chain: PrefixChain, buffers: Buffer, *, part: Part | None = None, timeout_s: float | None = None
    ) -> FetchResult:
        """Copy the longest stored prefix into ``buffers``: one per block, or one that holds all in a row.

        Checksum and generation of every block are checked after the copy. Buffers behind the result's
        ``blocks`` may have been written to and hold nothing of value.
        """
        length_bytes = self._state.length_bytes(chain, part)
        views = split_buffers(buffers, length_bytes=length_bytes, count=len(chain), what="buffers")
        require_writable(views, "buffers")
        return await self._fetch(chain, lambda start, stop: views[start:stop], part=part, timeout_s=timeout_s)

    async def get(
        self, chain: PrefixChain, *, part: Part | None = None, timeout_s: float | None = None
    ) -> list[npt.NDArray[np.uint8]]:
        """Return the bytes of the longest stored prefix, one array ``[length_bytes]`` uint8 per block."""
        blocks: list[npt.NDArray[np.uint8]] = []
        source = calls.allocate_blocks(self._state.length_bytes(chain, part), blocks)
        result = await self._fetch(chain, source, part=part, timeout_s=timeout_s)
        return blocks[: result.blocks]

    async def put(
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
            await self._run(
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

    async def prefetch(
        self, chain: PrefixChain, *, part: Part | None = None, timeout_s: float | None = None
    ) -> int:
        """Load stored leading blocks into the top tier; returns how many are there (0 without a server)."""
        self._state.length_bytes(chain, part)
        with contextlib.suppress(*AWAY), self._counted():
            return await self._run(
                lambda session: calls.prefetch_plan(session, chain, part),
                deadline_s=self._state.deadline_s(timeout_s, self._state.timeouts.fetch_s),
                namespace=chain.namespace,
            )
        return 0

    async def drop(
        self, chain: PrefixChain, *, part: Part | None = None, timeout_s: float | None = None
    ) -> int:
        """Forget every copy of these blocks that is not leased; returns how many blocks had one.

        Raises:
            ServerUnavailable: no server answers in time.
        """
        self._state.length_bytes(chain, part)
        return await self._control(
            lambda session: calls.drop_plan(session, chain, part), timeout_s, namespace=chain.namespace
        )

    async def demote(
        self, chain: PrefixChain, *, part: Part | None = None, timeout_s: float | None = None
    ) -> int:
        """Write blocks to a tier below and take them out of shared memory; returns how many left it.

        Leased blocks, and those with a child there that is not among them, stay.

        Raises:
            ServerUnavailable: no server answers in time.
        """
        self._state.length_bytes(chain, part)
        return await self._control(
            lambda session: calls.demote_plan(session, chain, part), timeout_s, namespace=chain.namespace
        )

    async def why(
        self, chain: PrefixChain, *, part: Part | None = None, timeout_s: float | None = None
    ) -> list[BlockReport]:
        """Explain block by block (the first 1000) where it is stored, or why, since when and by whom not.

        Raises:
            ServerUnavailable: no server answers in time.
        """
        self._state.length_bytes(chain, part)
        return await self._control(
            lambda session: calls.why_plan(session, chain, part), timeout_s, namespace=chain.namespace
        )

    async def advance_epoch(self, model: str, *, timeout_s: float | None = None) -> int:
        """Make every block stored for a model so far unreachable, on all nodes; returns the new epoch.

        To be called when the weights change in place. Engines then use ``namespace.at_epoch(epoch)``.

        Raises:
            ServerUnavailable: no server answers in time.
        """
        return await self._control(lambda _: calls.advance_epoch_plan(model), timeout_s)

    async def erase_tenant(self, salt: bytes, *, timeout_s: float | None = None) -> EraseReport:
        """Destroy the key of the tenant with that salt, on all nodes, and forget its blocks.

        Nothing that was stored for it can be read again. What its ``problems`` name still has the key; that
        is tried again until it is gone. The salt itself is not sent.

        Raises:
            InvalidRequest: the store does not encrypt blocks.
            TierUnavailable: the store does not have the right master key.
            ServerUnavailable: no server answers in time.
        """
        return await self._control(lambda _: calls.erase_plan(tenant_of(salt), None), timeout_s)

    async def erase_tenant_of(
        self, namespace: NamespaceDigest, *, timeout_s: float | None = None
    ) -> EraseReport:
        """As ``erase_tenant``, for the tenant of a namespace that is open in the store.

        Raises:
            InvalidRequest: the namespace is not open, or the store does not encrypt blocks.
            TierUnavailable: the store does not have the right master key.
            ServerUnavailable: no server answers in time.
        """
        return await self._control(lambda _: calls.erase_plan(None, namespace), timeout_s)

    async def namespaces(self, *, timeout_s: float | None = None) -> list[Namespace]:
        """Return the namespaces that clients of the server opened, without their salts.

        Raises:
            ServerUnavailable: no server answers in time.
        """
        return await self._control(lambda _: calls.namespaces_plan(), timeout_s)

    async def flush(self, timeout_s: float | None = None) -> bool:
        """Wait until everything put has been written through; False if time ran out.

        Raises:
            ServerUnavailable: no server answers in time.
        """
        return await self._control(calls.flush_plan, timeout_s)

    async def stats(self, *, timeout_s: float | None = None) -> dict[str, Any]:  # Any: JSON
        """Return the server's counters and occupancy.

        Raises:
            ServerUnavailable: no server answers in time.
        """
        return await self._control(lambda _: calls.stats_plan(), timeout_s)

    async def check(self, sample_blocks: int = 64, *, timeout_s: float | None = None) -> list[str]:
        """Have the server verify its invariants and a sample of checksums; one line per violation.

        If that takes longer than the call may, a line says that it was cut.

        Raises:
            ServerUnavailable: no server answers in time.
        """
        return await self._control(lambda session: calls.check_plan(session, sample_blocks), timeout_s)

    async def ping(self, *, timeout_s: float | None = None) -> None:
        """Return if the server answers.

        Raises:
            ServerUnavailable: no server answers in time.
            ProtocolMismatch: it speaks another version of the protocol.
        """
        await self._control(lambda _: calls.ping_plan(), timeout_s)

    @property
    def timeouts(self) -> Timeouts:
        """Times of calls that are not given one."""
        return self._state.timeouts

    @property
    def is_reachable(self) -> bool:
        """Whether a call is worth making: the last attempt to connect succeeded, or is long enough ago."""
        return not self._is_closed and self._state.may_connect

    def client_stats(self) -> ClientStats:
        """Return what happened to this client since it was made."""
        return self._state.stats

    async def _fetch(
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
            reason = await self._run(
                lambda session: calls.fetch_plan(
                    session, chain, part=part, length_bytes=length_bytes, buffers=buffers, tally=tally
                ),
                deadline_s=self._state.deadline_s(timeout_s, self._state.timeouts.fetch_s),
                namespace=chain.namespace,
            )
        except AWAY as error:
            reason = None if tally.blocks == len(chain) else self._state.note_away(error)
        return tally.result(reason)

    async def _control(
        self,
        make_plan: Callable[[Session], Plan[T]],
        timeout_s: float | None,
        *,
        namespace: NamespaceDigest | None = None,
    ) -> T:
        deadline_s = self._state.deadline_s(timeout_s, self._state.timeouts.control_s)
        return await self._run(make_plan, deadline_s=deadline_s, namespace=namespace, is_control=True)

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        try:
            yield
        except AWAY as error:
            self._state.note_away(error)
            raise

    async def _run(
        self,
        make_plan: Callable[[Session], Plan[T]],
        *,
        deadline_s: float,
        namespace: NamespaceDigest | None = None,
        is_control: bool = False,
    ) -> T:
        try:
            link = await self._open_link(deadline_s, is_control=is_control)
            try:
                space = None if namespace is None else self._state.namespace(namespace)
                session = _CallSession(link, self._state, self._copiers, deadline_s, space)
                if namespace is not None and namespace not in link.opened:
                    await session.open_namespace()
                return await _follow(make_plan(session), session)
            except ProtocolMismatch:
                # Only the connection that said it: others may have made a new one meanwhile.
                if self._link is link:
                    self._link = None
                await link.close()
                raise
        except ProtocolMismatch:
            self._state.note_protocol_error()
            raise

    async def _open_link(self, deadline_s: float, *, is_control: bool) -> AsyncLink:
        """Return the connection, made if there is none; one caller makes it, the others wait for it."""
        if self._is_closed:
            raise InvalidRequest("client: it is closed")
        if self._link is not None and self._link.is_open:
            return self._link
        try:
            async with asyncio.timeout(max(0.0, deadline_s - time.monotonic())), self._connecting:
                if self._is_closed:
                    raise ServerUnavailable("client: it was closed meanwhile")
                if self._link is not None and self._link.is_open:
                    return self._link
                if not is_control:
                    self._state.check_may_connect()
                lost, self._link = self._link, None
                if lost is not None:
                    await lost.close()
                return await self._connect()
        except TimeoutError as error:
            raise TimedOut(f"server at {self._path}: no connection in time") from error

    async def _connect(self) -> AsyncLink:
        """Make the connection in a task of its own, which ends with the caller's call and with ``close``."""
        self._attempt = attempt = asyncio.create_task(AsyncLink.open(self._path, self._arenas))
        try:
            await asyncio.wait([attempt])
            if attempt.cancelled() or self._is_closed:
                raise ServerUnavailable("client: it was closed meanwhile")
            self._link = link = attempt.result()
        except BaseException:
            self._state.note_not_connected()
            attempt.cancel()
            attempt.add_done_callback(_discard)
            raise
        finally:
            self._attempt = None
        self._state.note_connected(link.welcome.instance)
        return link


def _discard(attempt: "asyncio.Task[AsyncLink]") -> None:
    """End a connection that nobody takes."""
    if not attempt.cancelled() and attempt.exception() is None:
        attempt.result().abort()


async def _follow(plan: Plan[T], session: _CallSession) -> T:
    """Carry out a plan's steps until it returns."""
    try:
        step = next(plan)
        while True:
            try:
                outcome = await session.carry_out(step)
            except BaseException as error:  # whatever it is, the plan gives back what it holds and re-raises
                step = plan.throw(error)
            else:
                step = plan.send(outcome)
    except StopIteration as end:
        value: T = end.value
        return value
