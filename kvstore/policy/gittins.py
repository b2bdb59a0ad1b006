"""GittinsPolicy: keeps what is expected to be used soonest for the room it takes."""

import heapq
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import islice, repeat
from typing import TypeVar

from kvstore.policy.block_classes import new_class, told_class, trailing_class, used_class
from kvstore.policy.cohorts import Block, Cohort, Cohorts, Lane, new_block
from kvstore.policy.hazard_state import STATE_VERSION, read_state
from kvstore.policy.hazards import ClassPath, Hazards
from kvstore.policy.protocol import NO_HINT, Hint, Offer
from kvstore.tier import StorageKey

T = TypeVar("T")

_REBUILD_REQUESTS = 64
"""Requests after which what was seen changes what blocks are worth."""

_MIN_GHOSTS = 65_536
_GHOSTS_PER_BLOCK = 8
_MANY_GHOSTS = 524_288
_MAX_OFFERED = 65_536
"""Blocks whose class is remembered between their offer and their coming."""

_SLACK_BLOCKS = 1024
"""How many more are forgotten at once when there are too many: to find a dict's first is not free."""

_MAX_PRIORITY = 4
_MAX_COST_STEPS = 6


class GittinsPolicy:
    """Evicts the block whose slot is worth least: its Gittins index, expected uses per slot-second.

    Worth: keeping a block rents one slot. Of a class of blocks last used so long ago it is the most, over all
    times to give up, of the probability of a use until then over the expected slot-seconds until that use or
    that time. Only leaves are candidates; a parent becomes one as soon as its last child is named, or small
    caches lose twelve points of hit rate. Blocks just computed compete, so that what is worth least is not
    stored at all.

    Classes: see ``block_classes``; hazards per class and age: ``hazards``; how the least is found among all
    without looking at each: ``cohorts``.

    Ghosts: the uses of blocks that left or were refused are part of what is learned. At most eight per
    stored block, or 65 536 if that is more, and at most 524 288.
    """

    is_blockwise = False
    may_refuse = True

    def __init__(self, capacity_bytes: int = 0) -> None:
        self._hazards = Hazards()
        self._cohorts = Cohorts(self._hazards)
        self._blocks: dict[StorageKey, Block] = {}
        # By the hash of the key: two keys that share it share a memory of uses, and nothing else.
        self._ghosts: dict[int, Block] = {}
        self._ghost_limit = _MIN_GHOSTS
        self._offered: dict[StorageKey, tuple[Lane, int]] = {}
        # Adopted before their parents, by these.
        self._awaiting: dict[StorageKey, list[Block]] = {}
        self._num_offers = 0
        self._now_s = 0.0
        self._usual_cost = 0.0

    def touch(self, blocks: Sequence[StorageKey], *, now_s: float, hint: Hint = NO_HINT) -> None:
        """Move the known blocks, and ghosts, to cohorts of this use."""
        self._cohorts.tidy()
        get, ghosts, cohorts = self._blocks.get, self._ghosts, self._cohorts
        fresh: dict[Lane, Cohort] = {}
        old: Cohort | None = None
        new: Cohort | None = None
        uses = num = 0
        for key in blocks:
            block = get(key) or ghosts.get(hash(key))
            if block is None:
                continue
            if block.cohort is not old or block.uses != uses or new is None:
                if old is not None and new is not None:
                    self._move(old, new, num, now_s)
                old, uses, num = block.cohort, block.uses, 0
                new = self._fresh(fresh, self._used_lane(uses + 1, now_s - old.at_s, hint), now_s)
            num += 1
            block.uses = uses + 1
            if block.children or block.key is None:
                block.cohort = new
            else:
                cohorts.drop_leaf(block)
                block.cohort = new
                cohorts.add_leaf(block)
        if old is not None and new is not None:
            self._move(old, new, num, now_s)

    def _move(self, old: Cohort, new: Cohort, num: int, now_s: float) -> None:
        self._cohorts.end(old, num, now_s, is_use=True)
        self._cohorts.grow(new, num)

    def note_hint(self, blocks: Sequence[StorageKey], *, now_s: float, hint: Hint) -> None:
        """Move the known blocks to cohorts of what is said of them; how long they were unused starts anew."""
        cohorts = self._cohorts
        fresh: dict[Lane, Cohort] = {}
        for key in blocks:
            block = self._blocks.get(key)
            if block is None:
                continue
            lane = self._lane(told_class(block.cohort.lane.evidence.path, block.uses, hint), hint)
            if lane is block.cohort.lane:
                continue
            if not block.children:
                cohorts.drop_leaf(block)
            cohorts.end(block.cohort, 1, now_s, is_use=False)
            block.cohort = self._fresh(fresh, lane, now_s)
            cohorts.grow(block.cohort, 1)
            if not block.children:
                cohorts.add_leaf(block)

    def offer(self, offer: Offer, *, now_s: float) -> None:
        """Class blocks as those of one request."""
        self._count_offer(now_s)
        keys, hint, offered = offer.blocks, offer.hint, self._offered
        parent = None if offer.parent is None else self._blocks.get(offer.parent)
        if offered and not offered.keys().isdisjoint(keys):
            for key in keys:  # what is offered again comes behind what may be forgotten
                offered.pop(key, None)
        known = self._known_ghosts(keys)
        last = next((ghost for ghost in reversed(known) if ghost is not None), parent)
        turns = 2 if last is None else (last.turns & ~1) + 2 * (last.turns & 1)
        num_new = len(keys) - len(known) + known.count(None)
        lane = self._lane(new_class(turns >> 1, num_new, hint), hint)
        if len(keys) > 1:
            offered.update(dict.fromkeys(keys, (lane, turns)))
        if known:
            self._offer_ghosts(keys, known, now_s, hint)
        if not known or known[-1] is None:
            offered[keys[-1]] = self._lane(trailing_class(turns >> 1, num_new, hint), hint), turns
        for key in keys[-2:]:
            lane, turns = offered[key]
            offered[key] = lane, turns | 1
        if len(keys) == 1 and parent is not None:
            parent.turns |= 1
        self._bound_offered(max(_MAX_OFFERED, 2 * len(keys)))

    def _count_offer(self, now_s: float) -> None:
        self._num_offers += 1
        self._now_s = now_s
        if self._num_offers % _REBUILD_REQUESTS == 0:
            self._cohorts.rebuild(now_s)
            self._ghost_limit = max(_MIN_GHOSTS, min(_GHOSTS_PER_BLOCK * len(self._blocks), _MANY_GHOSTS))

    def _bound_offered(self, limit: int) -> None:
        if len(self._offered) > limit:
            for key in _too_many(self._offered, limit):
                del self._offered[key]

    def _known_ghosts(self, keys: Sequence[StorageKey]) -> list[Block | None]:
        """Return the ghosts of blocks; nothing if none of them has one."""
        ghosts = self._ghosts
        if not ghosts:
            return []
        known = list(map(ghosts.get, map(hash, keys)))
        return known if any(known) else []

    def _offer_ghosts(
        self, keys: Sequence[StorageKey], known: Sequence[Block | None], now_s: float, hint: Hint
    ) -> None:
        """Class offered blocks that have ghosts by their uses."""
        offered = self._offered
        old: Cohort | None = None
        uses = turns = 0
        classed: tuple[Lane, int] | None = None
        for key, ghost in zip(keys, known, strict=True):
            if ghost is None:
                continue
            if classed is None or ghost.cohort is not old or ghost.uses != uses or ghost.turns != turns:
                old, uses, turns = ghost.cohort, ghost.uses, ghost.turns
                classed = self._used_lane(uses + 1, now_s - old.at_s, hint), turns
            offered[key] = classed

    def insert(
        self,
        blocks: Sequence[StorageKey],
        *,
        size_bytes: int,
        now_s: float,
        parent: StorageKey | None = None,
        hint: Hint = NO_HINT,
        is_use: bool = True,
    ) -> None:
        """File blocks in cohorts of the request that offered them."""
        stored = self._blocks
        if not stored.keys().isdisjoint(blocks):
            self._insert_missing(blocks, Offer(blocks, size_bytes, parent, hint, is_use), now_s)
            return
        if not blocks:
            return
        run = self._learn(Offer(blocks, size_bytes, parent, hint, is_use), now_s)
        above = None if parent is None else stored.get(parent)
        if len(run) == 1:
            stored[blocks[0]] = run[0]
        else:
            num_before = len(stored)
            stored.update(zip(blocks, run, strict=True))
            if len(stored) != num_before + len(run):  # a chain that names a block twice
                self._file(blocks, dict(zip(blocks, run, strict=True)), above)
                return
            _chain(run)
        # Blocks that have no child yet: no claim of a chain can make a circle.
        if above is not None:
            self._link(run[0], above)
        self._cohorts.add_leaf(run[-1])

    def _insert_missing(self, blocks: Sequence[StorageKey], offer: Offer, now_s: float) -> None:
        """File those blocks of a chain that are not stored yet, and use the others."""
        stored = self._blocks
        if offer.is_use:
            self.touch([key for key in blocks if key in stored], now_s=now_s, hint=offer.hint)
        missing = [key for key in blocks if key not in stored]
        if not missing:
            return
        new = dict(zip(missing, self._learn(offer._replace(blocks=missing), now_s), strict=True))
        self._file(blocks, new, None if offer.parent is None else stored.get(offer.parent))

    def _file(
        self, blocks: Sequence[StorageKey], new: Mapping[StorageKey, Block], previous: Block | None
    ) -> None:
        """File those blocks of a chain that are new one by one; ``previous`` is before the first."""
        for key in blocks:
            block = new.get(key)
            if block is None:
                previous = self._blocks[key]
                continue
            self._blocks[key] = block
            if previous is not None:
                self._link(block, previous)
            previous = block
            self._cohorts.add_leaf(block)

    def adopt(
        self,
        blocks: Sequence[StorageKey],
        parents: Sequence[StorageKey | None],
        *,
        size_bytes: int,
        now_s: float,
    ) -> None:
        """File blocks in one cohort of new ones: when they were last used is not known."""
        lane = self._lane(new_class(1, len(blocks), NO_HINT), NO_HINT)
        cohort = self._cohorts.start(lane, now_s)
        new = {key: new_block(key, cohort, 1, 2) for key in blocks if key not in self._blocks}
        self._cohorts.grow(cohort, len(new))
        self._blocks.update(new)
        for key, parent in zip(blocks, parents, strict=True):
            if parent is None or key not in new:
                continue
            above = self._blocks.get(parent)
            if above is None:
                self._awaiting.setdefault(parent, []).append(new[key])
            else:
                above.children += 1
                new[key].parent = above
        for block in new.values():
            if not block.children:
                self._cohorts.add_leaf(block)
            if block.parent is not None and block.parent.key not in new:
                self._cohorts.drop_leaf(block.parent)
        if self._awaiting:
            self._unite(new)

    def _unite(self, new: Mapping[StorageKey, Block]) -> None:
        """Link blocks that were adopted before their parents to those that came now."""
        awaiting = self._awaiting
        for key, block in new.items():
            for child in awaiting.pop(key, ()):
                if child.key is not None and child.parent is None and not _is_above(child, block):
                    self._link(child, block)
        if len(awaiting) > len(self._blocks):
            self._awaiting = {
                parent: left
                for parent, children in awaiting.items()
                if (left := [child for child in children if child.key is not None])
            }

    def refuse(self, offer: Offer, *, now_s: float) -> None:
        """Remember blocks as ghosts in cohorts of the request that offered them."""
        ghosts = self._ghosts
        for block in self._learn(offer, now_s):
            key, block.key = block.key, None
            ghosts[hash(key)] = block
        self._bound_ghosts(now_s)

    def _learn(self, offer: Offer, now_s: float) -> list[Block]:
        """Make the blocks of an offer, each in its cohort and its ghost forgotten, and not yet linked."""
        self._class(offer, now_s)
        if self._known_ghosts(offer.blocks):
            return self._learn_ghosts(offer, now_s)
        offered, keys = self._offered, offer.blocks
        if len(keys) == 1:  # most puts: what a run takes pays from two blocks on
            lane, turns = offered.pop(keys[0])
            cohort = self._cohorts.start(lane, now_s)
            self._cohorts.grow(cohort, 1)
            return [new_block(keys[0], cohort, 1, turns)]
        return self._learn_run(offer, now_s)

    def _learn_run(self, offer: Offer, now_s: float) -> list[Block]:
        """As ``_learn``, of classed blocks none of which has a ghost."""
        offered, keys = self._offered, offer.blocks
        classes = list(map(offered.pop, keys, repeat(None)))
        if not all(classes):  # a chain that names a block twice
            offered.update((key, known) for key, known in zip(keys, classes, strict=True) if known)
            return self._learn_ghosts(offer, now_s)
        fresh: dict[Lane, Cohort] = {}
        run: list[Block] = []
        last: tuple[Lane, int] | None = None
        cohort: Cohort | None = None
        start = turns = 0
        for key, classed in zip(keys, classes, strict=True):
            if classed is not last:
                assert classed is not None, "a block without a class"
                self._settle(None, cohort, len(run) - start, now_s)
                start, last = len(run), classed
                lane, turns = classed
                cohort = self._fresh(fresh, lane, now_s)
            assert cohort is not None, "a block without a cohort"
            # As new_block does, without a call for each.
            block = Block()
            block.key = key
            block.parent = None
            block.children = 0
            block.cohort = cohort
            block.uses = 1
            block.turns = turns
            run.append(block)
        self._settle(None, cohort, len(run) - start, now_s)
        return run

    def _learn_ghosts(self, offer: Offer, now_s: float) -> list[Block]:
        """As ``_learn``, of any blocks: some have ghosts."""
        fresh: dict[Lane, Cohort] = {}
        ghosts, offered = self._ghosts, self._offered
        run: list[Block] = []
        old: Cohort | None = None
        new: Cohort | None = None
        num = 0
        for key in offer.blocks:
            ghost = ghosts.pop(hash(key), None)
            if ghost is not None and not offer.is_use:
                offered.pop(key, None)
                # Not the ghost itself: blocks that it left behind may still name it as their parent.
                run.append(new_block(key, ghost.cohort, ghost.uses, ghost.turns))
                continue
            if key not in offered:  # its ghost was another's, whose key has the same hash
                self._settle(old, new, num, now_s)
                num = 0
                self.offer(offer._replace(blocks=(key,), is_use=True), now_s=now_s)
            lane, turns = offered.pop(key)
            cohort = fresh.get(lane) or self._fresh(fresh, lane, now_s)
            left = None if ghost is None else ghost.cohort
            if left is not old or cohort is not new:
                self._settle(old, new, num, now_s)
                old, new, num = left, cohort, 0
            num += 1
            run.append(new_block(key, cohort, 1 if ghost is None else 1 + ghost.uses, turns))
        self._settle(old, new, num, now_s)
        return run

    def _settle(self, old: Cohort | None, new: Cohort | None, num: int, now_s: float) -> None:
        """Blocks of a new cohort were made, which had ghosts in an old one, or none."""
        if new is None or not num:
            return
        if old is None:
            self._cohorts.grow_each(new, num)
        else:
            self._cohorts.move_each(old, new, num, now_s)

    def candidates(self, *, now_s: float, offer: Offer | None = None) -> Iterator[StorageKey]:
        """Yield leaves, least worth first, and each parent as soon as its last child was named."""
        self._cohorts.advance(now_s)
        heap = [(rung.worth, rung.order, rung.leaves()) for rung in self._cohorts.leafy]
        heapq.heapify(heap)
        offered = [] if offer is None else self._worths(offer, now_s)
        waiting = None if offer is None or offer.parent is None else self._blocks.get(offer.parent)
        gone: dict[Block, int] = {}
        order = -1
        while heap or offered:
            if not heap and waiting is None:
                return  # what is offered competes with nothing
            # Of equals the older one goes: without evidence that is LRU.
            if offered and (not heap or offered[-1][0] < heap[0][0]):
                yield offered.pop()[1]
                if offered or waiting is None:
                    continue
                parent, waiting = waiting, None
                if parent.children > gone.get(parent, 0):
                    continue
            else:
                leaf = next(heap[0][2], None)
                if leaf is None:
                    heapq.heappop(heap)
                if leaf is None or leaf is waiting:
                    continue
                assert leaf.key is not None, "a ghost is no leaf"
                yield leaf.key
                if leaf.parent is None or leaf.parent.key is None:
                    continue
                parent = leaf.parent
                gone[parent] = gone.get(parent, 0) + 1
                if gone[parent] < parent.children or parent is waiting:
                    continue
            worth = parent.cohort.lane.rungs[parent.cohort.age].worth
            heapq.heappush(heap, (worth, order, iter((parent,))))
            order -= 1

    def _class(self, offer: Offer, now_s: float) -> None:
        """Class an offer that was not announced, or so long ago that it is forgotten.

        Blocks from another tier are classed already if they are ghosts.
        """
        if all(map(self._offered.__contains__, offer.blocks)):
            return
        if offer.is_use:
            self.offer(offer, now_s=now_s)
            return
        unknown = [b for b in offer.blocks if b not in self._offered and hash(b) not in self._ghosts]
        if unknown:
            self.offer(offer._replace(blocks=unknown), now_s=now_s)

    def _worths(self, offer: Offer, now_s: float) -> list[tuple[float, StorageKey]]:
        self._class(offer, now_s)
        if offer.is_use:
            return [(self._offered[key][0].rungs[0].worth, key) for key in offer.blocks]
        return [(self._worth_below(key), key) for key in offer.blocks]

    def _worth_below(self, key: StorageKey) -> float:
        """What a block from another tier is worth: as old as it is."""
        ghost = self._ghosts.get(hash(key))
        if ghost is None:
            return self._offered[key][0].rungs[0].worth
        return ghost.cohort.lane.rungs[ghost.cohort.age].worth

    def evict(self, block: StorageKey, *, now_s: float) -> None:
        """Make a block a ghost."""
        known = self._take(block)
        if known is not None:
            self._ghosts[hash(block)] = known
            if len(self._ghosts) > self._ghost_limit:
                self._bound_ghosts(now_s)

    def remove(self, block: StorageKey) -> None:
        """Forget a block and its ghost."""
        known = self._take(block) or self._ghosts.pop(hash(block), None)
        if known is not None:
            self._cohorts.end(known.cohort, 1, known.cohort.at_s, is_use=False)

    def _take(self, key: StorageKey) -> Block | None:
        block = self._blocks.pop(key, None)
        if block is None:
            return None
        parent = block.parent
        if parent is not None:
            block.parent = None
            if parent.key is None:
                parent = None
            else:
                parent.children -= 1
        if block.children:
            if parent is not None and not parent.children:
                self._cohorts.add_leaf(parent)
            block.children = 0
        elif parent is not None and not parent.children:
            self._cohorts.leave_to_parent(block, parent)
        else:
            self._cohorts.drop_leaf(block)
        block.key = None
        return block

    def _bound_ghosts(self, now_s: float) -> None:
        if len(self._ghosts) > self._ghost_limit:
            for name in _too_many(self._ghosts, self._ghost_limit):
                self._cohorts.end(self._ghosts.pop(name).cohort, 1, now_s, is_use=False)

    def _link(self, block: Block, parent: Block) -> None:
        self._unlink(block)
        if not parent.children:
            self._cohorts.drop_leaf(parent)
        parent.children += 1
        block.parent = parent

    def _unlink(self, block: Block) -> None:
        parent, block.parent = block.parent, None
        if parent is not None and parent.key is not None:
            parent.children -= 1
            if not parent.children:
                self._cohorts.add_leaf(parent)

    def _fresh(self, fresh: dict[Lane, Cohort], lane: Lane, now_s: float) -> Cohort:
        cohort = fresh.get(lane)
        if cohort is None:
            cohort = fresh[lane] = self._cohorts.start(lane, now_s)
        return cohort

    def _used_lane(self, uses: int, gap_s: float, hint: Hint) -> Lane:
        return self._lane(used_class(uses, gap_s, hint), hint)

    def _lane(self, path: ClassPath, hint: Hint) -> Lane:
        return self._cohorts.lane(path, 1.0 if hint is NO_HINT else self._weight(hint))

    def _weight(self, hint: Hint) -> float:
        """What a use of a request's blocks is worth, relative to others, in steps of two."""
        power = max(-_MAX_PRIORITY, min(_MAX_PRIORITY, hint.priority))
        cost = hint.saves_s_per_byte
        if cost is not None and cost > 0 and math.isfinite(cost):
            self._usual_cost = self._usual_cost or cost
            steps = round(math.log2(cost / self._usual_cost))
            power += max(-_MAX_COST_STEPS, min(_MAX_COST_STEPS, steps))
        return float(2.0**power)

    def to_state(self) -> dict[str, object]:
        """Return uses and exposure of every class: some hundred kilobytes at most."""
        return {"version": STATE_VERSION, "classes": self._hazards.to_state(self._now_s)}

    def from_state(self, state: dict[str, object]) -> None:
        """Add what an earlier run has seen.

        Raises:
            ValueError: it is not what ``to_state`` returns; nothing was taken over.
        """
        saved = read_state(state)
        for path, _, _ in saved:
            self._cohorts.lane(path, 1.0)
        self._hazards.from_state(saved)
        self._cohorts.rebuild(self._now_s)

    def __contains__(self, block: object) -> bool:
        return block in self._blocks

    def __len__(self) -> int:
        return len(self._blocks)


def _too_many(known: Collection[T], limit: int) -> list[T]:
    """Return the first ones of more than ``limit``: what is too many, and some more."""
    return list(islice(known, len(known) - limit + min(_SLACK_BLOCKS, limit // 64)))


def _is_above(block: Block, other: Block) -> bool:
    """Whether a block is the other or one of those that lead to it."""
    above: Block | None = other
    while above is not None and above is not block:
        above = above.parent
    return above is block


def _chain(run: Sequence[Block]) -> None:
    """Make each of some new blocks the parent of the next."""
    previous = run[0]
    for block in run[1:]:
        previous.children = 1
        block.parent = previous
        previous = block
