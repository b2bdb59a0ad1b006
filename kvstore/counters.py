"""Counters of one BlockManager: lookups that balance, transfers, evictions, drops."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kvstore.miss import MissReason

BATCH_BOUNDS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
"""Upper bounds of the classes that durations are counted in, in seconds; one more class has no bound."""


@dataclass(slots=True)
class Durations:
    """How long things took, counted in classes. ``counts`` has one more place than there are bounds."""

    bounds_s: tuple[float, ...] = BATCH_BOUNDS_S
    counts: list[int] = field(default_factory=list)
    sum_s: float = 0.0

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds_s) + 1)

    def note(self, duration_s: float) -> None:
        """Count one."""
        self.counts[bisect_left(self.bounds_s, duration_s)] += 1
        self.sum_s += duration_s

    def as_dict(self) -> dict[str, object]:
        """Return a JSON-ready copy: in ``counts``, each class by its upper bound in seconds."""
        names = [*(f"{bound:g}" for bound in self.bounds_s), "+Inf"]
        return {"counts": dict(zip(names, self.counts, strict=True)), "seconds": round(self.sum_s, 6)}


@dataclass(slots=True)
class LookupCounters:
    """Blocks asked for, and how each ended. ``hits`` (by tier of origin) + ``misses`` = ``lookups``.

    The same in tokens: namespaces differ in how many a block has.
    """

    requests: int = 0
    lookups: int = 0
    lookups_tokens: int = 0
    hits: Counter[str] = field(default_factory=Counter)
    misses: Counter[str] = field(default_factory=Counter)
    hits_tokens: Counter[str] = field(default_factory=Counter)
    misses_tokens: Counter[str] = field(default_factory=Counter)

    def count(
        self, num_blocks: int, origins: Sequence[str], reason: MissReason | None, *, block_tokens: int
    ) -> None:
        """Count one request for ``num_blocks`` blocks whose leading blocks came from ``origins``."""
        if origins and origins.count(origins[0]) == num_blocks:  # much cheaper than to count each
            self.count_hits(num_blocks, origins[0], block_tokens=block_tokens)
            return
        self.requests += 1
        self.lookups += num_blocks
        self.lookups_tokens += num_blocks * block_tokens
        for origin, count in Counter(origins).items():
            self.hits[origin] += count
            self.hits_tokens[origin] += count * block_tokens
        if len(origins) < num_blocks:
            first, behind = (reason or MissReason.NEVER_SEEN).value, MissReason.BEHIND_MISS.value
            num_behind = num_blocks - len(origins) - 1
            self.misses[first] += 1
            self.misses_tokens[first] += block_tokens
            self.misses[behind] += num_behind
            self.misses_tokens[behind] += num_behind * block_tokens

    def count_hits(self, num_blocks: int, origin: str, *, block_tokens: int) -> None:
        """Count one request whose blocks all came from one tier."""
        num_tokens = num_blocks * block_tokens
        self.requests += 1
        self.lookups += num_blocks
        self.lookups_tokens += num_tokens
        self.hits[origin] += num_blocks
        self.hits_tokens[origin] += num_tokens

    @property
    def is_balanced(self) -> bool:
        """Whether every lookup ended as exactly one hit or miss, in blocks and in tokens."""
        num_blocks = sum(self.hits.values()) + sum(self.misses.values())
        num_tokens = sum(self.hits_tokens.values()) + sum(self.misses_tokens.values())
        return (num_blocks, num_tokens) == (self.lookups, self.lookups_tokens)

    def as_dict(self) -> dict[str, object]:
        """Return a JSON-ready copy."""
        return {
            "requests": self.requests,
            "lookups_blocks": self.lookups,
            "lookups_tokens": self.lookups_tokens,
            "hits_blocks": dict(self.hits),
            "hits_tokens": dict(self.hits_tokens),
            "misses_blocks": _positive(self.misses),
            "misses_tokens": _positive(self.misses_tokens),
        }


def _positive(counts: Mapping[str, int]) -> dict[str, int]:
    return {name: count for name, count in counts.items() if count}


@dataclass(slots=True)
class TransferCounters:
    """Moves from one tier to another."""

    blocks: int = 0
    bytes: int = 0
    batches: Durations = field(default_factory=Durations)
    failures: Counter[str] = field(default_factory=Counter)

    def as_dict(self) -> dict[str, object]:
        """Return a JSON-ready copy."""
        return {
            "blocks": self.blocks,
            "bytes": self.bytes,
            "seconds": round(self.batches.sum_s, 6),
            "batches": self.batches.as_dict()["counts"],
            "failures": dict(self.failures),
        }


@dataclass(slots=True)
class Counters:
    """All counters of a manager. Keys of the Counter fields are ``tier/reason`` or a reason."""

    match: LookupCounters = field(default_factory=LookupCounters)
    fetch: LookupCounters = field(default_factory=LookupCounters)
    exists: Counter[str] = field(default_factory=Counter)
    puts: Counter[str] = field(default_factory=Counter)
    evictions: Counter[str] = field(default_factory=Counter)
    write_drops: Counter[str] = field(default_factory=Counter)
    corrupt: Counter[str] = field(default_factory=Counter)
    leases: Counter[str] = field(default_factory=Counter)
    hinted_requests: int = 0
    direct_blocks: int = 0
    checked_blocks: int = 0
    transfers: dict[tuple[str, str], TransferCounters] = field(default_factory=dict)

    def transfer(self, origin: str, target: str) -> TransferCounters:
        """Return the counters of moves from one tier to another."""
        return self.transfers.setdefault((origin, target), TransferCounters())

    def as_dict(self) -> dict[str, object]:
        """Return a JSON-ready copy."""
        return {
            "match": self.match.as_dict(),
            "fetch": self.fetch.as_dict(),
            "exists": dict(self.exists),
            "puts_blocks": dict(self.puts),
            "evictions_blocks": dict(self.evictions),
            "write_drops_blocks": dict(self.write_drops),
            "corrupt_blocks": dict(self.corrupt),
            "lease_events": dict(self.leases),
            "hinted_requests": self.hinted_requests,
            "direct_blocks": self.direct_blocks,
            "checked_blocks": self.checked_blocks,
            "transfers": {f"{a}->{b}": t.as_dict() for (a, b), t in self.transfers.items()},
        }
