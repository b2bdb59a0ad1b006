"""What a store answers about its size: estimated hit rates now, at multiples of its tiers, and between."""

from collections.abc import Iterable

from kvstore.hit_curve import HitCurve
from kvstore.keys import NamespaceDigest
from kvstore.size_curve import MIN_SAMPLES, SizeCurve
from kvstore.state import State, WriteMode

MULTIPLES = {"0.5x": 0.5, "1x": 1.0, "2x": 2.0, "4x": 4.0}
"""Sizes that hit rates are always told for, as shares of what there is."""

_POINTS_PER_DOUBLING = 8
_DOUBLINGS = 12


def largest_size_bytes(state: State) -> int:
    """Return the largest size that hit rates are estimated for: four times this node's tiers together."""
    return max(1, int(max(MULTIPLES.values()) * sum(_capacities(state).values())))


def reach_bytes(capacities: Iterable[int], write_mode: str) -> int:
    """Return how many bytes of different blocks tiers hold together.

    Where blocks are written below as they are stored, a smaller tier holds copies of what a larger one has;
    where they are written as they leave, each tier holds others, nearly.
    """
    sizes = list(capacities)
    return sum(sizes) if write_mode == WriteMode.BACK.value else max(sizes, default=0)


def size_answer(state: State, namespaces: Iterable[NamespaceDigest] | None = None) -> dict[str, object]:
    """Return hit rates by size, of all lookups or of those in some namespaces, ready for JSON.

    A hit rate is None where too few samples tell of it.
    """
    ghost = state.size_curve
    if ghost is None:
        return {"is_on": False}
    curve = ghost.curve(namespaces)
    capacities = _capacities(state)
    write_mode = state.settings.write_mode.value
    sizes = {"dram": state.top.capacity_bytes, "all": reach_bytes(capacities.values(), write_mode)}
    return {
        "is_on": ghost.is_on,
        "lookups_blocks": round(curve.lookups),
        "samples": round(curve.samples),
        "min_samples": MIN_SAMPLES,
        "sampled_blocks": ghost.num_sampled,
        "sample_ratio": ghost.sample_ratio,
        "lost_blocks": ghost.lost_blocks,
        "limit_bytes": ghost.limit_bytes,
        "write_mode": write_mode,
        "capacity_bytes": capacities,
        "size_bytes": sizes,
        "hit_ratio": {
            of: {name: _told(ghost, curve, size * ratio) for name, ratio in MULTIPLES.items()}
            for of, size in sizes.items()
        },
        "points": [[round(size), _told(ghost, curve, size)] for size in _grid(ghost.limit_bytes)],
    }


def _capacities(state: State) -> dict[str, int]:
    """Return the capacity of the tiers that are this node's own, by what they are made of."""
    found = {state.top.medium.value: state.top.capacity_bytes}
    for tier in state.lower:
        if not tier.is_shared:
            found[tier.medium.value] = found.get(tier.medium.value, 0) + tier.capacity_bytes
    return found


def _told(ghost: SizeCurve, curve: HitCurve, size_bytes: float) -> float | None:
    return round(curve.hit_ratio(size_bytes), 4) if ghost.tells(curve, size_bytes) else None


def _grid(limit_bytes: int) -> Iterable[float]:
    for step in range(_DOUBLINGS * _POINTS_PER_DOUBLING, -1, -1):
        yield limit_bytes / 2 ** (step / _POINTS_PER_DOUBLING)
