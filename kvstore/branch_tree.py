"""BranchTree: which prefixes of a namespace's lookups are shared by most of them, in bounded memory.

A compressed prefix tree over checkpoints: not every block of a chain is a step of it, but blocks 1 to 16,
then eight in each doubling. A key names its block and all before it, so two chains part between the last
checkpoint they share and the next: where is known to an eighth of the depth. A chain of 6250 blocks has 84.

Counts are of whole minutes, and those of the last ``WINDOW_MINUTES`` are told. Nodes that are used least are
forgotten first; what is counted of a node that stays is right from the time it was made.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from heapq import heappop, heappush
from itertools import count
from operator import itemgetter

from kvstore.keys import BlockKey
from kvstore.layout import Part

WINDOW_MINUTES = 5
"""Whole minutes before the running one that are told."""

CONTINUES_RATIO = 0.75
"""A branch goes on as long as one way on has this share of its lookups; beyond, it divides."""

_MAX_DEPTH_BLOCKS = 1 << 20
_EACH_UNTIL = 16
_PER_DOUBLING = 8
_FEWEST_AT_ONCE = 2


def _checkpoints() -> Iterator[int]:
    yield from range(1, _EACH_UNTIL + 1)
    for doubling in count():
        step = (_EACH_UNTIL << doubling) // _PER_DOUBLING
        for at in range(1, _PER_DOUBLING + 1):
            depth = (_EACH_UNTIL << doubling) + at * step
            if depth > _MAX_DEPTH_BLOCKS:
                return
            yield depth


CHECKPOINTS: tuple[int, ...] = tuple(_checkpoints())
"""Depths, in blocks, that are steps of the tree."""


@dataclass(slots=True)
class Tally:
    """Lookups that went through a branch, and of those the ones that found all of it stored.

    ``partly`` are those that found a part of it, by whether they were fetches and the checkpoints they found.
    """

    matches: float = 0.0
    match_hits: float = 0.0
    fetches: float = 0.0
    fetch_hits: float = 0.0
    partly: dict[tuple[bool, int], float] = field(default_factory=dict)

    @property
    def lookups(self) -> float:
        """Lookups of the kind that there are more of: an engine that matches and then fetches means one."""
        return max(self.matches, self.fetches)

    def note(self, weight: float, *, is_fetch: bool) -> None:
        """Count a lookup that stands for ``weight`` of them."""
        if is_fetch:
            self.fetches += weight
        else:
            self.matches += weight

    def note_found(self, weight: float, *, is_fetch: bool) -> None:
        """Count that one found all."""
        if is_fetch:
            self.fetch_hits += weight
        else:
            self.match_hits += weight

    def add(self, other: "Tally") -> None:
        """Add what another counts, but for what was found partly."""
        self.matches += other.matches
        self.match_hits += other.match_hits
        self.fetches += other.fetches
        self.fetch_hits += other.fetch_hits

    def divided(self, checkpoints: int) -> "Tally":
        """Return what holds of the part up to so many checkpoints; what is left is of the part beyond."""
        upper = Tally()
        upper.add(self)
        for (is_fetch, found), weight in list(self.partly.items()):
            if found >= checkpoints:
                upper.note_found(weight, is_fetch=is_fetch)
            if found <= checkpoints:
                del self.partly[is_fetch, found]
            if found < checkpoints:
                upper.partly[is_fetch, found] = weight
        return upper


@dataclass(slots=True, eq=False)
class Branch:
    """A node: the checkpoints from its parent's last to the one where it divides or ends.

    ``first`` is the place of its first key in CHECKPOINTS. ``minutes`` are (minute, tally), the latest last.
    """

    keys: tuple[BlockKey, ...]
    first: int
    parent: "Branch | None"
    children: "dict[BlockKey, Branch]" = field(default_factory=dict)
    minutes: list[tuple[int, Tally]] = field(default_factory=list)
    last_use_s: float = 0.0

    @property
    def depth_blocks(self) -> int:
        """Blocks from the start of the sequence to its end; 0 of the root."""
        end = self.first + len(self.keys)
        return CHECKPOINTS[end - 1] if end else 0

    def tally(self, minute: int) -> Tally:
        """Return what was counted in the running minute and those before it that are told."""
        total = Tally()
        for at, counted in self.minutes:
            if at >= minute - WINDOW_MINUTES:
                total.add(counted)
        return total

    def lookups(self, minute: int) -> float:
        """Return the lookups of its tally, without making one."""
        matches = fetches = 0.0
        for at, counted in self.minutes:
            if at >= minute - WINDOW_MINUTES:
                matches += counted.matches
                fetches += counted.fetches
        return max(matches, fetches)

    def note(self, minute: int, visit: "Visit") -> None:
        """Count a lookup that went through it."""
        if not self.minutes or self.minutes[-1][0] != minute:
            self.minutes.append((minute, Tally()))
            del self.minutes[: -WINDOW_MINUTES - 1]
        counted, weight, is_fetch = self.minutes[-1][1], visit.weight, visit.is_fetch
        counted.note(weight, is_fetch=is_fetch)
        if visit.found >= self.first + len(self.keys):
            counted.note_found(weight, is_fetch=is_fetch)
        elif visit.found > self.first:
            part = (is_fetch, visit.found)
            counted.partly[part] = counted.partly.get(part, 0.0) + weight


@dataclass(frozen=True, slots=True)
class Told:
    """A branch as it is told: ``node`` is where it divides or ends; it leaves ``parent`` at some block."""

    node: Branch
    tally: Tally
    parent: Branch | None
    leaves_at_blocks: int


@dataclass(slots=True)  # not frozen: that takes three times as long to make
class Visit:
    """A lookup: its checkpoints, the place of the first, and how many were found from block 0 on."""

    keys: tuple[BlockKey, ...]
    first: int
    found: int
    is_fetch: bool
    weight: float


def num_checkpoints(blocks: int) -> int:
    """Return how many checkpoints are among so many leading blocks of a sequence."""
    return bisect_right(CHECKPOINTS, blocks)


def checkpoints_of(keys: Sequence[BlockKey], start: int) -> tuple[int, tuple[BlockKey, ...]]:
    """Return the checkpoints among the keys from block ``start`` on: the place of the first, and keys."""
    first = bisect_right(CHECKPOINTS, start)
    stop = bisect_right(CHECKPOINTS, start + len(keys))
    if start or stop < _FEWEST_AT_ONCE:
        return first, tuple([keys[depth - start - 1] for depth in CHECKPOINTS[first:stop]])
    return first, _picked(stop)(keys)


@lru_cache(maxsize=len(CHECKPOINTS))
def _picked(stop: int) -> Callable[[Sequence[BlockKey]], tuple[BlockKey, ...]]:
    """Return what picks the first ``stop`` checkpoints of a sequence, in one call: 1 us for 84 of them."""
    return itemgetter(*[depth - 1 for depth in CHECKPOINTS[:stop]])


class BranchTree:
    """The branches of one namespace. ``part`` of its blocks was asked for; of those in parts, the first."""

    def __init__(self, block_tokens: int, part: Part) -> None:
        self.block_tokens = block_tokens
        self.part = part
        self.root = Branch((), 0, None)
        self.num_branches = 0
        self.last_use_s = 0.0

    def visit(self, visit: Visit, minute: int, now_s: float, *, origin: Branch | None = None) -> Branch:
        """Count a lookup along its way, and return where it ends; ``origin``: where its last piece ended."""
        node = origin or self.root
        self.last_use_s = now_s
        if origin is None:
            node.note(minute, visit)
        at, keys = 0, visit.keys
        while at < len(keys):
            child = node.children.get(keys[at])
            if child is None:
                child = self._grown(node, keys[at:], visit.first + at)
            same = _num_same(child.keys, keys, at)
            if same < len(child.keys):
                child = self._divided(child, same)
            at += same
            child.note(minute, visit)
            child.last_use_s = now_s
            node = child
        return node

    def _grown(self, node: Branch, keys: tuple[BlockKey, ...], first: int) -> Branch:
        child = Branch(keys, first, node)
        node.children[keys[0]] = child
        self.num_branches += 1
        return child

    def _divided(self, lower: Branch, at: int) -> Branch:
        """Return a new node for the first ``at`` steps of one, which keeps the rest and its identity."""
        assert lower.parent is not None, "the root has no steps"
        upper = self._grown(lower.parent, lower.keys[:at], lower.first)
        end = upper.first + at
        upper.minutes += [(minute, counted.divided(end)) for minute, counted in lower.minutes]
        lower.keys, lower.first, lower.parent = lower.keys[at:], lower.first + at, upper
        upper.children[lower.keys[0]] = lower
        return upper

    def thin_out(self, minute: int, keep: int) -> None:
        """Forget the branches used least, ends before what leads to them, until ``keep`` are left."""
        while self.num_branches > keep:
            ends = [node for node in self.nodes() if not node.children]
            ends.sort(key=lambda node: (node.lookups(minute), node.last_use_s))
            for node in ends[: self.num_branches - keep]:
                assert node.parent is not None, "the root is no branch"
                del node.parent.children[node.keys[0]]
                node.parent = None
                self.num_branches -= 1

    def nodes(self) -> Iterator[Branch]:
        """Yield every branch, parents before children."""
        waiting = list(self.root.children.values())
        while waiting:
            node = waiting.pop()
            yield node
            waiting += node.children.values()

    def holds(self, node: Branch) -> bool:
        """Whether a branch has not been forgotten."""
        return node is self.root or node.parent is not None

    def told(self, minute: int, *, limit: int) -> Iterator[Told]:
        """Yield branches used lately, each down to where it divides: parents first, then by use.

        No branch has more lookups than its parent: only the ways on from those that are told are looked at.
        """
        order = count()
        waiting: list[tuple[float, int, Branch, Branch | None, int]] = []

        def wait(node: Branch, parent: Branch | None, leaves_at: int) -> None:
            lookups = node.lookups(minute)
            if lookups:
                heappush(waiting, (-lookups, next(order), node, parent, leaves_at))

        for child in self.root.children.values():
            wait(child, None, 0)
        for _ in range(limit):
            if not waiting:
                return
            negative, _, node, parent, leaves_at = heappop(waiting)
            least = -negative * CONTINUES_RATIO
            sides: list[tuple[Branch, int]] = []
            on = _most_used(node, minute)
            while on is not None and on.lookups(minute) >= least:
                sides += [(at, node.depth_blocks) for at in node.children.values() if at is not on]
                node, on = on, _most_used(on, minute)
            yield Told(node, node.tally(minute), parent, leaves_at)
            for side, depth in (*sides, *((at, node.depth_blocks) for at in node.children.values())):
                wait(side, node, depth)


def path_of(node: Branch) -> list[tuple[int, BlockKey]]:
    """Return depth and key of every checkpoint from the start of the sequence to the end of a branch."""
    path: list[tuple[int, BlockKey]] = []
    at: Branch | None = node
    while at is not None:
        depths = CHECKPOINTS[at.first : at.first + len(at.keys)]
        path += list(zip(depths, at.keys, strict=True))[::-1]
        at = at.parent
    return path[::-1]


def _most_used(node: Branch, minute: int) -> Branch | None:
    return max(node.children.values(), key=lambda child: child.lookups(minute), default=None)


def _num_same(ours: tuple[BlockKey, ...], theirs: tuple[BlockKey, ...], start: int) -> int:
    """Return how many steps are the same from ``start`` of theirs on, at least the first."""
    most = min(len(ours), len(theirs) - start)
    if ours[:most] == theirs[start : start + most]:
        return most
    # A key stands for all before it: what is the same is so up to one place and not beyond.
    low, high = 1, most
    while low < high:
        middle = (low + high) // 2
        if ours[middle] == theirs[start + middle]:
            low = middle + 1
        else:
            high = middle
    return low
