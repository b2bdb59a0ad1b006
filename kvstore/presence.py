"""Which of any number of blocks are stored, whatever their order: the shared tiers are asked for the rest."""

from collections.abc import Sequence

from kvstore.directory import Shelf
from kvstore.keys import BlockKey
from kvstore.loading import Loader
from kvstore.miss import MissReason
from kvstore.state import State
from kvstore.tier import Tier

_NO_ANSWER = (MissReason.TIMED_OUT, MissReason.UNAVAILABLE, MissReason.BREAKER_OPEN)


def find_present_at_once(state: State, shelf: Shelf, keys: Sequence[BlockKey]) -> list[bool] | None:
    """As ``find_present``, but None where a shared tier would have to be asked."""
    if shelf.is_stale:
        return [False] * len(keys)
    if state.down_tiers() or any(tier.is_shared for tier in state.lower):
        return None
    present = list(map(shelf.fastest.__contains__, keys))
    state.counters.exists.update(requests=1, blocks=len(keys), present=sum(present))
    return present


async def find_present(
    state: State, loader: Loader, shelf: Shelf, keys: Sequence[BlockKey], *, deadline_s: float
) -> list[bool]:
    """Say for each key whether a block of it is stored within reach.

    What a shared tier does not say by the deadline, or cannot say, counts as not stored.
    """
    at_once = find_present_at_once(state, shelf, keys)
    if at_once is not None:
        return at_once
    down, get = state.down_tiers(), shelf.entries.get
    present = [
        entry is not None and entry.fastest is not None and entry.fastest not in down
        for entry in map(get, keys)
    ]
    unknown = [key for key, is_here in zip(keys, present, strict=True) if not is_here]
    found = {key for key in unknown if state.is_certain(get(key), down)}
    for tier in state.lower:
        if tier.is_shared:
            rest = [key for key in dict.fromkeys(unknown) if key not in found]
            found |= await _ask_for_all(state, loader, tier, shelf, rest, deadline_s)
    present = [is_here or key in found for key, is_here in zip(keys, present, strict=True)]
    state.counters.exists.update(requests=1, blocks=len(keys), present=sum(present))
    return present


async def _ask_for_all(
    state: State, loader: Loader, tier: Tier, shelf: Shelf, keys: Sequence[BlockKey], deadline_s: float
) -> set[BlockKey]:
    """Probe until the tier has answered for every block: a probe may stop at the first that is absent."""
    found: set[BlockKey] = set()
    while keys and tier.health().is_up and state.clock() < deadline_s:
        probe = await loader.ask(tier, [shelf.block(key) for key in keys], deadline_s)
        found.update(key for key, name in zip(keys, probe.tiers, strict=True) if name is not None)
        if probe.reason in _NO_ANSWER or probe.num_known is None:
            break
        keys = [key for key in keys[max(1, probe.num_known) :] if key not in found]
    return found
