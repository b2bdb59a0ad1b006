"""EventFeed: tells whoever listens which blocks a store holds, and where, as it changes.

The way of a put only appends to a bounded queue, and that only while somebody listens. A task empties it
some times a second, a slice at a time, and hands batches to listeners, which must not block. What finds no
room is lost, which listeners are told: then they know less than there is, and may learn it anew.
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

_TICK_S = 0.05
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
        self._telling: asyncio.Task[None] | None = None
        self._turns = asyncio.Lock()

    @contextlib.contextmanager
    def listening(self, listener: Listener) -> Iterator[None]:
        """Hand every batch from now on to a listener, until the block ends."""
        if not self._listeners:
            self._changes = CopyChanges()
            self._manager.note_changes(self._changes)
            self._telling = asyncio.create_task(self._tell_forever(), name="event-feed")
        self._listeners.append(listener)
        self._counters.listeners = len(self._listeners)
        try:
            yield
        finally:
            self._listeners.remove(listener)
            self._counters.listeners = len(self._listeners)
            if not self._listeners and self._telling is not None:
                self._manager.note_changes(None)
                self._telling.cancel()
                self._telling = None

    async def take_turn(self) -> None:
        """Wait until no other listener has just begun to write: between any two, requests are answered."""
        async with self._turns:
            await asyncio.sleep(0)

    async def _tell_forever(self) -> None:
        changes = self._changes
        while True:
            await asyncio.sleep(_TICK_S)
            try:
                await self._tell(changes)
            except Exception:
                logger.exception("telling of changed blocks failed")

    async def _tell(self, changes: CopyChanges) -> None:
        """Tell what there is to tell now, giving way to others after each slice."""
        while len(changes):
            events, lost = self._events(changes.take(_SLICE_BLOCKS)), changes.take_lost()
            if events or lost:
                self._hand_out(events, lost)
            await asyncio.sleep(0)
        while changes.opened:
            # Blocks of an earlier run, whose namespace was not known when they were found.
            copies = self._manager.ready_copies(changes.opened.popleft())
            while events := self._events(list(islice(copies, _SLICE_BLOCKS))):
                self._hand_out(events, {})
                await asyncio.sleep(0)

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
