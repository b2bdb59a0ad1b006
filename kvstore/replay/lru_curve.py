"""The hits of LRU at every capacity, in one pass over a trace.

A request touches its blocks tail first, which leaves them on top of the stack in chain order. A later request
that takes some of them takes leading ones, with all their ancestors: what remains of a request's group is
always a tail of it. So the stack is a list of such groups, one for each request, and the depth of a block
in it is the size of the groups above plus its place in its own. A Fenwick tree over the requests holds the
sizes. Cost: a few sums of logarithmic length for each request, whatever its number of blocks.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvstore.replay.trace import Trace


@dataclass(frozen=True, slots=True)
class LruCurve:
    """Hits by capacity: ``hit_blocks[c]`` and ``hit_tokens[c]`` at ``c`` blocks, int64 ``[unique + 1]``."""

    hit_blocks: NDArray[np.int64]
    hit_tokens: NDArray[np.int64]

    def at(self, capacity_blocks: int) -> tuple[int, int]:
        """Return hit blocks and hit tokens at a capacity, however large."""
        index = min(capacity_blocks, len(self.hit_blocks) - 1)
        return int(self.hit_blocks[index]), int(self.hit_tokens[index])

    def capacity_for(self, share: float) -> int:
        """Return the fewest blocks at which LRU has this share, 0..1, of the hits that it has with all."""
        return int(np.searchsorted(self.hit_blocks, share * self.hit_blocks[-1] - 1e-9))

    def capacities(self, *, most: int = 256) -> list[int]:
        """Return capacities from 1 to all blocks, evenly spaced on a logarithmic scale, at most so many."""
        last = max(len(self.hit_blocks) - 1, 1)
        if last <= most:
            return list(range(1, last + 1))
        return sorted({round(at) for at in np.geomspace(1, last, most).tolist()})


def lru_curve(trace: Trace) -> LruCurve:
    """Return what tail-first LRU hits at every capacity from 0 to the number of unique blocks."""
    size = trace.unique_blocks + 2
    # Differences: a run of blocks adds one hit at each of neighbouring capacities.
    changes = np.zeros(size, np.int64)
    missing_tokens = np.zeros(size, np.int64)
    tree = _Sizes(trace.requests)
    run_requests, run_groups, run_lengths, run_ends = (column.tolist() for column in _runs(trace))
    starts, input_tokens, block_tokens = (
        trace.starts.tolist(),
        trace.input_tokens.tolist(),
        trace.block_tokens,
    )
    at, num_runs = 0, len(run_requests)
    for request in range(trace.requests):
        first = at
        while at < num_runs and run_requests[at] == request:
            if run_groups[at] >= 0:
                depth = tree.above(run_groups[at])
                changes[depth + 1] += 1
                changes[depth + 1 + run_lengths[at]] -= 1
                tokens_missing = run_ends[at] * block_tokens - input_tokens[request]
                if tokens_missing > 0:
                    missing_tokens[depth + run_lengths[at]] += tokens_missing
            at += 1
        for run in range(first, at):
            if run_groups[run] >= 0:
                tree.add(run_groups[run], -run_lengths[run])
        tree.add(request, starts[request + 1] - starts[request])
    by_capacity = np.cumsum(changes)
    hit_blocks = np.cumsum(by_capacity)[:-1]
    hit_tokens = hit_blocks * block_tokens - np.cumsum(missing_tokens)[:-1]
    return LruCurve(hit_blocks, hit_tokens)


def _runs(trace: Trace) -> tuple[NDArray[np.int64], ...]:
    """Cut each request where the request that last used its blocks changes.

    Returns int64 ``[runs]`` each: the request, the request that used the run before (-1: none), the number
    of blocks, and the place in the request's chain at which the run ends.
    """
    num_accesses = len(trace.blocks)
    lengths = np.diff(trace.starts)
    requests = np.repeat(np.arange(trace.requests), lengths)
    order = np.argsort(trace.blocks, kind="stable")
    is_same = trace.blocks[order[1:]] == trace.blocks[order[:-1]]
    groups = np.full(num_accesses, -1, np.int64)
    groups[order[1:][is_same]] = requests[order[:-1][is_same]]
    is_first = np.ones(num_accesses, bool)
    is_first[1:] = (requests[1:] != requests[:-1]) | (groups[1:] != groups[:-1])
    firsts = np.flatnonzero(is_first)
    run_lengths = np.diff(np.append(firsts, num_accesses))
    ends = firsts + run_lengths - trace.starts[:-1][requests[firsts]]
    return requests[firsts], groups[firsts], run_lengths, ends


class _Sizes:
    """Sizes of the groups of ``count`` requests, with sums over the later ones (a Fenwick tree)."""

    def __init__(self, count: int) -> None:
        self._sums = [0] * (count + 1)
        self._total = 0

    def add(self, group: int, amount: int) -> None:
        self._total += amount
        at, sums = group + 1, self._sums
        while at < len(sums):
            sums[at] += amount
            at += at & -at

    def above(self, group: int) -> int:
        """Return the size of all groups later than this one."""
        at, total = group + 1, self._total
        while at:
            total -= self._sums[at]
            at -= at & -at
        return total
