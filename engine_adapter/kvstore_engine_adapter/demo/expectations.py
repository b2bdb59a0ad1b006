"""What the demo expects of each tier, and the judgement over what was measured. No I/O."""

from dataclasses import dataclass

import numpy as np

from kvstore.miss import MissReason
from kvstore_engine_adapter.demo.replica import Answer

MATCHED_RATIO = 0.9
"""Least share of the common prefix that must be reused, and come from the expected tier."""

LATE_RATIO = 0.5
"""The same where the load was late: the engine computes meanwhile, as it should on a busy machine."""

MAX_LOGIT_DIFF = 1e-3
"""Largest difference of the first logits to those of a replica without a store."""

SPEEDUP = {"vram": 5.0, "dram": 5.0, "ssd": 3.0, "remote": 3.0}
"""Least ratio of time to first token without a store to that with a hit in the tier."""

LATE_SPEEDUP = 1.2
"""The same where the load was late."""

STOPPED_EXTRA_S = 1.0
STOPPED_RATIO = 2.0
"""With Redis stopped: at most ``STOPPED_RATIO`` times the time without a store, plus ``STOPPED_EXTRA_S``.

The store's own deadline is far below; the rest is what a busy machine adds to a prefill.
"""


@dataclass(frozen=True, slots=True)
class Trial:
    """One question asked twice: of a replica with the store, and of one that reuses nothing."""

    question: str
    replica: str
    shared_tokens: int
    answer: Answer
    cold: Answer

    @property
    def outputs_equal(self) -> bool:
        """Whether both gave the same greedy output, token for token."""
        same_text = self.answer.text == self.cold.text
        return same_text and self.answer.output_tokens == self.cold.output_tokens

    @property
    def max_logit_diff(self) -> float:
        """Largest absolute difference of the first logits; infinite if their shapes differ."""
        ours, reference = self.answer.first_logits, self.cold.first_logits
        if ours.shape != reference.shape or ours.size == 0:
            return float("inf")
        return float(np.max(np.abs(ours - reference)))

    @property
    def speedup(self) -> float:
        """Time to first token without a store divided by that with it."""
        return self.cold.ttft_s / max(self.answer.ttft_s, 1e-9)

    def to_json(self) -> dict[str, object]:
        """Return the measured values, ready for JSON."""
        answer, cold = self.answer, self.cold
        return {
            "replica": self.replica,
            "question": self.question,
            "answer": answer.text,
            "prompt_tokens": answer.prompt_tokens,
            "shared_tokens": self.shared_tokens,
            "matched_tokens": answer.matched_tokens,
            "matched_ratio": round(answer.matched_tokens / self.shared_tokens, 4),
            "tiers": dict(answer.tiers),
            "miss_reason": answer.miss_reason,
            "outputs_equal": self.outputs_equal,
            "max_logit_diff": self.max_logit_diff,
            "ttft_s": answer.ttft_s,
            "ttft_cold_s": cold.ttft_s,
            "speedup": round(self.speedup, 2),
            "load_s": answer.load_s,
            "prefill_s": answer.prefill_s,
        }


def broken_of_tier(tier: str, trial: Trial) -> list[str]:
    """Return what did not hold for a hit in ``tier``, one line each."""
    was_late = trial.answer.miss_reason == MissReason.TIMED_OUT.value
    wanted = (LATE_RATIO if was_late else MATCHED_RATIO) * trial.shared_tokens
    from_tier = trial.answer.tiers.get(tier, 0)
    broken = _broken_correctness(tier, trial)
    if trial.answer.matched_tokens < wanted:
        broken.append(
            f"{tier}: {trial.answer.matched_tokens} tokens matched of {trial.shared_tokens} shared,"
            f" expected at least {wanted:.0f} (miss: {trial.answer.miss_reason})"
        )
    elif from_tier < wanted:
        broken.append(f"{tier}: {from_tier} tokens came from it, expected at least {wanted:.0f}")
    least_speedup = LATE_SPEEDUP if was_late else SPEEDUP[tier]
    if trial.speedup < least_speedup:
        broken.append(
            f"{tier}: first token {trial.speedup:.1f} times sooner than without a store,"
            f" expected {least_speedup:g} times"
        )
    return broken


def broken_with_redis_stopped(trial: Trial) -> list[str]:
    """Return what did not hold for the request that was served while Redis was stopped."""
    broken = _broken_correctness("redis stopped", trial)
    if trial.answer.tiers.get("remote", 0) > 0:
        broken.append("redis stopped: tokens are said to come from it")
    limit_s = STOPPED_RATIO * trial.cold.ttft_s + STOPPED_EXTRA_S
    if trial.answer.ttft_s > limit_s:
        broken.append(f"redis stopped: first token after {trial.answer.ttft_s:.2f} s, limit {limit_s:.2f} s")
    return broken


def _broken_correctness(where: str, trial: Trial) -> list[str]:
    broken = []
    if not trial.outputs_equal:
        broken.append(f"{where}: the answer differs from that without a store")
    if not trial.max_logit_diff <= MAX_LOGIT_DIFF:
        broken.append(
            f"{where}: first logits differ by {trial.max_logit_diff:.2e}, limit {MAX_LOGIT_DIFF:.0e}"
        )
    return broken
