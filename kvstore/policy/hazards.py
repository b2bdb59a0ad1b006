"""Hazards: how likely blocks of a class are used again at each age, and what keeping one is worth.

Per class, a piecewise-constant hazard: uses over exposure in ages whose edges grow by half from one second.
Blocks that have not been used yet count with the exposure they have had (right-censored), whether they are
stored or ghosts; so does the partial exposure in the age they are in, without which large caches lose three
points of hit rate. A class with little evidence leans on its parent in the tree of classes.
"""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

ClassPath = tuple[int, int, int, int]
"""A class, from its kind down to what says least: a path in the tree of classes."""

_RATIO = 1.5
NUM_AGES = 28
_PRIOR_BLOCKS = 200.0
"""Evidence that a class borrows from its parent, in blocks."""
_ROOT_BLOCKS = 20.0
_ROOT_USES = 0.3
"""Before any evidence a block of age ``a`` is used again at ``_ROOT_USES / a`` per second: that is LRU."""
_MAX_EVIDENCE = float(1 << 20)
"""Blocks of evidence in a class before it is halved, so that it follows traffic that changes."""

EDGES_S: list[float] = [0.0, *(_RATIO**power for power in range(NUM_AGES - 1))]
"""Where each age starts, seconds; the last has no end."""

_STARTS = np.array(EDGES_S)
_WIDTHS = np.diff(_STARTS, append=EDGES_S[-1] * _RATIO)
_ROOT_HAZARD = _ROOT_USES / np.maximum(1.0, _STARTS + _WIDTHS / 2)

Array = npt.NDArray[np.float64]


class Evidence:
    """What was seen of one class. ``worth`` is by age, per slot-second; ``Hazards.rebuild`` makes it.

    Sums of floats depend on their order. ``add_each`` and ``end_each`` sum block by block, so that a run of
    blocks leaves to the last bit what its blocks one by one would: measured, 20 ns a block.
    """

    __slots__ = ("ended", "live", "live_at_s", "partial_s", "path", "prior", "saved_s", "used", "worth")

    def __init__(self, path: ClassPath, prior: Array) -> None:
        self.path = path
        self.prior = prior
        self.used = [0.0] * NUM_AGES  # blocks used again, by age
        self.ended = [0.0] * NUM_AGES  # blocks used again or forgotten
        self.partial_s = [0.0] * NUM_AGES  # what those were exposed in that age
        self.live = [0] * NUM_AGES  # blocks that are in that age
        self.live_at_s = [0.0] * NUM_AGES  # and the sum of the instants of their last use
        self.saved_s = [0.0] * NUM_AGES  # exposure in earlier runs
        self.worth: list[float] = []

    def add(self, age: int, at_s: float, num: int) -> None:
        """Count blocks last used at ``at_s`` that are in an age."""
        self.live[age] += num
        self.live_at_s[age] += num * at_s

    def add_each(self, age: int, at_s: float, num: int) -> None:
        """As ``add`` of one block, so many times."""
        self.live[age] += num
        moment = self.live_at_s[age]
        for _ in range(num):
            moment += at_s
        self.live_at_s[age] = moment

    def move(self, age: int, to_age: int, at_s: float, num: int) -> None:
        """Such blocks have reached a later age."""
        moment = num * at_s
        live, live_at_s = self.live, self.live_at_s
        live[age] -= num
        live[to_age] += num
        live_at_s[age] -= moment
        live_at_s[to_age] += moment

    def end(self, age: int, at_s: float, num: int, *, now_s: float, is_use: bool) -> None:
        """Such blocks were used again, or forgotten. ``age`` is the one that they were moved to last."""
        self.live[age] -= num
        self.live_at_s[age] -= num * at_s
        age_s = max(0.0, now_s - at_s)
        age = bisect_right(EDGES_S, age_s) - 1
        self.ended[age] += num
        self.partial_s[age] += num * (age_s - EDGES_S[age])
        if is_use:
            self.used[age] += num

    def end_each(self, age: int, at_s: float, num: int, *, now_s: float) -> None:
        """As ``end`` of one block that was used again, so many times."""
        self.live[age] -= num
        moment = self.live_at_s[age]
        for _ in range(num):
            moment -= at_s
        self.live_at_s[age] = moment
        age_s = max(0.0, now_s - at_s)
        age = bisect_right(EDGES_S, age_s) - 1
        within_s = age_s - EDGES_S[age]
        used, ended, partial_s = self.used[age], self.ended[age], self.partial_s[age]
        for _ in range(num):
            used += 1
            ended += 1
            partial_s += within_s
        self.used[age], self.ended[age], self.partial_s[age] = used, ended, partial_s

    def bound(self) -> None:
        """Halve old evidence where there is much."""
        if sum(self.ended) > _MAX_EVIDENCE or sum(self.used) > _MAX_EVIDENCE:
            for counts in (self.used, self.ended, self.partial_s, self.saved_s):
                counts[:] = [count / 2 for count in counts]


def _exposures_s(classes: Sequence[Evidence], now_s: float) -> Array:
    """Block-seconds ``[classes, ages]`` spent in each age, by blocks that left it and by those in it."""
    live = np.array([c.live for c in classes], dtype=float)
    all_s = live + np.array([c.ended for c in classes])
    beyond = np.cumsum(all_s[:, ::-1], axis=1)[:, ::-1] - all_s
    in_it_s = np.maximum(0.0, live * (now_s - _STARTS) - np.array([c.live_at_s for c in classes]))
    partial_s, saved_s = np.array([c.partial_s for c in classes]), np.array([c.saved_s for c in classes])
    exposures_s: Array = beyond * _WIDTHS + partial_s + in_it_s + saved_s
    return exposures_s


class Tree(NamedTuple):
    """How classes hang together: all that a rebuild needs of them besides what was seen.

    ``priors`` has shape ``[classes, ages]``. Per depth of the tree there are which node a class lies below,
    ``[classes]``, and what lies below a node, ones in ``[nodes, classes]``.
    """

    priors: Array
    depths: Sequence[tuple[npt.NDArray[np.intp], Array]]

    @classmethod
    def of(cls, classes: Sequence[Evidence]) -> "Tree":
        """Return the tree of some classes."""
        depths = []
        for depth in range(1, 5):
            nodes = {path: i for i, path in enumerate(dict.fromkeys(c.path[:depth] for c in classes))}
            where = np.array([nodes[c.path[:depth]] for c in classes])
            member = np.zeros((len(nodes), len(classes)))
            member[where, np.arange(len(classes))] = 1.0
            depths.append((where, member))
        return cls(np.array([c.prior for c in classes]), depths)


class Hazards:
    """The tree of classes, and what a slot is worth to each of them at each age."""

    def __init__(self) -> None:
        self._by_path: dict[ClassPath, Evidence] = {}
        self._root = _ROOT_HAZARD  # of all blocks
        self._tree: Tree | None = None  # of all classes, if none has come since

    def evidence(self, path: ClassPath, factors: Sequence[float] | None = None) -> Evidence:
        """Return the evidence of a class. ``factors`` scale what is assumed of it at first, by age."""
        known = self._by_path.get(path)
        if known is None:
            prior = np.ones(NUM_AGES) if factors is None else np.array(factors)
            known = Evidence(path, prior)
            self._first_worth(known)
            self._by_path[path] = known
            self._tree = None
        return known

    def _first_worth(self, new: Evidence) -> None:
        """Until the next rebuild a class is worth what its nearest relative is."""
        kin = [other for other in self._by_path.values() if other.path[0] == new.path[0]]
        if kin:
            new.worth = max(kin, key=lambda other: _kinship(new, other)).worth
        else:
            new.worth = index_table((self._root * new.prior)[None, :])[0].tolist()

    def to_state(self, now_s: float) -> list[list[object]]:
        """Return what was seen, ready for msgpack: per class its path, uses and exposure by age."""
        classes = list(self._by_path.values())
        exposures_s = _exposures_s(classes, now_s).tolist() if classes else []
        return [
            [list(c.path), c.used, exposure_s] for c, exposure_s in zip(classes, exposures_s, strict=True)
        ]

    def from_state(self, saved: Iterable[tuple[ClassPath, list[float], list[float]]]) -> None:
        """Add what an earlier run has seen of classes that there are; it adds up."""
        for path, used, exposure_s in saved:
            evidence = self._by_path[path]
            for age in range(NUM_AGES):
                evidence.used[age] += used[age]
                evidence.saved_s[age] += exposure_s[age]

    def rebuild(self, now_s: float) -> None:
        """Compute what every class is worth from what was seen."""
        classes = list(self._by_path.values())
        if not classes:
            return
        tree = self._tree = self._tree or Tree.of(classes)
        used = np.array([c.used for c in classes])
        table = index_table(self._hazards(tree, used, _exposures_s(classes, now_s)))
        for c, worth in zip(classes, table.tolist(), strict=True):
            c.worth = worth
            c.bound()

    def _hazards(self, tree: Tree, used: Array, exposed_s: Array) -> Array:
        prior_s, root_s = _PRIOR_BLOCKS * _WIDTHS, _ROOT_BLOCKS * _WIDTHS
        self._root = (used.sum(0) + root_s * _ROOT_HAZARD) / (exposed_s.sum(0) + root_s)
        hazards: Array = self._root * tree.priors
        for where, member in tree.depths:
            node_used, node_exposed_s = member @ used, member @ exposed_s
            hazards = (node_used[where] + prior_s * hazards) / (node_exposed_s[where] + prior_s)
        return hazards


def _kinship(one: Evidence, other: Evidence) -> int:
    return next((depth for depth in range(4, 0, -1) if one.path[:depth] == other.path[:depth]), 0)


def index_table(hazards: Array) -> Array:
    """Return the Gittins index by class and age of hazards ``[classes, ages]`` per second.

    For a block that reaches an age: the most, over all times to give up, of the probability of a use until
    then per expected second that its slot is rented.
    """
    hazards = np.maximum(hazards, 1e-12)
    survives = np.exp(-hazards * _WIDTHS)
    stays_s = ((1.0 - survives) / hazards).T.copy()
    survives = survives.T.copy()
    # Of blocks of each age, [ages, classes]: who is alive, what they have rented, the most that was worth.
    alive = np.ones((NUM_AGES - 1, len(hazards)))
    rented_s, most, spare = np.zeros_like(alive), np.zeros_like(alive), np.empty_like(alive)
    # All of them come to one age after the other: measured, half of the time of one age by itself at a time.
    for later in range(NUM_AGES):
        # Those of that age or an earlier one live through it.
        end = later + 1
        some, some_s, some_most, some_spare = alive[:end], rented_s[:end], most[:end], spare[:end]
        np.multiply(some, stays_s[later], some_spare)
        np.add(some_s, some_spare, some_s)
        np.multiply(some, survives[later], some)
        np.subtract(1.0, some, some_spare)
        np.divide(some_spare, some_s, some_spare)
        np.maximum(some_most, some_spare, out=some_most)
    table: Array = np.concatenate([most, hazards.T[-1:]]).T
    return table
