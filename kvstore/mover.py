"""Mover: writes blocks from the top tier through to the tiers below, in the background.

Every lower tier has a bounded queue and one worker, so that a slow tier delays only itself. A full queue
drops the write and counts it. Demotions go to the front of the queue: somebody waits for their slots. Other
writes may be put off for a while (``WritePace``), and are then made in larger batches; not while a queue is
half full. Bytes whose checksum is known are checked before they are written, so damage in memory does not
spread.
"""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence

from kvstore.checksum import checksum
from kvstore.directory import BlockEntry, Copy, CopyState
from kvstore.keys import NamespaceDigest
from kvstore.log_limit import LimitedWarning
from kvstore.miss import MissReason
from kvstore.space import Space
from kvstore.state import State
from kvstore.tier import BlockHeader, Slot, SummingTier, Tier, WriteRequest, WriteStatus
from kvstore.tier_spans import Operation, begin_serving
from kvstore.tracing import Attribute, TraceContext, current

logger = logging.getLogger(__name__)


class WriteQueue:
    """Entries that wait to be written to one tier; bounded, first in first out, urgent ones first."""

    def __init__(self, limit_blocks: int) -> None:
        self._limit_blocks = limit_blocks
        self._hurry_blocks = max(1, limit_blocks // 2)  # the rest of the room is for what comes meanwhile
        self._waiting: OrderedDict[BlockEntry, None] = OrderedDict()
        self._demoting: set[BlockEntry] = set()
        self._causes: dict[BlockEntry, TraceContext] = {}
        self.has_work = asyncio.Event()
        self.is_urgent = asyncio.Event()
        self.in_flight = 0

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def is_idle(self) -> bool:
        """Whether nothing waits and nothing is being written."""
        return not self._waiting and not self.in_flight

    def add(self, entry: BlockEntry) -> bool:
        """Queue an entry; False if the queue is full."""
        if entry in self._waiting:
            return True
        if len(self._waiting) >= self._limit_blocks:
            return False
        self._waiting[entry] = None
        self.has_work.set()
        if len(self._waiting) >= self._hurry_blocks:
            self.is_urgent.set()
        return True

    def add_first(self, entry: BlockEntry) -> None:
        """Queue an entry before all others, to leave the top tier once it is written."""
        self._demoting.add(entry)
        self._waiting[entry] = None
        self._waiting.move_to_end(entry, last=False)
        self.has_work.set()
        self.is_urgent.set()

    def hurry(self) -> None:
        """Somebody waits for what waits to be written."""
        if self._waiting:
            self.is_urgent.set()

    def note_cause(self, entry: BlockEntry, cause: TraceContext) -> None:
        """Note the span of the request that had a queued entry written."""
        if entry in self._waiting:
            self._causes[entry] = cause

    def take_causes(self, batch: Sequence[tuple[BlockEntry, bool]]) -> dict[BlockEntry, TraceContext]:
        """Return what was noted of the entries of a batch, and forget it."""
        if not self._causes:
            return {}
        return {entry: self._causes.pop(entry) for entry, _ in batch if entry in self._causes}

    def take(self, limit_blocks: int) -> list[tuple[BlockEntry, bool]]:
        """Take the first entries, each with whether it is to leave the top tier afterwards."""
        batch: list[tuple[BlockEntry, bool]] = []
        while self._waiting and len(batch) < limit_blocks:
            entry, _ = self._waiting.popitem(last=False)
            batch.append((entry, entry in self._demoting))
            self._demoting.discard(entry)
        if not self._waiting:
            self.has_work.clear()
            self.is_urgent.clear()
        return batch


class Mover:
    """Runs one write queue and worker per lower tier of a manager."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._queues: dict[str, WriteQueue] = {}
        self._workers: list[asyncio.Task[None]] = []
        self._space = Space(state, self)
        self._progress = asyncio.Event()
        self._damage = LimitedWarning(logger, clock=state.clock)

    def start(self) -> None:
        """Start the workers."""
        for tier in self._state.lower:
            self._queues[tier.name] = WriteQueue(self._state.settings.write_queue_blocks)
            self._workers.append(asyncio.create_task(self._run(tier), name=f"mover-{tier.name}"))

    async def stop(self, *, patience_s: float) -> None:
        """Stop the workers; what still waits is dropped and counted.

        A worker whose tier has not answered after ``patience_s`` seconds ends when the tier is closed.
        """
        for worker in self._workers:
            worker.cancel()
        if self._workers:
            await asyncio.wait(self._workers, timeout=patience_s)
        self._workers.clear()
        for name, queue in self._queues.items():
            if len(queue):
                self._state.counters.write_drops[f"{name}/stopped"] += len(queue)

    async def flush(self, *, timeout_s: float) -> bool:
        """Wait until all queues are empty and nothing is in flight; False if time ran out."""
        try:
            async with asyncio.timeout(timeout_s):
                while not all(queue.is_idle for queue in self._queues.values()):
                    for queue in self._queues.values():
                        queue.hurry()
                    self._progress.clear()
                    await self._progress.wait()
        except TimeoutError:
            return False
        return True

    def write_through(
        self, entries: Iterable[BlockEntry], *, above: str | None = None, is_new: bool = False
    ) -> None:
        """Queue entries for every lower tier that lacks them; ``above``: only for tiers over that one.

        ``is_new`` blocks were computed because nobody had them: no belief keeps them from a shared tier.
        """
        state, cause = self._state, current()
        for tier in state.lower:
            if tier.name == above:
                return
            queue = self._queues[tier.name]
            for entry in entries:
                is_there = tier.name in entry.copies or (not is_new and state.is_in(entry, tier))
                if not is_there and not queue.add(entry):
                    state.counters.write_drops[f"{tier.name}/queue_full"] += 1
                elif cause is not None:
                    queue.note_cause(entry, cause)

    def demote(self, entries: Sequence[BlockEntry]) -> None:
        """Write entries to the first healthy lower tier at once; they leave the top tier when READY there."""
        for entry in reversed(entries):
            tier = self._demotion_target_of(entry)
            if tier is not None and tier.name not in entry.copies:
                self._queues[tier.name].add_first(entry)

    @property
    def is_writing(self) -> bool:
        """Whether the worker that demotions go to has a batch in hand."""
        tier = self._demotion_target()
        return tier is not None and self._queues[tier.name].in_flight > 0

    def _demotion_target(self) -> Tier | None:
        return next((tier for tier in self._state.lower if tier.health().is_up), None)

    def _demotion_target_of(self, entry: BlockEntry) -> Tier | None:
        tiers = [tier for tier in self._state.lower if tier.health().is_up]
        return next((tier for tier in tiers if tier.name not in entry.refused_by), None)

    def queue_lengths(self) -> dict[str, int]:
        """Blocks that wait or are in flight, by tier."""
        return {name: len(queue) + queue.in_flight for name, queue in self._queues.items()}

    async def _run(self, tier: Tier) -> None:
        queue, pace = self._queues[tier.name], self._state.settings.write_pace
        while True:
            await queue.has_work.wait()
            due_s = 0.0 if pace is None else pace.due_s()
            while len(queue):
                if pace is not None:
                    await pace.turn(is_urgent=queue.is_urgent, until_s=due_s)
                await self._write_batch(tier, queue)

    async def _write_batch(self, tier: Tier, queue: WriteQueue) -> None:
        batch = queue.take(self._state.settings.write_batch_blocks)
        queue.in_flight = len(batch)
        causes = queue.take_causes(batch)
        for group in self._groups(tier, batch):
            try:
                await self._write_group(tier, group, causes)
            except Exception:
                # The group's blocks are settled and counted as not written.
                logger.exception("%s: writing %d blocks failed", tier.name, len(group))
        queue.in_flight = 0
        self._progress.set()

    def _groups(
        self, tier: Tier, batch: list[tuple[BlockEntry, bool]]
    ) -> list[list[tuple[BlockEntry, bool]]]:
        """Sort a batch into blocks of one size and namespace, leaving out what need not be written."""
        state = self._state
        groups: dict[tuple[int, NamespaceDigest], list[tuple[BlockEntry, bool]]] = {}
        for entry, is_demotion in batch:
            if tier.name in entry.copies:
                continue
            if not entry.is_ready(state.top.name):
                state.counters.write_drops[f"{tier.name}/left_top"] += 1
                continue
            alike = (entry.length_bytes, entry.shelf.namespace)
            groups.setdefault(alike, []).append((entry, is_demotion))
        cut: list[list[tuple[BlockEntry, bool]]] = []
        for (length, _), group in groups.items():
            # A tier is never asked to empty itself for one batch.
            limit = max(1, tier.capacity_bytes // (4 * length)) if tier.capacity_bytes else len(group)
            cut += [group[start : start + limit] for start in range(0, len(group), limit)]
        return cut

    async def _write_group(
        self, tier: Tier, group: list[tuple[BlockEntry, bool]], causes: Mapping[BlockEntry, TraceContext]
    ) -> None:
        state = self._state
        # It may have left the top tier, or been written by a demotion, while earlier groups were written.
        group = [(e, d) for e, d in group if e.is_ready(state.top.name) and tier.name not in e.copies]
        if not group:
            return
        length = group[0][0].length_bytes
        entries = [entry for entry, _ in group]
        statuses = [WriteStatus.UNAVAILABLE] * len(group)
        with state.holding() as held:
            for entry in entries:
                state.hold(entry, held)
                state.directory.set_copy(entry, tier.name, Copy(CopyState.WRITING))
            try:
                namespace = entries[0].shelf.namespace
                has_room = await self._space.make_room_below(tier, length, len(group), by=namespace)
                statuses = (
                    await self._transfer_in_span(tier, length, entries, causes)
                    if has_room
                    else [WriteStatus.FULL] * len(group)
                )
            finally:
                for entry, status in zip(entries, statuses, strict=True):
                    self._settle(tier, entry, status)
        for entry, is_demotion in group:
            # Also when the write failed: whoever waits for the slot cannot wait for a tier that refuses.
            if is_demotion and entry.may_leave(state.top.name):
                refused = statuses[entries.index(entry)] is WriteStatus.NOT_ADMITTED
                reason = MissReason.NOT_ADMITTED if refused else MissReason.EVICTED
                state.forget_copy(entry, state.top.name, reason)
                state.counters.evictions[f"{state.top.name}/demoted"] += 1

    async def _transfer_in_span(
        self,
        tier: Tier,
        length: int,
        entries: list[BlockEntry],
        causes: Mapping[BlockEntry, TraceContext],
    ) -> list[WriteStatus]:
        its_causes = [causes[entry] for entry in entries if entry in causes] if causes else ()
        span = begin_serving(tier, Operation.WRITE, its_causes, blocks=len(entries), length_bytes=length)
        if span is None:
            return await self._transfer(tier, length, entries)
        with span:
            statuses = await self._transfer(tier, length, entries)
            span.set(Attribute.DONE_BLOCKS, statuses.count(WriteStatus.OK))
            return statuses

    async def _transfer(self, tier: Tier, length: int, entries: list[BlockEntry]) -> list[WriteStatus]:
        state = self._state
        top_copies = [entry.copies[state.top.name] for entry in entries]
        slots = [copy.slot for copy in top_copies if copy.slot is not None]
        assert len(slots) == len(entries), "a READY copy in the top tier has no slot"
        started_s = state.clock()
        async with state.top.reading(slots, length) as buffers:
            sums = await self._sums(tier, [buffer[:length] for buffer in buffers], top_copies)
            good = [
                i for i, copy in enumerate(top_copies) if copy.checksum is None or copy.checksum == sums[i]
            ]
            requests = [
                WriteRequest(
                    self._header(entries[i], length, sums[i] or 0), buffers[i], is_summed=sums[i] is not None
                )
                for i in good
            ]
            deadline_s = state.clock() + state.settings.write_timeout_s
            written = await tier.write(requests, deadline_s=deadline_s) if requests else []
        statuses = [WriteStatus.REFUSED] * len(entries)
        transfer = state.counters.transfer(state.top.name, tier.name)
        transfer.batches.note(state.clock() - started_s)
        for i, status in zip(good, written, strict=True):
            statuses[i] = status
            top_copies[i].checksum = sums[i]
        for i in set(range(len(entries))) - set(good):
            self._condemn(entries[i], slots[i])
        return statuses

    async def _sums(
        self, tier: Tier, payloads: list[memoryview], copies: Sequence[Copy]
    ) -> Sequence[int | None]:
        """Return the payloads' checksums; None for those that nobody summed yet and the tier sums itself."""
        sums_itself = isinstance(tier, SummingTier) and tier.sums_payloads
        if sums_itself and all(copy.checksum is None for copy in copies):
            return [None] * len(payloads)
        return await asyncio.to_thread(lambda: list(map(checksum, payloads)))

    def _header(self, entry: BlockEntry, length: int, payload_sum: int) -> BlockHeader:
        assert entry.parent is not None, "a stored block has a parent"
        return BlockHeader(
            block=entry.block,
            parent=entry.parent,
            depth=entry.depth,
            layout=entry.shelf.layout,
            length_bytes=length,
            checksum=payload_sum,
        )

    def _condemn(self, entry: BlockEntry, slot: Slot) -> None:
        """Drop a top copy whose bytes no longer match their checksum."""
        state = self._state
        if not entry.is_ready(state.top.name):
            return  # another tier's worker found it before
        state.counters.corrupt[state.top.name] += 1
        self._damage.warn("%s: the bytes in slot %s do not match their checksum", state.top.name, slot)
        state.quarantine_top(entry)

    def _settle(self, tier: Tier, entry: BlockEntry, status: WriteStatus) -> None:
        state = self._state
        transfer = state.counters.transfer(state.top.name, tier.name)
        if status is WriteStatus.OK:
            state.mark_ready(entry, tier.name)
            transfer.blocks += 1
            transfer.bytes += entry.length_bytes
            return
        if status is WriteStatus.NOT_ADMITTED:
            entry.refused_by = (*entry.refused_by, tier.name)
        state.directory.remove_copy(entry, tier.name)
        transfer.failures[status.value] += 1
        state.counters.write_drops[f"{tier.name}/{status.value}"] += 1
