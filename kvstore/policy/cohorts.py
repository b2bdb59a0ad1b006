"""Cohorts: blocks that one request used, filed by what they are worth, so that the least is found fast."""

from bisect import bisect_right
from collections import deque
from collections.abc import Hashable, Iterator

from kvstore.policy.block_classes import first_factors
from kvstore.policy.hazards import EDGES_S, NUM_AGES, ClassPath, Evidence, Hazards
from kvstore.tier import StorageKey

_MAX_MOVES = 4096
"""Cohorts that come to another age in one call, about 5 ms: after a quiet night it may be all of them."""

_SPARE_EMPTY = 4096


class Block:
    """A stored block, or a ghost, which has neither key nor parent.

    ``uses`` counts the requests for it, ``children`` its stored ones. ``turns`` is twice the turn of the
    request that it came with, plus one if a request ended here.

    Whoever makes one sets all of it: a call of a constructor in Python takes as long as all else that a
    policy does for a new block of a run. ``new_block`` is for those who make few.
    """

    __slots__ = ("children", "cohort", "key", "parent", "turns", "uses")

    key: StorageKey | None
    parent: "Block | None"
    children: int
    cohort: "Cohort"
    uses: int
    turns: int


def new_block(key: StorageKey, cohort: "Cohort", uses: int, turns: int) -> Block:
    """Return a block that has neither parent nor children yet."""
    block = Block()
    block.key, block.cohort, block.uses, block.turns = key, cohort, uses, turns
    block.parent = None
    block.children = 0
    return block


class Cohort:
    """Blocks, stored or ghosts, last used by the same request with the same class; ``num`` of them.

    ``leaves`` are the stored ones without a stored child.
    """

    __slots__ = ("age", "at_s", "lane", "leaves", "num")

    def __init__(self, lane: "Lane", at_s: float) -> None:
        self.lane = lane
        self.at_s = at_s
        self.age = 0
        self.num = 0
        self.leaves: dict[Block, None] | None = None


class Rung:
    """The cohorts of one lane and age that have leaves: all of them are worth the same."""

    __slots__ = ("cohorts", "order", "worth")

    def __init__(self, order: int, worth: float) -> None:
        self.order = order
        self.worth = worth
        self.cohorts: dict[Cohort, None] = {}

    def leaves(self) -> Iterator[Block]:
        """Yield the leaves, those of the oldest cohort first."""
        for cohort in self.cohorts:
            yield from cohort.leaves or ()


class Lane:
    """A class, times what its blocks weigh: one rung per age."""

    __slots__ = ("evidence", "rungs", "weight")

    def __init__(self, evidence: Evidence, weight: float, order: int) -> None:
        self.evidence = evidence
        self.weight = weight
        self.rungs = [Rung(order * NUM_AGES + age, 0.0) for age in range(NUM_AGES)]
        self.weigh()

    def weigh(self) -> None:
        """Take over what its class is worth."""
        weight = self.weight
        for rung, worth in zip(self.rungs, self.evidence.worth, strict=True):
            rung.worth = worth * weight


class Cohorts:
    """All cohorts of one policy, by the age that they have reached."""

    def __init__(self, hazards: Hazards) -> None:
        self._hazards = hazards
        self._lanes: dict[Hashable, Lane] = {}
        # By age; in each the oldest first, since all of them come to an age at the same time of their life.
        self._by_age: list[deque[Cohort]] = [deque() for _ in EDGES_S]
        self._num_cohorts = 0
        self._num_empty = 0
        self.leafy: dict[Rung, None] = {}
        """Rungs that have leaves."""

    def lane(self, path: ClassPath, weight: float) -> Lane:
        """Return the lane of a class and a weight."""
        lane = self._lanes.get((path, weight))
        if lane is None:
            lane = Lane(self._hazards.evidence(path, first_factors(path)), weight, len(self._lanes))
            self._lanes[path, weight] = lane
        return lane

    def start(self, lane: Lane, at_s: float) -> Cohort:
        """Return a new cohort without blocks."""
        cohort = Cohort(lane, at_s)
        self._by_age[0].append(cohort)
        self._num_cohorts += 1
        return cohort

    def grow(self, cohort: Cohort, num: int) -> None:
        """More blocks belong to a cohort."""
        cohort.num += num
        cohort.lane.evidence.add(cohort.age, cohort.at_s, num)

    def grow_each(self, cohort: Cohort, num: int) -> None:
        """As ``grow`` by one, so many times."""
        cohort.num += num
        cohort.lane.evidence.add_each(cohort.age, cohort.at_s, num)

    def move_each(self, old: Cohort, new: Cohort, num: int, now_s: float) -> None:
        """As ``end`` of one block that was used again and ``grow`` of another by one, so many times."""
        if old.lane.evidence is new.lane.evidence and old.age == new.age:
            for _ in range(num):  # both change the same sum, in turns
                self.end(old, 1, now_s, is_use=True)
                self.grow(new, 1)
            return
        old.num -= num
        if not old.num:
            self._num_empty += 1
        old.lane.evidence.end_each(old.age, old.at_s, num, now_s=now_s)
        self.grow_each(new, num)

    def end(self, cohort: Cohort, num: int, now_s: float, *, is_use: bool) -> None:
        """Blocks of a cohort were used again, or forgotten."""
        cohort.num -= num
        if not cohort.num:
            self._num_empty += 1
        cohort.lane.evidence.end(cohort.age, cohort.at_s, num, now_s=now_s, is_use=is_use)

    def add_leaf(self, block: Block) -> None:
        """A stored block has no stored child."""
        cohort = block.cohort
        if cohort.leaves is None:
            cohort.leaves = {}
            self._climb(cohort)
        cohort.leaves[block] = None

    def drop_leaf(self, block: Block) -> None:
        """A block is no leaf any more; ignored if it was none."""
        cohort = block.cohort
        leaves = cohort.leaves
        if leaves is not None and block in leaves:
            del leaves[block]
            if not leaves:
                cohort.leaves = None
                self._leave(cohort)

    def leave_to_parent(self, leaf: Block, parent: Block) -> None:
        """A leaf goes, and its parent becomes one: as ``drop_leaf`` and ``add_leaf``."""
        cohort, leaves = leaf.cohort, leaf.cohort.leaves
        if cohort is not parent.cohort or leaves is None or len(leaves) != 1:
            self.drop_leaf(leaf)
            self.add_leaf(parent)
            return
        # The cohort leaves its rung with its only leaf, and comes back as the last.
        del leaves[leaf]
        leaves[parent] = None
        cohorts = cohort.lane.rungs[cohort.age].cohorts
        del cohorts[cohort]
        cohorts[cohort] = None

    def _climb(self, cohort: Cohort) -> None:
        rung = cohort.lane.rungs[cohort.age]
        if not rung.cohorts:
            self.leafy[rung] = None
        rung.cohorts[cohort] = None

    def _leave(self, cohort: Cohort) -> None:
        rung = cohort.lane.rungs[cohort.age]
        del rung.cohorts[cohort]
        if not rung.cohorts:
            del self.leafy[rung]

    def tidy(self) -> None:
        """Forget cohorts that nothing is left of, if they are many; for when no new one is without blocks."""
        if self._num_empty <= _SPARE_EMPTY or 2 * self._num_empty <= self._num_cohorts:
            return
        for age, cohorts in enumerate(self._by_age):
            self._by_age[age] = deque(cohort for cohort in cohorts if cohort.num)
        self._num_cohorts = sum(map(len, self._by_age))
        self._num_empty = 0

    def advance(self, now_s: float) -> None:
        """Move cohorts to the age that they have reached, the oldest first: if they are many, not all."""
        by_age, num_moves = self._by_age, 0
        # From the last age down, so that each comes to its place behind all that are older.
        for age in range(NUM_AGES - 2, -1, -1):
            cohorts = by_age[age]
            before_s = now_s - EDGES_S[age + 1]
            while cohorts and cohorts[0].at_s <= before_s:
                if num_moves == _MAX_MOVES:
                    return
                num_moves += 1
                cohort = cohorts.popleft()
                if cohort.num:
                    self._age(cohort, bisect_right(EDGES_S, now_s - cohort.at_s) - 1)
                else:
                    self._num_cohorts -= 1
                    self._num_empty -= 1

    def _age(self, cohort: Cohort, age: int) -> None:
        cohort.lane.evidence.move(cohort.age, age, cohort.at_s, cohort.num)
        self._by_age[age].append(cohort)
        if cohort.leaves is None:
            cohort.age = age
        else:
            self._leave(cohort)
            cohort.age = age
            self._climb(cohort)

    def rebuild(self, now_s: float) -> None:
        """Learn from what was seen what a slot is worth."""
        self.advance(now_s)
        self._hazards.rebuild(now_s)
        for lane in self._lanes.values():
            lane.weigh()
