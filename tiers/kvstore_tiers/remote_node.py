"""RemoteNode: one server of the remote tier, with its connections, its threads and its circuit breaker.

Threads. A call's shares run in threads of the node's own, each with a connection of the pool, so that a node
that is stuck delays no other. Reads and probes do not queue behind writes. What no thread has begun by the
deadline is given up.

Faults. A fault closes its connection. A connection is used again only if it is quiet: nothing came that was
not asked for. One that had gone stale while idle is replaced once within the call.

Breaker. Three faults in a row open it (a call that ended late without one answer is one), or one silence: no
byte from the server in ``timeout_s``, or in the last 20 ms or more of a call that its deadline cut short
(shorter ones add up). While it is open calls end at once, and the node asks the server itself, with PING on a
new connection: right after a silence, else after the pause, which doubles up to its limit. When it has
answered, one call may go; if that succeeds, all may. So an outage costs the calls under way one deadline, and
a false alarm the time of one PING.
"""

import asyncio
import logging
import ssl
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field

from kvstore.log_limit import LimitedWarning
from kvstore.tier import TierHealth
from kvstore_tiers.breaker import CircuitBreaker
from kvstore_tiers.jobs import Jobs
from kvstore_tiers.remote_control import Reply, control_line
from kvstore_tiers.remote_look import Look, Use, look
from kvstore_tiers.remote_session import Tally
from kvstore_tiers.resp import ErrorReply, RespConnection, command
from kvstore_tiers.resp_address import AddressLookup, RespAddress
from kvstore_tiers.resp_stream import LoginRefused, RespFault

_log = logging.getLogger(__name__)

SILENCE_COUNTS_S = 0.02
"""Silence before a deadline that makes a server suspect; a busy one answers sooner, and PING sorts it out."""

CONTROL_TIMEOUT_S = 0.25
"""Least time for a question about servers: nobody's request waits for it."""

Work = Callable[[RespConnection, Tally], None]
"""What a thread does with a connection for a share of a call."""


@dataclass(frozen=True, slots=True)
class NodeSettings:
    """What all nodes of a tier have in common.

    ``count`` is told of events: faults, breaker_opened; ``remark`` of what a look at a server found amiss.
    """

    name: str = "remote"
    timeout_s: float = 0.5
    num_connections: int = 4
    backoff_s: float = 0.25
    backoff_max_s: float = 8.0
    tls: ssl.SSLContext | None = None
    clock: Callable[[], float] = time.monotonic
    count: Callable[[str], None] = lambda event: None
    remark: Callable[[RespAddress, str], None] = lambda address, remark: None
    use: Use = field(default_factory=Use)

    @property
    def control_timeout_s(self) -> float:
        """Longest wait for what is asked about servers, login included."""
        return max(self.timeout_s, CONTROL_TIMEOUT_S)

    def connect(self, address: RespAddress, lookup: AddressLookup, deadline_s: float) -> RespConnection:
        """Connect and log in. Blocks until the deadline at most. Raises RespFault."""
        return RespConnection.connect(
            address,
            lookup,
            timeout_s=self.timeout_s,
            deadline_s=deadline_s,
            clock=self.clock,
            tls=self._tls_for(address),
        )

    def ask(self, address: RespAddress, words: Sequence[str], deadline_s: float) -> Reply:
        """Ask one server one question. Blocks. Raises RespFault, of which Refused."""
        until_s = min(deadline_s, self.clock() + self.control_timeout_s)
        with control_line(address, deadline_s=until_s, clock=self.clock, tls=self._tls_for(address)) as line:
            return line.ask(*words)

    def look(self, address: RespAddress) -> Look:
        """See what a server is. Blocks. Raises RespFault."""
        until_s = self.clock() + self.control_timeout_s
        with control_line(address, deadline_s=until_s, clock=self.clock, tls=self._tls_for(address)) as line:
            return look(line, self.use, user=address.user)

    def _tls_for(self, address: RespAddress) -> ssl.SSLContext | None:
        return self.tls if address.is_tls else None


class RemoteNode:
    """One server. Its methods run on the event loop."""

    def __init__(self, address: RespAddress, settings: NodeSettings) -> None:
        self.address = address
        self._settings = settings
        self._clock = settings.clock
        self._lookup = AddressLookup(address)
        self._breaker = CircuitBreaker(
            clock=settings.clock, delay_s=settings.backoff_s, max_delay_s=settings.backoff_max_s
        )
        self.reads = Jobs(f"{settings.name}-read", settings.num_connections)
        self.writes = Jobs(f"{settings.name}-write", max(1, settings.num_connections // 2))
        self._pings = Jobs(f"{settings.name}-ping", 1)
        self._healing: asyncio.Task[None] | None = None
        self._meeting: asyncio.Task[None] | None = None
        self._was_seen = False
        self._trouble = ""
        self._idle: list[RespConnection] = []
        self._warning = LimitedWarning(_log, clock=settings.clock)
        self._silent_s = 0.0
        self._is_open = False

    def start(self) -> None:
        """Make threads available, and begin to meet the server."""
        self.reads.start()
        self.writes.start()
        self._pings.start()
        self._is_open = True
        self._begin(self._meet)

    async def close(self) -> None:
        """Finish what is under way and close the connections. Idempotent."""
        self._is_open = False
        tasks = [task for task in (self._healing, self._meeting) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for jobs in (self.reads, self.writes, self._pings):
            await jobs.close()
        self._lookup.close()
        self._close_idle()

    def health(self) -> TierHealth:
        """Return whether the server is worth asking now."""
        if self._healing is not None or not self._breaker.is_up():
            return TierHealth(is_up=False, reason=self._trouble or self._breaker.reason)
        return TierHealth(is_up=True)

    def allows(self) -> bool:
        """Return whether a call may go; one that may must be run, and may be the only one for now."""
        return self._is_open and self._healing is None and self._breaker.allows()

    async def met(self) -> None:
        """Wait until it is known whether the server answers, and what it is."""
        if self._meeting is not None:
            await asyncio.wait([self._meeting])

    async def run(self, jobs: Jobs, works: Sequence[Work], deadline_s: float) -> list[Tally]:
        """Run shares in threads; returns what each saw, when no thread is at it any more."""
        if not self._is_open:
            return [Tally(fault="the server left the cluster")] * len(works)
        calls = [self._share_call(work, deadline_s) for work in works]
        running = asyncio.ensure_future(jobs.run_within(calls, deadline_s - self._clock()))
        # Also when the caller is cancelled the breaker learns how its call ended.
        running.add_done_callback(self._settle)
        return [tally or Tally(is_late=True) for tally in await jobs.outlive(running)]

    def _settle(self, running: "asyncio.Future[list[Tally | None]]") -> None:
        tallies = [] if running.cancelled() or running.exception() else running.result()
        known = [tally for tally in tallies if tally is not None]
        faults = [tally.fault for tally in known if tally.fault]
        silent_s = max((tally.silent_s for tally in known), default=0.0)
        was_answered = any(tally.was_answered for tally in known)
        if was_answered:
            self._silent_s = 0.0
        elif silent_s:
            self._silent_s += silent_s
        is_silent = silent_s > 0 and max(silent_s, self._silent_s) >= min(
            SILENCE_COUNTS_S, self._settings.timeout_s
        )
        was_slow = any(tally.is_late and tally.waited_s >= SILENCE_COUNTS_S for tally in known)
        if faults or is_silent or (was_slow and not was_answered):
            self._note_fault(faults[0] if faults else "no answer in time", is_silent=is_silent)
        elif was_answered:
            self._breaker.succeeded()
        else:
            self._breaker.abandoned()

    def _note_fault(self, reason: str, *, is_silent: bool, what: str = "not used for now") -> None:
        self._settings.count("faults")
        has_opened = self._breaker.failed(reason, is_timeout=is_silent)
        if has_opened:
            self._settings.count("breaker_opened")
            self._warning.warn("%s: %s: %s: %s", self._settings.name, self.address, what, reason)
            self._close_idle()
        if self._is_open and self._healing is None and not self._breaker.is_up():
            pause_s = 0.0 if has_opened and is_silent else self._breaker.delay_s
            self._healing = asyncio.create_task(self._heal(pause_s), name=f"{self._settings.name}-heal")
            self._healing.add_done_callback(self._healed)

    def _begin(self, meet: Callable[[], Coroutine[None, None, None]]) -> None:
        self._meeting = asyncio.create_task(meet(), name=f"{self._settings.name}-meet")
        self._meeting.add_done_callback(self._report)

    async def _meet(self) -> None:
        """See whether the server answers, and what it is. One that does not is unreachable until it does."""
        try:
            await self._see()
        except RespFault as fault:
            self._note_fault(str(fault), is_silent=True, what="not reachable yet")

    async def _meet_again(self) -> None:
        try:
            await self._see()
        except RespFault as fault:
            _log.debug("%s: %s: not looked at: %s", self._settings.name, self.address, fault)

    async def _see(self) -> None:
        """Tell the log what the server is, and what about it is amiss. Raises RespFault."""
        seen = await self._pings.run(lambda: self._settings.look(self.address))
        self._was_seen = True
        if seen.server:
            _log.info("%s: %s: %s", self._settings.name, self.address, seen.server)
        for remark in seen.remarks:
            self._settings.remark(self.address, remark)

    async def _heal(self, pause_s: float) -> None:
        """Wait until the server answers."""
        await asyncio.sleep(pause_s)
        while (fault := await self._pings.run(self._ping)) is not None:
            if isinstance(fault, LoginRefused) and str(fault) not in (self._trouble, self._breaker.reason):
                _log.warning("%s: %s: not used for now: %s", self._settings.name, self.address, fault)
            self._trouble = str(fault)
            pause_s = min(max(2 * pause_s, self._settings.backoff_s), self._settings.backoff_max_s)
            await asyncio.sleep(pause_s)

    def _healed(self, healing: "asyncio.Task[None]") -> None:
        self._healing = None
        self._silent_s = 0.0
        self._trouble = ""
        self._report(healing)
        if not healing.cancelled():
            self._breaker.end_delay()
            if self._is_open and not self._was_seen:
                self._begin(self._meet_again)

    def _report(self, task: "asyncio.Task[None]") -> None:
        if not task.cancelled() and task.exception() is not None:
            _log.error(
                "%s: %s: %s failed",
                self._settings.name,
                self.address,
                task.get_name(),
                exc_info=task.exception(),
            )

    def _ping(self) -> RespFault | None:
        """Ask PING on a new connection, which joins the pool; in a thread. None: it was answered."""
        deadline_s = self._clock() + self._settings.timeout_s
        connection: RespConnection | None = None
        try:
            connection = self._settings.connect(self.address, self._lookup, deadline_s)
            connection.send([command(b"PING")], deadline_s=deadline_s)
            reply = connection.read_simple(deadline_s=deadline_s)
        except RespFault as fault:
            if connection is not None:
                connection.close()
            return fault
        self._put_back(connection)
        # A user who may not ask PING was answered all the same.
        if isinstance(reply, ErrorReply) and reply.code != "NOPERM":
            return reply.as_fault()
        return None

    def _share_call(self, work: Work, deadline_s: float) -> Callable[[], Tally]:
        return lambda: self._share(work, deadline_s)

    def _share(self, work: Work, deadline_s: float) -> Tally:
        """Do one share with a connection of the pool; in a thread."""
        tally = Tally()
        began_s = self._clock()
        if began_s >= deadline_s:
            tally.is_late = True
            return tally
        connection: RespConnection | None = None
        try:
            connection, is_used = self._take_connection(deadline_s)
            try:
                work(connection, tally)
            except RespFault as fault:
                if fault.is_timeout or not is_used or tally.was_answered:
                    raise
                connection.close()
                self._close_idle()
                connection = self._settings.connect(self.address, self._lookup, deadline_s)
                work(connection, tally)
        except RespFault as fault:
            if connection is not None:
                connection.close()
            tally.note(fault)
            tally.waited_s = self._clock() - began_s
            return tally
        except BaseException:
            if connection is not None:
                connection.close()
            raise
        if tally.is_doubtful:
            connection.close()
        else:
            self._put_back(connection)
        return tally

    def _take_connection(self, deadline_s: float) -> tuple[RespConnection, bool]:
        while self._idle:
            try:
                connection = self._idle.pop()
            except IndexError:
                break
            if connection.is_quiet():
                return connection, True
            connection.close()
        return self._settings.connect(self.address, self._lookup, deadline_s), False

    def _put_back(self, connection: RespConnection) -> None:
        has_room = len(self._idle) < self.reads.num_threads + self.writes.num_threads
        if self._is_open and has_room and connection.is_quiet():
            self._idle.append(connection)
        else:
            connection.close()

    def _close_idle(self) -> None:
        while self._idle:
            try:
                self._idle.pop().close()
            except IndexError:
                return
