"""LoadPolicy: whether loading stored blocks is expected to be cheaper than computing them again."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

FREE_TIER = "vram"
"""Blocks here are used in place."""

_START_BYTES_PER_S = {"dram": 2e9, "ssd": 1e9, "remote": 2e8}
_START_OTHER_BYTES_PER_S = 2e8
_START_CALL_S = 0.001
_START_PREFILL_TOKENS_PER_S = 300.0
_START_BLOCKS = (1.0, 64.0)
"""What is believed at first counts as much as a load of each of these numbers of blocks."""

_KEEP = 0.8
"""What an observation still counts at the next one."""

_WEIGHT = 0.3
_RECOVERY = 0.9
_MARGIN = 0.8
_LARGEST_CORRECTION = 8.0


class LoadSpeed:
    """What loads from one tier take: a time per call and a time per block.

    A least-squares line through past loads, of which later ones count more. Starts from a guess.
    """

    def __init__(self, *, call_s: float, block_s: float) -> None:
        self._count = self._blocks = self._squares = self._seconds = self._products = 0.0
        for blocks in _START_BLOCKS:
            self._add(blocks, call_s + block_s * blocks)

    def note(self, blocks: int, seconds: float) -> None:
        """Learn from a load; one that is far from what was expected is taken for less far."""
        expected_s = self.expected_s(blocks)
        seconds = min(max(seconds, expected_s / _LARGEST_CORRECTION), expected_s * _LARGEST_CORRECTION)
        self._scale(_KEEP)
        self._add(blocks, seconds)

    def expected_s(self, blocks: int) -> float:
        """Return the time that loading so many blocks is expected to take."""
        spread = self._count * self._squares - self._blocks**2
        block_s = max(0.0, (self._count * self._products - self._blocks * self._seconds) / spread)
        call_s = max(0.0, (self._seconds - block_s * self._blocks) / self._count)
        return max(call_s + block_s * blocks, 1e-9)

    def hope(self) -> None:
        """Expect a tenth less of a tier that was passed over, so that it is tried once it has recovered."""
        self._seconds *= _RECOVERY
        self._products *= _RECOVERY

    def _add(self, blocks: float, seconds: float) -> None:
        self._count += 1
        self._blocks += blocks
        self._squares += blocks * blocks
        self._seconds += seconds
        self._products += blocks * seconds

    def _scale(self, factor: float) -> None:
        self._count *= factor
        self._blocks *= factor
        self._squares *= factor
        self._seconds *= factor
        self._products *= factor


@dataclass(slots=True)
class PrefillSpeed:
    """What prefill takes: ``token_s`` per token, and ``context_s`` more for each token before it.

    Both are measured when the engine opens; ``factor`` follows the passes since.
    """

    token_s: float = 1 / _START_PREFILL_TOKENS_PER_S
    context_s: float = 0.0
    factor: float = 1.0

    def expected_s(self, start: int, tokens: int) -> float:
        """Return the time that tokens at ``start...`` are expected to take."""
        context = tokens * (start + tokens / 2)
        return self.factor * (self.token_s * tokens + self.context_s * context)

    def note(self, expected_s: float, seconds: float) -> None:
        """Learn from a pass that was expected to take ``expected_s``."""
        if expected_s > 0:
            ratio = min(max(seconds / expected_s, 1 / _LARGEST_CORRECTION), _LARGEST_CORRECTION)
            self.factor *= 1 + _WEIGHT * (ratio - 1)


@dataclass(slots=True)
class LoadPolicy:
    """Compares the expected times of loading and of prefill, both as they were measured so far."""

    block_tokens: int
    block_bytes: int
    prefill: PrefillSpeed = field(default_factory=PrefillSpeed)
    speeds: dict[str, LoadSpeed] = field(default_factory=dict)

    def blocks_worth_loading(self, tiers: Sequence[str]) -> int:
        """Return how many leading blocks to load, given the tier each is in.

        The number that saves most time, among those that end with the last block of a tier: within one tier
        each further block saves at least as much as the one before. Loading must be clearly cheaper.
        """
        in_place = next((i for i, tier in enumerate(tiers) if tier != FREE_TIER), len(tiers))
        last = len(tiers) - 1
        ends = [i + 1 for i in range(in_place, len(tiers)) if i == last or tiers[i + 1] != tiers[i]]
        best = max([in_place, *ends], key=lambda end: (self._saved_s(tiers[:end], in_place), end))
        for tier in set(tiers[best:]) - {FREE_TIER}:
            self._speed(tier).hope()
        return best

    def expected_load_s(self, tiers: Sequence[str]) -> float:
        """Return the expected time to load blocks from those tiers."""
        return sum(self._speed(tier).expected_s(count) for tier, count in _loaded(tiers).items())

    def expected_prefill_s(self, start: int, blocks: int) -> float:
        """Return the expected time to compute ``blocks`` blocks after the first ``start``."""
        return self.prefill.expected_s(start * self.block_tokens, blocks * self.block_tokens)

    def note_load(self, tiers: Sequence[str], seconds: float) -> None:
        """Learn from a load of blocks that came from those tiers."""
        expected_s = self.expected_load_s(tiers)
        for tier, count in _loaded(tiers).items():
            speed = self._speed(tier)
            speed.note(count, seconds * speed.expected_s(count) / expected_s)

    def _saved_s(self, tiers: Sequence[str], in_place: int) -> float:
        saved_s = self.expected_prefill_s(in_place, len(tiers) - in_place)
        return saved_s - self.expected_load_s(tiers) / _MARGIN

    def _speed(self, tier: str) -> LoadSpeed:
        if tier not in self.speeds:
            bytes_per_s = _START_BYTES_PER_S.get(tier, _START_OTHER_BYTES_PER_S)
            self.speeds[tier] = LoadSpeed(call_s=_START_CALL_S, block_s=self.block_bytes / bytes_per_s)
        return self.speeds[tier]


def _loaded(tiers: Sequence[str]) -> dict[str, int]:
    """Count the blocks of each tier that have to be loaded."""
    return {tier: count for tier, count in Counter(tiers).items() if tier != FREE_TIER}
