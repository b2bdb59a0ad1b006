"""A gittins policy that does block by block what the real one does run by run, and nothing to save time."""

import numpy as np

from kvstore.policy import NO_HINT, GittinsPolicy, Offer
from kvstore.policy.block_classes import new_class, trailing_class
from kvstore.policy.cohorts import new_block
from kvstore.policy.gittins import _MAX_OFFERED, _too_many
from kvstore.policy.hazards import NUM_AGES


class PlainGittins(GittinsPolicy):
    """The same decisions and the same state as GittinsPolicy, to the last bit."""

    def offer(self, offer, *, now_s):
        self._count_offer(now_s)
        hint = offer.hint
        parent = None if offer.parent is None else self._blocks.get(offer.parent)
        known = [self._ghosts.get(hash(key)) for key in offer.blocks]
        last = next((ghost for ghost in reversed(known) if ghost is not None), parent)
        turns = 2 if last is None else (last.turns & ~1) + 2 * (last.turns & 1)
        lane = self._lane(new_class(turns >> 1, known.count(None), hint), hint)
        for key, ghost in zip(offer.blocks, known, strict=True):
            self._offered.pop(key, None)
            self._offered[key] = lane, turns
            if ghost is not None:
                used = self._used_lane(ghost.uses + 1, now_s - ghost.cohort.at_s, hint)
                self._offered[key] = used, ghost.turns
        if known[-1] is None:
            trailing = self._lane(trailing_class(turns >> 1, known.count(None), hint), hint)
            self._offered[offer.blocks[-1]] = trailing, turns
        for key in offer.blocks[-2:]:
            self._offered[key] = self._offered[key][0], self._offered[key][1] | 1
        if len(known) == 1 and parent is not None:
            parent.turns |= 1
        limit = max(_MAX_OFFERED, 2 * len(offer.blocks))
        if len(self._offered) > limit:
            for key in _too_many(self._offered, limit):
                del self._offered[key]

    def insert(self, blocks, *, size_bytes, now_s, parent=None, hint=NO_HINT, is_use=True):
        known = [key for key in blocks if key in self._blocks]
        if known and is_use:
            self.touch(known, now_s=now_s, hint=hint)
        missing = [key for key in blocks if key not in self._blocks]
        learned = self._learn(Offer(missing, size_bytes, parent, hint, is_use), now_s) if missing else []
        new = dict(zip(missing, learned, strict=True))
        self._file(blocks, new, None if parent is None else self._blocks.get(parent))

    def _learn(self, offer, now_s):
        self._class(offer, now_s)
        fresh, run = {}, []
        for key in offer.blocks:
            ghost = self._ghosts.pop(hash(key), None)
            if ghost is not None and not offer.is_use:
                self._offered.pop(key, None)
                run.append(new_block(key, ghost.cohort, ghost.uses, ghost.turns))
                continue
            lane, turns = self._offered.pop(key)
            cohort = self._fresh(fresh, lane, now_s)
            if ghost is not None:
                self._cohorts.end(ghost.cohort, 1, now_s, is_use=True)
            self._cohorts.grow(cohort, 1)
            run.append(new_block(key, cohort, 1 if ghost is None else 1 + ghost.uses, turns))
        return run

    def _take(self, key):
        block = self._blocks.pop(key, None)
        if block is not None:
            if not block.children:
                self._cohorts.drop_leaf(block)
            self._unlink(block)
            block.key = None
            block.children = 0
        return block


def plain_index_table(hazards):
    """What index_table returns, one age by itself after the other."""
    hazards = np.maximum(hazards, 1e-12)
    widths_s = np.diff([0.0, *(1.5**power for power in range(NUM_AGES))])
    survives = np.exp(-hazards * widths_s)
    stays_s = (1.0 - survives) / hazards
    table = hazards.copy()
    for age in range(NUM_AGES - 1):
        alive = np.cumprod(survives[:, age:], axis=1)
        before = np.concatenate([np.ones((len(alive), 1)), alive[:, :-1]], axis=1)
        table[:, age] = np.max((1.0 - alive) / np.cumsum(before * stays_s[:, age:], axis=1), axis=1)
    return table


def state_of(policy):
    """All that a gittins policy knows, to compare."""

    def known(block):
        parent = block.parent and block.parent.key
        cohort = block.cohort
        place = cohort.lane.evidence.path, cohort.lane.weight, cohort.at_s, cohort.age, cohort.num
        return block.key, parent, block.children, block.uses, block.turns, place

    lanes = policy._cohorts._lanes
    return {
        "learned": policy.to_state(),
        "blocks": [(key, known(block)) for key, block in policy._blocks.items()],
        "ghosts": [(name, known(block)) for name, block in policy._ghosts.items()],
        "offered": [(key, lane.evidence.path, turns) for key, (lane, turns) in policy._offered.items()],
        "worths": {name: [rung.worth for rung in lane.rungs] for name, lane in lanes.items()},
        "leaves": {
            name: [[leaf.key for leaf in rung.leaves()] for rung in lane.rungs]
            for name, lane in lanes.items()
        },
        "cohorts": [[(cohort.at_s, cohort.num) for cohort in some] for some in policy._cohorts._by_age],
    }
