"""SizeCurve: a sampled ghost of the store that tells what its hit rate would be at other sizes.

Sampling. SHARDS with a fixed number of samples (Waldspurger et al., FAST'15): a block is sampled if a hash of
its key is below a limit, and the limit falls whenever there would be too many. The hash is keyed, so that
nobody can choose keys that are sampled. To sample block by block is safe for prefixes: every use of a block
is a use of all before it, so in an order that is touched tail first a block is in a store of some size only
if those before it are, and block by block is the same as prefix by prefix.

One order. Blocks of all namespaces compete for the same tiers, so they stand in one order here, and each
namespace has a curve of its own lookups over it.

A request. A lookup counts its blocks where they stand, then puts them on top, tail first. A block that is
not there gets a place of no bytes, and its bytes when it is put: then the request is one use, as an
engine means it. A fetch after a match is the same request and counts nothing.

Cost. The way of a block only appends to a bounded queue, which a task empties some times a second, a slice at
a time. Keys are hashed many at once; only samples cost more. When there are too many in a second, lookups are
not noted for the rest of it, and the limit falls if enough blocks stay sampled. Measured:
benchmarks/size_curve.py.

Faults. The first one is logged and switches it off: nothing else depends on it.
"""

import asyncio
import logging
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import chain as concatenated

import numpy as np
import numpy.typing as npt

from kvstore.byte_stack import ByteStack
from kvstore.directory import Shelf
from kvstore.hit_curve import HitCurve
from kvstore.keys import KEY_BYTES, NamespaceDigest, PrefixChain
from kvstore.size_visits import FollowUps, Visit, VisitKind
from kvstore.tier import ALIGNMENT_BYTES

logger = logging.getLogger(__name__)

MAX_SAMPLED_BLOCKS = 8192
MAX_NAMESPACES = 64
MIN_SAMPLES = 500
"""Sampled lookups below which no hit rate is told."""

MAX_QUEUED_BLOCKS = 131_072
MAX_QUEUED_VISITS = 16_384
"""The queue takes at most some 14 MB."""

_TICK_S = 0.1
_SLICE_BLOCKS = 4096
"""Blocks hashed at a time: about a tenth of a millisecond."""

_SLICE_SAMPLES = 32
"""Samples handled at a time: 0.1 to 0.3 ms."""

MAX_SAMPLES_PER_S = 2000
"""Sampled blocks of lookups and puts that are handled in a second: 6 to 13 ms of the loop."""

_FEWEST_BLOCKS = 1024
"""The rate of samples lowers the limit only while more blocks than these are sampled."""

_MIN_BLOCKS_WITHIN = 16
"""Sampled blocks that a size must hold for its hit rate to be told: fewer do not tell sizes apart."""

_HALF_LIFE_S = 3600.0
_HASH_MAX = (1 << 64) - 1


@dataclass(slots=True)
class Sample:
    """A sampled block. ``is_put`` is False while it is only looked for; ``awaits_put`` since a lookup."""

    hash: int
    is_put: bool
    awaits_put: bool


Picked = Sequence[tuple[int, int]]
"""Sampled blocks of a visit, in chain order: what each is called here, and its hash."""

_NONE: Picked = ()


class SizeCurve:
    """The ghost of one store; one event loop's thread. ``limit_bytes`` is the largest size it tells of.

    ``multipliers`` are four odd 64-bit numbers that key the hash.
    """

    def __init__(
        self,
        *,
        multipliers: Sequence[int],
        limit_bytes: int,
        clock: Callable[[], float],
        max_blocks: int = MAX_SAMPLED_BLOCKS,
        max_samples_per_s: int = MAX_SAMPLES_PER_S,
    ) -> None:
        self._multipliers = np.array(multipliers, np.uint64)
        self.limit_bytes = limit_bytes
        self._max_blocks = max_blocks
        self._max_expected = max_blocks // 4
        self._clock = clock
        self._queue: deque[Visit] = deque()
        self._queued_blocks = 0
        self._steps: Iterator[None] = iter(())
        self._hash_limit = _HASH_MAX
        self._sampled_bytes = limit_bytes * self.sample_ratio  # of what is sampled, what sizes can hold
        self._stack: ByteStack[int] = ByteStack(max_blocks + self._max_expected + 1)
        self._samples: dict[int, Sample] = {}
        self._largest: list[tuple[int, int]] = []  # a heap of (-hash, name) of what is put
        self._expected: OrderedDict[int, None] = OrderedDict()  # looked for and not put
        self._follow_ups = FollowUps()
        self._whole = HitCurve(limit_bytes)
        self._by_namespace: dict[NamespaceDigest, HitCurve] = {}
        self._aged_s = self._paced_s = clock()
        self._max_samples_per_s = max_samples_per_s
        self._recent_samples = 0
        self.lost_blocks = 0
        self.is_on = True

    def note_match(self, shelf: Shelf, chain: PrefixChain, *, num_hits: int) -> None:
        """Take note of a match; what it found may be fetched next."""
        self._note(VisitKind.MATCH_HIT if num_hits else VisitKind.MATCH_MISS, shelf, chain)

    def note_fetch(self, shelf: Shelf, chain: PrefixChain) -> None:
        """Take note of a fetch."""
        self._note(VisitKind.FETCH, shelf, chain)

    def note_put(self, shelf: Shelf, chain: PrefixChain) -> None:
        """Take note that blocks are offered, stored already or not."""
        self._note(VisitKind.PUT, shelf, chain)

    def _note(self, kind: VisitKind, shelf: Shelf, chain: PrefixChain) -> None:
        num_blocks = len(chain.keys)
        if not num_blocks or not self.is_on:
            return
        is_past_pace = kind is not VisitKind.PUT and self._is_past_pace
        is_full = (
            len(self._queue) >= MAX_QUEUED_VISITS or self._queued_blocks + num_blocks > MAX_QUEUED_BLOCKS
        )
        if is_past_pace or is_full:
            self.lost_blocks += num_blocks
            return
        self._queued_blocks += num_blocks
        # Parts of a block are sampled together, and are different things.
        part = 0 if shelf.is_first else hash(shelf.part)
        self._queue.append((kind, shelf.length_bytes, part, chain))

    async def run_forever(self) -> None:
        """Handle what was noted, some times a second, giving way to others after each slice."""
        while self.is_on:
            await asyncio.sleep(_TICK_S)
            while self.step():  # noqa: ASYNC110 (it gives way; nothing is waited for)
                await asyncio.sleep(0)

    def settle(self) -> None:
        """Handle all that was noted, at once."""
        while self.step():
            pass

    def step(self) -> bool:
        """Handle a slice of what was noted; False if there is nothing left. A fault switches it off."""
        if not self.is_on:
            return False
        try:
            if next(self._steps, self) is not self:
                return True
            self._keep_pace()
            if not self._queue:
                return False
            self._steps = self._handle(self._taken())
        except Exception:
            logger.exception("the curve of hit rates over sizes failed: it is off until the next start")
            self.is_on = False
            self._queue.clear()
            return False
        return True

    @property
    def sample_ratio(self) -> float:
        """The share of blocks that is sampled now."""
        return (self._hash_limit + 1) / (_HASH_MAX + 1)

    @property
    def num_sampled(self) -> int:
        """Blocks in the ghost that are put."""
        return len(self._samples) - len(self._expected)

    def curve(self, namespaces: Iterable[NamespaceDigest] | None = None) -> HitCurve:
        """Return the curve of all lookups, or of those in some namespaces; a copy."""
        merged = HitCurve(self.limit_bytes)
        if namespaces is None:
            merged.add(self._whole)
            return merged
        for namespace in namespaces:
            if namespace in self._by_namespace:
                merged.add(self._by_namespace[namespace])
        return merged

    def namespaces(self) -> list[NamespaceDigest]:
        """Return the namespaces that have a curve of their own."""
        return list(self._by_namespace)

    def tells(self, curve: HitCurve, size_bytes: float) -> bool:
        """Whether a curve rests on enough samples for its hit rate at a size to mean something."""
        if not self.is_on or curve.samples < MIN_SAMPLES or not 0 < size_bytes <= self.limit_bytes:
            return False
        if self._hash_limit == _HASH_MAX or not self.num_sampled:
            return True
        mean_bytes = self._stack.total_bytes / self.num_sampled
        return self.sample_ratio * size_bytes >= _MIN_BLOCKS_WITHIN * mean_bytes

    @property
    def _is_past_pace(self) -> bool:
        """Whether as many samples were handled in this second as may be."""
        return self._recent_samples >= self._max_samples_per_s

    def _taken(self) -> list[Visit]:
        """Take a slice of visits off the queue, at least one."""
        taken: list[Visit] = []
        num_blocks = 0
        while self._queue and num_blocks < _SLICE_BLOCKS:
            visit = self._queue.popleft()
            taken.append(visit)
            num_blocks += len(visit[3].keys)
        self._queued_blocks -= num_blocks
        return taken

    def _handle(self, visits: Sequence[Visit]) -> Iterator[None]:
        """Handle visits, yielding after some samples each."""
        num_handled = 0
        for (kind, length_bytes, _, chain), picked in zip(visits, self._picked(visits), strict=True):
            if kind is VisitKind.PUT:
                if picked:  # seldom, once there are many blocks
                    yield from self._put(length_bytes, picked)
                self._keep_within()
            elif self._is_past_pace:
                self.lost_blocks += len(chain.keys)
                continue
            elif kind is not VisitKind.FETCH or not self._follow_ups.is_one(chain):
                if kind is VisitKind.MATCH_HIT:
                    self._follow_ups.expect(chain)
                yield from self._look_up(chain.namespace, len(chain.keys), picked)
            num_handled += len(picked)
            self._recent_samples += len(picked)
            if num_handled >= _SLICE_SAMPLES:
                num_handled = 0
                yield

    def _picked(self, visits: Sequence[Visit]) -> Iterator[Picked]:
        """Yield the sampled blocks of each visit."""
        joined = b"".join(concatenated.from_iterable([visit[3].keys for visit in visits]))
        words = np.frombuffer(joined, "<u8").reshape(-1, KEY_BYTES // 8)
        hashes: npt.NDArray[np.uint64] = words @ self._multipliers
        where = np.flatnonzero(hashes <= np.uint64(self._hash_limit))
        indices: list[int] = where.tolist()
        sampled: list[int] = hashes[where].tolist()
        indices.append(len(hashes))  # behind the last visit
        at = end = 0
        for _, _, part, chain in visits:
            end += len(chain.keys)
            if indices[at] >= end:
                yield _NONE
                continue
            first = at
            while indices[at] < end:
                at += 1
            limit = self._hash_limit  # it may have fallen meanwhile
            yield [(value ^ part, value) for value in sampled[first:at] if value <= limit]

    def _look_up(self, namespace: NamespaceDigest, num_blocks: int, picked: Picked) -> Iterator[None]:
        curves = (self._whole, self._curve_of(namespace))
        for curve in curves:
            curve.lookups += num_blocks
        weight = 1 / self.sample_ratio
        for at, (name, _) in enumerate(picked, 1):  # all where they stand now, before any moves
            sample = self._samples.get(name)
            is_put = sample is not None and sample.is_put
            from_bytes = 0.0
            if is_put:
                # Less by half of what sizes are multiples of: a bin that begins just there is a hit already.
                from_bytes = self._stack.above(name) * weight + self._stack.size(name) - ALIGNMENT_BYTES / 2
            for curve in curves:
                if is_put:
                    curve.note_hit(from_bytes, weight)
                else:
                    curve.note_miss(weight)
            if at % _SLICE_SAMPLES == 0:
                yield
        for at, (name, value) in enumerate(reversed(picked), 1):
            self._touch(name, value)
            if at % _SLICE_SAMPLES == 0:
                yield

    def _touch(self, name: int, value: int) -> None:
        """Put a block that was looked for on top."""
        sample = self._samples.get(name)
        if sample is None:
            if value > self._hash_limit:
                return
            if len(self._expected) == self._max_expected:
                self._forget(next(iter(self._expected)))
            self._samples[name] = Sample(value, is_put=False, awaits_put=True)
            self._expected[name] = None
            self._stack.push(name, 0)
            return
        sample.awaits_put = True
        self._stack.push(name, self._stack.size(name))
        if not sample.is_put:
            self._expected.move_to_end(name)

    def _put(self, length_bytes: int, picked: Picked) -> Iterator[None]:
        size_bytes = -(-length_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        samples = self._samples
        for at, (name, value) in enumerate(reversed(picked), 1):
            sample = samples.get(name)
            if sample is not None and sample.is_put:
                if not sample.awaits_put:
                    self._stack.push(name, size_bytes)
                sample.awaits_put = False
            elif value <= self._hash_limit:
                self._admit(name, value, size_bytes)
            if at % _SLICE_SAMPLES == 0:
                yield

    def _admit(self, name: int, value: int, size_bytes: int) -> None:
        """Give a block its bytes: at the place that a lookup gave it, or else on top."""
        samples, expected = self._samples, self._expected
        if name in expected:
            del expected[name]
            self._stack.resize(name, size_bytes)
        else:
            self._stack.push(name, size_bytes)
        samples[name] = Sample(value, True, False)
        heappush(self._largest, (-value, name))
        while len(samples) - len(expected) > self._max_blocks:
            self._lower_limit(-self._largest[0][0] - 1)

    def _lower_limit(self, limit: int) -> None:
        self._hash_limit = limit = min(self._hash_limit, max(limit, 0))
        self._sampled_bytes = self.limit_bytes * self.sample_ratio
        largest, samples = self._largest, self._samples
        while largest and -largest[0][0] > limit:
            _, name = heappop(largest)
            sample = samples.get(name)
            if sample is not None and sample.is_put:
                self._forget(name)

    def _keep_within(self) -> None:
        """Forget blocks used so long ago that no size keeps them; the heap does not grow with them."""
        while self._stack.total_bytes > self._sampled_bytes and self.num_sampled > 1:
            deepest = self._stack.deepest()
            assert deepest is not None, "bytes without a block"
            self._forget(deepest)
        if len(self._largest) > 2 * self._max_blocks:
            self._largest = [(-sample.hash, name) for name, sample in self._samples.items() if sample.is_put]
            heapify(self._largest)

    def _forget(self, name: int) -> None:
        self._stack.remove(name)
        del self._samples[name]
        self._expected.pop(name, None)

    def _curve_of(self, namespace: NamespaceDigest) -> HitCurve:
        curve = self._by_namespace.get(namespace)
        if curve is None:
            if len(self._by_namespace) == MAX_NAMESPACES:
                del self._by_namespace[min(self._by_namespace, key=lambda at: self._by_namespace[at].lookups)]
            curve = self._by_namespace[namespace] = HitCurve(self.limit_bytes)
        return curve

    def _keep_pace(self) -> None:
        """Have old counts fade, and sample less when there are too many samples a second."""
        now_s = self._clock()
        if now_s - self._aged_s >= _HALF_LIFE_S:
            self._aged_s = now_s
            for curve in (self._whole, *self._by_namespace.values()):
                curve.age()
        if now_s - self._paced_s < 1.0:
            return
        if self._is_past_pace and self.num_sampled > _FEWEST_BLOCKS:
            self._lower_limit(self._hash_limit // 2)
        self._paced_s, self._recent_samples = now_s, 0
