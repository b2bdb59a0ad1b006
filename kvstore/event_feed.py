"""EventFeed: tells whoever listens which blocks a store holds, and where, as it changes.

The way of a put only appends to a bounded queue, and that only while somebody listens. The queue is emptied
a moment after something came into it, at most ten times a second and a slice at a time; batches are handed to
listeners, which must not block. While nothing changes, nothing is done. What finds no room is lost, which
listeners are told: then they know less than there is, and may learn it anew.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

from kvstore.changes import ChangedRun, CopyChanges
from kvstore.keys import NamespaceDigest
from kvstore.kv_events import KvEvent, events_of
from kvstore.manager import BlockManager
from kvstore.server_counters import EventCounters

logger = logging.getLogger(__name__)

_GATHER_S = 0.02
_PACE_S = 0.1
"""What comes after a pause is told so much later, with what has followed it; while changes go on coming they
are told in such a distance. Telling some hundred takes 0.3 to 0.5 ms, much of it however few they are, as
nothing that it needs is in the core's caches by then (the store of benchmarks/telemetry.py, 2 cores)."""

_SLICE_BLOCKS = 512
"""Changes told at a time: about half a millisecond of the loop."""


@dataclass(frozen=True, slots=True)
class EventBatch:
    """Events in their order; before them, changes were not told: ``lost`` has how many in which namespace.

    ``texts`` is for listeners: what one has made of an event, by its place, others need not make again.
    """

    events: Sequence[KvEvent]
    lost: Mapping[NamespaceDigest, int] = field(default_factory=dict)
    texts: dict[int, str] = field(default_factory=dict)


Listener = Callable[[EventBatch], None]
"""Takes a batch, at once, on the loop's thread."""


class EventFeed:
    """The events of one manager. One event loop's thread."""

    def __init__(self, manager: BlockManager, counters: EventCounters | None = None) -> None:
        self._manager = manager
        self._counters = counters or EventCounters()
        self._listeners: list[Listener] = []
        self._changes = CopyChanges()
        self._due: asyncio.Handle | None = None  # of what tells next
        self._slices: Iterator[bool] | None = None  # of a telling that has begun
        self._told_s = 0.0
        self._turns = asyncio.Lock()

    @contextlib.contextmanager
    def listening(self, listener: Listener) -> Iterator[None]:
        """Hand every batch from now on to a listener, until the block ends."""
        if not self._listeners:
            self._changes = CopyChanges(on_first=self._tell_soon)
            self._manager.note_changes(self._changes)
        self._listeners.append(listener)
        self._counters.listeners = len(self._listeners)
        try:
            yield
        finally:
            self._listeners.remove(listener)
            self._counters.listeners = len(self._listeners)
            if not self._listeners:
                self._manager.note_changes(None)
                if self._due is not None:
                    self._due.cancel()
                self._due = self._slices = None

    async def take_turn(self) -> None:
        """Wait until no other listener has just begun to write: between any two, requests are answered."""
        async with self._turns:
            await asyncio.sleep(0)

    def _tell_soon(self) -> None:
        """Have told what waits: a moment after it came, and not before ``_PACE_S`` have passed."""
        if self._due is None:
            loop = asyncio.get_running_loop()
            self._due = loop.call_at(max(loop.time() + _GATHER_S, self._told_s + _PACE_S), self._tell)

    def _tell(self) -> None:
        """Tell a slice of what waits, and have the next told once others had their turn."""
        loop = asyncio.get_running_loop()
        self._slices = self._slices or self._tell_slices()
        try:
            is_more = next(self._slices, False)
        except Exception:
            logger.exception("telling of changed blocks failed")
            is_more = False
        if is_more:
            self._due = loop.call_soon(self._tell)
            return
        self._slices, self._due, self._told_s = None, None, loop.time()
        if len(self._changes) or self._changes.opened:
            self._tell_soon()

    def _tell_slices(self) -> Iterator[bool]:
        """Tell what there is to tell now; yields True after each slice that is not the last."""
        changes = self._changes
        while len(changes):
            events, lost = self._events(changes.take(_SLICE_BLOCKS)), changes.take_lost()
            if events or lost:
                self._hand_out(events, lost)
            if len(changes) or changes.opened:
                yield True
        while changes.opened:
            # Blocks of an earlier run, whose namespace was not known when they were found.
            copies = self._manager.ready_copies(changes.opened.popleft())
            while events := self._events(list(islice(copies, _SLICE_BLOCKS))):
                self._hand_out(events, {})
                yield True

    def _events(self, changes: Sequence[ChangedRun]) -> list[KvEvent]:
        return events_of(changes, media=self._manager.media(), block_tokens=self._block_tokens)

    def _block_tokens(self, namespace: NamespaceDigest) -> int:
        known = self._manager.namespace(namespace)
        return 0 if known is None else known.block_tokens

    def _hand_out(self, events: Sequence[KvEvent], lost: Mapping[NamespaceDigest, int]) -> None:
        self._counters.batches += 1
        self._counters.blocks += sum(len(event.keys) for event in events)
        self._counters.lost_blocks += sum(lost.values())
        batch = EventBatch(events, lost)
        for listener in tuple(self._listeners):
            listener(batch)
