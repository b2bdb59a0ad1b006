"""A replay: each policy at each capacity, or over several tiers, with the bound beside it."""

import time
from collections.abc import Iterator, Sequence
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
    capacities = [sum(tier.blocks for tier in plan.tiers)] if plan.tiers else plan.capacities
    following = next_uses(trace)
    bounds: dict[int, tuple[Tally, float]] = {}
    for capacity in capacities:
        progress.start(f"bound {capacity}", trace.requests)
        started_s = time.perf_counter()
        bounds[capacity] = replay_bound(trace, capacity, following), time.perf_counter() - started_s
    runner = _Runner(trace, plan, progress)
    results = []
    for policy in plan.policies:
        for capacity in capacities:
            bound, seconds = bounds[capacity]
            tally = bound
            tiers: tuple[TierTally, ...] = ()
            if not policy.is_bound:
                started_s = time.perf_counter()
                tally, tiers = runner.run(policy, capacity)
                seconds = time.perf_counter() - started_s
            results.append(_result(trace, policy, capacity, tally, bound, tiers, seconds))
    return results


class _Runner:
    """Replays one trace through one policy after the other.

    Policies know its blocks by names of which there is one object each: the hash of bytes is kept in them.
    """

    def __init__(self, trace: Trace, plan: ReplayPlan, progress: Progress) -> None:
        self._trace = trace
        self._plan = plan
        self._progress = progress
        self._names = [StorageKey(number.to_bytes(8, "little")) for number in range(trace.unique_blocks)]

    def run(self, policy: NamedPolicy, capacity: int) -> tuple[Tally, tuple[TierTally, ...]]:
        """Replay all requests at one capacity, or over the plan's tiers.

        Raises:
            InvalidRequest: the policy is the user's own, and fails.
        """
        self._progress.start(f"{policy.name} {capacity}", self._trace.requests)
        try:
            if self._plan.tiers:
                return self._run_tiers(policy)
            return self._run_one_tier(policy, capacity), ()
        except InvalidRequest:
            raise
        except Exception as error:
            if policy.own_file is None:
                raise
            raise InvalidRequest(f"policy {policy.name}: {describe(error, policy.own_file)}") from error

    def _run_one_tier(self, policy: NamedPolicy, capacity: int) -> Tally:
        trace, tally = self._trace, Tally()
        cache = _cache(policy.of_tiers(1)[0], capacity)
        for request, (blocks, now_s, hint) in enumerate(self._requests()):
            served = cache.serve(blocks, size_bytes=REPLAY_BLOCK_BYTES, now_s=now_s, hint=hint)
            tally.add(served.hit_blocks, trace.hit_tokens(request, served.hit_blocks), len(served.written))
        return tally

    def _run_tiers(self, policy: NamedPolicy) -> tuple[Tally, tuple[TierTally, ...]]:
        trace, sizes, tally = self._trace, self._plan.tiers, Tally()
        caches = [
            _cache(part, tier.blocks) for part, tier in zip(policy.of_tiers(len(sizes)), sizes, strict=True)
        ]
        tiers = TieredCache(caches, self._parents(), size_bytes=REPLAY_BLOCK_BYTES)
        for request, (blocks, now_s, hint) in enumerate(self._requests()):
            hit_blocks = tiers.serve(blocks, now_s=now_s, hint=hint)
            tally.add(hit_blocks, trace.hit_tokens(request, hit_blocks), 0)
        tally.written_blocks = sum(tiers.written_blocks)
        counts = zip(sizes, tiers.hit_blocks, tiers.written_blocks, strict=True)
        return tally, tuple(
            TierTally(tier.name, tier.blocks, hits, written) for tier, hits, written in counts
        )

    def _requests(self) -> Iterator[tuple[list[StorageKey], float, Hint]]:
        """Yield each request's blocks, instant and hint, and show how far it is."""
        trace, names = self._trace, self._names
        hints = self._hints()
        instants = zip(trace.chains(), trace.arrival_s.tolist(), strict=True)
        for request, (chain, now_s) in enumerate(instants):
            yield [names[number] for number in chain], now_s, hints[request]
            if request % _REPORT_EVERY == 0:
                self._progress.show(request)

    def _parents(self) -> dict[StorageKey, StorageKey | None]:
        names = self._names
        return {
            name: None if parent < 0 else names[parent]
            for name, parent in zip(names, self._trace.parents.tolist(), strict=True)
        }

    def _hints(self) -> list[Hint]:
        if not self._plan.tells_output:
            return [NO_HINT] * self._trace.requests
        lengths = self._trace.output_tokens.tolist()
        return [NO_HINT if tokens < 0 else Hint(output_tokens=tokens) for tokens in lengths]


def _cache(policy: NamedPolicy, capacity_blocks: int) -> PolicyCache:
    return PolicyCache(policy.make(capacity_blocks), capacity_blocks * REPLAY_BLOCK_BYTES)


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
