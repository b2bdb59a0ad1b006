"""The state of one BlockManager, shared by its parts, and the settings they work under."""

import asyncio
import contextlib
import enum
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from kvstore.afterwards import Afterwards
from kvstore.beliefs import Beliefs
from kvstore.branches import Branches
from kvstore.counters import Counters
from kvstore.directory import BlockEntry, Copy, CopyState, Directory, Shelf
from kvstore.errors import InvalidRequest
from kvstore.gone import Gone
from kvstore.hints import Hints
from kvstore.idle_work import IdleWork
from kvstore.keys import NamespaceDigest
from kvstore.lease import LeaseTable
from kvstore.miss import MissReason
from kvstore.pacing import WritePace
from kvstore.policy import NO_HINT, EvictionPolicy, Hint
from kvstore.ready_table import MAX_DIRECT_BLOCKS
from kvstore.size_curve import SizeCurve
from kvstore.tier import BlockId, ListedBlock, ListedTier, Listing, Slot, SlotTier, StorageKey, Tier

_LISTED_AT_ONCE = 4
"""Blocks listed in one turn of an idle loop: 20 us, or 70 where nothing of it lies in a cache (measured)."""

_LEFT_FOR_ROOM = (MissReason.EVICTED, MissReason.NOT_ADMITTED)
"""Reasons to leave that say nothing about a block but that others are worth more: it may come again."""


class WriteMode(enum.Enum):
    """When a block is written to the tiers below the top one.

    THROUGH: as soon as it is stored. BACK: when it leaves the top tier, or at the end. SECOND_HIT: when it
    is used again; one that leaves before was not admitted, and is gone.
    """

    THROUGH = "through"
    BACK = "back"
    SECOND_HIT = "second_hit"


@dataclass(frozen=True, slots=True)
class ManagerSettings:
    """What a manager is told; see ``docs/configuration.md`` for the meaning and the defaults.

    ``lease_s`` may be infinite where the owner lives in the same process. ``load_patience_s`` bounds how
    long a load goes on for later use after those who asked for it gave up. ``namespace_quota_ratio`` is the
    share of each tier that one namespace may fill, ``pin_budget_ratio`` the share of the top tier it may
    lease. ``prefill_tokens_per_s``: how fast engines compute what is not found, so that policies know what a
    hit saves; 0: not known, and all bytes are worth the same. ``write_pace`` may put background writes off
    for a while.
    """

    timeout_s: float = 0.05
    lease_s: float = 30.0
    high_water_ratio: float = 0.95
    low_water_ratio: float = 0.90
    write_queue_blocks: int = 1024
    write_batch_blocks: int = 16
    load_batch_blocks: int = 32
    write_timeout_s: float = 10.0
    load_patience_s: float = 1.0
    write_mode: WriteMode = WriteMode.THROUGH
    namespace_quota_ratio: float = 1.0
    pin_budget_ratio: float = 1.0
    prefill_tokens_per_s: float = 0.0
    write_pace: WritePace | None = None


@dataclass(slots=True)
class State:
    """Directory, leases, policies and counters over one top tier and the tiers below it, fastest first.

    ``doomed`` slots hold what was erased, and are overwritten before they are free. ``size_curve`` is told of
    lookups and puts, if there is one, ``branches`` of lookups.

    Read and changed on one event loop's thread only, never across an await without looking again.
    """

    top: SlotTier
    lower: Sequence[Tier]
    policies: dict[str, EvictionPolicy]
    settings: ManagerSettings
    clock: Callable[[], float]
    directory: Directory
    leases: LeaseTable = field(default_factory=LeaseTable)
    counters: Counters = field(default_factory=Counters)
    freed: asyncio.Event = field(default_factory=asyncio.Event)
    doomed: set[Slot] = field(default_factory=set)
    overwrite: Callable[[Sequence[Slot]], None] | None = None
    beliefs: dict[str, Beliefs] = field(default_factory=dict)
    size_curve: SizeCurve | None = None
    afterwards: Afterwards = field(default_factory=Afterwards)
    idle_work: IdleWork = field(default_factory=IdleWork)
    branches: Branches | None = None

    @classmethod
    def over(
        cls,
        top: SlotTier,
        lower: Sequence[Tier],
        *,
        settings: ManagerSettings,
        new_policies: Callable[[Sequence[SlotTier | Tier]], dict[str, EvictionPolicy]],
        clock: Callable[[], float],
    ) -> "State":
        """Return the state of a manager that holds nothing yet.

        ``new_policies`` gives the tiers that name their own victims a policy each, by name.

        Raises:
            InvalidRequest: two tiers have one name.
        """
        names = [top.name, *(tier.name for tier in lower)]
        if len(set(names)) != len(names):
            raise InvalidRequest(f"manager: tier names must differ, got {', '.join(names)}")
        certain: list[SlotTier | Tier] = [top, *(tier for tier in lower if not tier.is_shared)]
        directory = Directory([tier.name for tier in certain])
        directory.listing = top.listing if isinstance(top, ListedTier) else None
        state = cls(
            top=top,
            lower=tuple(lower),
            policies=new_policies(certain),
            settings=settings,
            clock=clock,
            directory=directory,
        )
        state.leave_for_idle(state.idle_work)
        return state

    def leave_for_idle(self, idle_work: IdleWork) -> None:
        """Leave to it what can wait until the event loop has nothing else to do."""
        self.idle_work = idle_work
        if (listing := self.directory.listing) is not None:
            idle_work.keep_up(listing.grow, is_due=lambda: listing.wants_to_grow)

    def all_tiers(self) -> list[SlotTier | Tier]:
        """All tiers, fastest first."""
        return [self.top, *self.lower]

    def has_lower_copy(self, entry: BlockEntry) -> bool:
        """Whether any tier below the top has a READY copy, or is believed to."""
        return any(self.is_in(entry, tier) for tier in self.lower)

    def is_in(self, entry: BlockEntry, tier: Tier) -> bool:
        """Whether a lower tier has a READY copy, or, of a shared one, whether that is believed."""
        if tier.is_shared:
            return tier.name in self.beliefs and entry.name in self.beliefs[tier.name]
        return entry.is_ready(tier.name) and tier.health().is_up

    def down_tiers(self) -> frozenset[str]:
        """Names of the tiers whose copies are certain, but of no use now since the tier is down."""
        return frozenset(tier.name for tier in self.lower if not tier.is_shared and not tier.health().is_up)

    def fastest(self, entry: BlockEntry, down: frozenset[str]) -> str | None:
        """The fastest tier that has a certain READY copy and is not ``down``."""
        if not down or entry.fastest not in down:
            return entry.fastest
        return next((name for name in self.policies if name not in down and entry.is_ready(name)), None)

    def is_certain(self, entry: BlockEntry | None, down: frozenset[str]) -> bool:
        """Whether a block is known to be within reach, or on its way up, without asking anyone."""
        return entry is not None and (self.fastest(entry, down) is not None or entry.loading is not None)

    def forget_belief(self, name: StorageKey, tier: str) -> None:
        """A shared tier does not have a block after all."""
        if tier in self.beliefs:
            self._tell_of_end(name, tier)
            self.beliefs[tier].forget(name)

    def _tell_of_end(self, name: StorageKey, tier: str) -> None:
        """Have others told that a shared tier lost a block that it was believed to hold."""
        changes = self.directory.changes
        if changes is not None and name in self.beliefs[tier]:
            namespace, part, key = BlockId.of_storage_key(name)
            if part.is_first:
                changes.note_gone(tier, namespace, key)

    def deadline_s(self, timeout_s: float | None) -> float:
        """Return the instant a call that may take ``timeout_s`` (None: the default) must end at."""
        return self.clock() + (self.settings.timeout_s if timeout_s is None else timeout_s)

    def free_slots(self, slots: Sequence[Slot]) -> None:
        """Give slots of the top tier back."""
        if slots:
            self._free(slots)

    def _free(self, slots: Sequence[Slot]) -> None:
        doomed = self.doomed.intersection(slots) if self.doomed else ()
        if doomed and self.overwrite is not None:
            self.overwrite(list(doomed))
            self.doomed -= doomed
        self.top.free(slots)
        self.freed.set()

    @contextlib.contextmanager
    def holding(self) -> Iterator[list[BlockEntry]]:
        """Keep entries from eviction inside the block: append to the list after ``holds += 1``."""
        held: list[BlockEntry] = []
        try:
            yield held
        finally:
            for entry in held:
                self.let_go(entry)

    def hold(self, entry: BlockEntry, held: list[BlockEntry]) -> None:
        """Hold an entry for the enclosing ``holding`` block."""
        entry.holds += 1
        held.append(entry)

    def let_go(self, entry: BlockEntry) -> None:
        """End one hold."""
        entry.holds -= 1
        assert entry.holds >= 0, "a hold was ended twice"
        self.note_release(entry)

    def note_release(self, entry: BlockEntry) -> None:
        """Take note that an entry lost a lease or a hold: it may be evictable, or forgotten, now."""
        if entry.is_kept:
            return
        top_copy = entry.copies.get(self.top.name)
        if top_copy is not None and top_copy.state is CopyState.DROPPING:
            self.forget_copy(entry, self.top.name, top_copy.why_dropping)
        self.directory.prune(entry)
        self.freed.set()

    def quarantine_top(self, entry: BlockEntry, reason: MissReason = MissReason.CORRUPT) -> None:
        """Match a top copy no more; its slot is freed once nobody keeps the block."""
        entry.copies[self.top.name].why_dropping = reason
        self.directory.set_state(entry, self.top.name, CopyState.DROPPING)
        self.policies[self.top.name].remove(entry.name)
        self.note_release(entry)

    def hint(self, shelf: Shelf, hints: Hints | None) -> Hint:
        """Return what policies are told of a request for blocks of a shelf: what it says, and what hits save.

        What a token costs grows with its depth, by attention; that is left out: it would have deep blocks
        outlive their parents' worth.
        """
        saves = self.saves_s_per_byte(shelf)
        if hints is None:
            return NO_HINT if saves is None else Hint(saves_s_per_byte=saves)
        self.counters.hinted_requests += 1
        return Hint(
            hints.ends_session,
            hints.is_one_off,
            hints.next_use_s,
            hints.priority,
            hints.output_tokens,
            saves,
        )

    def saves_s_per_byte(self, shelf: Shelf) -> float | None:
        """Prefill seconds that a hit of the shelf's blocks saves per byte; None if the speed is not known."""
        tokens_per_s = self.settings.prefill_tokens_per_s
        if not tokens_per_s:
            return None
        namespace = self.directory.namespace(shelf.namespace)
        if namespace is None:
            return None
        return namespace.block_tokens / tokens_per_s / namespace.layout.block_bytes

    def take_slots(self, length_bytes: int, count: int) -> list[Slot]:
        """Allocate up to ``count`` slots of the top tier, as many as there are now."""
        if self.top.has_room(length_bytes, count):
            return self.top.allocate(length_bytes, count)
        slots: list[Slot] = []
        while len(slots) < count and self.top.has_room(length_bytes):
            slots += self.top.allocate(length_bytes)
        return slots

    def take_load_slots(self, length_bytes: int, count: int) -> list[Slot]:
        """Allocate up to ``count`` slots for blocks that come up, staging included: as many as there are."""
        slots = self.take_slots(length_bytes, count)
        while len(slots) < count and self.top.has_staging_room(length_bytes):
            slots += self.top.allocate_staging(length_bytes)
        return slots

    def publish_top(self, entries: Sequence[BlockEntry], *, is_use: bool) -> None:
        """Tell the policy of entries of one chain whose top copies became READY; is that a use by itself?"""
        names = [entry.name for entry in entries]
        self.directory.gone.forget(names)
        self._insert(self.top.name, entries, names, is_use=is_use)

    def list_soon(self, entries: Sequence[BlockEntry]) -> None:
        """Have clients find blocks that are READY on top, and asked for, without asking, if they are few."""
        listing = self.directory.listing
        if listing is not None and len(entries) <= MAX_DIRECT_BLOCKS:
            self.afterwards.do(partial(self._list, listing, entries))

    def list_when_idle(self, entries: Sequence[BlockEntry]) -> None:
        """As ``list_soon``, of blocks that nobody may ever ask for."""
        listing = self.directory.listing
        if listing is not None and len(entries) <= MAX_DIRECT_BLOCKS:
            for start in range(0, len(entries), _LISTED_AT_ONCE):
                piece = partial(self._list, listing, entries[start : start + _LISTED_AT_ONCE])
                self.afterwards.do(partial(self.idle_work.do, piece))

    def _list(self, listing: Listing, entries: Sequence[BlockEntry]) -> None:
        """List what is READY of entries of one shelf."""
        top = self.top.name
        if not entries or not self.directory.is_current(entries[0].shelf):
            return
        blocks: list[ListedBlock] = []
        for entry in entries:
            copy = entry.copies.get(top)
            if (
                copy is None
                or copy.state is not CopyState.READY
                or copy.slot is None
                or copy.checksum is None
            ):
                continue
            if copy.generation is None:
                copy.generation = self.top.generation(copy.slot)
            copy.is_listed = True
            blocks.append((entry.name, copy.slot, copy.checksum, copy.generation))
        listing.add_all(blocks, entries[0].shelf.name_end, entries[0].length_bytes)
        self.idle_work.note_due()

    def _insert(
        self, tier: str, entries: Sequence[BlockEntry], names: Sequence[StorageKey], *, is_use: bool
    ) -> None:
        if not entries:
            return
        first = entries[0]
        parent = None if first.parent is None or not first.depth else first.shelf.name(first.parent)
        self.policies[tier].insert(
            names,
            size_bytes=first.length_bytes,
            now_s=self.clock(),
            parent=parent,
            is_use=is_use,
        )

    def mark_ready(self, entry: BlockEntry, tier: str) -> None:
        """Note that a lower tier has a READY copy; of a shared one that is a belief, and no copy of ours."""
        if tier in self.policies:
            self.directory.set_copy(entry, tier, Copy(CopyState.READY))
            self._insert(tier, [entry], [entry.name], is_use=False)
            return
        beliefs = self.beliefs.setdefault(tier, Beliefs())
        if entry.name not in beliefs:
            self.directory.note_ready(entry, tier)
        beliefs.note(entry.name)
        if tier in entry.copies:
            self.directory.remove_copy(entry, tier)

    def forget_copy(
        self,
        entry: BlockEntry,
        tier: str,
        reason: MissReason | None,
        *,
        by: NamespaceDigest | None = None,
    ) -> None:
        """Remove a copy from directory and policy, and free its slot if it was in the top tier.

        ``reason`` is remembered if it was the last copy (None: it never was READY); ``by`` names the
        namespace that needed the room.
        """
        gone = None if reason is None else Gone(reason, tier, self.clock(), by)
        copy = self.directory.remove_copy(entry, tier, gone)
        if tier in self.policies:
            if reason in _LEFT_FOR_ROOM:
                self.policies[tier].evict(entry.name, now_s=self.clock())
            else:
                self.policies[tier].remove(entry.name)
        if tier == self.top.name and copy.slot is not None:
            self._free([copy.slot])
