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
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvstore.log_limit import LimitedWarning
from kvstore.tier import TierHealth
from kvstore_tiers.breaker import CircuitBreaker
from kvstore_tiers.jobs import Jobs
from kvstore_tiers.remote_session import Tally
from kvstore_tiers.resp import ErrorReply, RespConnection, RespFault, command
from kvstore_tiers.resp_address import AddressLookup, RespAddress

_log = logging.getLogger(__name__)

SILENCE_COUNTS_S = 0.02
"""Silence before a deadline that makes a server suspect; a busy one answers sooner, and PING sorts it out."""

Work = Callable[[RespConnection, Tally], None]
"""What a thread does with a connection for a share of a call."""


@dataclass(frozen=True, slots=True)
class NodeSettings:
    """What all nodes of a tier have in common. ``count`` is told of events: faults, breaker_opened."""

    name: str = "remote"
    timeout_s: float = 0.5
    num_connections: int = 4
    backoff_s: float = 0.25
    backoff_max_s: float = 8.0
    tls: ssl.SSLContext | None = None
    clock: Callable[[], float] = time.monotonic
    count: Callable[[str], None] = lambda event: None

    def connect(self, address: RespAddress, lookup: AddressLookup, deadline_s: float) -> RespConnection:
        """Connect and log in. Blocks until the deadline at most. Raises RespFault."""
        return RespConnection.connect(
            address,
            lookup,
            timeout_s=self.timeout_s,
            deadline_s=deadline_s,
            clock=self.clock,
            tls=self.tls if address.is_tls else None,
        )


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
        self._idle: list[RespConnection] = []
        self._warning = LimitedWarning(_log, clock=settings.clock)
        self._silent_s = 0.0
        self._is_open = False

    def start(self) -> None:
        """Make threads available; connections come with the first calls."""
        self.reads.start()
        self.writes.start()
        self._pings.start()
        self._is_open = True

    async def close(self) -> None:
        """Finish what is under way and close the connections. Idempotent."""
        self._is_open = False
        if self._healing is not None:
            self._healing.cancel()
            await asyncio.gather(self._healing, return_exceptions=True)
        for jobs in (self.reads, self.writes, self._pings):
            await jobs.close()
        self._lookup.close()
        self._close_idle()

    def health(self) -> TierHealth:
        """Return whether the server is worth asking now."""
        if self._healing is not None or not self._breaker.is_up():
            return TierHealth(is_up=False, reason=self._breaker.reason)
        return TierHealth(is_up=True)

    def allows(self) -> bool:
        """Return whether a call may go; one that may must be run, and may be the only one for now."""
        return self._is_open and self._healing is None and self._breaker.allows()

    def distrust(self, reason: str) -> None:
        """Take the server for unreachable until it answers a PING."""
        self._note_fault(reason, is_silent=True)

    async def greet(self) -> str:
        """Connect and ask PING within the timeout; returns why that failed, empty if it did not."""
        return await self._pings.run(self._ping)

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

    def _note_fault(self, reason: str, *, is_silent: bool) -> None:
        self._settings.count("faults")
        has_opened = self._breaker.failed(reason, is_timeout=is_silent)
        if has_opened:
            self._settings.count("breaker_opened")
            self._warning.warn("%s: %s: not used for now: %s", self._settings.name, self.address, reason)
            self._close_idle()
        if self._is_open and self._healing is None and not self._breaker.is_up():
            pause_s = 0.0 if has_opened and is_silent else self._breaker.delay_s
            self._healing = asyncio.create_task(self._heal(pause_s), name=f"{self._settings.name}-heal")
            self._healing.add_done_callback(self._healed)

    async def _heal(self, pause_s: float) -> None:
        """Wait until the server answers."""
        await asyncio.sleep(pause_s)
        while await self.greet():
            pause_s = min(max(2 * pause_s, self._settings.backoff_s), self._settings.backoff_max_s)
            await asyncio.sleep(pause_s)

    def _healed(self, healing: "asyncio.Task[None]") -> None:
        self._healing = None
        self._silent_s = 0.0
        if not healing.cancelled():
            if healing.exception() is not None:
                _log.error(
                    "%s: waiting for %s failed",
                    self._settings.name,
                    self.address,
                    exc_info=healing.exception(),
                )
            self._breaker.end_delay()

    def _ping(self) -> str:
        """Ask PING on a new connection, which joins the pool; in a thread."""
        deadline_s = self._clock() + self._settings.timeout_s
        connection: RespConnection | None = None
        try:
            connection = self._settings.connect(self.address, self._lookup, deadline_s)
            connection.send([command(b"PING")], deadline_s=deadline_s)
            reply = connection.read_simple(deadline_s=deadline_s)
        except RespFault as fault:
            if connection is not None:
                connection.close()
            return str(fault)
        self._put_back(connection)
        # A user who may not ask PING was answered all the same.
        if isinstance(reply, ErrorReply) and reply.code != "NOPERM":
            return f"the server answers {reply.code}"
        return ""

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
