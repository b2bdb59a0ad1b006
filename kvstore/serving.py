"""Connection: one client served, from its greeting to its end.

Several requests of a client may be under way; each is answered by its id. When the connection ends, however
it ends, everything its owner holds is given back at once. What a client can make the server hold is bounded:
requests under way, bytes not yet read, answers it does not read. A frame that breaks the protocol ends this
connection and no other. Control operations are waited for only as long as the request says: one that a hung
disk holds goes on, but not as a request under way.
"""

import asyncio
import json
import logging
import time
from collections.abc import Callable

from kvstore.access_log import AccessLog
from kvstore.answering import (
    UNTIMED_S,
    answer_erase,
    answer_exists,
    answer_lease,
    answer_lookup_at_once,
    answer_match_and_lease,
    answer_namespaces,
    answer_renew,
    answer_seen,
    answer_sizes,
    answer_stats,
    control_limit_s,
    ready_slots,
)
from kvstore.client_slots import ClientSlots
from kvstore.coming_back import ComingBack
from kvstore.errors import (
    InvalidRequest,
    KVStoreError,
    ProtocolMismatch,
    ServerUnavailable,
    TimedOut,
)
from kvstore.garbage import unlink_transport
from kvstore.late_work import LateWork
from kvstore.lingering import Lingering
from kvstore.log_limit import LimitedWarning
from kvstore.manager import BlockManager
from kvstore.messages import (
    AdvanceEpoch,
    Answer,
    AskSizes,
    ChainRef,
    ChangePolicy,
    Check,
    Commit,
    Count,
    Demote,
    Done,
    Drop,
    Erase,
    Exists,
    Failed,
    FailureCode,
    Fetch,
    Flush,
    LeaseChain,
    Lent,
    ListNamespaces,
    Match,
    MatchAndLease,
    Matched,
    NoteHints,
    NoteReads,
    OpenNamespace,
    Peek,
    Ping,
    Prefetch,
    Ready,
    Release,
    Renew,
    Report,
    ReportDamage,
    Request,
    Reserve,
    ReturnSlots,
    Stats,
    Store,
    Stored,
    TierNames,
    Why,
    decode_traced,
    encode_message,
)
from kvstore.noted_requests import note_access
from kvstore.record_answers import RECORD_REQUESTS, answer_about_records
from kvstore.record_store import RecordStore
from kvstore.results import LeaseId, Owner, Reserved
from kvstore.server_counters import ServerCounters
from kvstore.traced_calls import answer_in_span
from kvstore.tracing import TraceContext
from kvstore.wire import Frame, FrameDecoder

logger = logging.getLogger(__name__)

_MAX_WHY_BLOCKS = 1000
MAX_IN_FLIGHT = 32
"""Requests of one connection that may be under way; more wait unread in its socket."""

_TURN_BYTES = 64 << 10
_TURN_S = 200e-6
_TURN_TASKS = 4
"""What a connection may have accepted before it is the others' turn: so many bytes, as many requests as are
answered in so much time, and so many that go on as tasks. A client with many large requests, or very many
small ones, keeps no other waiting for more than one such turn."""

_WRITE_HIGH_BYTES = 1 << 20
_SLOW_READER_S = 10.0
_MAX_NAMESPACES = 1024
_MAX_CHECK_LINES = 200


class Connection(asyncio.BufferedProtocol):
    """One greeted client. ``decoder`` holds what it sent after its greeting.

    Bytes are received straight into the decoder's buffer: a plain Protocol costs a buffer of 256 KiB for
    each (measured with benchmarks/data_plane.py: 15 us of a round trip, 2 cores).

    Turns. What needs no waiting is answered as it is read, but no more than a turn's worth: then other
    connections and tasks have their turn. What waits runs as a task.
    """

    def __init__(
        self,
        manager: BlockManager,
        records: RecordStore,
        decoder: FrameDecoder,
        *,
        counters: ServerCounters,
        malformed: LimitedWarning,
        late_work: LateWork,
        on_end: Callable[["Connection"], None],
        stay_awake: Callable[[float], None] | None = None,
        access_log: AccessLog | None = None,
    ) -> None:
        self._access_log = access_log
        self._manager = manager
        self._afterwards = manager.afterwards
        self._records = records
        self._decoder = decoder
        self._counters = counters
        self._malformed = malformed
        self._late_work = late_work
        self._on_end = on_end
        self._coming_back = None if stay_awake is None else ComingBack(stay_awake)
        self._owner = Owner(0)
        self._slots = ClientSlots(manager, self._owner)
        self._in_flight: dict[int, asyncio.Task[None]] = {}
        self._namespaces: set[bytes] = set()
        self._transport: asyncio.Transport | None = None
        self._is_choked = False
        self._is_draining = False
        self._slow_timer: asyncio.TimerHandle | None = None
        self._idle = asyncio.Event()
        self._idle.set()
        self._heard_s = time.monotonic()
        self._is_turn_over = False
        self._is_reading = True
        self._lingering: Lingering | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin to serve."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._owner = self._manager.new_owner(may_freeze=True)
        self._slots = ClientSlots(self._manager, self._owner)
        transport.set_write_buffer_limits(high=_WRITE_HIGH_BYTES)
        self._pump()

    def get_buffer(self, sizehint: int) -> memoryview:
        """Say where the next bytes from the client go."""
        return self._decoder.space()

    def buffer_updated(self, nbytes: int) -> None:
        """Take bytes from the client."""
        self._heard_s = time.monotonic()
        if self._coming_back is not None:
            self._coming_back.heard()
        self._decoder.received(nbytes)
        self._pump()

    def connection_lost(self, exc: Exception | None) -> None:
        """Give back everything the client held, once it cannot write into slots any more."""
        unlink_transport(self._transport)
        self._transport = None
        if self._slow_timer is not None:
            self._slow_timer.cancel()
        for task in self._in_flight.values():
            task.cancel()
        if self._lingering is None:
            self._end()

    def _end(self) -> None:
        self._lingering = None
        self._manager.release_owner(self._owner)
        self._on_end(self)

    def pause_writing(self) -> None:
        """The client does not read its answers: read nothing more from it, and not for ever."""
        self._is_choked = True
        self._slow_timer = asyncio.get_running_loop().call_later(_SLOW_READER_S, self._end_slow_reader)
        self._pump()

    def resume_writing(self) -> None:
        """The client has caught up."""
        self._is_choked = False
        if self._slow_timer is not None:
            self._slow_timer.cancel()
            self._slow_timer = None
        self._pump()

    @property
    def idle_s(self) -> float:
        """Seconds since the client was last heard, while it waits for nothing and holds nothing; else 0.

        Slots lent to it ahead are nothing.
        """
        return self.silent_s if not self._in_flight and self._slots.are_all_ahead else 0.0

    @property
    def silent_s(self) -> float:
        """Seconds since the client was last heard."""
        return time.monotonic() - self._heard_s

    @property
    def holds_anything(self) -> bool:
        """Whether the client has leases or lent slots."""
        return self._manager.has_anything(self._owner)

    async def drain(self) -> None:
        """Refuse new requests and wait until those under way are answered."""
        self._is_draining = True
        await self._idle.wait()

    def close(self) -> None:
        """End the connection once what was answered has been sent, as far as the client reads it."""
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """End the connection now."""
        if self._lingering is not None:
            self._lingering.end()
        elif self._transport is not None:
            self._transport.abort()

    def cut(self) -> None:
        """End the connection now, but keep what the client may be writing into until it is gone."""
        if self._transport is None or self._lingering is not None:
            return
        try:
            if self._manager.has_anything(self._owner):
                self._counters.lingering += 1
                self._lingering = Lingering.begin(self._transport, self._end)
                return
        except OSError as error:
            logger.warning("server: a client that was disconnected cannot be watched: %s", error)
        self._transport.abort()

    def _pump(self) -> None:
        """Accept whole frames while there is room for their requests, and read on only if there is.

        After a turn's worth of them the other connections have theirs first.
        """
        if self._is_turn_over:
            return
        decoder, left_bytes, is_over = self._decoder, _TURN_BYTES, False
        until_s, most_in_flight = time.monotonic() + _TURN_S, len(self._in_flight) + _TURN_TASKS
        try:
            while decoder.pending_bytes and not is_over and self._has_room:
                frame = decoder.next_frame()
                if frame is None:
                    break
                left_bytes -= len(frame.body)
                self._accept(frame)
                is_over = left_bytes <= 0 or len(self._in_flight) >= most_in_flight
                is_over = is_over or time.monotonic() >= until_s
        except ProtocolMismatch as error:
            self._counters.protocol_errors += 1
            self._malformed.warn("server: closed a connection: %s", error)
            self.cut()
            return
        if is_over and decoder.pending_bytes:
            self._is_turn_over = True
            asyncio.get_running_loop().call_soon(self._begin_turn)
        self._read_on(is_wanted=self._has_room and not self._is_turn_over)

    def _read_on(self, *, is_wanted: bool) -> None:
        """Read from the socket, or leave what comes in it."""
        if is_wanted is self._is_reading or self._transport is None or self._transport.is_closing():
            return
        self._is_reading = is_wanted
        if is_wanted:
            self._transport.resume_reading()
        else:
            self._transport.pause_reading()

    def _begin_turn(self) -> None:
        self._is_turn_over = False
        self._pump()

    @property
    def _has_room(self) -> bool:
        is_open = self._transport is not None and not self._transport.is_closing()
        return is_open and not self._is_choked and len(self._in_flight) < MAX_IN_FLIGHT

    def _accept(self, frame: Frame) -> None:
        try:
            request, trace = decode_traced(frame)
        except InvalidRequest as error:
            self._refuse(error, frame.request_id)
            return
        self._counters.requests[type(request).__name__.lower()] += 1
        if self._access_log is not None:
            note_access(self._access_log, self._owner, request)
        if isinstance(request, Release):
            self._release(request)
        elif isinstance(request, ReturnSlots):
            self._slots.take_back(request)
        elif isinstance(request, ReportDamage):
            self._note_damage(request.about)
        elif isinstance(request, NoteReads):
            self._manager.note_reads(request.about.chain, part=request.about.part, hints=request.hints)
        elif frame.request_id in self._in_flight:
            raise ProtocolMismatch(f"request id {frame.request_id} is already under way")
        elif self._is_draining:
            self._send(Failed.of(ServerUnavailable("server: stopping")), frame.request_id)
        elif trace is not None or not self._answer_at_once(request, frame.request_id):
            task = asyncio.create_task(self._serve(request, frame.request_id, trace))
            self._in_flight[frame.request_id] = task
            self._idle.clear()
            task.add_done_callback(lambda _: self._finish(frame.request_id))

    def _finish(self, request_id: int) -> None:
        del self._in_flight[request_id]
        if not self._in_flight:
            self._idle.set()
        self._pump()

    def _answer_at_once(self, request: Request, request_id: int) -> bool:
        """Answer what needs no waiting; False if the request is none of those.

        What the answer need not wait for is done behind it, and before anything else of the loop.
        """
        self._afterwards.begin()
        try:
            answer = self._immediate_answer(request)
            if answer is not None:
                self._send(answer, request_id)
            return answer is not None
        except KVStoreError as error:
            self._refuse(error, request_id)
            return True
        finally:
            self._afterwards.settle()

    def _immediate_answer(self, request: Request) -> Answer | None:
        match request:
            case Peek():
                return self._peek(request)
            case Fetch() | Match() | Exists():
                return answer_lookup_at_once(self._manager, self._owner, request)
            case Reserve(about, _, hints):
                reserved = self._manager.reserve_at_once(
                    about.chain, owner=self._owner, part=about.part, hints=hints
                )
                return None if reserved is None else self._lent_slots(reserved)
            case Commit() | Store():
                return self._publish_at_once(request)
            case Ping() | NoteHints():
                self._note_hints(request)
                return Done()
            case OpenNamespace():
                return self._open_namespace(request)
            case Stats():
                return answer_stats(self._manager, self._records, self._counters)
            case Renew():
                return answer_renew(self._manager, self._owner, request)
            case _:
                return None

    async def _serve(self, request: Request, request_id: int, trace: TraceContext | None) -> None:
        try:
            answer = await (
                self._answer(request) if trace is None else answer_in_span(request, trace, self._answer_any)
            )
        except ProtocolMismatch:
            self._counters.protocol_errors += 1
            self.cut()
        except KVStoreError as error:
            self._refuse(error, request_id)
        except Exception:
            logger.exception("server: %s failed", type(request).__name__)
            self._counters.failed_requests += 1
            self._send(Failed(FailureCode.INTERNAL, "see the server's log"), request_id)
        else:
            self._send(answer, request_id)

    async def _answer_any(self, request: Request) -> Answer:
        return self._immediate_answer(request) or await self._answer(request)

    async def _answer(self, request: Request) -> Answer:
        if isinstance(request, RECORD_REQUESTS):
            return await answer_about_records(self._records, request)
        match request:
            case Match(about, timeout_us):
                found = await self._manager.match(about.chain, part=about.part, timeout_s=timeout_us / 1e6)
                return Matched(TierNames.of(found.tiers), found.reason)
            case Fetch() | Peek():
                return await self._fetch(request)
            case Exists():
                return await answer_exists(self._manager, request)
            case LeaseChain():
                return await answer_lease(self._manager, self._owner, request)
            case MatchAndLease():
                return await answer_match_and_lease(self._manager, self._owner, request)
            case Reserve() | Commit() | Store():
                return await self._store(request)
            case Prefetch(about, timeout_us):
                return Count(
                    await self._manager.prefetch(about.chain, part=about.part, timeout_s=timeout_us / 1e6)
                )
            case Check():
                return await self._check(request)
            case _:
                limit_s = control_limit_s(request)
                return await self._late_work.within(self._answer_control(request), limit_s, _name(request))

    async def _answer_control(self, request: Request) -> Answer:
        match request:
            case Drop(about, _):
                return Count(await self._manager.drop(about.chain, part=about.part))
            case Demote(about, timeout_us):
                return Count(
                    await self._manager.demote(about.chain, part=about.part, timeout_s=timeout_us / 1e6)
                )
            case Why(about, timeout_us):
                reports = await self._manager.why(
                    about.chain[:_MAX_WHY_BLOCKS], part=about.part, timeout_s=timeout_us / 1e6
                )
                return Report(json.dumps([report.as_dict() for report in reports]).encode())
            case ChangePolicy(plan):
                before = await self._manager.change_policy(plan)
                return Report(json.dumps({"before": before}).encode())
            case AdvanceEpoch(model):
                return Count(await self._manager.advance_epoch(model))
            case Erase():
                return await answer_erase(self._manager, request)
            case ListNamespaces():
                return answer_namespaces(self._manager)
            case AskSizes(namespace):
                return answer_sizes(self._manager, namespace)
            case Flush(timeout_us):
                return Count(int(await self._manager.flush(timeout_s=timeout_us / 1e6)))
            case _:
                raise ProtocolMismatch(f"message: {type(request).__name__} is not expected here")

    async def _check(self, request: Check) -> Report:
        limit_s = request.timeout_us / 1e6
        try:
            work = self._manager.check(sample_blocks=request.sample_blocks)
            lines = await self._late_work.within(work, limit_s, "check")
            lines += await self._records.check(sample_records=request.sample_blocks)
        except TimedOut as error:
            # The invariants are checked without I/O; it is the sample of checksums that hangs.
            lines = [str(error), *await self._manager.check(sample_blocks=0)]
        return Report(json.dumps(lines[:_MAX_CHECK_LINES]).encode())

    async def _fetch(self, request: Fetch | Peek) -> Ready:
        about = request.about
        fetched = await self._manager.fetch(
            about.chain,
            owner=self._owner,
            part=about.part,
            timeout_s=request.timeout_us / 1e6,
            hints=request.hints,
        )
        return Ready(
            lease=fetched.lease,
            length_bytes=fetched.blocks[0].length_bytes if fetched.blocks else 0,
            slots=ready_slots(fetched.blocks),
            origins=TierNames.of([block.origin for block in fetched.blocks]),
            reason=fetched.reason,
        )

    async def _store(self, request: Reserve | Commit | Store) -> Answer:
        if isinstance(request, Commit):
            return await self._slots.commit(request)
        if isinstance(request, Store):
            return await self._slots.store(request)
        about = request.about
        reserved = await self._manager.reserve(
            about.chain,
            owner=self._owner,
            part=about.part,
            timeout_s=request.timeout_us / 1e6,
            hints=request.hints,
        )
        return self._lent_slots(reserved)

    def _note_hints(self, request: Ping | NoteHints) -> None:
        if isinstance(request, NoteHints):
            about = request.about
            self._manager.note_hints(about.chain, request.hints, part=about.part)

    def _peek(self, request: Peek) -> Answer | None:
        about = request.about
        found = self._manager.peek_at_once(about.chain, part=about.part, hints=request.hints)
        if found is None:
            return None
        self._await_copy(len(found.copies) * found.length_bytes, is_certain=False)
        return answer_seen(found)

    def _publish_at_once(self, request: Commit | Store) -> Count | Stored | None:
        answer = self._slots.publish_at_once(request)
        if isinstance(answer, Stored) and answer.slots:
            self._await_copy(self._slots.ahead_bytes, is_certain=False)
        return answer

    def _lent_slots(self, reserved: Reserved) -> Lent:
        lent = self._slots.lend(reserved)
        if lent.slots:
            self._await_copy(len(lent.slots) * reserved.length_bytes, is_certain=True)
        return lent

    def _open_namespace(self, request: OpenNamespace) -> Done:
        if request.namespace.digest not in self._namespaces and len(self._namespaces) >= _MAX_NAMESPACES:
            raise InvalidRequest(f"server: a connection may open {_MAX_NAMESPACES} namespaces")
        self._namespaces.add(self._manager.open_namespace(request.namespace, owner=self._owner))
        return Done()

    def _release(self, request: Release) -> None:
        self._manager.release(LeaseId(request.lease), owner=self._owner)
        if request.corrupt is not None:
            self._note_damage(request.corrupt)

    def _note_damage(self, about: ChainRef) -> None:
        if not self._is_draining:
            self._counters.corrupt_reports += 1
            self._malformed.warn("server: a client found a damaged block: it is looked at")
            task = asyncio.create_task(self._look_at_damage(about))
            report_id = -self._counters.corrupt_reports  # no request id is negative
            self._in_flight[report_id] = task
            self._idle.clear()
            task.add_done_callback(lambda _: self._finish(report_id))

    async def _look_at_damage(self, about: ChainRef) -> None:
        try:
            work = self._manager.report_damage(about.chain, part=about.part)
            await self._late_work.within(work, UNTIMED_S, "looking at a reported block")
        except KVStoreError as error:
            self._malformed.warn("server: a reported block could not be looked at: %s", error)

    def _await_copy(self, num_bytes: int, *, is_certain: bool) -> None:
        if self._coming_back is not None:
            self._coming_back.told(num_bytes, is_certain=is_certain)

    def _refuse(self, error: KVStoreError, request_id: int) -> None:
        self._counters.failed_requests += 1
        self._send(Failed.of(error), request_id)

    def _send(self, answer: Answer, request_id: int) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(encode_message(answer, request_id))

    def _end_slow_reader(self) -> None:
        self._counters.slow_readers += 1
        self._malformed.warn(
            "server: closed a connection: it did not read its answers for %g s", _SLOW_READER_S
        )
        self.cut()


def _name(request: Request) -> str:
    return type(request).__name__.lower()
