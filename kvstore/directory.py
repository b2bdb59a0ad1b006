"""Directory: what is known of every block: which tiers have a copy, in what state, and who holds it.

One block's copy in one tier goes ABSENT -> WRITING -> READY -> DROPPING -> ABSENT (absent: no Copy object).
Only READY copies are matched. Blocks are filed on shelves, one per namespace and part, so that no lookup
reaches another namespace's blocks and a chain is matched by plain dictionary look-ups of its keys.
"""

import asyncio
import enum
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import cast
from weakref import WeakValueDictionary

from kvstore.changes import CopyChanges
from kvstore.errors import NamespaceNotOpen
from kvstore.gone import Gone, GoneRecords
from kvstore.keys import BlockKey, Namespace, NamespaceDigest, PrefixChain
from kvstore.layout import Part
from kvstore.miss import MissReason
from kvstore.tier import BlockHeader, BlockId, Listing, ReadOutcome, ReadRequest, Slot, StorageKey

MAX_NAMESPACES = 4096
"""How many open namespaces are remembered before empty ones are forgotten."""

NO_CHILDREN: Mapping[str, int] = MappingProxyType({})
"""Counts of a block without children; shared."""


class CopyState(enum.Enum):
    """State of one copy; an absent copy has no object."""

    WRITING = "writing"
    READY = "ready"
    DROPPING = "dropping"


@dataclass(slots=True)
class Copy:
    """One copy in one tier.

    ``slot`` and ``checksum`` belong to copies in the top tier, and so does ``generation``: that of the slot,
    None until somebody asks for it. ``is_counted``: the parent counts this copy among its children,
    ``why_dropping``: the reason if it leaves when nobody keeps it, ``is_listed``: others may find it.
    """

    state: CopyState
    slot: Slot | None = None
    checksum: int | None = None
    is_counted: bool = False
    generation: int | None = None
    why_dropping: MissReason = MissReason.CORRUPT
    is_listed: bool = False


@dataclass(slots=True, eq=False)
class BlockEntry:
    """All that is known of one block (one part of it). ``name`` is what policies and records call it.

    ``leases`` counts external leases, ``holds`` internal ones (a transfer or a running fetch). ``loading``
    is set while a copy is on its way into the top tier: its result is the outcome of the read. ``fastest``
    names the fastest tier whose READY copy is certain (shared tiers are never certain), or is None.
    ``refused_by`` are tiers whose write budget did not admit it.
    ``children`` counts, per tier, the blocks with a copy there whose parent is this one; it is replaced and
    never changed, since entries share it. ``parent`` is None while the block itself was never seen and the
    entry only carries those counts.
    """

    shelf: "Shelf"
    key: BlockKey
    name: StorageKey
    parent: BlockKey | None
    depth: int
    copies: dict[str, Copy] = field(default_factory=dict)
    leases: int = 0
    holds: int = 0
    loading: "asyncio.Future[ReadOutcome] | None" = None
    loading_origin: str = ""
    children: Mapping[str, int] = field(default_factory=lambda: NO_CHILDREN)
    fastest: str | None = None
    refused_by: tuple[str, ...] = ()

    @property
    def block(self) -> BlockId:
        """Its id, as tiers want it."""
        return BlockId(self.shelf.namespace, self.shelf.part, self.key)

    @property
    def length_bytes(self) -> int:
        """Its payload bytes."""
        return self.shelf.length_bytes

    def read_request(self, buffer: memoryview) -> ReadRequest:
        """A request to read a copy of it into a buffer."""
        shelf = self.shelf
        return ReadRequest(self.block, shelf.layout, shelf.length_bytes, buffer, self.parent, self.depth)

    def is_ready(self, tier: str) -> bool:
        """Whether the tier has a READY copy."""
        copy = self.copies.get(tier)
        return copy is not None and copy.state is CopyState.READY

    @property
    def is_kept(self) -> bool:
        """Whether a lease or a hold forbids taking its copies away."""
        return self.leases > 0 or self.holds > 0

    def may_leave(self, tier: str) -> bool:
        """Whether its READY copy in the tier may be taken: not kept, and no child there."""
        return self.is_ready(tier) and not self.is_kept and not self.children.get(tier)

    @property
    def change_id(self) -> tuple[NamespaceDigest, BlockKey, BlockKey | None] | None:
        """See ``changes.Stored``: the part with the first layer and the first head stands for all parts."""
        shelf = self.shelf
        return (shelf.namespace, self.key, self.parent if self.depth else None) if shelf.is_first else None

    def residency(self) -> tuple[str, ...]:
        """Names of the tiers with a READY copy."""
        return tuple(name for name in self.copies if self.is_ready(name))


@dataclass(slots=True, weakref_slot=True)
class Shelf:
    """The blocks of one part of one namespace. Of a stale one (an epoch that is over) none is served.

    ``fastest`` repeats what the entries say, for look-ups of thousands of keys at once. ``name_end`` is what
    its storage keys have behind the block key. ``is_first``: its part has the first layer and the first head.
    """

    namespace: NamespaceDigest
    part: Part
    layout: bytes
    length_bytes: int
    entries: dict[BlockKey, BlockEntry] = field(default_factory=dict)
    fastest: dict[BlockKey, str] = field(default_factory=dict)
    is_stale: bool = False
    name_end: bytes = b""
    is_first: bool = True

    def __post_init__(self) -> None:
        self.is_first = self.part.is_first
        self.name_end = self.part.pack() + self.namespace

    def block(self, key: BlockKey) -> BlockId:
        """The id of the block of that key on this shelf."""
        return BlockId(self.namespace, self.part, key)

    def name(self, key: BlockKey) -> StorageKey:
        """The storage key of the block of that key on this shelf."""
        return StorageKey(key + self.name_end)

    def are_new(self, chain: PrefixChain) -> bool:
        """Whether a chain has blocks, and none of them is known, nor its first one's parent among them."""
        if self.is_stale or not chain.keys or not self.entries.keys().isdisjoint(chain.keys):
            return False
        return chain.parent is None or chain.parent not in chain.keys

    def names(self, keys: Sequence[BlockKey]) -> list[StorageKey]:
        """As ``name``, of several keys."""
        end = self.name_end
        return cast("list[StorageKey]", [key + end for key in keys])  # a NewType each would cost a call each


def _new_run(
    shelf: Shelf,
    blocks: Iterable[tuple[BlockKey, StorageKey, Copy]],
    parent: BlockKey,
    *,
    depth: int,
    tier: str,
) -> list[BlockEntry]:
    """Return new entries of a run of a chain, each with one copy.

    Of thousands a second: to set each attribute here takes half of the time that ``BlockEntry`` takes.
    """
    new, run = object.__new__, list[BlockEntry]()
    for key, name, copy in blocks:
        entry = new(BlockEntry)
        entry.shelf, entry.key, entry.name, entry.parent, entry.depth = shelf, key, name, parent, depth
        entry.copies = {tier: copy}
        entry.leases = entry.holds = 0
        entry.loading, entry.loading_origin = None, ""
        entry.children, entry.fastest, entry.refused_by = NO_CHILDREN, tier, ()
        run.append(entry)
        parent, depth = key, depth + 1
    return run


class Directory:
    """Shelves and namespaces; ``gone`` are the records of blocks that are gone. Pure: no I/O, no clock.

    ``certain_tiers`` are the tiers whose copies only this directory's owner adds and takes away, fastest
    first.
    """

    def __init__(self, certain_tiers: Sequence[str]) -> None:
        self._certain_tiers = tuple(certain_tiers)
        # A shelf lives as long as its entries, or whoever looks at it: naming parts costs no memory.
        self._shelves: WeakValueDictionary[tuple[NamespaceDigest, Part], Shelf] = WeakValueDictionary()
        self._whole: dict[NamespaceDigest, Shelf] = {}  # of open namespaces, as ``shelf`` found them last
        self._namespaces: OrderedDict[NamespaceDigest, Namespace] = OrderedDict()
        self._by_name: dict[StorageKey, BlockEntry] = {}
        self._used_bytes: dict[tuple[str, NamespaceDigest], int] = {}
        self._epochs: dict[str, int] = {}
        self._only_child: dict[str, Mapping[str, int]] = {tier: {tier: 1} for tier in certain_tiers}
        self.gone = GoneRecords()
        self.num_opened = 0
        """How often a namespace was opened that was not open."""
        self.changes: CopyChanges | None = None
        """Where changes of copies are noted, if anybody wants to know."""
        self.listing: Listing | None = None
        """Where others look for READY copies in the fastest tier: one that is no more is taken out here."""

    def open_namespace(
        self, namespace: Namespace, *, in_use: Callable[[], Set[NamespaceDigest]] = frozenset
    ) -> NamespaceDigest:
        """Make a namespace known and return its digest.

        Beyond MAX_NAMESPACES the one that was opened longest ago is forgotten, if it has no blocks and is
        not ``in_use``.
        """
        digest = namespace.digest
        if digest not in self._namespaces:
            self.num_opened += 1
            if self.changes is not None:
                self.changes.note_opened(digest)
        self._namespaces[digest] = namespace
        self._namespaces.move_to_end(digest)
        if len(self._namespaces) > MAX_NAMESPACES:
            self._forget_idle_namespace(in_use() | {digest})
        return digest

    def forget_namespace(self, namespace: NamespaceDigest) -> None:
        """Have a namespace opened again before it is used; its blocks stay."""
        self._namespaces.pop(namespace, None)
        self._whole.pop(namespace, None)

    def shelf(self, namespace: NamespaceDigest, part: Part | None) -> Shelf:
        """Return the shelf of a part (None: the whole block) of an open namespace.

        Raises:
            NamespaceNotOpen: the namespace was not opened, or has been forgotten.
            InvalidLayout: the part does not fit the namespace's layout.
        """
        if part is None:
            whole = self._whole.get(namespace)
            if whole is not None:
                return whole
        known = self._namespaces.get(namespace)
        if known is None:
            raise NamespaceNotOpen(f"namespace {namespace.hex()[:12]} is not open: call open_namespace first")
        layout = known.layout
        place = (namespace, part or layout.whole)
        shelf = self._shelves.get(place)
        if shelf is None:
            shelf = Shelf(*place, layout.fingerprint, layout.part_bytes(place[1]))
            self._shelves[place] = shelf
        shelf.is_stale = known.epoch < self.epoch(known.model)
        if part is None:
            self._whole[namespace] = shelf
        return shelf

    def epoch(self, model: str) -> int:
        """Return the epoch that a model's namespaces must at least have; 0 if none was ever ended."""
        return self._epochs.get(model, 0)

    def epochs(self) -> dict[str, int]:
        """Return the epochs of all models that ever ended one."""
        return dict(self._epochs)

    def raise_epoch(self, model: str, epoch: int) -> None:
        """End every epoch of a model before ``epoch``: blocks of older namespaces are matched no more."""
        if epoch > self.epoch(model) and self.listing is not None:
            self.listing.begin_era()
        self._epochs[model] = max(epoch, self.epoch(model))
        for (digest, _), shelf in self._shelves.items():
            known = self._namespaces.get(digest)
            if known is not None and known.model == model:
                shelf.is_stale = known.epoch < self._epochs[model]

    def stale_entries(self, limit: int) -> list[BlockEntry]:
        """Return up to ``limit`` entries of stale shelves that have copies and that nobody keeps."""
        found: list[BlockEntry] = []
        for shelf in self._shelves.values():
            if not shelf.is_stale:
                continue
            for entry in shelf.entries.values():
                if entry.copies and not entry.is_kept:
                    found.append(entry)
                    if len(found) == limit:
                        return found
        return found

    def adopt(self, headers: Iterable[BlockHeader], tier: str) -> tuple[list[StorageKey], list[BlockId]]:
        """File copies that a tier holds though nobody here wrote them; returns their names, in their order.

        Those that contradict what is known are not filed: their blocks are returned beside. One that is
        known already is left as it is.
        """
        names: list[StorageKey] = []
        strangers: list[BlockId] = []
        new: list[BlockEntry] = []
        about: tuple[NamespaceDigest, Part, bytes, int] | None = None
        shelf: Shelf | None = None
        by_name, ready = self._by_name, CopyState.READY
        fastest = tier if tier in self._certain_tiers else None
        # A start files them by the hundred thousand: nothing is called that can be spared.
        for (namespace, part, key), parent, depth, layout, length_bytes, _, _ in headers:
            if (namespace, part, layout, length_bytes) != about:
                about = (namespace, part, layout, length_bytes)
                shelf = self._shelf_of(about)
            if shelf is None:
                strangers.append(BlockId(namespace, part, key))
                continue
            known = shelf.entries.get(key)
            if known is not None:
                names += self._adopt_known(known, parent, tier)
                continue
            name = StorageKey(key + shelf.name_end)
            copies = {tier: Copy(ready, None, None, depth > 0)}
            entry = BlockEntry(shelf, key, name, parent, depth, copies, 0, 0, None, "", NO_CHILDREN, fastest)
            shelf.entries[key] = by_name[name] = entry
            if fastest is not None:
                shelf.fastest[key] = fastest
            names.append(name)
            new.append(entry)
        self._count_adopted(new, tier)
        return names, strangers

    def _adopt_known(self, entry: BlockEntry, parent: BlockKey, tier: str) -> list[StorageKey]:
        """Give an entry that is filed already its copy; returns its name if it had none there."""
        if tier in entry.copies:
            return []
        entry.parent = entry.parent or parent
        self.set_copy(entry, tier, Copy(CopyState.READY))
        return [entry.name]

    def _count_adopted(self, entries: Sequence[BlockEntry], tier: str) -> None:
        """Count new entries with one copy at their parents, now that all of them are filed."""
        used_bytes: dict[NamespaceDigest, int] = {}
        only_child: Mapping[str, int] = {tier: 1}
        for entry in entries:
            shelf = entry.shelf
            used_bytes[shelf.namespace] = used_bytes.get(shelf.namespace, 0) + shelf.length_bytes
            if not entry.depth:
                continue
            parent = shelf.entries.get(entry.parent) if entry.parent else None
            if parent is None or parent.depth != entry.depth - 1:
                entry.copies[tier].is_counted = self._count_at_parent(entry, tier)
                continue
            entry.parent = parent.key  # one object for equal keys
            is_first = parent.children is NO_CHILDREN
            parent.children = only_child if is_first else _counted(parent.children, tier, 1)
        for namespace, count in used_bytes.items():
            self._used_bytes[tier, namespace] = self.used_bytes(tier, namespace) + count

    def _shelf_of(self, about: tuple[NamespaceDigest, Part, bytes, int]) -> Shelf | None:
        """Return the shelf that a stored block belongs on, made if need be; None if it contradicts it."""
        namespace, part, layout, length_bytes = about
        shelf = self._shelves.get((namespace, part))
        if shelf is None:
            shelf = self._shelves[namespace, part] = Shelf(namespace, part, layout, length_bytes)
            known = self._namespaces.get(namespace)
            shelf.is_stale = known is not None and known.epoch < self.epoch(known.model)
        return shelf if (shelf.layout, shelf.length_bytes) == (layout, length_bytes) else None

    def find(self, name: StorageKey) -> BlockEntry | None:
        """Return the entry of a block, or None."""
        return self._by_name.get(name)

    def entry(self, shelf: Shelf, key: BlockKey, parent: BlockKey, depth: int) -> BlockEntry:
        """Return the entry of a key, made if there is none."""
        entry = shelf.entries.get(key)
        if entry is None:
            entry = self._new_entry(shelf, key, parent, depth)
        elif entry.parent is None:
            entry.parent = parent
        return entry

    def file(
        self, shelf: Shelf, key: BlockKey, parent: BlockKey, *, depth: int, tier: str, copy: Copy
    ) -> BlockEntry:
        """File a block that has no entry, with a READY copy in a certain tier. See ``use_bytes``."""
        name, copies = shelf.name(key), {tier: copy}
        entry = BlockEntry(shelf, key, name, parent, depth, copies, 0, 0, None, "", NO_CHILDREN, tier)
        shelf.entries[key] = self._by_name[name] = entry
        shelf.fastest[key] = tier
        copy.is_counted = self._count_at_parent(entry, tier)
        self.note_ready(entry, tier)
        return entry

    def file_run(
        self,
        shelf: Shelf,
        chain: PrefixChain,
        names: Sequence[StorageKey],
        *,
        tier: str,
        copies: Sequence[Copy],
    ) -> list[BlockEntry]:
        """As ``file``, of a run of a chain none of whose blocks has an entry, called by their ``names``.

        All ``copies`` say that they are counted.
        """
        keys, parent, depth = chain.keys, chain.parent or BlockKey(chain.namespace), chain.start
        run = _new_run(shelf, zip(keys, names, copies, strict=True), parent, depth=depth, tier=tier)
        only_child = self._only_child[tier]
        for entry in run[:-1]:
            entry.children = only_child
        shelf.entries.update(zip(keys, run, strict=True))
        self._by_name.update(zip(names, run, strict=True))
        shelf.fastest.update(dict.fromkeys(keys, tier))
        copies[0].is_counted = self._count_at_parent(run[0], tier)
        if self.changes is not None and shelf.is_first:
            self.changes.note_ready(tier, shelf.namespace, keys, parent if depth else None)
        self._use_bytes(shelf.namespace, tier, len(run) * shelf.length_bytes)
        return run

    def use_bytes(self, shelf: Shelf, tier: str, num_blocks: int) -> None:
        """Count the bytes of blocks that were filed."""
        self._use_bytes(shelf.namespace, tier, num_blocks * shelf.length_bytes)

    def set_copy(self, entry: BlockEntry, tier: str, copy: Copy) -> None:
        """Give an entry a copy in a tier (or change it), counting it as its parent's child."""
        known = entry.copies.get(tier)
        if known is None:
            copy.is_counted = self._count_at_parent(entry, tier)
            self._use_bytes(entry.shelf.namespace, tier, entry.length_bytes)
        else:
            copy.is_counted, copy.is_listed = known.is_counted, known.is_listed
        entry.copies[tier] = copy
        if copy.state is CopyState.READY:
            self.note_ready(entry, tier)
        if entry.fastest is None and len(entry.copies) == 1:
            if copy.state is CopyState.READY and tier in self._certain_tiers:
                entry.fastest = entry.shelf.fastest[entry.key] = tier
        else:
            self._update_fastest(entry)

    def set_state(self, entry: BlockEntry, tier: str, state: CopyState) -> None:
        """Change the state of a copy that is there."""
        copy = entry.copies[tier]
        was_ready, copy.state = copy.state is CopyState.READY, state
        if was_ready and state is not CopyState.READY:
            self._unlist(entry, copy)
            self._note_gone(entry, tier)
        elif state is CopyState.READY and not was_ready:
            self.note_ready(entry, tier)
        self._update_fastest(entry)

    def remove_copy(self, entry: BlockEntry, tier: str, gone: Gone | None = None) -> Copy:
        """Take an entry's copy in a tier away, and remember why if it was the last and a reason is given."""
        copy = entry.copies.pop(tier)
        self._unlist(entry, copy)
        if copy.state is CopyState.READY:
            self._note_gone(entry, tier)
        self._use_bytes(entry.shelf.namespace, tier, -entry.length_bytes)
        self._update_fastest(entry)
        if copy.is_counted:
            self._uncount_at_parent(entry, tier)
        if gone is not None and not entry.residency():
            self.gone.remember(entry.name, gone)
        self.prune(entry)
        return copy

    def note_ready(self, entry: BlockEntry, tier: str) -> None:
        """Have it told that a tier has a copy of a block, if anybody wants to know."""
        if self.changes is not None and (about := entry.change_id) is not None:
            namespace, key, parent = about
            self.changes.note_ready(tier, namespace, (key,), parent)

    def _note_gone(self, entry: BlockEntry, tier: str) -> None:
        if self.changes is not None and entry.shelf.is_first:
            self.changes.note_gone(tier, entry.shelf.namespace, entry.key)

    def _unlist(self, entry: BlockEntry, copy: Copy) -> None:
        if copy.is_listed and self.listing is not None:
            self.listing.remove(entry.name)

    def entries_in(self, namespace: NamespaceDigest) -> list[BlockEntry]:
        """Return the entries of all parts of a namespace."""
        shelves = [shelf for (digest, _), shelf in self._shelves.items() if digest == namespace]
        return [entry for shelf in shelves for entry in shelf.entries.values()]

    def prune(self, entry: BlockEntry) -> None:
        """Forget an entry that has no copies, no counted children, and that nobody holds."""
        if entry.copies or entry.is_kept or entry.loading is not None or any(entry.children.values()):
            return
        if self._by_name.get(entry.name) is entry:
            del self._by_name[entry.name]
            del entry.shelf.entries[entry.key]

    def namespace(self, digest: NamespaceDigest) -> Namespace | None:
        """Return an open namespace."""
        return self._namespaces.get(digest)

    def has_ended(self, digest: NamespaceDigest) -> bool:
        """Whether the epoch of an open namespace is over."""
        known = self._namespaces.get(digest)
        return known is not None and known.epoch < self.epoch(known.model)

    def is_current(self, shelf: Shelf) -> bool:
        """Whether a shelf's namespace is open, and its epoch is not over."""
        return not shelf.is_stale and shelf.namespace in self._namespaces

    def namespaces(self) -> list[Namespace]:
        """Return every namespace that is known."""
        return list(self._namespaces.values())

    def used_bytes(self, tier: str, namespace: NamespaceDigest) -> int:
        """Payload bytes of a namespace's copies in a tier, in whatever state."""
        return self._used_bytes.get((tier, namespace), 0)

    def entries_of(self, is_meant: Callable[[Namespace], bool]) -> list[BlockEntry]:
        """Return the entries in all open namespaces that a predicate accepts."""
        return [
            entry
            for (digest, _), shelf in self._shelves.items()
            if (known := self._namespaces.get(digest)) is not None and is_meant(known)
            for entry in shelf.entries.values()
        ]

    def entries(self) -> Iterator[BlockEntry]:
        """Yield every entry."""
        yield from self._by_name.values()

    def _new_entry(self, shelf: Shelf, key: BlockKey, parent: BlockKey | None, depth: int) -> BlockEntry:
        entry = BlockEntry(shelf, key, shelf.name(key), parent, depth)
        shelf.entries[key] = self._by_name[entry.name] = entry
        return entry

    def _forget_idle_namespace(self, in_use: Set[NamespaceDigest]) -> None:
        kept = in_use | {namespace for (namespace, _), shelf in self._shelves.items() if shelf.entries}
        digest = next((digest for digest in self._namespaces if digest not in kept), None)
        if digest is not None:
            self.forget_namespace(digest)
            for about in [about for about in self._shelves if about[0] == digest]:
                del self._shelves[about]

    def _update_fastest(self, entry: BlockEntry) -> None:
        fastest = next((tier for tier in self._certain_tiers if entry.is_ready(tier)), None)
        entry.fastest = fastest
        if fastest is not None:
            entry.shelf.fastest[entry.key] = fastest
        else:
            entry.shelf.fastest.pop(entry.key, None)

    def _use_bytes(self, namespace: NamespaceDigest, tier: str, change: int) -> None:
        about = (tier, namespace)
        used = self._used_bytes.get(about, 0) + change
        if used:
            self._used_bytes[about] = used
        else:
            self._used_bytes.pop(about, None)

    def _count_at_parent(self, entry: BlockEntry, tier: str) -> bool:
        """Count a copy at the parent's entry, made if need be; False if the chain's claims disagree.

        Depths fall by one along counted edges, so no claim of a client can make a cycle of blocks that
        keep each other from eviction.
        """
        if entry.depth == 0 or entry.parent is None:
            return False
        parent = entry.shelf.entries.get(entry.parent)
        if parent is None:
            parent = self._new_entry(entry.shelf, entry.parent, None, entry.depth - 1)
        if parent.depth != entry.depth - 1:
            return False
        if parent.children is NO_CHILDREN and tier in self._only_child:
            parent.children = self._only_child[tier]
        else:
            parent.children = _counted(parent.children, tier, 1)
        return True

    def _uncount_at_parent(self, entry: BlockEntry, tier: str) -> None:
        assert entry.parent is not None, "a copy that is counted has a parent"
        parent = entry.shelf.entries[entry.parent]
        parent.children = _counted(parent.children, tier, -1)
        self.prune(parent)


def _counted(children: Mapping[str, int], tier: str, change: int) -> Mapping[str, int]:
    counts = {**children, tier: children.get(tier, 0) + change}
    if not counts[tier]:
        del counts[tier]
    return counts or NO_CHILDREN
