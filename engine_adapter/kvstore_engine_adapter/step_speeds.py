"""StepSpeeds: load or compute, for an engine that is not ours: both are measured from its scheduler's steps.

Prefill: two successive steps with many tokens tell what tokens take; two, because an engine may plan a step
before the one before it has been computed. Loads: from when one is planned until its request can go on,
which is what it costs the request. ``LoadPolicy`` compares them.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence

from kvstore_engine_adapter.load_policy import LoadPolicy

_LEAST_TOKENS = 64
"""A step with fewer says more of the engine's fixed costs than of prefill."""

_LONGEST_STEP_S = 30.0


class StepSpeeds:
    """What one engine's prefill and loads take. Called from its scheduler's thread."""

    def __init__(self, policy: LoadPolicy, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._policy = policy
        self._clock = clock
        self._steps: deque[tuple[float, int]] = deque(maxlen=2)
        self._loads: dict[str, tuple[float, tuple[str, ...]]] = {}

    def note_step(self, num_tokens: int) -> None:
        """The engine is about to compute so many tokens."""
        now_s = self._clock()
        if not num_tokens:
            self._steps.clear()
            return
        if len(self._steps) == self._steps.maxlen:
            began_s, tokens = self._steps[0][0], sum(count for _, count in self._steps)
            if self._steps[0][1] >= _LEAST_TOKENS and now_s - began_s < _LONGEST_STEP_S:
                prefill = self._policy.prefill
                prefill.note(prefill.expected_s(0, tokens), now_s - began_s)
        self._steps.append((now_s, num_tokens))

    def blocks_worth_loading(self, tiers: Sequence[str], blocks: int) -> int:
        """Return how many of so many blocks to load; ``tiers`` are those that the first of them are in."""
        if not tiers:
            return blocks
        known = [*tiers[:blocks], *[tiers[-1]] * (blocks - len(tiers))]
        return self._policy.blocks_worth_loading(known)

    def begin_load(self, request_id: str, tiers: Sequence[str]) -> None:
        """A load of blocks from these tiers was planned."""
        self._loads[request_id] = self._clock(), tuple(tiers)

    def end_load(self, request_id: str, *, is_whole: bool) -> None:
        """A load has ended, or will not: only one that brought everything tells what loads take."""
        began_s, tiers = self._loads.pop(request_id, (0.0, ()))
        if tiers and is_whole:
            self._policy.note_load(tiers, self._clock() - began_s)
