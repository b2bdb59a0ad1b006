"""A replay: each policy at each capacity, or over several tiers, with the bound beside it."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kvstore.errors import InvalidRequest
from kvstore.policy import NO_HINT, Hint, PolicyCache
from kvstore.replay.bound import next_uses, replay_bound
from kvstore.replay.choosing import REPLAY_BLOCK_BYTES, NamedPolicy
from kvstore.replay.outcome import ReplayResult, Tally, TierTally
from kvstore.replay.own_policy import describe
from kvstore.replay.tiers import TieredCache, TierSize
from kvstore.replay.trace import Trace
from kvstore.tier import StorageKey

_REPORT_EVERY = 64
_DEFAULT_SHARES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)


class Progress(Protocol):
    """Who is shown how far a replay is."""

    def start(self, label: str, total: float) -> None:
        """Begin another piece of work."""

    def show(self, done: float) -> None:
        """Say how much of it is done."""


@dataclass(frozen=True, slots=True)
class ReplayPlan:
    """What to replay: these policies, at these capacities in blocks, or over these tiers if there are any.

    ``tells_output``: policies are told the length of each request's answer, where the trace has it.
    """

    policies: Sequence[NamedPolicy]
    capacities: Sequence[int]
    tiers: Sequence[TierSize] = field(default=())
    tells_output: bool = False


def default_capacities(trace: Trace) -> list[int]:
    """Return capacities from 1 % to all of a trace's blocks."""
    return sorted({max(round(share * trace.unique_blocks), 1) for share in _DEFAULT_SHARES})


def replay(trace: Trace, plan: ReplayPlan, progress: Progress) -> list[ReplayResult]:
    """Replay a trace as planned; results by policy, then by capacity.

    Raises:
        InvalidRequest: a policy of the user's own fails.
    """
    following = next_uses(trace)
    capacities = [sum(tier.blocks for tier in plan.tiers)] if plan.tiers else plan.capacities
    bounds: dict[int, tuple[Tally, float]] = {}
    for capacity in capacities:
        progress.start(f"bound {capacity}", trace.requests)
        started_s = time.perf_counter()
        bounds[capacity] = replay_bound(trace, capacity, following), time.perf_counter() - started_s
    results = []
    for policy in plan.policies:
        for capacity in capacities:
            bound, seconds = bounds[capacity]
            tally = bound
            tiers: tuple[TierTally, ...] = ()
            if policy.new is not None:
                progress.start(f"{policy.name} {capacity}", trace.requests)
                started_s = time.perf_counter()
                tally, tiers = _replay_policy(trace, plan, policy, capacity, progress.show)
                seconds = time.perf_counter() - started_s
            results.append(_result(trace, policy, capacity, tally, bound, tiers, seconds))
    return results


class _Keys:
    """The names that policies know a trace's blocks by: one object each, whose hash is kept in it."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._names = [StorageKey(number.to_bytes(8, "little")) for number in range(trace.unique_blocks)]

    def chains(self) -> Iterator[list[StorageKey]]:
        """Yield the blocks of each request, in chain order."""
        names = self._names
        for chain in self._trace.chains():
            yield [names[number] for number in chain]

    def parents(self) -> dict[StorageKey, StorageKey | None]:
        """Return each block's parent."""
        names = self._names
        return {
            name: None if parent < 0 else names[parent]
            for name, parent in zip(names, self._trace.parents.tolist(), strict=True)
        }


def _replay_policy(
    trace: Trace, plan: ReplayPlan, policy: NamedPolicy, capacity: int, show: Callable[[float], None]
) -> tuple[Tally, tuple[TierTally, ...]]:
    try:
        if plan.tiers:
            return _replay_tiers(trace, plan, policy, show)
        return _replay_one_tier(trace, plan, policy, capacity, show), ()
    except InvalidRequest:
        raise
    except Exception as error:
        if policy.own_file is None:
            raise
        raise InvalidRequest(f"policy {policy.name}: {describe(error, policy.own_file)}") from error


def _replay_one_tier(
    trace: Trace, plan: ReplayPlan, policy: NamedPolicy, capacity: int, show: Callable[[float], None]
) -> Tally:
    cache = _cache(policy, capacity)
    tally = Tally()
    arrivals_s, hints = trace.arrival_s.tolist(), _hints(trace, plan)
    for request, blocks in enumerate(_Keys(trace).chains()):
        served = cache.serve(
            blocks, size_bytes=REPLAY_BLOCK_BYTES, now_s=arrivals_s[request], hint=hints[request]
        )
        tally.add(served.hit_blocks, trace.hit_tokens(request, served.hit_blocks), len(served.written))
        if request % _REPORT_EVERY == 0:
            _require_room(cache, policy)
            show(request)
    _require_room(cache, policy)
    return tally


def _replay_tiers(
    trace: Trace, plan: ReplayPlan, policy: NamedPolicy, show: Callable[[float], None]
) -> tuple[Tally, tuple[TierTally, ...]]:
    keys = _Keys(trace)
    caches = [_cache(policy, tier.blocks) for tier in plan.tiers]
    tiers = TieredCache(caches, keys.parents(), size_bytes=REPLAY_BLOCK_BYTES)
    tally = Tally()
    arrivals_s, hints = trace.arrival_s.tolist(), _hints(trace, plan)
    for request, blocks in enumerate(keys.chains()):
        hit_blocks = tiers.serve(blocks, now_s=arrivals_s[request], hint=hints[request])
        tally.add(hit_blocks, trace.hit_tokens(request, hit_blocks), 0)
        if request % _REPORT_EVERY == 0:
            for cache in caches:
                _require_room(cache, policy)
            show(request)
    tally.written_blocks = sum(tiers.written_blocks)
    counts = zip(plan.tiers, tiers.hit_blocks, tiers.written_blocks, strict=True)
    return tally, tuple(TierTally(tier.name, tier.blocks, hits, written) for tier, hits, written in counts)


def _cache(policy: NamedPolicy, capacity_blocks: int) -> PolicyCache:
    return PolicyCache(policy.make(capacity_blocks), capacity_blocks * REPLAY_BLOCK_BYTES)


def _require_room(cache: PolicyCache, policy: NamedPolicy) -> None:
    if cache.used_bytes > cache.capacity_bytes:
        raise InvalidRequest(
            f"policy {policy.name}: its candidates are too few: more blocks are stored than there is room for"
        )


def _hints(trace: Trace, plan: ReplayPlan) -> list[Hint]:
    if not plan.tells_output:
        return [NO_HINT] * trace.requests
    return [NO_HINT if tokens < 0 else Hint(output_tokens=tokens) for tokens in trace.output_tokens.tolist()]


def _result(
    trace: Trace,
    policy: NamedPolicy,
    capacity: int,
    tally: Tally,
    bound: Tally,
    tiers: tuple[TierTally, ...],
    seconds: float,
) -> ReplayResult:
    return ReplayResult(
        policy=policy.name,
        capacity_blocks=capacity,
        requests=trace.requests,
        block_accesses=trace.block_accesses,
        input_tokens=trace.total_input_tokens,
        hit_blocks=tally.hit_blocks,
        hit_tokens=tally.hit_tokens,
        written_blocks=tally.written_blocks,
        seconds=seconds,
        bound_blocks=bound.hit_blocks,
        bound_tokens=bound.hit_tokens,
        tiers=tiers,
    )
