"""Putter: lends slots of the top tier to writers, and publishes what they wrote.

No put holds the loop for long: one of more than PUT_SLICE_BLOCKS is reserved a slice after the other, each
complete in itself, and between two slices others have their turn.
"""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from itertools import repeat

from kvstore.directory import BlockEntry, Copy, CopyState, Shelf
from kvstore.errors import InvalidRequest, TierFull
from kvstore.gone import Gone
from kvstore.hints import Hints
from kvstore.keys import BlockKey, PrefixChain
from kvstore.layout import Part
from kvstore.lease import LentSlot
from kvstore.miss import MissReason
from kvstore.mover import Mover
from kvstore.policy import NO_HINT, Hint, Offer
from kvstore.recency import Uses
from kvstore.results import Admitted, Owner, Published, Reserved, ReservedSlot
from kvstore.slots_ahead import SlotsAhead
from kvstore.space import Space
from kvstore.state import State, WriteMode
from kvstore.tier import Slot, StorageKey

PUT_SLICE_BLOCKS = 1024
"""Most blocks reserved at once: what a client asks for at once too, so that they compete as one request's."""

_DROPS = {MissReason.QUOTA: "over_quota", MissReason.NOT_ADMITTED: "not_admitted"}
"""How drops are counted that have a count of their own."""


class Putter:
    """Puts of one manager. A stale namespace, and a store that drains, take no blocks.

    ``note_fill`` is called whenever the top tier has become fuller.
    """

    def __init__(
        self, state: State, space: Space, mover: Mover, uses: Uses, note_fill: Callable[[], None]
    ) -> None:
        self._state = state
        self._space = space
        self._mover = mover
        self._uses = uses
        self._note_fill = note_fill
        self.is_draining = False
        self.ahead = SlotsAhead(state, space)

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
        deadline_s = self._state.deadline_s(timeout_s)
        if len(chain) <= PUT_SLICE_BLOCKS:
            return await self._reserve_slice(
                chain, owner=owner, part=part, deadline_s=deadline_s, hints=hints
            )
        lent: list[ReservedSlot] = []
        present = length_bytes = 0
        reason = None
        try:
            for start in range(0, len(chain), PUT_SLICE_BLOCKS):
                if start:
                    await asyncio.sleep(0)
                piece = chain[start : start + PUT_SLICE_BLOCKS]
                if reason is not None:
                    present += self._drop_slice(piece, part, reason, hints)
                    continue
                got = await self._reserve_slice(
                    piece, owner=owner, part=part, deadline_s=deadline_s, hints=hints
                )
                lent += [slot._replace(position=start + slot.position) for slot in got.slots]
                present += got.present
                length_bytes = length_bytes or got.length_bytes
                reason = got.reason
        except BaseException:
            if self._state.leases.is_live(owner):
                self.return_slots([slot.slot for slot in lent], owner=owner)
            raise
        return Reserved(tuple(lent), present, length_bytes, reason)

    def _drop_slice(
        self, chain: PrefixChain, part: Part | None, reason: MissReason, hints: Hints | None
    ) -> int:
        """Drop what is missing of a put's slice behind one that was dropped; returns how many are stored."""
        state = self._state
        shelf = state.directory.shelf(chain.namespace, part)
        if shelf.is_stale or self.is_draining:
            state.counters.puts["dropped"] += len(chain)
            return 0
        missing = self._missing(shelf, chain)
        self._note_present(shelf, chain, missing, state.hint(shelf, hints))
        state.counters.puts["dropped"] += len(missing)
        if reason in _DROPS:
            state.counters.puts[_DROPS[reason]] += len(missing)
        self._remember_dropped(shelf, [chain.keys[index] for index in missing], [reason] * len(missing))
        return len(chain) - len(missing)

    async def _reserve_slice(
        self,
        chain: PrefixChain,
        *,
        owner: Owner,
        part: Part | None,
        deadline_s: float,
        hints: Hints | None,
    ) -> Reserved:
        """Lend slots for blocks that compete as those of one request."""
        at_once = self.reserve_at_once(chain, owner=owner, part=part, hints=hints)
        if at_once is not None:
            return at_once
        state = self._state
        shelf = state.directory.shelf(chain.namespace, part)
        missing = self._missing(shelf, chain)
        hint = state.hint(shelf, hints)
        self._note_present(shelf, chain, missing, hint)
        within = await self._space.fit_quota_on_top(shelf, len(missing), deadline_s=deadline_s)
        offer = self._offer(shelf, chain, missing[: min(within, self._share_left(owner, shelf))], hint)
        worth = await self._space.make_room_for(offer, deadline_s=deadline_s, by=shelf.namespace)
        return self._lend_missing(owner, shelf, chain, missing, offer, within=within, worth=worth)

    def reserve_at_once(
        self, chain: PrefixChain, *, owner: Owner, part: Part | None = None, hints: Hints | None = None
    ) -> Reserved | None:
        """As ``reserve``, but None where room would have to be made first, or it would take several slices.

        Raises:
            InvalidRequest: the namespace is not open.
        """
        state = self._state
        shelf = state.directory.shelf(chain.namespace, part)
        if len(chain) > PUT_SLICE_BLOCKS:
            return None
        if shelf.is_stale or self.is_draining:
            state.counters.puts["dropped"] += len(chain)
            return Reserved(
                (), 0, reason=MissReason.OTHER_EPOCH if shelf.is_stale else MissReason.UNAVAILABLE
            )
        missing = self._missing(shelf, chain)
        wanted = min(len(missing), self._share_left(owner, shelf))
        if missing and not self._space.has_room_now(shelf.length_bytes, wanted):
            return None
        hint = state.hint(shelf, hints)
        self._note_present(shelf, chain, missing, hint)
        offer = self._offer(shelf, chain, missing[:wanted], hint)
        worth = self._space.admit_below_high_water(offer) if offer.blocks else 0
        return self._lend_missing(owner, shelf, chain, missing, offer, within=len(missing), worth=worth)

    def _offer(self, shelf: Shelf, chain: PrefixChain, missing: Sequence[int], hint: Hint) -> Offer:
        """Offer blocks of a put to the policies: they are one request's, and compete with what is stored."""
        first = missing[0] if missing else 0
        parent = chain.keys[first - 1] if first else chain.parent
        is_all = len(missing) == len(chain.keys)
        offer = Offer(
            shelf.names(chain.keys if is_all else [chain.keys[index] for index in missing]),
            shelf.length_bytes,
            None if parent is None else shelf.name(parent),
            hint,
        )
        if missing:
            self._state.afterwards.do(partial(self._tell_policies, offer))
        return offer

    def _tell_policies(self, offer: Offer) -> None:
        now_s = self._state.clock()
        for tier, policy in self._state.policies.items():
            policy.offer(offer, now_s=now_s)
            if tier != self._state.top.name:
                policy.refuse(offer, now_s=now_s)  # it comes there from above, if at all

    def _share_left(self, owner: Owner, shelf: Shelf) -> int:
        """Return how many more slots an owner may have lent: a frozen one must not keep all from others."""
        state = self._state
        return state.leases.share_left(owner, shelf.length_bytes, state.top.capacity_bytes)

    def _note_present(self, shelf: Shelf, chain: PrefixChain, missing: Sequence[int], hint: Hint) -> None:
        """Count what is stored already; it is a use, so that it does not leave to make room for the rest."""
        self._state.counters.puts["present"] += len(chain) - len(missing)
        if self._state.size_curve is not None:
            self._state.size_curve.note_put(shelf, chain)
        if len(missing) < len(chain):
            self._state.afterwards.do(partial(self._touch, shelf, chain, hint))

    def _lend_missing(
        self,
        owner: Owner,
        shelf: Shelf,
        chain: PrefixChain,
        missing: Sequence[int],
        offer: Offer,
        *,
        within: int,
        worth: int,
    ) -> Reserved:
        """Lend slots for missing blocks, as many as there are; the rest was dropped.

        ``within`` of them are within the quota. The ``offer`` has those of them that are within the owner's
        share too, of which ``worth`` are worth their room.
        """
        state, present = self._state, len(chain) - len(missing)
        offered = min(len(offer.blocks), self._share_left(owner, shelf))
        worth = min(worth, offered)
        if not missing or not state.leases.is_live(owner):
            return Reserved((), present, reason=MissReason.UNAVAILABLE if missing else None)
        slots = state.take_slots(shelf.length_bytes, worth)
        reason = None
        if len(slots) < len(missing):
            reasons = [
                *[MissReason.NO_ROOM] * (worth - len(slots)),
                *[MissReason.NOT_ADMITTED] * (offered - worth),
                *[MissReason.NO_ROOM] * (within - offered),
                *[MissReason.QUOTA] * (len(missing) - within),
            ]
            reason = reasons[0]
            state.counters.puts["over_share"] += max(0, within - offered)
            self._note_dropped(shelf, [chain.keys[index] for index in missing[len(slots) :]], reasons)
            self._note_refused(offer, worth)
        self._lend(owner, slots, shelf.length_bytes)
        lent = tuple(map(ReservedSlot, missing, slots, state.top.generations(slots)))
        return Reserved(lent, present, shelf.length_bytes, reason)

    def _note_dropped(self, shelf: Shelf, keys: Sequence[BlockKey], reasons: Sequence[MissReason]) -> None:
        puts = self._state.counters.puts
        puts["dropped"] += len(keys)
        puts["over_quota"] += reasons.count(MissReason.QUOTA)
        puts["not_admitted"] += reasons.count(MissReason.NOT_ADMITTED)
        self._remember_dropped(shelf, keys, reasons)

    def _note_refused(self, offer: Offer, worth: int) -> None:
        """Tell the top tier's policy of the blocks behind the first ``worth``, if there are any."""
        if worth == len(offer.blocks):
            return
        parent = offer.blocks[worth - 1] if worth else offer.parent
        refused = offer._replace(blocks=offer.blocks[worth:], parent=parent)
        policy = self._state.policies[self._state.top.name]
        self._state.afterwards.do(partial(policy.refuse, refused, now_s=self._state.clock()))

    def admit_written(self, chain: PrefixChain, *, part: Part | None, hints: Hints | None) -> Admitted:
        """Decide about a put whose blocks lie in slots already as ``reserve_at_once`` does about others.

        Their room is in use already, so nothing is evicted: not even by a namespace at its quota.

        Raises:
            InvalidRequest: the namespace is not open.
        """
        state = self._state
        shelf = state.directory.shelf(chain.namespace, part)
        if shelf.is_stale or self.is_draining:
            state.counters.puts["dropped"] += len(chain)
            reason = MissReason.OTHER_EPOCH if shelf.is_stale else MissReason.UNAVAILABLE
            return Admitted(list(range(len(chain))), 0, reason)
        missing = self._missing(shelf, chain)
        hint = state.hint(shelf, hints)
        self._note_present(shelf, chain, missing, hint)
        within = self._space.within_quota_now(shelf, len(missing))
        offer = self._offer(shelf, chain, missing[:within], hint)
        worth = self._space.admit_below_high_water(offer, is_taken=True) if within else 0
        if worth == len(missing):
            return Admitted(missing, worth, names=offer.blocks)
        reasons = [MissReason.NOT_ADMITTED] * (within - worth) + [MissReason.QUOTA] * (len(missing) - within)
        self._note_dropped(shelf, [chain.keys[index] for index in missing[worth:]], reasons)
        self._note_refused(offer, worth)
        return Admitted(missing, worth, reasons[0], offer.blocks[:worth])

    def lend_ahead(
        self, chain: PrefixChain, part: Part | None, count: int, *, owner: Owner
    ) -> list[tuple[Slot, int]]:
        """Lend slots for a put to come; see ``SlotsAhead.lend``. None while the store drains."""
        return [] if self.is_draining else self.ahead.lend(chain, part, count, owner=owner)

    async def reserve_unnamed(
        self, count: int, length_bytes: int, *, owner: Owner, timeout_s: float | None = None
    ) -> list[Slot]:
        """Lend ``count`` slots that have no name yet: an engine's growing blocks.

        Raises:
            TierFull: there is no room for all of them by the timeout.
            InvalidRequest: the owner has ended.
        """
        state = self._state
        deadline_s = state.deadline_s(timeout_s)
        await self._space.make_room_on_top(length_bytes, count, deadline_s=deadline_s)
        return self._lend_unnamed(count, length_bytes, owner)

    def reserve_unnamed_at_once(
        self, count: int, length_bytes: int, *, owner: Owner, is_pressing: bool = False
    ) -> list[Slot] | None:
        """As ``reserve_unnamed``, but None where it would have to wait.

        If it ``is_pressing``, blocks leave that are stored nowhere else.

        Raises:
            InvalidRequest: the owner has ended.
        """
        if not self._space.make_room_at_once(length_bytes, count, is_pressing=is_pressing):
            return None
        return self._lend_unnamed(count, length_bytes, owner)

    def _lend_unnamed(self, count: int, length_bytes: int, owner: Owner) -> list[Slot]:
        state = self._state
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
        ``release_owner``. False: the block was stored already, its epoch has ended, or the slot is not lent
        to this owner any more; a slot that is lent stays so. ``checksums`` None (vram): taken when the block
        first leaves.

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
        self._note_stored(shelf, published, num_others=len(chain) - len(published))
        return results

    def _note_stored(self, shelf: Shelf, entries: Sequence[BlockEntry], *, num_others: int) -> None:
        """Take note of blocks of one chain that were published; others of it were stored already.

        Of an epoch that has ended none is stored.
        """
        state = self._state
        state.publish_top(entries, is_use=True)
        state.list_when_idle(entries)
        state.counters.puts["stored"] += len(entries)
        state.counters.puts["dropped" if shelf.is_stale else "duplicate"] += num_others
        if state.settings.write_mode is WriteMode.THROUGH:
            self._mover.write_through(entries, is_new=True)
        self._note_fill()

    def publish(
        self,
        chain: PrefixChain,
        slots: Sequence[Slot],
        *,
        owner: Owner,
        checksums: Sequence[int],
        part: Part | None = None,
    ) -> Published:
        """As ``commit`` and then ``return_slots`` of the same slots, in one pass: nothing stays lent.

        Raises:
            InvalidRequest: as ``commit``; then every slot stays lent.
        """
        state = self._state
        shelf = state.directory.shelf(chain.namespace, part)
        if not len(slots) == len(chain.keys) == len(checksums):
            raise InvalidRequest(f"publish: {len(chain)} blocks, {len(slots)} slots: one slot per block")
        self._refuse_small_slots(slots, owner, shelf.length_bytes)
        return self._file_all(shelf, chain, slots, checksums, state.leases.take_all_back(owner, slots))

    def publish_soon(
        self,
        chain: PrefixChain,
        slots: Sequence[Slot],
        *,
        owner: Owner,
        checksums: Sequence[int],
        part: Part | None,
        names: Sequence[StorageKey],
    ) -> Published:
        """As ``publish``, of slots lent for blocks so named; new ones are filed behind the answer."""
        state = self._state
        shelf = state.directory.shelf(chain.namespace, part)
        lent = state.leases.take_all_back(owner, slots)
        if not shelf.are_new(chain):
            return self._file_all(shelf, chain, slots, checksums, lent)
        state.afterwards.do(partial(self._publish_run, shelf, chain, slots, checksums, names))
        return Published(len(slots), 0)

    def _file_all(
        self,
        shelf: Shelf,
        chain: PrefixChain,
        slots: Sequence[Slot],
        checksums: Sequence[int],
        all_lent: Sequence[LentSlot | None],
    ) -> Published:
        """File blocks in slots that were taken back; what cannot be is freed."""
        state = self._state
        is_all = all(lent is not None and lent.may_be_published for lent in all_lent)
        if is_all and shelf.are_new(chain):
            return self._publish_run(shelf, chain, slots, checksums, shelf.names(chain.keys))
        stored: list[BlockEntry] = []
        unused: list[Slot] = []
        copies: list[Copy] = []
        num_late = 0
        parent, depth = chain.parent or BlockKey(chain.namespace), chain.start
        for key, slot, payload_sum, lent in zip(chain.keys, slots, checksums, all_lent, strict=True):
            if lent is None or not lent.may_be_published:
                num_late += lent is None or lent.is_overdue
                self._note_returned(slot, lent)
            else:
                copy = Copy(CopyState.READY, slot, payload_sum)
                entry = self._file(shelf, key, parent, depth=depth, copy=copy)
                if entry is None:
                    unused.append(slot)
                else:
                    stored.append(entry)
                    copies.append(copy)
            parent, depth = key, depth + 1
        state.free_slots(unused)
        self._note_generations(copies)
        state.afterwards.do(partial(self._note_stored, shelf, stored, num_others=len(slots) - len(stored)))
        state.freed.set()
        return Published(len(stored), num_late)

    def _publish_run(
        self,
        shelf: Shelf,
        chain: PrefixChain,
        slots: Sequence[Slot],
        checksums: Sequence[int],
        names: Sequence[StorageKey],
    ) -> Published:
        """Publish blocks none of which is known, in slots that were taken back."""
        state, ready = self._state, CopyState.READY
        generations = state.top.generations(slots)
        # Of thousands a second: all but the first are counted at their parents, which come with them.
        copies = list(map(Copy, repeat(ready), slots, checksums, repeat(True), generations))
        run = state.directory.file_run(shelf, chain, names, tier=state.top.name, copies=copies)
        state.afterwards.do(partial(self._note_stored, shelf, run, num_others=0))
        state.freed.set()
        return Published(len(run), 0)

    def _note_generations(self, copies: Sequence[Copy]) -> None:
        """Note what readers of the copies will ask for."""
        generations = self._state.top.generations([copy.slot for copy in copies if copy.slot is not None])
        for copy, generation in zip(copies, generations, strict=True):
            copy.generation = generation

    def _file(
        self, shelf: Shelf, key: BlockKey, parent: BlockKey, *, depth: int, copy: Copy
    ) -> BlockEntry | None:
        """File a copy in the top tier; None if the block has one, or its epoch is over."""
        directory, top = self._state.directory, self._state.top.name
        entry = shelf.entries.get(key)
        if shelf.is_stale or (entry is not None and top in entry.copies):
            return None
        if entry is None:
            entry = directory.file(shelf, key, parent, depth=depth, tier=top, copy=copy)
            directory.use_bytes(shelf, top, 1)
            return entry
        entry = directory.entry(shelf, key, parent, depth)
        directory.set_copy(entry, top, copy)
        return entry

    def return_slots(self, slots: Sequence[Slot], *, owner: Owner) -> None:
        """Give lent slots back: unnamed ones are freed, published ones lose the owner's lease.

        A slot that is not lent to the owner (its deadline passed, say) is ignored and counted.
        """
        state = self._state
        for slot in slots:
            self._note_returned(slot, state.leases.take_back(owner, slot))

    def _note_returned(self, slot: Slot, lent: LentSlot | None) -> None:
        state = self._state
        if lent is None:
            state.counters.leases["stale_returns"] += 1
        elif lent.entry is None:
            state.free_slots([slot])
        else:
            state.note_release(lent.entry)

    def _lend(self, owner: Owner, slots: Sequence[Slot], length_bytes: int) -> None:
        deadline_s = self._state.clock() + self._state.settings.lease_s
        self._state.leases.lend(owner, slots, length_bytes=length_bytes, deadline_s=deadline_s)
        self._note_fill()

    def _publish(
        self, shelf: Shelf, entry: BlockEntry, slot: Slot, *, owner: Owner, payload_sum: int | None
    ) -> bool:
        state = self._state
        lent = state.leases.lent(owner, slot)
        is_new = lent is not None and lent.entry is None and state.top.name not in entry.copies
        if not is_new or shelf.is_stale:
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
        if shelf.entries.keys().isdisjoint(chain.keys):
            return list(range(len(chain.keys)))
        find, is_certain, down = shelf.entries.get, self._state.is_certain, self._state.down_tiers()
        return [
            index
            for index, key in enumerate(chain.keys)
            if (entry := find(key)) is None or not is_certain(entry, down)
        ]

    def _remember_dropped(
        self, shelf: Shelf, keys: Sequence[BlockKey], reasons: Sequence[MissReason]
    ) -> None:
        """Remember why blocks of a put are not stored."""
        state = self._state
        for key, reason in zip(keys, reasons, strict=True):
            state.directory.gone.remember(shelf.name(key), Gone(reason, state.top.name, state.clock()))

    def _touch(self, shelf: Shelf, chain: PrefixChain, hint: Hint) -> None:
        entries, now_s = shelf.entries, self._state.clock()
        names = [entries[key].name for key in chain.keys if key in entries]
        goes_on = self._uses.goes_on(names)
        for policy in self._state.policies.values():
            if not goes_on:
                policy.touch(names, now_s=now_s, hint=hint)
            elif hint is not NO_HINT:
                policy.note_hint(names, now_s=now_s, hint=hint)

    def note_hints(self, chain: PrefixChain, hints: Hints, *, part: Part | None = None) -> None:
        """Tell the policies more of the future of stored blocks; it is no use of them.

        Raises:
            InvalidRequest: the namespace is not open.
        """
        state = self._state
        shelf = state.directory.shelf(chain.namespace, part)
        names = [shelf.entries[key].name for key in chain.keys if key in shelf.entries]
        hint = state.hint(shelf, hints)
        for policy in state.policies.values():
            policy.note_hint(names, now_s=state.clock(), hint=hint)
        self._uses.note_hints(chain, hints, part)
