"""Loader: finds the stored prefix of a chain, and brings blocks up into the top tier, each only once.

Finding: blocks with a certain copy (top tier, own lower tiers) are known from the directory; for the others
the shared tiers are probed. Loading: one task per source tier and batch; everyone who wants a block that is
already on its way waits for the same task. Whoever runs out of time goes on with less, and the load ends in
the background for later use.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from kvstore.directory import BlockEntry, Copy, CopyState, Shelf
from kvstore.gone import Gone
from kvstore.keys import BlockKey, PrefixChain
from kvstore.log_limit import LimitedWarning
from kvstore.miss import MissReason
from kvstore.space import Space
from kvstore.state import State
from kvstore.tier import BlockId, Probe, ReadOutcome, ReadStatus, Slot, Tier
from kvstore.tier_spans import Operation, begin_asking
from kvstore.tracing import Attribute, Span, current

WriteThrough = Callable[..., None]
"""`Mover.write_through`."""

logger = logging.getLogger(__name__)

_TAIL_BLOCKS = 16
"""How many blocks at the end of a chain are given up at a time for those at its start."""

_PROBE_SHARE = 0.9
"""Share of the time left that a shared tier gets to say what it has."""

MISS_REASONS = {
    ReadStatus.ABSENT: MissReason.EVICTED,
    ReadStatus.CORRUPT: MissReason.CORRUPT,
    ReadStatus.MISMATCH: MissReason.CORRUPT,
    ReadStatus.TIMED_OUT: MissReason.TIMED_OUT,
    ReadStatus.UNAVAILABLE: MissReason.UNAVAILABLE,
}
"""What a failed read means to whoever asked for the block."""


@dataclass(frozen=True, slots=True)
class Located:
    """One stored block of a prefix. ``source`` is None if it is in the top tier or on its way there."""

    entry: BlockEntry
    source: Tier | None
    origin: str


@dataclass(frozen=True, slots=True)
class Probed:
    """What the shared tiers say: where each block is that they have, and why they could not say of others.

    ``trouble`` is set if the first block that was not found is one that they could not say.
    """

    found: dict[BlockKey, tuple[Tier, str]]
    unknown: dict[BlockKey, MissReason]
    trouble: MissReason | None


class Loader:
    """Finds and loads blocks for one manager."""

    def __init__(self, state: State, space: Space, write_through: WriteThrough) -> None:
        self._state = state
        self._space = space
        self._write_through = write_through
        self._tasks: set[asyncio.Task[None]] = set()
        self._spans: dict[BlockEntry, Span] = {}
        self._damage = LimitedWarning(logger, clock=state.clock)

    async def stop(self, *, timeout_s: float) -> bool:
        """Wait for loads under way: their buffers are in use until they end. False if time ran out."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=timeout_s)
        return not self._tasks

    @property
    def num_loads(self) -> int:
        """Read tasks under way."""
        return len(self._tasks)

    async def probe(self, shelf: Shelf, chain: PrefixChain, *, deadline_s: float) -> Probed:
        """Ask the shared tiers for the blocks no certain copy is known of, beyond the first such gap."""
        state = self._state
        found: dict[BlockKey, tuple[Tier, str]] = {}
        why_not: dict[BlockKey, MissReason] = {}
        trouble: MissReason | None = None
        down = state.down_tiers()
        unknown = [key for key in chain.keys if not state.is_certain(shelf.entries.get(key), down)]
        for tier in state.lower:
            if not tier.is_shared or not unknown:
                continue
            probe = await self.ask(tier, [shelf.block(key) for key in unknown], deadline_s)
            found |= {key: (tier, name) for key, name in zip(unknown, probe.tiers, strict=True) if name}
            why_not |= {unknown[index]: reason for index, reason in _unknown(probe).items()}
            trouble = probe.reason or trouble
            if probe.reason is None:
                # A tier may stop at the first block it lacks, so only that one is known to be absent.
                absent = next((key for key in unknown if key not in found), None)
                if absent is not None:
                    state.forget_belief(shelf.name(absent), tier.name)
            unknown = [key for key in unknown if key not in found]
        return Probed(found, {key: reason for key, reason in why_not.items() if key not in found}, trouble)

    async def ask(self, tier: Tier, blocks: Sequence[BlockId], deadline_s: float) -> Probe:
        """Probe one tier, but wait no longer than until the deadline, whatever the tier does."""
        nothing: list[str | None] = [None] * len(blocks)
        # A little sooner than we stop waiting: what some of its servers said by then is not lost.
        now_s = self._state.clock()
        its_deadline_s = now_s + _PROBE_SHARE * (deadline_s - now_s)
        with begin_asking(tier, Operation.PROBE, blocks=len(blocks)) or contextlib.nullcontext():
            probe = asyncio.create_task(tier.probe(blocks, deadline_s=its_deadline_s))
            try:
                await asyncio.wait([probe], timeout=max(0.0, deadline_s - self._state.clock()))
            finally:
                probe.cancel()
        if not probe.done() or probe.cancelled():
            return Probe(nothing, MissReason.TIMED_OUT)
        if probe.exception() is not None:
            logger.error("%s: a probe failed", tier.name, exc_info=probe.exception())
            return Probe(nothing, MissReason.UNAVAILABLE)
        return probe.result()

    def locate(
        self, shelf: Shelf, chain: PrefixChain, probed: dict[BlockKey, tuple[Tier, str]]
    ) -> list[Located]:
        """Return the leading blocks that are stored, making entries for those only a probe has found."""
        state = self._state
        lower = {tier.name: tier for tier in state.lower}
        down = state.down_tiers()
        located: list[Located] = []
        parent = chain.parent or BlockKey(chain.namespace)
        for index, key in enumerate(chain.keys):
            entry = shelf.entries.get(key)
            if entry is not None and state.is_certain(entry, down):
                name = state.fastest(entry, down)
                located.append(Located(entry, lower.get(name or ""), name or entry.loading_origin))
            elif key in probed:
                tier, name = probed[key]
                entry = state.directory.entry(shelf, key, parent, chain.start + index)
                located.append(Located(entry, tier, name))
            else:
                break
            parent = key
        return located

    async def load(
        self, shelf: Shelf, located: Sequence[Located], held: list[BlockEntry], *, deadline_s: float
    ) -> tuple[int, MissReason | None]:
        """Make located blocks, which the caller holds, READY in the top tier.

        Returns how many leading ones are READY now, and why the next one is not. Where there is no room for
        all, the last ones are let go of, so that they make room for the first.
        """
        state = self._state
        located, num_asked = list(located), len(located)
        wanted = [item for item in located if self._needs_load(item.entry)]
        within = len(wanted)
        if wanted:
            within = await self._space.fit_quota_on_top(shelf, len(wanted), deadline_s=deadline_s)
            await self._start_loads_as_room_comes(
                shelf, wanted[:within], located, held, deadline_s=deadline_s
            )
        loads = [item.entry.loading for item in located]
        waiting = [load for load in loads if load is not None]
        if self._spans:
            self._link_spans([item.entry for item in located])
        if waiting:
            await asyncio.wait(waiting, timeout=max(0.0, deadline_s - state.clock()))
        for index, (item, load) in enumerate(zip(located, loads, strict=True)):
            if item.entry.is_ready(state.top.name):
                continue
            if load is None and state.top.name in item.entry.copies:
                return index, item.entry.copies[state.top.name].why_dropping
            if load is None:
                return index, MissReason.NO_ROOM if within == len(wanted) else MissReason.QUOTA
            return index, _miss_reason(load.result()) if load.done() else MissReason.TIMED_OUT
        return len(located), None if len(located) == num_asked else MissReason.NO_ROOM

    def _link_spans(self, entries: Sequence[BlockEntry]) -> None:
        """Note in the spans of loads under way that the present request waits for them too."""
        waiting = current()
        if waiting is not None:
            for span in {self._spans[entry] for entry in entries if entry in self._spans}:
                span.serve(waiting)

    def _needs_load(self, entry: BlockEntry) -> bool:
        # A damaged top copy that somebody still leases keeps its slot, and the block from being loaded.
        return self._state.top.name not in entry.copies and entry.loading is None

    async def _start_loads_as_room_comes(
        self,
        shelf: Shelf,
        wanted: Sequence[Located],
        located: list[Located],
        held: list[BlockEntry],
        *,
        deadline_s: float,
    ) -> None:
        """Start what fits at once, and the rest as blocks leave; half of the time is kept for reading."""
        space, length, namespace = self._space, shelf.length_bytes, shelf.namespace
        now_s = self._state.clock()
        room_deadline_s = now_s + (deadline_s - now_s) / 2
        await space.make_room_on_top(length, len(wanted), deadline_s=now_s, by=namespace)
        started = self._start_loads(shelf, wanted, deadline_s)
        while True:
            # Nothing is read twice: what was started and failed stays missing.
            kept = {id(item) for item in located}
            rest = [
                item
                for item in wanted
                if id(item) in kept and item.entry not in started and self._needs_load(item.entry)
            ]
            if not rest:
                return
            is_tail_left = self._let_tail_go(located, held, rest)
            patience_s = now_s if is_tail_left else room_deadline_s
            has_room = await space.make_room_on_top(
                length, 1, deadline_s=patience_s, by=namespace, awaits_leases=True
            )
            if not has_room and not is_tail_left:
                return
            started |= self._start_loads(shelf, rest, deadline_s)

    def _let_tail_go(self, located: list[Located], held: list[BlockEntry], rest: Sequence[Located]) -> bool:
        """Let go of the last blocks of a chain in favour of earlier ones; False if none there is on top."""
        top = self._state.top.name
        waiting = {id(item) for item in rest}
        num_on_top, cut = 0, len(located)
        while cut > 0 and num_on_top < min(_TAIL_BLOCKS, len(waiting)) and located[cut - 1] is not rest[0]:
            cut -= 1
            waiting.discard(id(located[cut]))
            num_on_top += located[cut].entry.is_ready(top)
        if not num_on_top:
            return False
        for item in located[cut:]:
            held.remove(item.entry)
            self._state.let_go(item.entry)
        del located[cut:]
        return True

    def _start_loads(self, shelf: Shelf, wanted: Sequence[Located], deadline_s: float) -> set[BlockEntry]:
        """Give as many leading blocks as there is room for a slot, and read them from where they are.

        Returns those whose load was started.
        """
        state = self._state
        # Room was made across an await: others may have loaded the block, or taken the room.
        todo = list({item.entry: item for item in wanted if self._needs_load(item.entry)}.values())
        slots = state.take_load_slots(shelf.length_bytes, len(todo))
        by_source: dict[str, list[tuple[Located, Slot]]] = {}
        for item, slot in zip(todo, slots, strict=False):
            assert item.source is not None, "a block that needs a load has no source"
            assert item.entry.loading is None, "a chain names a block twice"
            state.directory.set_copy(item.entry, state.top.name, Copy(CopyState.WRITING, slot))
            item.entry.loading = asyncio.get_running_loop().create_future()
            item.entry.loading_origin = item.origin
            by_source.setdefault(item.source.name, []).append((item, slot))
        patience_s = max(deadline_s, state.clock() + state.settings.load_patience_s)
        for batch in by_source.values():
            for start in range(0, len(batch), state.settings.load_batch_blocks):
                part = batch[start : start + state.settings.load_batch_blocks]
                source = part[0][0].source
                assert source is not None, "a block that needs a load has no source"
                span = begin_asking(source, Operation.READ, blocks=len(part), length_bytes=shelf.length_bytes)
                if span is not None:
                    self._spans |= {item.entry: span for item, _ in part}
                task = asyncio.create_task(self._run_load_in(span, shelf, part, patience_s))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
        return {item.entry for batch in by_source.values() for item, _ in batch}

    async def _run_load_in(
        self, span: Span | None, shelf: Shelf, batch: list[tuple[Located, Slot]], deadline_s: float
    ) -> None:
        if span is None:
            await self._run_load(shelf, batch, deadline_s)
            return
        with span:
            try:
                num_loaded = await self._run_load(shelf, batch, deadline_s)
                span.set(Attribute.DONE_BLOCKS, num_loaded)
            finally:
                for item, _ in batch:
                    self._spans.pop(item.entry, None)

    async def _run_load(self, shelf: Shelf, batch: list[tuple[Located, Slot]], deadline_s: float) -> int:
        """Read one batch from one tier and settle every block of it, whatever happens.

        Returns how many blocks were loaded.
        """
        state = self._state
        for item, _ in batch:
            item.entry.holds += 1
        outcomes = [ReadOutcome(ReadStatus.UNAVAILABLE)] * len(batch)
        source = batch[0][0].source
        assert source is not None
        started_s = state.clock()
        try:
            async with state.top.writing([slot for _, slot in batch], shelf.length_bytes) as buffers:
                requests = [
                    item.entry.read_request(buffer) for (item, _), buffer in zip(batch, buffers, strict=True)
                ]
                outcomes = await source.read(requests, deadline_s=deadline_s)
        except Exception:
            logger.exception("%s: reading a batch of blocks failed", source.name)
            outcomes = [ReadOutcome(ReadStatus.UNAVAILABLE)] * len(batch)
        finally:
            state.counters.transfer(source.name, state.top.name).batches.note(state.clock() - started_s)
            self._settle(shelf, source, batch, outcomes)
        return sum(outcome.status is ReadStatus.OK for outcome in outcomes)

    def _settle(
        self,
        shelf: Shelf,
        source: Tier,
        batch: list[tuple[Located, Slot]],
        outcomes: Sequence[ReadOutcome],
    ) -> None:
        state = self._state
        loaded: list[BlockEntry] = []
        for (item, slot), outcome in zip(batch, outcomes, strict=True):
            entry = item.entry
            load, entry.loading = entry.loading, None
            if outcome.status is ReadStatus.ABSENT and not source.is_shared:
                # Nobody but us takes blocks out of it, so it lost this one.
                outcome = replace(outcome, reason=outcome.reason or MissReason.UNAVAILABLE)
            if outcome.status is ReadStatus.OK and outcome.header is not None:
                ready = Copy(CopyState.READY, slot, outcome.header.checksum)
                state.directory.set_copy(entry, state.top.name, ready)
                loaded.append(entry)
            else:
                self._settle_failure(source, entry, outcome)
            if load is not None and not load.done():
                load.set_result(outcome)
        transfer = state.counters.transfer(source.name, state.top.name)
        transfer.blocks += len(loaded)
        transfer.bytes += len(loaded) * shelf.length_bytes
        state.publish_top(loaded, is_use=False)
        state.list_soon(loaded)
        if source.is_shared:
            for entry in loaded:
                state.mark_ready(entry, source.name)
        self._write_through(loaded, above=source.name)
        for item, _ in batch:
            state.let_go(item.entry)

    def _settle_failure(self, source: Tier, entry: BlockEntry, outcome: ReadOutcome) -> None:
        state, status = self._state, outcome.status
        state.counters.transfer(source.name, state.top.name).failures[status.value] += 1
        state.forget_copy(entry, state.top.name, None)
        is_gone = status in (ReadStatus.ABSENT, ReadStatus.CORRUPT, ReadStatus.MISMATCH)
        if is_gone:
            state.forget_belief(entry.name, source.name)
            if source.is_shared:
                gone = Gone(_miss_reason(outcome), source.name, state.clock())
                state.directory.gone.remember(entry.name, gone)
        if is_gone and entry.is_ready(source.name):
            state.forget_copy(entry, source.name, _miss_reason(outcome))
        if status in (ReadStatus.CORRUPT, ReadStatus.MISMATCH):
            state.counters.corrupt[source.name] += 1
            name = entry.key.hex()[:12]
            self._damage.warn("%s: block %s is %s there: not served", source.name, name, status.value)


def _unknown(probe: Probe) -> Mapping[int, MissReason]:
    if probe.unknown or probe.reason is None:
        return probe.unknown
    return {index: probe.reason for index, name in enumerate(probe.tiers) if name is None}


def _miss_reason(outcome: ReadOutcome) -> MissReason:
    # An entry that was READY and left again before its reader looked was evicted.
    return outcome.reason or MISS_REASONS.get(outcome.status, MissReason.EVICTED)
