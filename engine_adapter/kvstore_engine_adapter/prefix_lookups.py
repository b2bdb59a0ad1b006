"""PrefixLookups: what the store has of a request's prefix, asked in threads, in time, under a lease.

For engines whose scheduler must not wait: every question is answered at once, with a number or with None
('not known yet'). Engine-independent; a connector turns its engine's requests into chains.

Time: all the waiting that one request does for lookups, over all its lookups, is at most ``deadline_s``.
After that it is a miss, and so is every further question of that request.
Failure: what could not be loaded is not offered again to that request, so a store that says yes and gives
nothing cannot make it loop. A store that does not answer is not asked for a while (``StoreBreaker``): the
requests in between are misses at once, and one of them tries again.
Leases: blocks that were found in memory are leased until they are loaded, or the request ends.
Threads: all methods may be called from any thread; the engine's calls take no lock across I/O.
"""

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace

from kvstore import tracing
from kvstore.client import KVStore
from kvstore.errors import KVStoreError
from kvstore.held import Lease
from kvstore.keys import BlockKey, PrefixChain
from kvstore.layout import Part
from kvstore.miss import MissReason
from kvstore.tracing import TraceContext
from kvstore_engine_adapter.counts import Counts
from kvstore_engine_adapter.store_breaker import AWAY, StoreBreaker

logger = logging.getLogger(__name__)

LATE, STORE_AWAY, KNOWN_MISSING, LOAD_FAILED = "late", "store_away", "known_missing", "load_failed"
"""Reasons of a miss that are the engine's side's own, beside those of MissReason."""

_THREADS = 4
_MAX_MISSING = 1 << 16
_MAX_ASKED = 1 << 16
_RENEW_BELOW_S = 10.0
_WAKING_S = 0.001
"""Of a deadline this much, a tenth at most, is left for waking up from a wait."""


@dataclass(frozen=True, slots=True)
class GroupChain:
    """The blocks of one group of layers that could be loaded, in order.

    ``window_blocks``: only so many blocks before the end of what is loaded are needed (sliding windows);
    None: all of them. ``is_each``: what of it is needed is the engine's affair, so these blocks bound
    nothing, and ``each_found`` says of every one whether it is stored.
    """

    chain: PrefixChain
    window_blocks: int | None = None
    is_each: bool = False


@dataclass(frozen=True, slots=True)
class Found:
    """How many leading blocks can be loaded, the leases on them, and why there are no more.

    ``tiers`` are those that the leading blocks are in, of the first group's first part. ``each``: for every
    group that is asked about block by block, which of its blocks are stored. ``is_away``: the store did not
    answer. The reason does not say so: it may be that of a slower tier behind a store that has answered.
    """

    blocks: int = 0
    leases: tuple[Lease, ...] = ()
    reason: str | None = None
    is_away: bool = False
    tiers: tuple[str, ...] = ()
    each: tuple[tuple[bool, ...], ...] = ()


@dataclass(slots=True)
class _Asked:
    """One request's questions so far; ``start`` is the block its last lookup began at."""

    spent_s: float = 0.0
    began_s: float = 0.0
    start: int = 0
    lookup: "Future[Found] | None" = None
    found: Found | None = None
    limit: int | None = None
    is_over: bool = False
    promised_start: int = 0
    trace: TraceContext | None = None


class PrefixLookups:
    """Lookups of one engine's requests in one store, for all ``parts`` that its ranks hold."""

    def __init__(
        self,
        client: KVStore,
        parts: Sequence[Part | None],
        *,
        deadline_s: float = 0.05,
        missing_s: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._parts = tuple(parts)
        self._deadline_s = deadline_s - min(_WAKING_S, deadline_s / 10)
        self._missing_s = missing_s
        self._clock = clock
        self._lock = threading.Lock()
        self._asked: OrderedDict[str, _Asked] = OrderedDict()
        self._missing: OrderedDict[BlockKey, float] = OrderedDict()
        self._breaker = StoreBreaker(clock)
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="kvstore-lookup")
        self.counts = Counts()

    def blocks_after(
        self,
        request_id: str,
        start: int,
        chains: Callable[[], Sequence[GroupChain]],
        *,
        patience_s: float = 0.0,
        trace: TraceContext | None = None,
    ) -> int | None:
        """Return how many blocks after the first ``start`` can be loaded; None: not known yet, ask again.

        ``chains`` gives the blocks from ``start`` on, of every group; it is called when a lookup begins.
        ``patience_s`` is how long this call itself may wait for an answer that is under way. ``trace`` is
        the span that the request belongs to.
        """
        asked = self._asked_of(request_id)
        asked.trace = trace
        if asked.limit is not None and start >= asked.limit:
            return self._miss(LOAD_FAILED)
        if asked.lookup is None and asked.found is None:
            answer = self._begin(asked, start, chains)
            if answer is not None:
                return answer
        if asked.lookup is not None and not self._has_settled(asked, patience_s):
            return None
        if asked.found is None:
            return 0
        return self._answer(asked, start, chains)

    def each_found(self, request_id: str) -> tuple[tuple[bool, ...], ...]:
        """Return what the last lookup found of the groups that are asked about block by block, in order."""
        found = self._asked_of(request_id).found
        return () if found is None else found.each

    def tiers_found(self, request_id: str, start: int) -> tuple[str, ...]:
        """Return the tiers that the blocks from ``start`` on are in, as far as the last lookup found them."""
        asked = self._asked_of(request_id)
        return () if asked.found is None else asked.found.tiers[max(0, start - asked.start) :]

    def first_missing(self, request_id: str) -> tuple[int, str] | None:
        """Return the block at which the last lookup ended, and why; None: it has found all."""
        asked = self._asked_of(request_id)
        found = asked.found
        if found is None or found.reason is None:
            return None
        return asked.start + found.blocks, found.reason

    def promised_start(self, request_id: str) -> int:
        """Return the ``start`` of the last question that was answered with blocks."""
        return self._asked_of(request_id).promised_start

    def note_failed(self, request_id: str, block: int) -> None:
        """A block that was found could not be loaded: it and those after it are not offered to it again."""
        asked = self._asked_of(request_id)
        asked.limit = block if asked.limit is None else min(asked.limit, block)
        self.counts.add("failed_loads")
        self._retire(asked)

    def note_loaded(self, request_id: str) -> None:
        """The load of a request has ended, well or not: its leases may end."""
        asked = self._asked.get(request_id)
        if asked is not None:
            self._retire(asked)

    def note_saved(self, keys: Sequence[BlockKey]) -> None:
        """Blocks are being stored: they are no longer known to be missing."""
        with self._lock:
            for key in keys:
                self._missing.pop(key, None)

    def forget(self, request_id: str) -> None:
        """A request has ended."""
        with self._lock:
            asked = self._asked.pop(request_id, None)
        if asked is not None:
            self._retire(asked)

    def close(self) -> None:
        """End the threads; lookups under way end by themselves."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _asked_of(self, request_id: str) -> _Asked:
        with self._lock:
            asked = self._asked.get(request_id)
            if asked is None:
                asked = self._asked[request_id] = _Asked()
                if len(self._asked) > _MAX_ASKED:
                    self._asked.popitem(last=False)
            return asked

    def _begin(self, asked: _Asked, start: int, chains: Callable[[], Sequence[GroupChain]]) -> int | None:
        """Begin a lookup; an answer if there is none to wait for."""
        if asked.is_over:
            return self._miss(LATE)
        groups = chains()
        stop = None if asked.limit is None else asked.limit - start
        groups = [replace(group, chain=group.chain[:stop]) for group in groups]
        if not groups or not len(groups[0].chain):
            return 0
        if self._is_known_missing(groups):
            return self._miss(KNOWN_MISSING)
        if not self._breaker.may_ask():
            asked.is_over = True
            return self._miss(STORE_AWAY)
        self.counts.add("lookups")
        asked.start, asked.began_s = start, self._clock()
        until_s = asked.began_s + self._deadline_s - asked.spent_s
        asked.lookup = self._threads.submit(self._find, groups, until_s, asked.trace)
        return None

    def _has_settled(self, asked: _Asked, patience_s: float) -> bool:
        lookup = asked.lookup
        if lookup is None:
            return True
        left_s = asked.began_s + self._deadline_s - asked.spent_s - self._clock()
        if not lookup.done() and patience_s > 0 and left_s > 0:
            wait([lookup], min(patience_s, left_s))
        if lookup.done():
            asked.spent_s += self._clock() - asked.began_s
            asked.lookup, asked.found = None, lookup.result()
            self._breaker.note(is_away=asked.found.is_away)
            self.counts.add("found_blocks", asked.found.blocks)
            if asked.found.reason is not None:
                self.counts.add(f"miss_{asked.found.reason}")
            return True
        if self._clock() < asked.began_s + self._deadline_s - asked.spent_s:
            return False
        asked.is_over, asked.lookup = True, None
        lookup.add_done_callback(self._release_late)
        self._breaker.note(is_away=True)
        self.counts.add(f"miss_{LATE}")
        return True

    def _answer(self, asked: _Asked, start: int, chains: Callable[[], Sequence[GroupChain]]) -> int | None:
        found = asked.found
        assert found is not None
        if start < asked.start:
            # The engine has lost blocks of its own since: what was found does not follow what it has.
            self._retire(asked)
            return self._begin(asked, start, chains)
        end = asked.start + found.blocks
        if asked.limit is not None:
            end = min(end, asked.limit)
        for lease in found.leases:
            if lease.blocks and lease.remaining_s < _RENEW_BELOW_S:
                self._in_thread(lease.renew)
        asked.promised_start = start
        return max(0, end - start)

    def _find(self, groups: Sequence[GroupChain], until_s: float, trace: TraceContext | None = None) -> Found:
        """Ask the store; in a thread. Never raises."""
        leases: list[Lease] = []
        unanswered = self._num_unanswered()
        try:
            with tracing.within(trace):
                found = self._find_all(groups, until_s, leases)
            # Another thread's failure in the meantime counts too, for it is the same store's.
            return replace(found, is_away=self._num_unanswered() > unanswered)
        except KVStoreError as error:
            logger.debug("lookup: %s", error)
            for lease in leases:
                self._in_thread(lease.release)
            return Found(reason=MissReason.UNAVAILABLE.value, is_away=True)

    def _num_unanswered(self) -> int:
        stats = self._client.client_stats()
        return stats.timeouts + stats.unavailable

    def _find_all(self, groups: Sequence[GroupChain], until_s: float, leases: list[Lease]) -> Found:
        blocks, reason = len(groups[0].chain), None
        tiers: tuple[str, ...] = ()
        for group in groups:
            if group.window_blocks is not None or group.is_each:
                continue
            for part in self._parts:
                left_s = max(0.0, until_s - self._clock())
                match = self._client.match(group.chain[:blocks], lease=True, part=part, timeout_s=left_s)
                leases.append(match.lease)
                tiers = tiers or match.tiers
                if match.blocks < blocks:
                    blocks, reason = match.blocks, None if match.reason is None else match.reason.value
                    if not blocks:
                        self._note_missing(group.chain.keys[0], reason)
                        return Found(0, tuple(leases), reason)
        windows = [group for group in groups if group.window_blocks is not None]
        if windows:
            within = self._end_of_windows(windows, blocks, until_s)
            if within < blocks:
                blocks, reason = within, MissReason.BEHIND_MISS.value
        each = tuple([tuple(self._stored(group.chain, until_s)) for group in groups if group.is_each])
        return Found(blocks, tuple(leases), reason, tiers=tiers[:blocks], each=each)

    def _stored(self, chain: PrefixChain, until_s: float) -> list[bool]:
        """Say of each block whether all its parts are stored."""
        flags = [True] * len(chain)
        for part in self._parts:
            left_s = max(0.0, until_s - self._clock())
            there = self._client.exists(chain, part=part, timeout_s=left_s)
            flags = [one and other for one, other in zip(flags, there, strict=True)]
        return flags

    def _end_of_windows(self, groups: Sequence[GroupChain], blocks: int, until_s: float) -> int:
        """Return the largest number of leading blocks whose windows are all stored."""
        is_stored = [self._stored(group.chain[:blocks], until_s) for group in groups]
        for end in range(blocks, 0, -1):
            if all(
                all(flags[max(0, end - (group.window_blocks or 0)) : end])
                for flags, group in zip(is_stored, groups, strict=True)
            ):
                return end
        return 0

    def _is_known_missing(self, groups: Sequence[GroupChain]) -> bool:
        key, now_s = groups[0].chain.keys[0], self._clock()
        with self._lock:
            until_s = self._missing.get(key)
            if until_s is None or now_s >= until_s:
                self._missing.pop(key, None)
                return False
            return True

    def _note_missing(self, key: BlockKey, reason: str | None) -> None:
        if reason in {away.value for away in AWAY}:
            return
        with self._lock:
            self._missing[key] = self._clock() + self._missing_s
            if len(self._missing) > _MAX_MISSING:
                self._missing.popitem(last=False)

    def _miss(self, reason: str) -> int:
        self.counts.add(f"miss_{reason}")
        return 0

    def _retire(self, asked: _Asked) -> None:
        """Let go of what was found, or will be."""
        found, asked.found = asked.found, None
        lookup, asked.lookup = asked.lookup, None
        if lookup is not None:
            asked.spent_s += self._clock() - asked.began_s
            lookup.add_done_callback(self._release_late)
        if found is not None:
            self._release(found)

    def _release_late(self, lookup: "Future[Found]") -> None:
        if not lookup.cancelled():
            self._release(lookup.result())

    def _release(self, found: Found) -> None:
        for lease in found.leases:
            self._in_thread(lease.release)

    def _in_thread(self, run: Callable[[], object]) -> None:
        try:
            self._threads.submit(_quietly, run)
        except RuntimeError:
            # Closed: the store ends the leases of a client that is gone.
            logger.debug("lookup: closed, so a lease ends with its connection")


def _quietly(run: Callable[[], object]) -> None:
    try:
        run()
    except KVStoreError as error:
        logger.debug("lease: %s", error)
