"""Leases: these blocks stay until the holder lets go, dies, or its time is up.

A lease is a counter on the block with an owner and a deadline, not a state of the copy. Slots that are lent
to a writer are kept here too: they have no name yet, and fall back to the tier when their owner goes.

A lease that is past its deadline ends: a reader that comes back late finds the slot in another generation. A
lent slot that is past its deadline cannot be published any more, but stays where it is until its owner gives
it back or goes: nothing can take the memory from a writer that was frozen and goes on, and in the hands of
another block its bytes would change under those who read them in place.
"""

import heapq
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from kvstore.directory import BlockEntry
from kvstore.keys import NamespaceDigest
from kvstore.results import LeaseId, Owner
from kvstore.tier import Slot, slot_bytes

_SPARE_DEADLINES = 4096


@dataclass(slots=True)
class Lease:
    """Blocks that one owner keeps until ``deadline_s`` (monotonic; infinity: until released)."""

    owner: Owner
    entries: tuple[BlockEntry, ...]
    deadline_s: float


@dataclass(slots=True, eq=False)
class LentSlot:
    """How a slot is in an owner's hands; it is replaced and never changed: slots lent together share one.

    ``entry`` is set, and leased, once the slot is published as that block. One that is overdue cannot be
    published any more. ``is_ahead``: it was lent for a put to come.
    """

    owner: Owner
    deadline_s: float
    length_bytes: int
    entry: BlockEntry | None = None
    is_overdue: bool = False
    is_ahead: bool = False

    @property
    def may_be_published(self) -> bool:
        """Whether it has no name yet, and is in time."""
        return self.entry is None and not self.is_overdue


@dataclass(slots=True)
class Holdings:
    """Everything one owner has."""

    leases: set[LeaseId] = field(default_factory=set)
    slots: dict[Slot, LentSlot] = field(default_factory=dict)
    namespaces: set[NamespaceDigest] = field(default_factory=set)
    unnamed_bytes: int = 0
    ahead_bytes: int = 0
    may_freeze: bool = False


class LeaseTable:
    """All leases and lent slots, by owner. Pure: the clock's reading comes in as an argument.

    The methods return entries and slots that became free; what to do with them is the manager's affair.
    """

    def __init__(self) -> None:
        self._owners: dict[Owner, Holdings] = {}
        self._leases: dict[LeaseId, Lease] = {}
        self._deadlines: list[tuple[float, int, LeaseId | None, Owner]] = []
        self._next_owner = itertools.count(1)
        self._next_lease = itertools.count(1)
        self._tie = itertools.count()
        self._sweep_at = _SPARE_DEADLINES
        self._leased_bytes: dict[NamespaceDigest, int] = {}
        self._num_overdue = 0
        self._num_leased = 0
        self._num_unnamed = 0
        self._unnamed_bytes = 0
        self._ahead_bytes = 0

    def new_owner(self) -> Owner:
        """Return an owner that has nothing yet."""
        owner = Owner(next(self._next_owner))
        self._owners[owner] = Holdings()
        return owner

    def note_may_freeze(self, owner: Owner) -> None:
        """Note that a live owner is another process, which may keep lent slots and never come back."""
        self._owners[owner].may_freeze = True

    def is_live(self, owner: Owner) -> bool:
        """Whether the owner has not ended. Only a live owner can be given anything."""
        return owner in self._owners

    def note_namespace(self, owner: Owner, namespace: NamespaceDigest) -> None:
        """Remember that a live owner uses a namespace."""
        self._owners[owner].namespaces.add(namespace)

    def used_namespaces(self) -> set[NamespaceDigest]:
        """Return the namespaces that live owners use."""
        return set().union(*(holdings.namespaces for holdings in self._owners.values()))

    def grant(self, owner: Owner, entries: Sequence[BlockEntry], deadline_s: float) -> LeaseId:
        """Lease entries to an owner."""
        lease_id = LeaseId(next(self._next_lease))
        for entry in entries:
            self._count_up(entry)
        self._leases[lease_id] = Lease(owner, tuple(entries), deadline_s)
        self._owners[owner].leases.add(lease_id)
        self._watch(deadline_s, lease_id, owner)
        return lease_id

    def renew(self, lease_id: LeaseId, owner: Owner, deadline_s: float) -> bool:
        """Move an owner's lease to a later deadline; False if there is none of that id."""
        lease = self._leases.get(lease_id)
        if lease is None or lease.owner != owner:
            return False
        lease.deadline_s = deadline_s
        self._watch(deadline_s, lease_id, owner)
        return True

    def end(self, lease_id: LeaseId, owner: Owner | None = None) -> Sequence[BlockEntry] | None:
        """End a lease; None if there is none of that id (ended before, or another owner's)."""
        lease = self._leases.get(lease_id)
        if lease is None or (owner is not None and lease.owner != owner):
            return None
        del self._leases[lease_id]
        self._owners[lease.owner].leases.discard(lease_id)
        for entry in lease.entries:
            self._count_down(entry)
        return lease.entries

    def lend(
        self,
        owner: Owner,
        slots: Sequence[Slot],
        *,
        length_bytes: int,
        deadline_s: float,
        is_ahead: bool = False,
    ) -> None:
        """Put unnamed slots into an owner's hands; with ``is_ahead`` for a put to come."""
        holdings = self._owners[owner]
        lent = LentSlot(owner, deadline_s, length_bytes, None, False, is_ahead)
        holdings.slots.update(dict.fromkeys(slots, lent))
        ahead_bytes = len(slots) * slot_bytes(length_bytes) if is_ahead else 0
        self._count_unnamed(holdings, len(slots), len(slots) * length_bytes, ahead_bytes)
        if slots:
            self._watch(deadline_s, None, owner)

    def lent(self, owner: Owner, slot: Slot) -> LentSlot | None:
        """Return the lent slot if this owner has it and its time is not over."""
        holdings = self._owners.get(owner)
        lent = holdings.slots.get(slot) if holdings else None
        return None if lent is None or lent.is_overdue else lent

    def publish(self, owner: Owner, slot: Slot, entry: BlockEntry) -> None:
        """Tie a lent slot to the block it now holds; the owner keeps a lease on that block."""
        holdings = self._owners[owner]
        lent = holdings.slots[slot]
        holdings.slots[slot] = LentSlot(
            owner, lent.deadline_s, lent.length_bytes, entry, lent.is_overdue, lent.is_ahead
        )
        ahead_bytes = slot_bytes(lent.length_bytes) if lent.is_ahead else 0
        self._count_unnamed(holdings, -1, -lent.length_bytes, -ahead_bytes)
        self._count_up(entry)

    def are_lent(self, owner: Owner, slots: Sequence[Slot], length_bytes: int) -> bool:
        """Whether an owner has all of these slots, unnamed, for that length, and in time."""
        holdings = self._owners.get(owner)
        if holdings is None:
            return False
        for lent in set(map(holdings.slots.get, slots)):
            if lent is None or not lent.may_be_published or lent.length_bytes != length_bytes:
                return False
        return True

    def take_back(self, owner: Owner, slot: Slot) -> LentSlot | None:
        """End the lending of one slot; None if this owner does not have it."""
        return self.take_all_back(owner, [slot])[0]

    def take_all_back(self, owner: Owner, slots: Sequence[Slot]) -> list[LentSlot | None]:
        """As ``take_back``, of several slots."""
        holdings = self._owners.get(owner)
        if holdings is None:
            return [None] * len(slots)
        taken = list(map(holdings.slots.pop, slots, itertools.repeat(None)))
        num_slots = num_bytes = ahead_bytes = 0
        for lent, num_alike in _alike(taken):
            if lent is None:
                continue
            if lent.is_overdue:
                self._num_overdue -= num_alike
            if lent.entry is not None:
                self._count_down(lent.entry)  # what has a name is alone with it
                continue
            num_slots += num_alike
            num_bytes += num_alike * lent.length_bytes
            if lent.is_ahead:
                ahead_bytes += num_alike * slot_bytes(lent.length_bytes)
        self._count_unnamed(holdings, -num_slots, -num_bytes, -ahead_bytes)
        return taken

    def end_owner(self, owner: Owner) -> tuple[list[BlockEntry], list[Slot]]:
        """End all that an owner has: (entries that lost a lease, slots that never got a name)."""
        holdings = self._owners.get(owner)
        if holdings is None:
            return [], []
        entries: list[BlockEntry] = []
        for lease_id in list(holdings.leases):
            entries.extend(self.end(lease_id) or ())
        slots: list[Slot] = []
        for slot in list(holdings.slots):
            lent = self.take_back(owner, slot)
            if lent is not None and lent.entry is None:
                slots.append(slot)
            elif lent is not None and lent.entry is not None:
                entries.append(lent.entry)
        del self._owners[owner]
        return entries, slots

    def expire(self, now_s: float) -> tuple[list[BlockEntry], int]:
        """End what is past its deadline: (entries that lost a lease, how many lent slots became overdue)."""
        entries: list[BlockEntry] = []
        num_overdue = 0
        while self._deadlines and self._deadlines[0][0] <= now_s:
            _, _, lease_id, owner = heapq.heappop(self._deadlines)
            if lease_id is None:
                lost, overdue = self._expire_slots(owner, now_s)
                entries += lost
                num_overdue += overdue
                continue
            lease = self._leases.get(lease_id)
            if lease is not None and lease.deadline_s <= now_s:  # else it was renewed meanwhile
                entries.extend(self.end(lease_id) or ())
        return entries, num_overdue

    def _expire_slots(self, owner: Owner, now_s: float) -> tuple[list[BlockEntry], int]:
        holdings = self._owners.get(owner)
        entries: list[BlockEntry] = []
        num_overdue = 0
        if holdings is None:
            return entries, num_overdue
        late: dict[LentSlot, LentSlot] = {}  # those that were lent together stay so
        for slot, lent in list(holdings.slots.items()):
            if lent.deadline_s > now_s or lent.is_overdue:
                continue
            if lent.entry is not None:
                self.take_back(owner, slot)
                entries.append(lent.entry)
            else:
                if lent not in late:
                    late[lent] = replace(lent, is_overdue=True)
                holdings.slots[slot] = late[lent]
                num_overdue += 1
        self._num_overdue += num_overdue
        return entries, num_overdue

    def lent_slots(self) -> list[LentSlot]:
        """Return every lent slot that has no name yet."""
        return [
            lent
            for holdings in self._owners.values()
            for lent in holdings.slots.values()
            if lent.entry is None
        ]

    def unnamed_slots(self) -> list[Slot]:
        """Return the slots themselves that have no name yet."""
        return [
            slot
            for holdings in self._owners.values()
            for slot, lent in holdings.slots.items()
            if lent.entry is None
        ]

    def share_left(self, owner: Owner, length_bytes: int, capacity_bytes: int) -> int:
        """Return how many more slots of that length an owner may have lent, of a tier of that capacity.

        One that may freeze: at most half of what is not lent to others, but one if it needs its first. What
        is lent to it cannot be taken back then, and so each such owner leaves at least half of the rest.
        """
        holdings = self._owners.get(owner)
        if holdings is None or not holdings.may_freeze:
            return capacity_bytes // length_bytes
        own_bytes = holdings.unnamed_bytes
        others_bytes = self._unnamed_bytes - own_bytes
        left = ((capacity_bytes - others_bytes) // 2 - own_bytes) // length_bytes
        if left > 0:
            return left
        return int(all(lent.entry is not None or lent.is_ahead for lent in holdings.slots.values()))

    def leased_bytes(self, namespace: NamespaceDigest) -> int:
        """Payload bytes of a namespace's leased blocks, each counted once."""
        return self._leased_bytes.get(namespace, 0)

    @property
    def num_leases(self) -> int:
        """Leases that have not ended."""
        return len(self._leases)

    @property
    def num_overdue(self) -> int:
        """Lent slots past their deadline whose owners have neither given them back nor gone."""
        return self._num_overdue

    @property
    def num_kept(self) -> int:
        """Slots that no eviction gets: leased blocks, each counted once, and lent slots without a name."""
        return self._num_leased + self._num_unnamed

    @property
    def num_owners(self) -> int:
        """Owners that have not ended."""
        return len(self._owners)

    def has_anything(self, owner: Owner) -> bool:
        """Whether an owner has a lease or a lent slot."""
        holdings = self._owners.get(owner)
        return holdings is not None and bool(holdings.leases or holdings.slots)

    def has_only_ahead(self, owner: Owner) -> bool:
        """Whether all that an owner has, if anything, are slots that were lent for a put to come."""
        holdings = self._owners.get(owner)
        if holdings is None or not holdings.slots:
            return not self.has_anything(owner)
        return not holdings.leases and all(lent.is_ahead for lent in holdings.slots.values())

    def ahead_bytes(self, owner: Owner | None = None) -> int:
        """Bytes of the slots that an owner, or all of them, have lent for puts to come."""
        if owner is None:
            return self._ahead_bytes
        holdings = self._owners.get(owner)
        return 0 if holdings is None else holdings.ahead_bytes

    def _count_unnamed(self, holdings: Holdings, num_slots: int, num_bytes: int, ahead_bytes: int) -> None:
        self._num_unnamed += num_slots
        self._unnamed_bytes += num_bytes
        holdings.unnamed_bytes += num_bytes
        self._ahead_bytes += ahead_bytes
        holdings.ahead_bytes += ahead_bytes

    def _count_up(self, entry: BlockEntry) -> None:
        entry.leases += 1
        if entry.leases == 1:
            self._num_leased += 1
            namespace = entry.shelf.namespace
            self._leased_bytes[namespace] = self.leased_bytes(namespace) + entry.length_bytes

    def _count_down(self, entry: BlockEntry) -> None:
        entry.leases -= 1
        assert entry.leases >= 0, "a lease was counted down twice"
        if entry.leases == 0:
            self._num_leased -= 1
            namespace = entry.shelf.namespace
            left = self.leased_bytes(namespace) - entry.length_bytes
            if left:
                self._leased_bytes[namespace] = left
            else:
                del self._leased_bytes[namespace]

    def _watch(self, deadline_s: float, lease_id: LeaseId | None, owner: Owner) -> None:
        if deadline_s == math.inf:
            return
        heapq.heappush(self._deadlines, (deadline_s, next(self._tie), lease_id, owner))
        if len(self._deadlines) > self._sweep_at:
            # Most of these ended before their deadline. Sweeping only after a doubling keeps it cheap.
            self._deadlines = [watch for watch in self._deadlines if self._is_pending(watch)]
            heapq.heapify(self._deadlines)
            self._sweep_at = 2 * len(self._deadlines) + _SPARE_DEADLINES

    def _is_pending(self, watch: tuple[float, int, LeaseId | None, Owner]) -> bool:
        deadline_s, _, lease_id, owner = watch
        if lease_id is not None:
            lease = self._leases.get(lease_id)
            return lease is not None and lease.deadline_s == deadline_s
        holdings = self._owners.get(owner)
        return holdings is not None and any(
            lent.deadline_s == deadline_s and not lent.is_overdue for lent in holdings.slots.values()
        )


def _alike(taken: Sequence[LentSlot | None]) -> Iterable[tuple[LentSlot | None, int]]:
    """Return how many there are of each."""
    if taken and taken.count(taken[0]) == len(taken):
        return ((taken[0], len(taken)),)
    return Counter(taken).items()
