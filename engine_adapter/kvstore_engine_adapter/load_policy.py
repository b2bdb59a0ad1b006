"""LoadPolicy: whether loading stored blocks is expected to be cheaper than computing them again."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

FREE_TIER = "vram"
"""Blocks here are used in place."""

_START_BYTES_PER_S = {"dram": 2e9, "ssd": 1e9, "remote": 2e8}
_START_OTHER_BYTES_PER_S = 2e8
_START_PREFILL_TOKENS_PER_S = 300.0
_WEIGHT = 0.3
_RECOVERY = 0.9
_MARGIN = 0.8
_LARGEST_CORRECTION = 8.0


@dataclass(slots=True)
class LoadPolicy:
    """Estimates, corrected by every request: seconds per computed token, seconds per loaded block by tier.

    A load that took ``r`` times what was expected moves the estimates of all tiers it read from towards
    ``r`` times as much. A tier that is passed over is expected to be a tenth quicker next time, so that it is
    tried again once it may have recovered.
    """

    block_tokens: int
    block_bytes: int
    prefill_s_per_token: float = 1 / _START_PREFILL_TOKENS_PER_S
    load_s_per_block: dict[str, float] = field(default_factory=dict)

    def blocks_worth_loading(self, tiers: Sequence[str]) -> int:
        """Return how many leading blocks to load, given the tier each is in.

        All of them if that is expected to be clearly cheaper than prefill; else those that lead in ``vram``.
        """
        in_place = next((i for i, tier in enumerate(tiers) if tier != FREE_TIER), len(tiers))
        expected_s = self.expected_load_s(tiers)
        if expected_s <= _MARGIN * self.expected_prefill_s(len(tiers) - in_place):
            return len(tiers)
        for tier in set(tiers):
            self.load_s_per_block[tier] = self._per_block_s(tier) * _RECOVERY
        return in_place

    def expected_load_s(self, tiers: Sequence[str]) -> float:
        """Return the expected time to load blocks from those tiers."""
        return sum(self._per_block_s(tier) * count for tier, count in Counter(tiers).items())

    def expected_prefill_s(self, blocks: int) -> float:
        """Return the expected time to compute that many blocks."""
        return blocks * self.block_tokens * self.prefill_s_per_token

    def note_prefill(self, tokens: int, seconds: float) -> None:
        """Learn from a prefill of ``tokens`` tokens."""
        if tokens > 0:
            self.prefill_s_per_token += _WEIGHT * (seconds / tokens - self.prefill_s_per_token)

    def note_load(self, tiers: Sequence[str], seconds: float) -> None:
        """Learn from a load of blocks that came from those tiers."""
        expected_s = self.expected_load_s(tiers)
        if expected_s <= 0:
            return
        ratio = min(max(seconds / expected_s, 1 / _LARGEST_CORRECTION), _LARGEST_CORRECTION)
        for tier in set(tiers):
            self.load_s_per_block[tier] = self._per_block_s(tier) * (1 + _WEIGHT * (ratio - 1))

    def _per_block_s(self, tier: str) -> float:
        if tier == FREE_TIER:
            return 0.0
        start_s = self.block_bytes / _START_BYTES_PER_S.get(tier, _START_OTHER_BYTES_PER_S)
        return self.load_s_per_block.get(tier, start_s)
