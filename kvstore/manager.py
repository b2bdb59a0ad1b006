"""BlockManager: the only owner of state; matches, fetches, puts, leases, drops and checks blocks."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence

from kvstore.directory import BlockEntry, Copy, CopyState, Directory, Shelf
from kvstore.errors import InvalidRequest, TierFull
from kvstore.garbage import garbage_collection_paused
from kvstore.inspection import check_manager, check_top_copies
from kvstore.keys import BlockKey, Namespace, NamespaceDigest, PrefixChain
from kvstore.layout import Part
from kvstore.loading import Loader
from kvstore.miss import MissReason
from kvstore.mover import Mover
from kvstore.policy import EvictionPolicy, LruPolicy
from kvstore.recency import Uses
from kvstore.results import Fetched, FetchedBlock, LeaseId, Owner, PrefixMatch, Reserved, ReservedSlot
from kvstore.space import Space
from kvstore.state import ManagerSettings, State
from kvstore.tier import Slot, SlotTier, Tier

logger = logging.getLogger(__name__)

_SWEEP_S = 0.25
"""How often expired leases are looked for when no call does it."""

_STUCK_AFTER_S = 1.0
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
        self._uses = Uses(self._state)
        self._maintenance: list[asyncio.Task[None]] = []
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
            for lower in state.lower:
                await self._learn(lower)
            opened.pop_all()
        self._mover.start()
        self._maintenance = [
            asyncio.create_task(self._expire_forever(), name="manager-expire"),
            asyncio.create_task(self._age_forever(), name="manager-age"),
        ]

    async def close(self, *, drain_s: float = 5.0) -> None:
        """Let queued writes finish for up to ``drain_s`` seconds, then close the tiers. Idempotent."""
        if not self._maintenance:
            return
        await self._mover.flush(timeout_s=drain_s)
        for task in self._maintenance:
            task.cancel()
        await asyncio.gather(*self._maintenance, return_exceptions=True)
        self._maintenance = []
        await self._mover.stop(patience_s=_STUCK_AFTER_S)
        await self._loader.stop(patience_s=_STUCK_AFTER_S)
        await self._uses.tell()
        for tier in reversed(self._state.all_tiers()):
            await tier.close()

    def open_namespace(self, namespace: Namespace) -> NamespaceDigest:
        """Make a namespace known; needed before its chains are used. Idempotent. Returns its digest."""
        for tier in self._state.lower:
            tier.open_namespace(namespace)
        return self._state.directory.open_namespace(namespace)

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
        entries = shelf.entries
        for key in chain.keys:
            entry = entries.get(key)
            if entry is None or entry.fastest is None:
                break
            tiers.append(entry.fastest)
        reason = None
        if len(tiers) < len(chain):
            tiers, reason = await self._match_by_probe(shelf, chain, self._deadline_s(timeout_s))
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
        deadline_s = self._deadline_s(timeout_s)
        shelf = state.directory.shelf(chain.namespace, part)
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
        with self._state.holding() as held:
            origins, _ = await self._bring_up(shelf, chain, held, self._deadline_s(timeout_s))
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
        state = self._state
        shelf = state.directory.shelf(chain.namespace, part)
        missing = self._missing(shelf, chain)
        present = len(chain) - len(missing)
        state.counters.puts["present"] += present
        self._touch(shelf, chain, len(chain))
        if not missing:
            return Reserved((), present)
        deadline_s = self._deadline_s(timeout_s)
        await self._space.make_room_on_top(shelf.length_bytes, len(missing), deadline_s=deadline_s)
        if not state.leases.is_live(owner):
            return Reserved((), present)
        slots = state.take_slots(shelf.length_bytes, len(missing))
        state.counters.puts["dropped"] += len(missing) - len(slots)
        self._lend(owner, slots, shelf.length_bytes)
        lent = [
            ReservedSlot(index, slot, state.top.generation(slot))
            for index, slot in zip(missing, slots, strict=False)
        ]
        return Reserved(tuple(lent), present)

    async def reserve_unnamed(
        self, count: int, length_bytes: int, *, owner: Owner, timeout_s: float | None = None
    ) -> list[Slot]:
        """Lend ``count`` slots that have no name yet: an engine's growing blocks.

        Raises:
            TierFull: there is no room for all of them by the timeout.
            InvalidRequest: the owner has ended.
        """
        state = self._state
        deadline_s = self._deadline_s(timeout_s)
        await self._space.make_room_on_top(length_bytes, count, deadline_s=deadline_s)
        if not state.leases.is_live(owner):
            raise InvalidRequest(f"owner {owner} has ended")
        if not state.top.has_room(length_bytes, count):
            raise TierFull(
                f"{state.top.name}: no {count} slots of {length_bytes} bytes free: "
                f"{state.top.used_bytes} of {state.top.capacity_bytes} bytes are in use and cannot leave"
            )
        slots = state.top.allocate(length_bytes, count)
        self._lend(owner, slots, length_bytes)
        return slots

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
        state = self._state
        shelf = state.directory.shelf(chain.namespace, part)
        if len(slots) != len(chain) or (checksums is not None and len(checksums) != len(chain)):
            raise InvalidRequest(f"commit: {len(chain)} blocks, {len(slots)} slots: one slot per block")
        self._refuse_small_slots(slots, owner, shelf.length_bytes)
        published: list[BlockEntry] = []
        results: list[bool] = []
        parent = chain.parent or BlockKey(chain.namespace)
        for index, (key, slot) in enumerate(zip(chain.keys, slots, strict=True)):
            entry = state.directory.entry(shelf, key, parent, chain.start + index)
            payload_sum = checksums[index] if checksums is not None else None
            is_new = self._publish(shelf, entry, slot, owner=owner, payload_sum=payload_sum)
            results.append(is_new)
            if is_new:
                published.append(entry)
            parent = key
        state.publish_top(published)
        state.counters.puts["stored"] += len(published)
        state.counters.puts["duplicate"] += len(chain) - len(published)
        self._mover.write_through(published)
        self._note_fill()
        return results

    def return_slots(self, slots: Sequence[Slot], *, owner: Owner) -> None:
        """Give lent slots back: unnamed ones are freed, published ones lose the owner's lease.

        A slot that is not lent to the owner (its deadline passed, say) is ignored and counted.
        """
        state = self._state
        for slot in slots:
            lent = state.leases.take_back(owner, slot)
            if lent is None:
                state.counters.leases["stale_returns"] += 1
            elif lent.entry is None:
                self._free_slots([slot])
            else:
                state.note_release(lent.entry)

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
        state = self._state
        shelf = state.directory.shelf(chain.namespace, part)
        entries = [shelf.entries[key] for key in reversed(chain.keys) if key in shelf.entries]
        dropped: set[BlockEntry] = set()
        for entry in entries:
            if entry.is_ready(state.top.name) and not entry.is_kept:
                state.forget_copy(entry, state.top.name, MissReason.DROPPED)
                dropped.add(entry)
        for tier in state.lower:
            going = [entry for entry in entries if entry.is_ready(tier.name) and not entry.is_kept]
            await self._space.drop_copies(tier, going, MissReason.DROPPED)
            dropped.update(going)
            if tier.is_shared:
                leased = {entry.key for entry in entries if entry.is_kept}
                await tier.drop([shelf.block(key) for key in chain.keys if key not in leased])
        return len(dropped)

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

    async def _learn(self, tier: Tier) -> None:
        """File what a tier holds from an earlier run; what contradicts the directory is dropped."""
        state = self._state
        headers = await tier.scan()
        with garbage_collection_paused():
            names, strangers = state.directory.adopt(headers, tier.name)
            if names:
                # One "chain" whose first block is the most recently used: policies insert from the back.
                state.policies[tier.name].insert(names[::-1])
        if strangers:
            logger.warning("%s: %d blocks contradict their namespace: dropped", tier.name, len(strangers))
            await tier.drop(strangers)

    async def _match_by_probe(
        self, shelf: Shelf, chain: PrefixChain, deadline_s: float
    ) -> tuple[list[str], MissReason | None]:
        probed, trouble = await self._loader.probe(shelf, chain, deadline_s=deadline_s)
        tiers: list[str] = []
        for key in chain.keys:
            entry = shelf.entries.get(key)
            if entry is not None and entry.fastest is not None:
                tiers.append(entry.fastest)
            elif key in probed:
                tiers.append(probed[key][1])
            else:
                gone = self._state.directory.why_gone(shelf.name(key))
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
                reason = trouble or state.directory.why_gone(shelf.name(chain.keys[len(located)]))
        num_ready, load_reason = await self._loader.load(shelf, located, deadline_s=deadline_s)
        return [item.origin for item in located[:num_ready]], load_reason or reason

    def _publish(
        self, shelf: Shelf, entry: BlockEntry, slot: Slot, *, owner: Owner, payload_sum: int | None
    ) -> bool:
        state = self._state
        lent = state.leases.lent(owner, slot)
        if lent is None or lent.entry is not None or state.top.name in entry.copies:
            state.directory.prune(entry)
            return False
        state.directory.set_copy(entry, state.top.name, Copy(CopyState.READY, slot, payload_sum))
        state.leases.publish(owner, slot, entry)
        return True

    def _refuse_small_slots(self, slots: Sequence[Slot], owner: Owner, length_bytes: int) -> None:
        for slot in slots:
            lent = self._state.leases.lent(owner, slot)
            if lent is not None and lent.length_bytes < length_bytes:
                raise InvalidRequest(
                    f"commit: slot {slot} was lent for {lent.length_bytes} bytes, a block has {length_bytes}"
                )

    def _missing(self, shelf: Shelf, chain: PrefixChain) -> list[int]:
        entries = shelf.entries
        missing: list[int] = []
        for index, key in enumerate(chain.keys):
            entry = entries.get(key)
            if entry is None or (entry.fastest is None and entry.loading is None):
                missing.append(index)
        return missing

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
        if entries:
            lease = state.leases.grant(owner, entries, state.clock() + state.settings.lease_s)
            blocks = tuple(map(self._fetched, entries, origins))
        for policy in state.policies.values():
            policy.touch([entry.name for entry in entries])
        self._uses.note(entries)
        state.counters.fetch.count(len(chain), origins, reason)
        return Fetched(blocks, lease, reason)

    def _fetched(self, entry: BlockEntry, origin: str) -> FetchedBlock:
        copy = entry.copies[self._state.top.name]
        assert copy.slot is not None, "a READY copy in the top tier has no slot"
        generation = self._state.top.generation(copy.slot)
        return FetchedBlock(copy.slot, generation, entry.length_bytes, copy.checksum, origin)

    def _touch(self, shelf: Shelf, chain: PrefixChain, num_blocks: int) -> None:
        entries = shelf.entries
        used = [entries[key] for key in chain.keys[:num_blocks] if key in entries]
        self._uses.note(used)
        names = [entry.name for entry in used]
        for policy in self._state.policies.values():
            policy.touch(names)

    def _lend(self, owner: Owner, slots: Sequence[Slot], length_bytes: int) -> None:
        deadline_s = self._state.clock() + self._state.settings.lease_s
        self._state.leases.lend(owner, slots, length_bytes=length_bytes, deadline_s=deadline_s)
        self._note_fill()

    def _free_slots(self, slots: Sequence[Slot]) -> None:
        if slots:
            self._state.top.free(slots)
            self._state.freed.set()

    def _take_effect(self, entries: Sequence[BlockEntry], slots: Sequence[Slot]) -> None:
        for entry in entries:
            self._state.note_release(entry)
        self._free_slots(slots)

    def _deadline_s(self, timeout_s: float | None) -> float:
        return self._state.clock() + (self._state.settings.timeout_s if timeout_s is None else timeout_s)

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

    async def _expire_forever(self) -> None:
        while True:
            await asyncio.sleep(_SWEEP_S)
            try:
                self.expire()
                await self._uses.tell()
            except Exception:
                logger.exception("ending expired leases, or telling tiers of uses, failed")

    def expire(self) -> None:
        """End leases and lendings that are past their deadline; runs by itself several times a second."""
        entries, slots = self._state.leases.expire(self._state.clock())
        self._state.counters.leases["expired"] += len(entries) + len(slots)
        self._take_effect(entries, slots)
