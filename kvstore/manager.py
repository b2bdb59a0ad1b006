"""BlockManager: the only owner of state; matches, fetches, puts, leases, drops and checks blocks."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

from kvstore.branches import Branches
from kvstore.changes import ChangedRun, CopyChanges, ready_changes
from kvstore.closing import close_tiers
from kvstore.departing import Departure
from kvstore.directory import BlockEntry
from kvstore.epoch_file import EpochFile
from kvstore.epochs import EpochKeeper
from kvstore.erasing import Encryption, Eraser
from kvstore.errors import InvalidRequest
from kvstore.explain import explain
from kvstore.fetching import Fetcher
from kvstore.granting import Granter, ReadyCopies
from kvstore.hints import Hints
from kvstore.hottest import TOLD, TOLD_IN_STATS, branches_answer, watched_namespaces
from kvstore.idle_work import IdleWork
from kvstore.inspection import check_manager, check_top_copies
from kvstore.keys import BlockKey, Namespace, NamespaceDigest, PrefixChain
from kvstore.layout import Part
from kvstore.learning import Learner
from kvstore.loading import Loader
from kvstore.mover import Mover
from kvstore.occupancy import occupancy_stats
from kvstore.policy import EvictionPolicy, GittinsPolicy, NewPolicy
from kvstore.policy_file import PolicyFile
from kvstore.policy_keeping import PolicyKeeper, policies_of
from kvstore.policy_plan import PolicyPlan
from kvstore.presence import find_present, find_present_at_once
from kvstore.putting import Putter
from kvstore.recency import Uses
from kvstore.results import (
    BlockReport,
    EraseReport,
    Fetched,
    LeaseId,
    MatchedLease,
    Owner,
    PrefixMatch,
    Reserved,
)
from kvstore.size_curve import SizeCurve
from kvstore.sizing import largest_size_bytes, size_answer
from kvstore.space import Space
from kvstore.state import ManagerSettings, State
from kvstore.tenant import TenantId
from kvstore.tier import Medium, Slot, SlotTier, Tier
from kvstore.upkeep import Upkeep

logger = logging.getLogger(__name__)

_LAST_MOVES_S = 1.0
"""How long at least ``close`` waits for moves under way before it leaves them to their tier, which abandons
them: what draining left of its time, if that is more."""


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
        new_policy: NewPolicy | PolicyPlan = GittinsPolicy,
        epoch_file: EpochFile | None = None,
        policy_file: PolicyFile | None = None,
        encryption: Encryption | None = None,
        new_size_curve: Callable[[int], SizeCurve] | None = None,
        branches: Branches | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        given = settings or ManagerSettings()
        new_policies = partial(policies_of, plan=new_policy)
        self._state = State.over(top, lower, settings=given, new_policies=new_policies, clock=clock)
        self._state.branches = branches
        if new_size_curve is not None:
            self._state.size_curve = new_size_curve(largest_size_bytes(self._state))
        self.afterwards = self._state.afterwards
        self._mover = Mover(self._state)
        self._space = Space(self._state, self._mover)
        self._loader = Loader(self._state, self._space, self._mover.write_through)
        self._epochs = EpochKeeper(self._state, self._space, epoch_file)
        self._eraser = None if encryption is None else Eraser(self._state, self._space, encryption)
        self._learner = Learner(self._state, self._epochs)
        self._policies = PolicyKeeper(self._state, policy_file)
        self._uses = Uses(self._state)
        self._granter = Granter(self._state, self._uses, self._mover)
        self._upkeep = Upkeep(self._state, self._space, self._uses, self._learner, self.expire)
        self._maintenance: list[asyncio.Task[None]] = []
        self._closing: asyncio.Future[None] | None = None
        self._fetcher = Fetcher(self._state, self._loader, self._granter, self._upkeep.note_fill)
        self.note_reads = self._fetcher.note_reads
        self._putter = Putter(self._state, self._space, self._mover, self._uses, self._upkeep.note_fill)
        self._departure = Departure(self._state, self._space, self._mover)

    @property
    def putter(self) -> Putter:
        """What lends slots and publishes what was written into them, in more ways than are offered here."""
        return self._putter

    def leave_for_idle(self, idle_work: IdleWork) -> None:
        """Leave to it what can wait until the event loop has nothing else to do."""
        self._state.leave_for_idle(idle_work)

    async def open(self) -> None:
        """Open the tiers and learn what they hold.

        Raises:
            TierUnavailable: a tier cannot be opened; those opened before it are closed again.
        """
        async with contextlib.AsyncExitStack() as opened:
            for tier in self._state.all_tiers():
                await tier.open()
                opened.push_async_callback(tier.close)
            if self._eraser is not None:
                await self._eraser.open()
            await self._learner.learn()
            await self._policies.open()
            opened.pop_all()
        self._mover.start()
        loops = [*self._upkeep.loops(), self._epochs.poll_forever(), self._policies.keep_forever()]
        if self._eraser is not None:
            loops.append(self._eraser.poll_forever())
        self._maintenance = [asyncio.create_task(loop) for loop in loops]

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
        now_s = asyncio.get_running_loop().time
        until_s = now_s() + drain_s
        await self.drain(timeout_s=drain_s)
        for task in self._maintenance:
            task.cancel()
        await asyncio.gather(*self._maintenance, return_exceptions=True)
        # All wait for the same medium, if for any: one after the other they would wait for it several times.
        patience_s = max(_LAST_MOVES_S, until_s - now_s())
        _, has_loaded = await asyncio.gather(
            self._mover.stop(patience_s=patience_s), self._loader.stop(timeout_s=patience_s)
        )
        if not has_loaded:
            logger.warning("closing: loads have not ended after %.1f s: abandoned", patience_s)
        await self._uses.tell()
        await self._policies.close()
        await self._policies.keep()
        if self._eraser is not None:
            patience_s = max(_LAST_MOVES_S, until_s - now_s())
            await asyncio.wait([asyncio.ensure_future(self._eraser.close())], timeout=patience_s)
        await close_tiers(self._state.lower)
        await close_tiers([self._state.top])

    def open_namespace(self, namespace: Namespace, *, owner: Owner | None = None) -> NamespaceDigest:
        """Make a namespace known; needed before its chains are used. Idempotent. Returns its digest.

        It is remembered while its owner lives or it has blocks, and longer while there are not too many.
        """
        state = self._state
        for tier in state.lower:
            tier.open_namespace(namespace)
        num_before = state.directory.num_opened
        digest = state.directory.open_namespace(namespace, in_use=state.leases.used_namespaces)
        if state.directory.num_opened > num_before:  # else its model's epoch is followed already
            self._epochs.note_namespace()
        if owner is not None and state.leases.is_live(owner):
            state.leases.note_namespace(owner, digest)
        return digest

    def new_owner(self, *, may_freeze: bool = False) -> Owner:
        """Return a fresh owner: one per client connection, or per request of an engine.

        ``may_freeze``: what is lent to it cannot be taken back, so it gets a share of the slots only.
        """
        owner = self._state.leases.new_owner()
        if may_freeze:
            self._state.leases.note_may_freeze(owner)
        return owner

    async def match(
        self, chain: PrefixChain, *, part: Part | None = None, timeout_s: float | None = None
    ) -> PrefixMatch:
        """Count the leading blocks that are stored, and say where. No payload moves, and it is no use.

        Raises:
            InvalidRequest: the namespace is not open.
        """
        return await self._fetcher.match(chain, part=part, timeout_s=timeout_s)

    def match_at_once(self, chain: PrefixChain, *, part: Part | None = None) -> PrefixMatch | None:
        """As ``match``, but None where a shared tier would have to be asked.

        Raises:
            InvalidRequest: the namespace is not open.
        """
        return self._fetcher.match_at_once(chain, part=part)

    async def match_and_lease(
        self, chain: PrefixChain, *, owner: Owner, part: Part | None = None, timeout_s: float | None = None
    ) -> MatchedLease:
        """Match, and lease the leading blocks that are in the top tier, up to the first that is not.

        Raises:
            InvalidRequest: the namespace is not open.
        """
        found = await self.match(chain, part=part, timeout_s=timeout_s)
        shelf = self._state.directory.shelf(chain.namespace, part)
        return MatchedLease(found, *self._granter.leading_on_top(owner, shelf, chain[: found.blocks]))

    def exists_at_once(
        self, namespace: NamespaceDigest, keys: Sequence[BlockKey], *, part: Part | None = None
    ) -> list[bool] | None:
        """As ``exists``, but None where a shared tier would have to be asked. Raises as it does."""
        return find_present_at_once(self._state, self._state.directory.shelf(namespace, part), keys)

    async def exists(
        self,
        namespace: NamespaceDigest,
        keys: Sequence[BlockKey],
        *,
        part: Part | None = None,
        timeout_s: float | None = None,
    ) -> list[bool]:
        """Say for each key whether its block is stored; any keys of the namespace, in any order.

        Raises:
            InvalidRequest: the namespace is not open.
        """
        shelf = self._state.directory.shelf(namespace, part)
        deadline_s = self._state.deadline_s(timeout_s)
        return await find_present(self._state, self._loader, shelf, keys, deadline_s=deadline_s)

    async def fetch(
        self,
        chain: PrefixChain,
        *,
        owner: Owner,
        part: Part | None = None,
        timeout_s: float | None = None,
        hints: Hints | None = None,
    ) -> Fetched:
        """Make the longest stored prefix READY in slots of the top tier, leased to ``owner``.

        Returns by its timeout with what is ready then. The lease ends with ``release``, with
        ``release_owner``, or at its deadline (``lease_s`` of the settings).

        Raises:
            InvalidRequest: the namespace is not open.
        """
        return await self._fetcher.fetch(chain, owner=owner, part=part, timeout_s=timeout_s, hints=hints)

    def fetch_at_once(
        self, chain: PrefixChain, *, owner: Owner, part: Part | None = None, hints: Hints | None = None
    ) -> ReadyCopies | None:
        """As ``fetch``, but None unless all of the chain is READY in the top tier and may be leased.

        Raises:
            InvalidRequest: the namespace is not open.
        """
        return self._fetcher.fetch_at_once(chain, owner=owner, part=part, hints=hints)

    def fetch_leading_at_once(
        self, chain: PrefixChain, *, owner: Owner, part: Part | None = None, hints: Hints | None = None
    ) -> Fetched:
        """Lease the leading blocks of a chain that are READY in the top tier now, however few; ask nobody.

        Raises:
            InvalidRequest: the namespace is not open.
        """
        return self._fetcher.fetch_leading_at_once(chain, owner=owner, part=part, hints=hints)

    def peek_at_once(
        self, chain: PrefixChain, *, part: Part | None = None, hints: Hints | None = None
    ) -> ReadyCopies | None:
        """Find a chain that is READY in the top tier as a whole, leasing nothing; None if it is not.

        Raises:
            InvalidRequest: the namespace is not open.
        """
        return self._fetcher.peek_at_once(chain, part=part, hints=hints)

    async def prefetch(
        self, chain: PrefixChain, *, part: Part | None = None, timeout_s: float | None = None
    ) -> int:
        """Load stored leading blocks into the top tier without a lease; returns how many are there.

        Raises:
            InvalidRequest: the namespace is not open.
        """
        return await self._fetcher.prefetch(chain, part=part, timeout_s=timeout_s)

    async def reserve(
        self,
        chain: PrefixChain,
        *,
        owner: Owner,
        part: Part | None = None,
        timeout_s: float | None = None,
        hints: Hints | None = None,
    ) -> Reserved:
        """Lend slots to write those blocks of ``chain`` into that are not stored.

        As many as there is room for by the timeout, in chain order; the rest is counted as dropped.

        Raises:
            InvalidRequest: the namespace is not open.
        """
        return await self._putter.reserve(chain, owner=owner, part=part, timeout_s=timeout_s, hints=hints)

    def reserve_at_once(
        self, chain: PrefixChain, *, owner: Owner, part: Part | None = None, hints: Hints | None = None
    ) -> Reserved | None:
        """As ``reserve``, but None where room would have to be made first.

        Raises:
            InvalidRequest: the namespace is not open.
        """
        return self._putter.reserve_at_once(chain, owner=owner, part=part, hints=hints)

    def note_hints(self, chain: PrefixChain, hints: Hints, *, part: Part | None = None) -> None:
        """Tell the policies more of the future of stored blocks; it is no use of them.

        Raises:
            InvalidRequest: the namespace is not open.
        """
        self._putter.note_hints(chain, hints, part=part)

    async def reserve_unnamed(
        self, count: int, length_bytes: int, *, owner: Owner, timeout_s: float | None = None
    ) -> list[Slot]:
        """Lend ``count`` slots that have no name yet: an engine's growing blocks.

        Raises:
            TierFull: there is no room for all of them by the timeout.
            InvalidRequest: the owner has ended.
        """
        return await self._putter.reserve_unnamed(count, length_bytes, owner=owner, timeout_s=timeout_s)

    def reserve_unnamed_at_once(
        self, count: int, length_bytes: int, *, owner: Owner, is_pressing: bool = False
    ) -> list[Slot] | None:
        """As ``reserve_unnamed``, but None where it would have to wait for blocks to be written below.

        If it ``is_pressing``, blocks leave that are stored nowhere else.

        Raises:
            InvalidRequest: the owner has ended.
        """
        return self._putter.reserve_unnamed_at_once(count, length_bytes, owner=owner, is_pressing=is_pressing)

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
        ``release_owner``. False: the block was stored already, its epoch has ended, or the slot is not lent
        to this owner any more; a slot that is lent stays so. ``checksums`` None (vram): taken when the block
        first leaves.

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

    def renew(self, lease: LeaseId, *, owner: Owner) -> float:
        """Have a lease last its full time from now; returns the seconds, 0.0 if there is no such lease."""
        return self._granter.renew(lease, owner)

    def has_anything(self, owner: Owner) -> bool:
        """Whether an owner has a lease or a lent slot."""
        return self._state.leases.has_anything(owner)

    @property
    def num_kept_slots(self) -> int:
        """Slots of the top tier that leases and lending keep: no eviction gets them."""
        return self._state.leases.num_kept

    @property
    def lease_s(self) -> float:
        """Seconds that a lease lasts which is neither renewed nor released."""
        return self._state.settings.lease_s

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
            InvalidRequest: no namespace can name such a model.
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

    def has_ended(self, namespace: NamespaceDigest) -> bool:
        """Whether the epoch of a namespace has ended: nothing of it is stored or served."""
        return self._state.directory.has_ended(namespace)

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
        probed = await self._loader.probe(shelf, chain, deadline_s=deadline_s)
        found_below = {key: name for key, (_, name) in probed.found.items()}
        return explain(self._state, shelf, chain, found_below=found_below, unknown=probed.unknown)

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
        """Write down what is queued for the lower tiers, or waits for it in memory; False if time ran out."""
        return await self._departure.flush(timeout_s=timeout_s)

    def note_changes(self, changes: CopyChanges | None) -> None:
        """Have every copy that becomes READY or goes noted there from now on; None: nowhere."""
        self._state.directory.changes = changes

    def ready_copies(self, namespace: NamespaceDigest) -> Iterator[ChangedRun]:
        """Yield the certain READY copies of a namespace one by one, each as it is when it is yielded."""
        return ready_changes(self._state.directory.entries_in(namespace))

    async def change_policy(self, text: str) -> str:
        """Change policies as a plan's text says; returns the one before. Blocks and leases stay.

        Cancelled, it goes on.

        Raises:
            InvalidRequest: it is no plan, or names a tier that has no policy.
        """
        return await self._policies.change(text)

    def policy_of(self, tier: str) -> EvictionPolicy:
        """Return the policy of one tier."""
        return self._state.policies[tier]

    def media(self) -> dict[str, Medium]:
        """Return what each tier is made of."""
        return {tier.name: tier.medium for tier in self._state.all_tiers()}

    def stats(self) -> dict[str, object]:
        """Return counters and occupancy, ready for JSON."""
        return {
            **occupancy_stats(self._state, self._mover.queue_lengths()),
            "loads": self._loader.num_loads,
            "encryption": {"is_on": False} if self._eraser is None else self._eraser.stats(),
            "size_curve": size_answer(self._state),
            "branches": branches_answer(self._state, limit=TOLD_IN_STATS),
            **self._state.counters.as_dict(),
        }

    def size_curve(self, namespaces: Iterable[NamespaceDigest] | None = None) -> dict[str, object]:
        """Return estimated hit rates by size, of all lookups or those in some namespaces, for JSON."""
        return size_answer(self._state, namespaces)

    def watched_namespaces(self) -> list[NamespaceDigest]:
        """Return the namespaces that hit rates by size, or branches, are known of."""
        return watched_namespaces(self._state)

    def branches(
        self, namespaces: Iterable[NamespaceDigest] | None = None, *, limit: int = TOLD
    ) -> dict[str, object]:
        """Return the branches that were looked up most lately, of all namespaces or of some, for JSON."""
        return branches_answer(self._state, namespaces, limit=limit)

    async def check(self, *, sample_blocks: int = 64) -> list[str]:
        """Verify the invariants and a sample of checksums; one line per violation, none if all is well."""
        return await check_manager(self._state, sample_blocks=sample_blocks)

    def _take_effect(self, entries: Sequence[BlockEntry], slots: Sequence[Slot]) -> None:
        for entry in entries:
            self._state.note_release(entry)
        self._state.free_slots(slots)

    def expire(self) -> None:
        """End leases and lendings that are past their deadline; runs by itself several times a second.

        A lent slot past its deadline cannot be committed any more: it is freed with its owner, if not before.
        """
        entries, num_overdue = self._state.leases.expire(self._state.clock())
        self._state.counters.leases["expired"] += len(entries) + num_overdue
        self._take_effect(entries, ())
