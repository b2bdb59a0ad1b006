"""BlockManager: the only owner of state; matches, fetches, puts, leases, drops and checks blocks."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence

from kvstore.departing import Departure
from kvstore.directory import BlockEntry, Directory, Shelf
from kvstore.epoch_file import EpochFile
from kvstore.epochs import EpochKeeper
from kvstore.erasing import Encryption, Eraser
from kvstore.errors import InvalidRequest
from kvstore.explain import explain
from kvstore.garbage import garbage_collection_paused
from kvstore.inspection import check_manager, check_top_copies
from kvstore.keys import Namespace, NamespaceDigest, PrefixChain
from kvstore.layout import Part
from kvstore.loading import Loader
from kvstore.miss import MissReason
from kvstore.mover import Mover
from kvstore.policy import EvictionPolicy, LruPolicy
from kvstore.putting import Putter
from kvstore.recency import Uses
from kvstore.results import (
    BlockReport,
    EraseReport,
    Fetched,
    FetchedBlock,
    LeaseId,
    Owner,
    PrefixMatch,
    Reserved,
)
from kvstore.space import Space
from kvstore.state import ManagerSettings, State, WriteMode
from kvstore.tenant import TenantId
from kvstore.tier import Slot, SlotTier, Tier

logger = logging.getLogger(__name__)

_CLOSE_S = 5.0
_SWEEP_S = 0.25
"""How often expired leases are looked for when no call does it."""

"""How long ``close`` waits for moves under way before it leaves them to their tier, which abandons them."""


class BlockManager:
    """Keeps hashed prefix blocks in a top tier of slots and any number of tiers below it.

    Concurrency: one event loop's thread. Every change of state between two awaits is complete in itself; no
    lock exists, and nothing is held across I/O but counters (leases, holds) that keep blocks from leaving.
    A call that is cancelled gives back all it took; loads and writes it started go on without it.

    Time: every call returns by its timeout with what is ready then. Loads outlive those who asked for them.

    Space: see ``space``. A put or a load that finds no room by its deadline is dropped and counted.

    Recovery: ``open`` learns from the tiers what they hold. Nothing about leases survives a restart.
    """

    def __init__(
        self,
        top: SlotTier,
        lower: Sequence[Tier],
        *,
        settings: ManagerSettings | None = None,
        new_policy: Callable[[], EvictionPolicy] = LruPolicy,
        epoch_file: EpochFile | None = None,
        encryption: Encryption | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        names = [top.name, *(tier.name for tier in lower)]
        if len(set(names)) != len(names):
            raise InvalidRequest(f"manager: tier names must differ, got {', '.join(names)}")
        certain = [top.name, *(tier.name for tier in lower if not tier.is_shared)]
        self._state = State(
            top=top,
            lower=tuple(lower),
            policies={name: new_policy() for name in certain},
            settings=settings or ManagerSettings(),
            clock=clock,
            directory=Directory(certain),
        )
        self._mover = Mover(self._state)
        self._space = Space(self._state, self._mover)
        self._loader = Loader(self._state, self._space, self._mover.write_through)
        self._epochs = EpochKeeper(self._state, self._space, epoch_file)
        self._eraser = None if encryption is None else Eraser(self._state, self._space, encryption)
        self._uses = Uses(self._state)
        self._maintenance: list[asyncio.Task[None]] = []
        self._closing: asyncio.Future[None] | None = None
        self._putter = Putter(self._state, self._space, self._mover, self._note_fill)
        self._departure = Departure(self._state, self._space, self._mover)
        self._needs_aging = asyncio.Event()

    async def open(self) -> None:
        """Open the tiers and learn what they hold.

        Raises:
            TierUnavailable: a tier cannot be opened; those opened before it are closed again.
        """
        state = self._state
        async with contextlib.AsyncExitStack() as opened:
            for tier in state.all_tiers():
                await tier.open()
                opened.push_async_callback(tier.close)
            if self._eraser is not None:
                await self._eraser.open()
            is_trusted = await self._epochs.open()
            for lower in state.lower:
                await self._learn(lower, is_trusted=is_trusted)
            opened.pop_all()
        self._mover.start()
        self._maintenance = [
            asyncio.create_task(self._sweep_forever(), name="manager-sweep"),
            asyncio.create_task(self._age_forever(), name="manager-age"),
            asyncio.create_task(self._epochs.poll_forever(), name="manager-epochs"),
        ]
        if self._eraser is not None:
            self._maintenance.append(asyncio.create_task(self._eraser.poll_forever(), name="manager-eraser"))

    async def close(self, *, drain_s: float = 5.0) -> None:
        """Drain for up to ``drain_s`` seconds, then close the tiers. Idempotent; goes on if cancelled.

        A medium that hangs is abandoned after a few seconds, with a warning.
        """
        if self._closing is None:
            self._closing = asyncio.ensure_future(self._close(drain_s))
        await asyncio.shield(self._closing)

    async def _close(self, drain_s: float) -> None:
        if not self._maintenance:
            return
        await self.drain(timeout_s=drain_s)
        for task in self._maintenance:
            task.cancel()
        await asyncio.gather(*self._maintenance, return_exceptions=True)
        await self._mover.stop(patience_s=_CLOSE_S)
        if not await self._loader.stop(timeout_s=_CLOSE_S):
            logger.warning("closing: loads have not ended after %g s: abandoned", _CLOSE_S)
        await self._uses.tell()
        if self._eraser is not None:
            await asyncio.wait([asyncio.ensure_future(self._eraser.close())], timeout=_CLOSE_S)
        for tier in reversed(self._state.all_tiers()):
            closing = asyncio.ensure_future(tier.close())
            await asyncio.wait([closing], timeout=_CLOSE_S)
            if not closing.done():
                logger.warning("%s: has not closed after %g s: abandoned", tier.name, _CLOSE_S)

    def open_namespace(self, namespace: Namespace, *, owner: Owner | None = None) -> NamespaceDigest:
        """Make a namespace known; needed before its chains are used. Idempotent. Returns its digest.

        It is remembered while its owner lives or it has blocks, and longer while there are not too many.
        """
        state = self._state
        for tier in state.lower:
            tier.open_namespace(namespace)
        digest = state.directory.open_namespace(namespace, in_use=state.leases.used_namespaces)
        self._epochs.note_namespace()
        if owner is not None and state.leases.is_live(owner):
            state.leases.note_namespace(owner, digest)
        return digest

    def new_owner(self) -> Owner:
        """Return a fresh owner: one per client connection, or per request of an engine."""
        return self._state.leases.new_owner()

    async def match(
        self, chain: PrefixChain, *, part: Part | None = None, timeout_s: float | None = None
    ) -> PrefixMatch:
        """Count the leading blocks that are stored, and say where. No payload moves, and it is no use.

        Raises:
            InvalidRequest: the namespace is not open.
        """
        state = self._state
        shelf = state.directory.shelf(chain.namespace, part)
        tiers: list[str] = []
        entries, down = shelf.entries, state.down_tiers()
        for key in chain.keys:
            entry = entries.get(key)
            if entry is None or entry.fastest is None or entry.fastest in down:
                break
            tiers.append(entry.fastest)
        reason = None
        if shelf.is_stale:
            tiers, reason = [], MissReason.OTHER_EPOCH
        elif len(tiers) < len(chain):
            tiers, reason = await self._match_by_probe(shelf, chain, self._state.deadline_s(timeout_s))
        state.counters.match.count(len(chain), tiers, reason)
        return PrefixMatch(len(tiers), tuple(tiers), reason)

    async def fetch(
        self,
        chain: PrefixChain,
        *,
        owner: Owner,
        part: Part | None = None,
        timeout_s: float | None = None,
    ) -> Fetched:
        """Make the longest stored prefix READY in slots of the top tier, leased to ``owner``.

        Returns by its timeout with what is ready then. The lease ends with ``release``, with
        ``release_owner``, or at its deadline (``lease_s`` of the settings).

        Raises:
            InvalidRequest: the namespace is not open.
        """
        state = self._state
        deadline_s = self._state.deadline_s(timeout_s)
        shelf = state.directory.shelf(chain.namespace, part)
        if shelf.is_stale:
            state.counters.fetch.count(len(chain), [], MissReason.OTHER_EPOCH)
            return Fetched((), None, MissReason.OTHER_EPOCH)
        on_top = self._all_on_top(shelf, chain)
        if on_top is not None:
            return self._lease_to(owner, shelf, chain, on_top, [state.top.name] * len(on_top), None)
        with state.holding() as held:
            origins, reason = await self._bring_up(shelf, chain, held, deadline_s)
            entries = [shelf.entries[key] for key in chain.keys[: len(origins)]]
            fetched = self._lease_to(owner, shelf, chain, entries, origins, reason)
        self._note_fill()
        return fetched

    async def prefetch(
        self, chain: PrefixChain, *, part: Part | None = None, timeout_s: float | None = None
    ) -> int:
        """Load stored leading blocks into the top tier without a lease; returns how many are there.

        Raises:
            InvalidRequest: the namespace is not open.
        """
        shelf = self._state.directory.shelf(chain.namespace, part)
        if shelf.is_stale:
            return 0
        with self._state.holding() as held:
            origins, _ = await self._bring_up(shelf, chain, held, self._state.deadline_s(timeout_s))
        self._note_fill()
        return len(origins)

    async def reserve(
        self,
        chain: PrefixChain,
        *,
        owner: Owner,
        part: Part | None = None,
        timeout_s: float | None = None,
    ) -> Reserved:
        """Lend slots to write those blocks of ``chain`` into that are not stored.

        As many as there is room for by the timeout, in chain order; the rest is counted as dropped.

        Raises:
            InvalidRequest: the namespace is not open.
        """
        return await self._putter.reserve(chain, owner=owner, part=part, timeout_s=timeout_s)

    async def reserve_unnamed(
        self, count: int, length_bytes: int, *, owner: Owner, timeout_s: float | None = None
    ) -> list[Slot]:
        """Lend ``count`` slots that have no name yet: an engine's growing blocks.

        Raises:
            TierFull: there is no room for all of them by the timeout.
            InvalidRequest: the owner has ended.
        """
        return await self._putter.reserve_unnamed(count, length_bytes, owner=owner, timeout_s=timeout_s)

    def commit(
        self,
        chain: PrefixChain,
        slots: Sequence[Slot],
        *,
        owner: Owner,
        checksums: Sequence[int] | None = None,
        part: Part | None = None,
    ) -> list[bool]:
        """Publish written slots as the blocks of ``chain``, one slot per block: READY from now on.

        True: the slot holds the stored block, which the owner leases until ``return_slots`` or
        ``release_owner``. False: the block was stored already, or the slot is not lent to this owner any
        more; a slot that is lent stays so. ``checksums`` None (vram): taken when the block first leaves.

        Raises:
            InvalidRequest: the namespace is not open, lengths differ, or a slot is too small for the block.
        """
        return self._putter.commit(chain, slots, owner=owner, checksums=checksums, part=part)

    def return_slots(self, slots: Sequence[Slot], *, owner: Owner) -> None:
        """Give lent slots back: unnamed ones are freed, published ones lose the owner's lease.

        A slot that is not lent to the owner (its deadline passed, say) is ignored and counted.
        """
        self._putter.return_slots(slots, owner=owner)

    def release(self, lease: LeaseId, *, owner: Owner | None = None) -> None:
        """End a lease. One that has ended, or that is another owner's, is ignored and counted."""
        entries = self._state.leases.end(lease, owner)
        if entries is None:
            self._state.counters.leases["stale_releases"] += 1
        for entry in entries or ():
            self._state.note_release(entry)

    def release_owner(self, owner: Owner) -> None:
        """End an owner and everything it has: leases end, unnamed slots are freed."""
        self._take_effect(*self._state.leases.end_owner(owner))

    async def drop(self, chain: PrefixChain, *, part: Part | None = None) -> int:
        """Forget every copy of these blocks that nothing keeps; returns how many blocks lost one.

        Raises:
            InvalidRequest: the namespace is not open.
        """
        return await self._departure.drop(chain, part=part)

    async def demote(self, chain: PrefixChain, *, part: Part | None = None, timeout_s: float = 10.0) -> int:
        """Write blocks to a tier below and take them out of the top tier; returns how many left it.

        Leased blocks, and those with a child there that is not among them, stay.

        Raises:
            InvalidRequest: the namespace is not open.
        """
        return await self._departure.demote(chain, part=part, timeout_s=timeout_s)

    async def drain(self, *, timeout_s: float) -> int:
        """Take no more blocks, and write down what only the top tier has; returns how many are left over."""
        self._putter.is_draining = True
        return await self._departure.drain(timeout_s=timeout_s)

    async def advance_epoch(self, model: str) -> int:
        """Make every block of a model's present and earlier epochs unreachable; returns the new epoch.

        On this node at once; on nodes that share a remote tier within a quarter second while it answers.

        Raises:
            TierUnavailable: the new epoch cannot be kept across a restart.
        """
        return await self._epochs.advance(model)

    async def erase(self, tenant: TenantId) -> EraseReport:
        """Destroy a tenant's key on every node, and forget its blocks: none of them can be read again.

        Raises:
            InvalidRequest: blocks are not encrypted here.
            TierUnavailable: the master key is not the right one.
        """
        if self._eraser is None:
            raise InvalidRequest(
                "erase: [encryption] is not configured, so there is no key to destroy: drop the blocks"
            )
        return await self._eraser.erase(tenant)

    async def reclaim(self) -> None:
        """Drop a batch of blocks of ended epochs; runs by itself several times a second."""
        await self._epochs.reclaim()

    def epoch(self, model: str) -> int:
        """Return the model's epoch: namespaces of an earlier one are not served."""
        return self._state.directory.epoch(model)

    def namespace(self, digest: NamespaceDigest) -> Namespace | None:
        """Return an open namespace, None if there is none of that digest."""
        return self._state.directory.namespace(digest)

    def namespaces(self) -> list[Namespace]:
        """Return the namespaces that clients opened."""
        return self._state.directory.namespaces()

    async def why(
        self, chain: PrefixChain, *, part: Part | None = None, timeout_s: float | None = None
    ) -> list[BlockReport]:
        """Report on every block of a chain: where it is stored, or why, since when and by whom it is not.

        Raises:
            InvalidRequest: the namespace is not open.
        """
        shelf = self._state.directory.shelf(chain.namespace, part)
        deadline_s = self._state.deadline_s(timeout_s)
        probed, trouble = await self._loader.probe(shelf, chain, deadline_s=deadline_s)
        found_below = {key: name for key, (_, name) in probed.items()}
        return explain(self._state, shelf, chain, found_below=found_below, trouble=trouble)

    async def report_damage(self, chain: PrefixChain, *, part: Part | None = None) -> int:
        """Look again at blocks whose bytes a reader found wrong; returns how many were found damaged.

        Only what is damaged indeed is dropped: a reader with bad memory of its own costs nobody a block.

        Raises:
            InvalidRequest: the namespace is not open.
        """
        shelf = self._state.directory.shelf(chain.namespace, part)
        entries = [shelf.entries[key] for key in chain.keys if key in shelf.entries]
        return len(await check_top_copies(self._state, entries))

    async def flush(self, *, timeout_s: float) -> bool:
        """Wait until everything queued for the lower tiers is written; False if time ran out."""
        return await self._mover.flush(timeout_s=timeout_s)

    def stats(self) -> dict[str, object]:
        """Return counters and occupancy, ready for JSON."""
        state = self._state
        return {
            "tiers": {tier.name: self._occupancy(tier) for tier in state.all_tiers()},
            "live_leases": state.leases.num_leases,
            "owners": state.leases.num_owners,
            "loads": self._loader.num_loads,
            "epochs": state.directory.epochs(),
            "encryption": {"is_on": False} if self._eraser is None else self._eraser.stats(),
            **state.counters.as_dict(),
        }

    async def check(self, *, sample_blocks: int = 64) -> list[str]:
        """Verify the invariants and a sample of checksums; one line per violation, none if all is well."""
        return await check_manager(self._state, sample_blocks=sample_blocks)

    def _occupancy(self, tier: SlotTier | Tier) -> dict[str, object]:
        occupancy: dict[str, object] = {
            "medium": tier.medium.value,
            "capacity_bytes": tier.capacity_bytes,
            "used_bytes": tier.used_bytes,
        }
        if tier.name in self._state.policies:
            occupancy["blocks"] = len(self._state.policies[tier.name])
        for lower in self._state.lower:
            if lower.name == tier.name:
                health = lower.health()
                occupancy |= {"is_up": health.is_up, "reason": health.reason}
                occupancy["queued_blocks"] = self._mover.queue_lengths().get(lower.name, 0)
        return occupancy

    async def _learn(self, tier: Tier, *, is_trusted: bool) -> None:
        """File what a tier holds from an earlier run; what contradicts the directory is dropped."""
        state = self._state
        headers = await tier.scan()
        if not is_trusted:
            await tier.drop([header.block for header in headers])
            return
        with garbage_collection_paused():
            names, strangers = state.directory.adopt(headers, tier.name)
            if names:
                # One "chain" whose first block is the most recently used: policies insert from the back.
                state.policies[tier.name].insert(names[::-1])
        if strangers:
            logger.warning(
                "%s: %d blocks contradict their namespace or are encrypted: dropped",
                tier.name,
                len(strangers),
            )
            await tier.drop(strangers)

    async def _match_by_probe(
        self, shelf: Shelf, chain: PrefixChain, deadline_s: float
    ) -> tuple[list[str], MissReason | None]:
        probed, trouble = await self._loader.probe(shelf, chain, deadline_s=deadline_s)
        tiers: list[str] = []
        state, down = self._state, self._state.down_tiers()
        for key in chain.keys:
            entry = shelf.entries.get(key)
            fastest = None if entry is None else state.fastest(entry, down)
            if fastest is not None:
                tiers.append(fastest)
            elif key in probed:
                tiers.append(probed[key][1])
            else:
                is_down = entry is not None and entry.fastest is not None
                gone = MissReason.UNAVAILABLE if is_down else state.directory.why_gone(shelf.name(key))
                return tiers, trouble or gone
        return tiers, None

    async def _bring_up(
        self, shelf: Shelf, chain: PrefixChain, held: list[BlockEntry], deadline_s: float
    ) -> tuple[list[str], MissReason | None]:
        """Locate, hold and load: (origins of the leading blocks that are READY on top, why not more)."""
        state = self._state
        located = self._loader.locate(shelf, chain, {})
        for item in located:
            state.hold(item.entry, held)
        reason = None
        if len(located) < len(chain):
            probed, trouble = await self._loader.probe(shelf, chain, deadline_s=deadline_s)
            before = len(located)
            located = self._loader.locate(shelf, chain, probed)
            for item in located[before:]:
                state.hold(item.entry, held)
            if len(located) < len(chain):
                missing = shelf.entries.get(chain.keys[len(located)])
                is_down = missing is not None and missing.fastest is not None
                gone = state.directory.why_gone(shelf.name(chain.keys[len(located)]))
                reason = trouble or (MissReason.UNAVAILABLE if is_down else gone)
        num_ready, load_reason = await self._loader.load(shelf, located, held, deadline_s=deadline_s)
        return [item.origin for item in located[:num_ready]], load_reason or reason

    def _all_on_top(self, shelf: Shelf, chain: PrefixChain) -> list[BlockEntry] | None:
        """Return the entries of a chain that is READY in the top tier as a whole, else None."""
        top = self._state.top.name
        get = shelf.entries.get
        entries: list[BlockEntry] = []
        for key in chain.keys:
            entry = get(key)
            if entry is None or entry.fastest != top:
                return None
            entries.append(entry)
        return entries

    def _lease_to(
        self,
        owner: Owner,
        shelf: Shelf,
        chain: PrefixChain,
        entries: Sequence[BlockEntry],
        origins: list[str],
        reason: MissReason | None,
    ) -> Fetched:
        """Lease READY leading blocks to whoever asked for a chain, and count how its lookups ended."""
        state = self._state
        blocks: tuple[FetchedBlock, ...] = ()
        lease = None
        if entries and not state.leases.is_live(owner):
            entries, origins, reason = [], [], MissReason.UNAVAILABLE
        within = self._within_pin_budget(entries)
        if within < len(entries):
            entries, origins, reason = entries[:within], origins[:within], MissReason.QUOTA
        if entries:
            lease = state.leases.grant(owner, entries, state.clock() + state.settings.lease_s)
            blocks = tuple(map(self._fetched, entries, origins))
        self._note_use(entries)
        state.counters.fetch.count(len(chain), origins, reason)
        return Fetched(blocks, lease, reason)

    def _within_pin_budget(self, entries: Sequence[BlockEntry]) -> int:
        """How many of these leading blocks their namespace may lease now."""
        state = self._state
        ratio = state.settings.pin_budget_ratio
        if ratio >= 1.0 or not entries:
            return len(entries)
        left = ratio * state.top.capacity_bytes - state.leases.leased_bytes(entries[0].shelf.namespace)
        for index, entry in enumerate(entries):
            left -= 0 if entry.leases else entry.length_bytes
            if left < 0:
                return index
        return len(entries)

    def _note_use(self, entries: Sequence[BlockEntry]) -> None:
        state = self._state
        names = [entry.name for entry in entries]
        for policy in state.policies.values():
            policy.touch(names)
        self._uses.note(entries)
        if state.settings.write_mode is WriteMode.SECOND_HIT:
            self._mover.write_through(entries)

    def _fetched(self, entry: BlockEntry, origin: str) -> FetchedBlock:
        copy = entry.copies[self._state.top.name]
        assert copy.slot is not None, "a READY copy in the top tier has no slot"
        generation = self._state.top.generation(copy.slot)
        return FetchedBlock(copy.slot, generation, entry.length_bytes, copy.checksum, origin)

    def _take_effect(self, entries: Sequence[BlockEntry], slots: Sequence[Slot]) -> None:
        for entry in entries:
            self._state.note_release(entry)
        self._state.free_slots(slots)

    def _note_fill(self) -> None:
        if self._space.is_above_high_water:
            self._needs_aging.set()

    async def _age_forever(self) -> None:
        while True:
            await self._needs_aging.wait()
            self._needs_aging.clear()
            try:
                await self._space.age()
            except Exception:
                logger.exception("%s: making room in the background failed", self._state.top.name)

    async def _sweep_forever(self) -> None:
        while True:
            await asyncio.sleep(_SWEEP_S)
            try:
                self.expire()
                self._doubt_tiers_that_are_down()
                await self._uses.tell()
            except Exception:
                logger.exception("ending expired leases, or telling tiers of uses, failed")

    def _doubt_tiers_that_are_down(self) -> None:
        """Believe nothing of a shared tier that may have lost everything meanwhile."""
        for tier in self._state.lower:
            if tier.name in self._state.beliefs and not tier.health().is_up:
                self._state.beliefs[tier.name].clear()

    def expire(self) -> None:
        """End leases and lendings that are past their deadline; runs by itself several times a second."""
        entries, slots = self._state.leases.expire(self._state.clock())
        self._state.counters.leases["expired"] += len(entries) + len(slots)
        self._take_effect(entries, slots)
