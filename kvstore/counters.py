"""Counters of one BlockManager: lookups that balance, transfers, evictions, drops."""

from collections import Counter
from dataclasses import dataclass, field

from kvstore.miss import MissReason


@dataclass(slots=True)
class LookupCounters:
    """Blocks asked for, and how each ended. ``hits`` (by tier of origin) + ``misses`` = ``lookups``."""

    requests: int = 0
    lookups: int = 0
    hits: Counter[str] = field(default_factory=Counter)
    misses: Counter[str] = field(default_factory=Counter)

    def count(self, num_blocks: int, origins: list[str], reason: MissReason | None) -> None:
        """Count one request for ``num_blocks`` blocks whose leading blocks came from ``origins``."""
        if origins and origins.count(origins[0]) == num_blocks:  # much cheaper than to count each
            self.count_hits(num_blocks, origins[0])
            return
        self.requests += 1
        self.lookups += num_blocks
        for origin, count in Counter(origins).items():
            self.hits[origin] += count
        if len(origins) < num_blocks:
            self.misses[(reason or MissReason.NEVER_SEEN).value] += 1
            self.misses[MissReason.BEHIND_MISS.value] += num_blocks - len(origins) - 1

    def count_hits(self, num_blocks: int, origin: str) -> None:
        """Count one request whose blocks all came from one tier."""
        self.requests += 1
        self.lookups += num_blocks
        self.hits[origin] += num_blocks

    @property
    def is_balanced(self) -> bool:
        """Whether every lookup ended as exactly one hit or miss."""
        return sum(self.hits.values()) + sum(self.misses.values()) == self.lookups

    def as_dict(self) -> dict[str, object]:
        """Return a JSON-ready copy."""
        misses = {reason: count for reason, count in self.misses.items() if count}
        return {
            "requests": self.requests,
            "lookups_blocks": self.lookups,
            "hits_blocks": dict(self.hits),
            "misses_blocks": misses,
        }


@dataclass(slots=True)
class TransferCounters:
    """Moves from one tier to another."""

    blocks: int = 0
    bytes: int = 0
    seconds: float = 0.0
    failures: Counter[str] = field(default_factory=Counter)

    def as_dict(self) -> dict[str, object]:
        """Return a JSON-ready copy."""
        return {
            "blocks": self.blocks,
            "bytes": self.bytes,
            "seconds": round(self.seconds, 6),
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
            "transfers": {f"{a}->{b}": t.as_dict() for (a, b), t in self.transfers.items()},
        }
