"""The bound: the most hits that any policy could have, knowing all that is asked for later.

Belady's rule with bypass, a request at a time: after each request the C blocks stay, of those resident and
those just computed, whose next use is soonest. Every use of a block is a use of its ancestors, so a parent's
next use is never later than its child's: what stays is closed under prefixes by itself, and the optimum over
blocks is the optimum over prefixes at once.

The next use of a block is one position in the list of all accesses. Positions order blocks by request and,
within one, by depth: soonest first, ties by the shallower. Each has at most one block waiting for it.
"""

from heapq import heappop, heappush
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from kvstore.replay.outcome import Tally
from kvstore.replay.trace import Trace

NEVER = -1
"""In ``next_uses``: there is no later use."""


def next_uses(trace: Trace) -> NDArray[np.int64]:
    """Return for each access the position of the same block's next access, or ``NEVER``: ``[accesses]``."""
    order = np.argsort(trace.blocks, kind="stable")
    is_same = trace.blocks[order[1:]] == trace.blocks[order[:-1]]
    following = np.full(len(order), NEVER, np.int64)
    following[order[:-1][is_same]] = order[1:][is_same]
    return following


def replay_bound(trace: Trace, capacity_blocks: int, following: NDArray[np.int64] | None = None) -> Tally:
    """Replay a trace with foreknowledge: the exact optimum of hit blocks.

    ``following`` is ``next_uses(trace)``, for whoever has it already. Written are the blocks that are kept
    when they are computed, if only for a while.
    """
    uses_after = next_uses(trace) if following is None else following
    is_awaited = bytearray(len(trace.blocks))  # 1: this access will find its block
    farthest: list[int] = []  # heap of the negated next uses of what is resident
    num_resident = 0
    tally = Tally()
    for request, (start, stop) in enumerate(pairwise(trace.starts.tolist())):
        first_miss = is_awaited.find(0, start, stop)
        hit_blocks = stop - start if first_miss < 0 else first_miss - start
        num_resident -= hit_blocks  # each of them waits for another use from here on
        uses = uses_after[start:stop].tolist()
        for use in uses:
            if use < 0:
                continue
            if num_resident == capacity_blocks:
                if not num_resident or -farthest[0] <= use:
                    continue
                is_awaited[-heappop(farthest)] = 0
                num_resident -= 1
            heappush(farthest, -use)
            is_awaited[use] = 1
            num_resident += 1
        kept = sum(is_awaited[use] for use in uses[hit_blocks:] if use >= 0)
        tally.add(hit_blocks, trace.hit_tokens(request, hit_blocks), kept)
    return tally
