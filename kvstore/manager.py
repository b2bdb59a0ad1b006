"""BlockManager: the only owner of state."""

from collections.abc import Sequence

from kvstore.keys import NamespaceDigest, PrefixChain
from kvstore.layout import KVLayout, Part
from kvstore.results import Fetched, LeaseId, MissReason, Owner, PrefixMatch, ReservedSlot
from kvstore.tier import Slot


class BlockManager:
    """Signature draft: every method runs on one event loop's thread; bodies follow."""

    async def open(self) -> None:
        """Open the tiers and learn what they hold. Raises TierUnavailable."""
        raise NotImplementedError

    async def close(self, *, drain_s: float = 5.0) -> None:
        """Let queued writes finish for up to ``drain_s`` seconds, then close the tiers."""
        raise NotImplementedError

    def open_namespace(self, digest: NamespaceDigest, layout: KVLayout) -> None:
        """Make a namespace known; needed before its chains are used. Idempotent.

        Raises InvalidRequest if the digest is open with another layout.
        """
        raise NotImplementedError

    def new_owner(self) -> Owner:
        """Return a fresh owner id (one per client connection or engine request)."""
        raise NotImplementedError

    async def match(
        self, chain: PrefixChain, *, part: Part | None = None, timeout_s: float | None = None
    ) -> PrefixMatch:
        """Count the leading blocks that are stored, and say where. No payload moves."""
        raise NotImplementedError

    async def fetch(
        self, chain: PrefixChain, *, owner: Owner, part: Part | None = None, timeout_s: float | None = None
    ) -> Fetched:
        """Make the longest stored prefix ready in slots of the top tier, leased to ``owner``.

        Returns within ``timeout_s`` with what is ready then. The lease ends with ``release``, with
        ``release_owner``, or at its deadline (settings.lease_s).
        """
        raise NotImplementedError

    async def reserve(
        self, chain: PrefixChain, *, owner: Owner, part: Part | None = None, timeout_s: float | None = None
    ) -> list[ReservedSlot]:
        """Lend slots to write the blocks of ``chain`` into that are not stored; present ones are left out.

        As many as there is room for, in chain order; the rest is counted as dropped.
        """
        raise NotImplementedError

    async def reserve_unnamed(
        self, count: int, length_bytes: int, *, owner: Owner, timeout_s: float | None = None
    ) -> list[Slot]:
        """Lend ``count`` slots that have no name yet (an engine's growing blocks). Raises TierFull."""
        raise NotImplementedError

    def commit(
        self,
        chain: PrefixChain,
        slots: Sequence[Slot],
        *,
        owner: Owner,
        checksums: Sequence[int] | None = None,
        part: Part | None = None,
    ) -> list[bool]:
        """Publish written slots as the blocks of ``chain`` (one slot per block): READY from now on.

        Slots were lent to ``owner`` by ``reserve`` or ``reserve_unnamed``. True: the slot now holds the
        stored block, under a lease of the owner that ends with ``release_owner`` (engines go on reading it)
        or ``return_slots``. False: the block was already present; the slot stays lent to the owner.
        ``checksums`` None (vram): taken when the block first leaves the device.
        """
        raise NotImplementedError

    def return_slots(self, slots: Sequence[Slot], *, owner: Owner) -> None:
        """Give lent slots back: unpublished ones are freed, published ones lose the owner's lease."""
        raise NotImplementedError

    def release(self, lease: LeaseId) -> None:
        """End a lease. A second release is ignored and counted."""
        raise NotImplementedError

    def release_owner(self, owner: Owner) -> None:
        """End everything an owner holds: leases end, lent slots are freed. Called when a client dies."""
        raise NotImplementedError

    async def prefetch(
        self, chain: PrefixChain, *, part: Part | None = None, timeout_s: float | None = None
    ) -> int:
        """Load stored leading blocks into the top tier without a lease; returns how many are there."""
        raise NotImplementedError

    async def drop(self, chain: PrefixChain, *, part: Part | None = None) -> int:
        """Forget every copy of these blocks that is not leased; returns how many blocks had one."""
        raise NotImplementedError

    async def flush(self, *, timeout_s: float) -> bool:
        """Wait until the write-through queues are empty; False if time ran out."""
        raise NotImplementedError

    def stats(self) -> dict[str, object]:
        """Return counters and occupancy, ready for JSON (keys documented in docs/stats.md)."""
        raise NotImplementedError

    async def check(self, *, sample_blocks: int = 64) -> list[str]:
        """Verify the invariants of DESIGN and a sample of checksums; one line per violation, [] if none."""
        raise NotImplementedError


__all__ = ["BlockManager", "MissReason"]
