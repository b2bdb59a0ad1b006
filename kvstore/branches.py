"""Branches: which prefixes are hot: a sample of a store's lookups, as one prefix tree per namespace.

Cost. The way of a lookup only counts down to the next one that is sampled; of that, the checkpoints are
queued, and a task some times a second takes them into the tree. At most some dozens a second are: while
there are fewer lookups every one is, beyond that each sample stands for as many as were passed over. A fetch
in pieces is sampled as a whole. Measured: benchmarks/branches.py.

Bounds. At most MAX_NAMESPACES trees, that of the namespace used longest ago making way; at most MAX_BRANCHES
branches of 84 keys or fewer for a chain of 6250 blocks: under 6 MB. The largest tree is thinned out first, so
that a namespace of many prompts does not push out the others.

Faults. The first one is logged and switches it off: nothing else depends on it.
"""

import asyncio
import logging
import random
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from kvstore.branch_tree import Branch, BranchTree, Visit, checkpoints_of, num_checkpoints
from kvstore.directory import Shelf
from kvstore.keys import BlockKey, NamespaceDigest, PrefixChain
from kvstore.layout import Part

logger = logging.getLogger(__name__)

MAX_BRANCHES = 1024
MAX_NAMESPACES = 64
MAX_SAMPLES_PER_S = 50
"""Samples that are aimed at while there are more lookups: each takes the loop some 6 us."""

_MAX_QUEUED = 1024
_MAX_PIECES = 512
_TICK_S = 0.25
_SLICE = 32
_MAX_STRIDE = 1 << 20


@dataclass(slots=True)
class _End:
    """Where a sampled lookup ended, for the piece after it. ``node`` is set once it is in the tree."""

    weight: float
    node: Branch | None = None


@dataclass(slots=True)
class _Sampled:
    """A lookup on its way into the tree of its namespace. ``origin``: where the piece before it ended."""

    namespace: NamespaceDigest
    part: Part
    block_tokens: int
    visit: Visit
    end: _End
    origin: _End | None


class Branches:
    """The hot prefixes of one store; one event loop's thread."""

    def __init__(
        self,
        *,
        clock: Callable[[], float],
        seed: int | None = None,
        max_samples_per_s: int = MAX_SAMPLES_PER_S,
        max_branches: int = MAX_BRANCHES,
    ) -> None:
        self._clock = clock
        self._random = random.Random(seed)  # noqa: S311 (a sample, no secret)
        self._max_samples_per_s = max_samples_per_s
        self._max_branches = max_branches
        self._queue: deque[_Sampled] = deque()
        self._ends: OrderedDict[BlockKey, _End] = OrderedDict()
        self._trees: dict[NamespaceDigest, BranchTree] = {}
        self._stride = 1
        self._skip = 1  # lookups until the next sample, which stands for ``_weight``
        self._weight = 1.0
        self._left = max_samples_per_s
        self._seen = 0.0
        self._paced_s = clock()
        self.lost_samples = 0
        self.is_on = True

    def note_match(self, shelf: Shelf, chain: PrefixChain, found_blocks: int) -> None:
        """Take note of a match, and how many leading blocks of the chain it found."""
        if shelf.is_first:  # the other parts of a block are asked for beside it
            self._note(shelf.part, chain, found_blocks, is_fetch=False)

    def note_fetch(self, shelf: Shelf, chain: PrefixChain, found_blocks: int) -> None:
        """Take note of a fetch, and how many leading blocks of the chain it served."""
        if shelf.is_first:
            self._note(shelf.part, chain, found_blocks, is_fetch=True)

    def _note(self, part: Part, chain: PrefixChain, found_blocks: int, *, is_fetch: bool) -> None:
        origin = None
        if chain.parent is None:
            self._skip -= 1
            if self._skip > 0:
                return
            weight = self._take_turn()
        else:
            origin = self._ends.pop(chain.parent, None)
            if origin is None:
                return
            weight = origin.weight
        if not chain.keys or not self.is_on:
            return
        if len(self._queue) >= _MAX_QUEUED:
            self.lost_samples += 1
            return
        first, keys = checkpoints_of(chain.keys, chain.start)
        end = self._ends[chain.keys[-1]] = _End(weight)
        if len(self._ends) > _MAX_PIECES:
            self._ends.popitem(last=False)
        visit = Visit(keys, first, num_checkpoints(chain.start + found_blocks), is_fetch, weight)
        self._queue.append(_Sampled(chain.namespace, part, chain.block_tokens, visit, end, origin))

    def _take_turn(self) -> float:
        """Return how many lookups this sample stands for, and choose the next one."""
        weight = self._weight
        self._seen += weight
        self._left -= 1
        if self._left <= 0:  # more in this second than is aimed at
            self._stride = min(2 * self._stride, _MAX_STRIDE)
            self._left = max(1, self._max_samples_per_s // 2)
        self._choose_next()
        return weight

    def _choose_next(self) -> None:
        self._weight = float(self._stride)
        self._skip = self._random.randrange(1, 2 * self._stride)

    async def run_forever(self) -> None:
        """Take in what was sampled, some times a second, giving way to others after each slice."""
        while self.is_on:
            await asyncio.sleep(_TICK_S)
            while self.step():  # noqa: ASYNC110 (it gives way; nothing is waited for)
                await asyncio.sleep(0)

    def settle(self) -> None:
        """Take in all that was sampled, at once."""
        while self.step():
            pass

    def step(self) -> bool:
        """Take in a slice of what was sampled; False if nothing is left. A fault switches it off."""
        if not self.is_on:
            return False
        try:
            self._keep_pace()
            for _ in range(min(_SLICE, len(self._queue))):
                self._take_in(self._queue.popleft())
            self._keep_within()
        except Exception:
            logger.exception("counting the branches that are used failed: it is off until the next start")
            self.is_on = False
            self._queue.clear()
            self._trees.clear()
        return bool(self._queue)

    @property
    def sample_ratio(self) -> float:
        """The share of lookups that is sampled now."""
        return 1 / self._stride

    @property
    def num_branches(self) -> int:
        """Branches that are kept, hot or not."""
        return sum(tree.num_branches for tree in self._trees.values())

    @property
    def minute(self) -> int:
        """The running minute."""
        return int(self._clock() // 60)

    @property
    def now_s(self) -> float:
        """The time that uses are dated by."""
        return self._clock()

    def trees(
        self, namespaces: Iterable[NamespaceDigest] | None = None
    ) -> list[tuple[NamespaceDigest, BranchTree]]:
        """Return the trees of all namespaces, or of some, after taking in what was sampled."""
        self.settle()
        wanted = self._trees if namespaces is None else namespaces
        return [(name, self._trees[name]) for name in wanted if name in self._trees]

    def namespaces(self) -> list[NamespaceDigest]:
        """Return the namespaces that branches are known of."""
        self.settle()
        return list(self._trees)

    def _take_in(self, sampled: _Sampled) -> None:
        tree = self._trees.get(sampled.namespace)
        start = None if sampled.origin is None else sampled.origin.node
        if sampled.origin is not None and (tree is None or start is None or not tree.holds(start)):
            return
        if tree is None:
            if len(self._trees) == MAX_NAMESPACES:
                del self._trees[min(self._trees, key=lambda at: self._trees[at].last_use_s)]
            tree = self._trees[sampled.namespace] = BranchTree(sampled.block_tokens, sampled.part)
        sampled.end.node = tree.visit(sampled.visit, self.minute, self._clock(), origin=start)

    def _keep_within(self) -> None:
        while self.num_branches > self._max_branches:
            largest = max(self._trees.values(), key=lambda tree: tree.num_branches)
            largest.thin_out(self.minute, largest.num_branches * 3 // 4)

    def _keep_pace(self) -> None:
        """Sample as many of the lookups as of the last second's would have been wanted."""
        now_s = self._clock()
        passed_s = now_s - self._paced_s
        if passed_s < 1.0:
            return
        stride = min(max(1, round(self._seen / passed_s / self._max_samples_per_s)), _MAX_STRIDE)
        if stride != self._stride:
            self._stride = stride
            self._choose_next()
        self._paced_s, self._seen, self._left = now_s, 0.0, self._max_samples_per_s
