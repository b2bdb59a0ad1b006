"""Sharing inside a block: which page of another request holds the tokens that a request would compute next.

Full blocks are shared as they are. The tail of a prompt, or the first tokens of a block that goes on
differently, are copied with their page and then written by their new owner alone.
"""

from collections.abc import Iterable

from kvstore.tier import Slot
from kvstore_engine_adapter.live_request import LiveRequest
from kvstore_engine_adapter.scheduler import Phase


def find_shared_page(live: LiveRequest, others: Iterable[LiveRequest]) -> tuple[Slot, int] | None:
    """Return a page that holds the most of the tokens it computes next, and how many; None if none does.

    Its last known token does not count: that one is always computed.
    """
    at, rest = divmod(live.computed, live.block_tokens)
    start = live.computed
    wanted = live.tokens[start : min(start + live.block_tokens, len(live.tokens) - 1)]
    if rest or len(live.slots) != at or not wanted:
        return None
    best: tuple[Slot, int] | None = None
    for other in others:
        if other is live or other.phase is not Phase.RUNNING or not _shares_blocks(live, other, at):
            continue
        there = other.tokens[start : min(start + live.block_tokens, other.computed)]
        common = _common(wanted, there)
        if common > (best[1] if best else 0):
            best = other.slots[at], common
    return best


def _shares_blocks(live: LiveRequest, other: LiveRequest, count: int) -> bool:
    """Whether their first blocks are the same, and the other one has computed beyond them."""
    if other.computed <= live.computed or other.chain.namespace != live.chain.namespace:
        return False
    return not count or other.chain.keys[count - 1] == live.chain.keys[count - 1]


def _common(first: list[int], second: list[int]) -> int:
    pairs = zip(first, second, strict=False)
    return next((index for index, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))
