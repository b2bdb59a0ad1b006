"""SplitPlan: how a long context is cut so that all multiprocessors have work."""

from collections.abc import Sequence
from dataclasses import dataclass

_LEAST_TOKENS = 256
"""Shortest split: its start and end (queries in, sums out, joining) cost about as much as 32 tokens."""

_MAX_SPLITS = 128


@dataclass(frozen=True, slots=True)
class SplitPlan:
    """Splits of ``tokens`` positions each, ``count`` per sequence; in a shorter one the last are empty."""

    tokens: int
    count: int


def plan_splits(context_lens: Sequence[int], *, rows: int, places: int) -> SplitPlan:
    """Return the split length that ends soonest.

    The model: every thread block takes its number of tokens plus a fixed cost; blocks start in order on
    ``places`` places. A split is never shorter than 256 tokens, and there are at most 128 of them.

    Args:
        context_lens: cached tokens of each sequence, or an upper bound.
        rows: thread blocks that one split of one sequence needs (KV heads times row blocks).
        places: thread blocks that the device runs at once.
    """
    longest = max(context_lens, default=0)
    best, best_cost = SplitPlan(max(longest, 1), 1), None
    for count in _split_counts(longest):
        tokens = _round_up(-(-longest // count), 64)
        blocks = rows * sum(-(-length // tokens) for length in context_lens)
        waves = -(-blocks // places)
        # The last wave may be partly filled; with many waves blocks of all lengths even out.
        cost = (waves if waves < 4 else blocks / places) * (tokens + 32) + (8 * count if count > 1 else 0)
        if best_cost is None or cost < best_cost:
            best, best_cost = SplitPlan(tokens, max(1, -(-longest // tokens))), cost
    return best


def _split_counts(longest: int) -> list[int]:
    most = min(_MAX_SPLITS, max(1, longest // _LEAST_TOKENS))
    return [1, *range(2, min(most, 16) + 1), *range(20, most + 1, 4)]


def _round_up(value: int, step: int) -> int:
    return max(step, -(-value // step) * step)
