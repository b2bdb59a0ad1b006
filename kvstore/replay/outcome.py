"""What a replay counts, and what follows from it."""

from dataclasses import dataclass

BOUND = "bound"
"""The name of the bound among policies."""


@dataclass(slots=True)
class Tally:
    """Sums over the requests of one replay."""

    hit_blocks: int = 0
    hit_tokens: int = 0
    written_blocks: int = 0

    def add(self, hit_blocks: int, hit_tokens: int, written_blocks: int) -> None:
        """Count one request."""
        self.hit_blocks += hit_blocks
        self.hit_tokens += hit_tokens
        self.written_blocks += written_blocks


@dataclass(frozen=True, slots=True)
class TierTally:
    """What one tier of several did: blocks found there and nowhere above, blocks written to it."""

    tier: str
    capacity_blocks: int
    hit_blocks: int
    written_blocks: int


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """One policy at one capacity.

    A hit is a block of the leading run of stored ones when its request arrives; ``hit_tokens`` are the
    tokens in them. ``written_blocks`` were not stored and were kept after their request. ``bound_blocks``
    and ``bound_tokens`` are the most hits that were possible in this capacity. ``seconds`` the replay took.
    """

    policy: str
    capacity_blocks: int
    requests: int
    block_accesses: int
    input_tokens: int
    hit_blocks: int
    hit_tokens: int
    written_blocks: int
    seconds: float
    bound_blocks: int
    bound_tokens: int
    tiers: tuple[TierTally, ...] = ()

    @property
    def block_hit_ratio(self) -> float:
        """Hit blocks over all blocks that were asked for, 0..1."""
        return self.hit_blocks / self.block_accesses if self.block_accesses else 0.0

    @property
    def token_hit_ratio(self) -> float:
        """Hit tokens over all tokens of prompts, 0..1."""
        return self.hit_tokens / self.input_tokens if self.input_tokens else 0.0

    @property
    def share_of_bound(self) -> float:
        """Hit blocks over the most that were possible, 0..1; 1.0 where none were."""
        return self.hit_blocks / self.bound_blocks if self.bound_blocks else 1.0


@dataclass(frozen=True, slots=True)
class Prices:
    """What a block costs and what a hit saves, where the user has measured it.

    ``block_bytes``: size of a block. ``prefill_tokens_per_s``: how fast the engine computes a prompt.
    """

    block_bytes: int | None = None
    prefill_tokens_per_s: float | None = None

    def written_bytes(self, written_blocks: int) -> int | None:
        """Bytes of blocks that were written."""
        return None if self.block_bytes is None else written_blocks * self.block_bytes

    def prefill_s(self, hit_tokens: int) -> float | None:
        """Seconds of prefill that hits saved."""
        return None if self.prefill_tokens_per_s is None else hit_tokens / self.prefill_tokens_per_s
