"""RemoteTier: copies on a Redis-protocol server that every replica can reach.

Values. One key per block holds header and payload together, so that the server evicts whole blocks only.
What comes back is checked like anything from outside: header, key, part, namespace, layout, length, checksum.

Threads. A call is split into shares; each runs in a thread of its own with a connection from the pool.
Reads and probes do not queue behind writes. What no thread has begun by the deadline is given up.

Faults. A fault closes its connection. A connection that had gone stale while idle is replaced once within
the call. A timeout without a byte from the server, or three faults in a row, open the breaker: calls then end
at once, and now and then one of them tries again. Opening the tier with the server absent is normal.
"""

import asyncio
import logging
import ssl
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TypeVar

from kvstore.keys import Namespace
from kvstore.miss import MissReason
from kvstore.tier import (
    BlockHeader,
    BlockId,
    Medium,
    Probe,
    ReadOutcome,
    ReadRequest,
    ReadStatus,
    TierHealth,
    WriteRequest,
    WriteStatus,
)
from kvstore_tiers.breaker import CircuitBreaker
from kvstore_tiers.jobs import Jobs
from kvstore_tiers.remote_session import KeyNames, Tally, drop_share, probe_share, read_share, write_share
from kvstore_tiers.resp import RespConnection, RespFault
from kvstore_tiers.resp_address import AddressLookup, RespAddress

_log = logging.getLogger(__name__)

_SHARE_MIN_BLOCKS = 2
_SILENCE_COUNTS_S = 0.02

T = TypeVar("T")
Work = Callable[[RespConnection, Tally], None]


class RemoteTier:
    """A shared Tier on one Redis or Valkey server."""

    def __init__(
        self,
        url: str,
        *,
        user: str = "",
        password: str = "",
        key_prefix: str = "kvstore",
        ttl_s: float | None = None,
        timeout_s: float = 0.5,
        num_connections: int = 4,
        breaker_backoff_s: float = 0.25,
        breaker_backoff_max_s: float = 8.0,
        tls: ssl.SSLContext | None = None,
        name: str = "remote",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._address = RespAddress.parse(url, user=user, password=password)
        self._tls = tls
        self._name = name
        self._clock = clock
        self._timeout_s = timeout_s
        self._names = KeyNames(key_prefix, ttl_s)
        self._lookup = AddressLookup(self._address)
        self._breaker = CircuitBreaker(
            clock=clock, delay_s=breaker_backoff_s, max_delay_s=breaker_backoff_max_s
        )
        self._reads = Jobs(f"{name}-read", num_connections)
        self._writes = Jobs(f"{name}-write", max(1, num_connections // 2))
        self._idle: list[RespConnection] = []
        self._is_open = False
        self._counters: Counter[str] = Counter()

    @property
    def name(self) -> str:
        """The tier's name in configuration, metrics and messages."""
        return self._name

    @property
    def medium(self) -> Medium:
        """A remote server."""
        return Medium.REMOTE

    @property
    def is_shared(self) -> bool:
        """True: other stores write to it, and it evicts by itself."""
        return True

    @property
    def capacity_bytes(self) -> int:
        """0: the server bounds itself."""
        return 0

    @property
    def used_bytes(self) -> int:
        """0: unknown here."""
        return 0

    @property
    def counters(self) -> dict[str, int]:
        """Events since open: faults, timeouts, corrupt, mismatched, full, refused, breaker_opened."""
        return {**self._counters, "breaker_opened": self._breaker.times_opened}

    def health(self) -> TierHealth:
        """Return whether the server is worth asking now."""
        if not self._is_open:
            return TierHealth(is_up=False, reason="not open")
        return TierHealth(is_up=True) if self._breaker.is_up() else TierHealth(False, self._breaker.reason)

    async def open(self) -> None:
        """Make the tier usable. A server that is absent is a warning: the tier heals when it comes."""
        if self._is_open:
            return
        if self._address.is_tls and self._tls is None:
            self._tls = await asyncio.to_thread(ssl.create_default_context)
        self._reads.start()
        self._writes.start()
        self._is_open = True
        deadline_s = self._clock() + self._timeout_s
        tally = await self._reads.run(lambda: self._share(lambda *_: None, deadline_s))
        if tally.fault:
            self._breaker.failed(tally.fault, is_timeout=True)
            _log.warning("%s: %s: not reachable yet: %s", self._name, self._address, tally.fault)

    async def close(self) -> None:
        """Finish what is under way and close the connections. Idempotent."""
        self._is_open = False
        await self._reads.close()
        await self._writes.close()
        self._lookup.close()
        self._close_idle()

    async def scan(self) -> list[BlockHeader]:
        """Return nothing: what a shared tier holds is asked by ``probe``."""
        return []

    def open_namespace(self, namespace: Namespace) -> None:
        """Need not know: every value carries its layout."""

    async def probe(self, blocks: Sequence[BlockId], *, deadline_s: float) -> Probe:
        """For each block: this tier's name if the server has it; None from the first absent one on."""
        found: list[str | None] = [None] * len(blocks)

        def work(connection: RespConnection, tally: Tally) -> None:
            probe_share(
                *(connection, self._names, blocks, found),
                tally=tally,
                origin=self._name,
                deadline_s=deadline_s,
            )

        if not blocks:
            return Probe(found)
        if not self._may_go():
            return Probe(found, MissReason.BREAKER_OPEN)
        is_late = await self._run(self._reads, [work], deadline_s)
        if is_late or self._clock() >= deadline_s:
            return Probe(found, MissReason.TIMED_OUT)
        return Probe(found, None if self._breaker.is_up() else MissReason.UNAVAILABLE)

    async def read(self, requests: Sequence[ReadRequest], *, deadline_s: float) -> list[ReadOutcome]:
        """Read copies into the buffers, and verify them."""
        if not self._may_go():
            return [ReadOutcome(ReadStatus.UNAVAILABLE)] * len(requests)
        outcomes: list[ReadOutcome | None] = [None] * len(requests)
        for request in requests:
            assert request.buffer.nbytes >= request.length_bytes, f"{self._name}: the buffer is too short"

        def work(share: Sequence[tuple[int, ReadRequest]]) -> Work:
            return lambda connection, tally: read_share(
                *(connection, self._names, [item for item in share if outcomes[item[0]] is None], outcomes),
                tally=tally,
                origin=self._name,
                deadline_s=deadline_s,
            )

        shares = [work(share) for share in _shares(requests, self._reads.num_threads)]
        is_late = await self._run(self._reads, shares, deadline_s)
        rest = ReadOutcome(ReadStatus.TIMED_OUT if is_late else ReadStatus.UNAVAILABLE)
        results = [outcome or rest for outcome in outcomes]
        self._count(
            corrupt=_tell(results, ReadStatus.CORRUPT), mismatched=_tell(results, ReadStatus.MISMATCH)
        )
        return results

    async def write(self, requests: Sequence[WriteRequest], *, deadline_s: float) -> list[WriteStatus]:
        """Write copies; a present one is replaced."""
        if not self._may_go():
            return [WriteStatus.UNAVAILABLE] * len(requests)
        statuses: list[WriteStatus | None] = [None] * len(requests)

        def work(share: Sequence[tuple[int, WriteRequest]]) -> Work:
            return lambda connection, tally: write_share(
                *(connection, self._names, [item for item in share if statuses[item[0]] is None], statuses),
                tally=tally,
                deadline_s=deadline_s,
            )

        shares = [work(share) for share in _shares(requests, self._writes.num_threads)]
        is_late = await self._run(self._writes, shares, deadline_s)
        rest = WriteStatus.TIMED_OUT if is_late else WriteStatus.UNAVAILABLE
        results = [status or rest for status in statuses]
        self._count(full=results.count(WriteStatus.FULL), refused=results.count(WriteStatus.REFUSED))
        return results

    async def drop(self, blocks: Sequence[BlockId]) -> None:
        """Forget copies, if the server answers in time."""
        deadline_s = self._clock() + self._timeout_s

        def work(connection: RespConnection, tally: Tally) -> None:
            drop_share(connection, self._names, blocks, tally=tally, deadline_s=deadline_s)

        if blocks and self._may_go():
            await self._run(self._writes, [work], deadline_s)

    async def touch(self, blocks: Sequence[BlockId]) -> None:
        """Do nothing: the server notes the use of what it serves."""

    def has_room(self, length_bytes: int, count: int = 1) -> bool:
        """Return True: the server evicts, or refuses with FULL."""
        return True

    def _may_go(self) -> bool:
        return self._is_open and self._breaker.allows()

    async def _run(self, jobs: Jobs, works: Sequence[Work], deadline_s: float) -> bool:
        """Run shares and tell the breaker how they ended; True if time ran out for one of them."""
        calls = [self._share_call(work, deadline_s) for work in works]
        running = asyncio.ensure_future(jobs.run_within(calls, deadline_s - self._clock()))
        tallies = [tally or Tally(is_late=True) for tally in await jobs.outlive(running)]
        faults = [tally.fault for tally in tallies if tally.fault]
        if faults:
            is_timeout = any(tally.silent_s >= self._timeout_s for tally in tallies)
            self._count(faults=len(faults))
            if self._breaker.failed(faults[0], is_timeout=is_timeout):
                _log.warning("%s: %s: not used for now: %s", self._name, self._address, faults[0])
        elif any(tally.was_answered for tally in tallies):
            self._breaker.succeeded()
        else:
            self._breaker.abandoned()
        return any(tally.is_late for tally in tallies)

    def _share_call(self, work: Work, deadline_s: float) -> Callable[[], Tally]:
        return lambda: self._share(work, deadline_s)

    def _share(self, work: Work, deadline_s: float) -> Tally:
        """Do one share with a connection of the pool; in a thread."""
        tally = Tally()
        if self._clock() >= deadline_s:
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
                connection = self._connect(deadline_s)
                work(connection, tally)
        except RespFault as fault:
            if connection is not None:
                connection.close()
            tally.note(fault, counts_from_s=_SILENCE_COUNTS_S)
            return tally
        if connection.is_in_step():
            self._idle.append(connection)
        else:
            connection.close()
            tally.fault = "the server sent more than was asked for"
        return tally

    def _take_connection(self, deadline_s: float) -> tuple[RespConnection, bool]:
        try:
            return self._idle.pop(), True
        except IndexError:
            return self._connect(deadline_s), False

    def _connect(self, deadline_s: float) -> RespConnection:
        return RespConnection.connect(
            self._address,
            self._lookup,
            timeout_s=self._timeout_s,
            deadline_s=deadline_s,
            clock=self._clock,
            tls=self._tls,
        )

    def _close_idle(self) -> None:
        while self._idle:
            try:
                self._idle.pop().close()
            except IndexError:
                return

    def _count(self, **events: int) -> None:
        self._counters.update({event: count for event, count in events.items() if count})


def _shares(requests: Sequence[T], most: int) -> list[list[tuple[int, T]]]:
    """Deal requests out like cards, so that the leading blocks of a chain come first in every share."""
    numbered = list(enumerate(requests))
    count = max(1, min(most, len(requests) // _SHARE_MIN_BLOCKS))
    return [numbered[first::count] for first in range(count)]


def _tell(outcomes: Sequence[ReadOutcome], status: ReadStatus) -> int:
    return sum(outcome.status is status for outcome in outcomes)
