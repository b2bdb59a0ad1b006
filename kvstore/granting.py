"""Granter: leases of READY blocks in the top tier, within the share of it that each namespace may keep."""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from kvstore.directory import BlockEntry, Copy, Shelf
from kvstore.hints import Hints
from kvstore.keys import PrefixChain
from kvstore.miss import MissReason
from kvstore.mover import Mover
from kvstore.recency import Uses
from kvstore.results import Fetched, FetchedBlock, LeaseId, Owner
from kvstore.state import State, WriteMode


class ReadyCopies(NamedTuple):
    """Copies in the top tier of a whole chain: each has slot, generation and checksum.

    Without a lease they may leave at any time: a reader checks generation and checksum after its copy.
    """

    copies: Sequence[Copy]
    length_bytes: int
    origin: str
    lease: LeaseId | None


class Granter:
    """Grants, renews and ends the leases of one manager."""

    def __init__(self, state: State, uses: Uses, mover: Mover) -> None:
        self._state = state
        self._uses = uses
        self._mover = mover

    def fetched(
        self,
        owner: Owner,
        chain: PrefixChain,
        entries: Sequence[BlockEntry],
        origins: list[str],
        reason: MissReason | None,
        *,
        hints: Hints | None = None,
    ) -> Fetched:
        """Lease READY leading blocks to whoever fetched a chain, and count how its lookups ended."""
        state = self._state
        if entries and not state.leases.is_live(owner):
            entries, origins, reason = [], [], MissReason.UNAVAILABLE
        within = self._within_pin_budget(entries)
        if within < len(entries):
            entries, origins, reason = entries[:within], origins[:within], MissReason.QUOTA
        lease = self._grant(owner, entries)
        self._note_use(entries, hints)
        state.counters.fetch.count(len(chain), origins, reason, block_tokens=chain.block_tokens)
        return Fetched(tuple(map(self._block, entries, origins)), lease, reason)

    def ready(
        self, owner: Owner, entries: Sequence[BlockEntry], block_tokens: int, hints: Hints | None = None
    ) -> ReadyCopies | None:
        """Lease a chain that is READY in the top tier as a whole; None if it may not be leased."""
        if not self._state.leases.is_live(owner) or self._within_pin_budget(entries) < len(entries):
            return None
        return self._found_on_top(entries, self._grant(owner, entries), block_tokens, hints)

    def seen(
        self, entries: Sequence[BlockEntry], block_tokens: int, hints: Hints | None = None
    ) -> ReadyCopies:
        """Point to a chain that is READY in the top tier as a whole, and lease nothing; it is a use."""
        self._state.list_soon(entries)
        return self._found_on_top(entries, None, block_tokens, hints)

    def note_told(
        self, entries: Sequence[BlockEntry], num_blocks: int, block_tokens: int, hints: Hints | None
    ) -> None:
        """Count blocks that a client found on top without asking, and note the use of those still there."""
        self._state.counters.direct_blocks += num_blocks
        self._state.counters.fetch.count_hits(num_blocks, self._state.top.name, block_tokens=block_tokens)
        self._note_use(entries, hints)

    def _found_on_top(
        self,
        entries: Sequence[BlockEntry],
        lease: LeaseId | None,
        block_tokens: int,
        hints: Hints | None,
    ) -> ReadyCopies:
        top = self._state.top.name
        copies = [entry.copies[top] for entry in entries]
        for copy in copies:
            if copy.generation is None:
                self._note_generation(copy)
        self._state.afterwards.do(partial(self._note_hits, entries, hints, block_tokens))
        return ReadyCopies(copies, entries[0].length_bytes, top, lease)

    def _note_hits(self, entries: Sequence[BlockEntry], hints: Hints | None, block_tokens: int) -> None:
        self._note_use(entries, hints)
        top = self._state.top.name
        self._state.counters.fetch.count_hits(len(entries), top, block_tokens=block_tokens)

    def leading_on_top(
        self, owner: Owner, shelf: Shelf, chain: PrefixChain
    ) -> tuple[tuple[FetchedBlock, ...], LeaseId | None, MissReason | None]:
        """Lease the leading blocks of a chain that are READY in the top tier now; it is no use of them.

        Returns them, their lease, and why no more of those that are there are leased.
        """
        state = self._state
        top = state.top.name
        entries: list[BlockEntry] = []
        for key in chain.keys:
            entry = shelf.entries.get(key)
            if entry is None or entry.fastest != top:
                break
            entries.append(entry)
        reason = None
        if entries and not state.leases.is_live(owner):
            entries, reason = [], MissReason.UNAVAILABLE
        within = self._within_pin_budget(entries)
        if within < len(entries):
            entries, reason = entries[:within], MissReason.QUOTA
        lease = self._grant(owner, entries)
        return tuple([self._block(entry, top) for entry in entries]), lease, reason

    def lease_leading(
        self, owner: Owner, shelf: Shelf, chain: PrefixChain, hints: Hints | None = None
    ) -> Fetched:
        """As ``leading_on_top``, but a use of what was found, and counted as a fetch of that."""
        blocks, lease, _ = self.leading_on_top(owner, shelf, chain)
        if not blocks:
            return Fetched((), None, None)
        entries = [shelf.entries[key] for key in chain.keys[: len(blocks)]]
        self._note_hits(entries, hints, chain.block_tokens)
        return Fetched(blocks, lease, None)

    def renew(self, lease: LeaseId, owner: Owner) -> float:
        """Have a lease last its full time from now; returns the seconds, 0.0 if there is no such lease."""
        state = self._state
        is_renewed = state.leases.renew(lease, owner, state.clock() + state.settings.lease_s)
        state.counters.leases["renewed" if is_renewed else "stale_renewals"] += 1
        return state.settings.lease_s if is_renewed else 0.0

    def _grant(self, owner: Owner, entries: Sequence[BlockEntry]) -> LeaseId | None:
        state = self._state
        if not entries:
            return None
        state.counters.leases["granted"] += 1
        return state.leases.grant(owner, entries, state.clock() + state.settings.lease_s)

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

    def _note_use(self, entries: Sequence[BlockEntry], hints: Hints | None) -> None:
        if not entries:
            return
        state = self._state
        names = [entry.name for entry in entries]
        hint = state.hint(entries[0].shelf, hints)
        for policy in state.policies.values():
            policy.touch(names, now_s=state.clock(), hint=hint)
        self._uses.note(entries)
        if state.settings.write_mode is WriteMode.SECOND_HIT:
            self._mover.write_through(entries)

    def _block(self, entry: BlockEntry, origin: str) -> FetchedBlock:
        copy = entry.copies[self._state.top.name]
        if copy.generation is None:
            self._note_generation(copy)
        assert copy.slot is not None, "a READY copy in the top tier has no slot"
        assert copy.generation is not None, "the copy's generation was not noted"
        return FetchedBlock(copy.slot, copy.generation, entry.length_bytes, copy.checksum, origin)

    def _note_generation(self, copy: Copy) -> None:
        # It is the slot's for as long as the copy has the slot: only allocating and freeing raise it.
        assert copy.slot is not None, "a READY copy in the top tier has no slot"
        copy.generation = self._state.top.generation(copy.slot)
