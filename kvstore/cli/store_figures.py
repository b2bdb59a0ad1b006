"""Figures of a store over time, from its stats: what is so now, and what happened between two of them.

A miss or hit is counted by the store where it happens; nothing here counts again. Where a store was away or
was started anew between two stats, nothing is said of the time between them.
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

Stats = Mapping[str, Any]
"""What ``KVStore.stats()`` returns. Any: JSON."""

_FAULT_EVENTS = ("faults", "io_faults", "breaker_opened", "lost", "broken_seals", "corrupt", "unreadable")
_SERVER_FAULTS = ("refused_connections", "protocol_errors", "failed_requests", "slow_readers")
_HTTP_FAULTS = ("refused_connections", "failed_handshakes", "slow_clients", "damaged_blocks")


@dataclass(frozen=True, slots=True)
class Lookups:
    """Blocks asked for and how each ended; ``hits`` by tier, ``misses`` by reason."""

    requests: int
    blocks: int
    hits: dict[str, int]
    misses: dict[str, int]

    def ratio(self, tier: str | None = None) -> float | None:
        """Return the part of the blocks that a tier had (None: any tier); None if none was asked for."""
        if not self.blocks:
            return None
        return (sum(self.hits.values()) if tier is None else self.hits.get(tier, 0)) / self.blocks

    def since(self, before: "Lookups") -> "Lookups":
        """Return what came after ``before``."""
        return Lookups(
            self.requests - before.requests,
            self.blocks - before.blocks,
            _increase(self.hits, before.hits),
            _increase(self.misses, before.misses),
        )

    def as_dict(self) -> dict[str, object]:
        """Return a JSON-ready copy."""
        return {
            "requests": self.requests,
            "lookups_blocks": self.blocks,
            "hits_blocks": self.hits,
            "misses_blocks": self.misses,
            "hit_ratio": self.ratio(),
            "hit_ratios": {tier: self.ratio(tier) for tier in self.hits},
        }

    @classmethod
    def of(cls, counted: Stats) -> "Lookups":
        """Return the figures of ``match`` or ``fetch`` of the stats."""
        return cls(
            int(counted.get("requests", 0)),
            int(counted.get("lookups_blocks", 0)),
            _counts(counted.get("hits_blocks")),
            _counts(counted.get("misses_blocks")),
        )


@dataclass(frozen=True, slots=True)
class Occupancy:
    """How full a tier is. ``problem`` is empty while it is up, ``queued_blocks`` wait to be written to it."""

    name: str
    medium: str
    used_bytes: int
    capacity_bytes: int
    blocks: int | None
    queued_blocks: int
    problem: str

    @property
    def ratio(self) -> float | None:
        """Used part of the capacity; None if it has none of its own."""
        return self.used_bytes / self.capacity_bytes if self.capacity_bytes else None

    @classmethod
    def of(cls, name: str, told: Stats) -> "Occupancy":
        """Return the figures of one of ``tiers`` of the stats."""
        blocks = told.get("blocks")
        problem = "" if told.get("is_up", True) else str(told.get("reason") or "down")
        return cls(
            name,
            str(told.get("medium", "")),
            int(told.get("used_bytes") or 0),
            int(told.get("capacity_bytes") or 0),
            None if blocks is None else int(blocks),
            int(told.get("queued_blocks", 0)),
            problem,
        )


@dataclass(frozen=True, slots=True)
class Moved:
    """What was moved from one tier to another since the store's start."""

    blocks: int
    bytes: int
    failures: int


@dataclass(frozen=True, slots=True)
class HotBranch:
    """A prefix that many lookups of the last minutes share; ``hit_ratio`` of them found all of it.

    ``depth`` is how many branches that are told lead to it.
    """

    key: str
    namespace: str
    depth: int
    lookups: int
    hit_ratio: float | None
    blocks: int
    tokens: int
    tiers: dict[str, int]
    last_use_s: float

    def as_dict(self) -> dict[str, object]:
        """Return a JSON-ready copy."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A store at one time. Counts are since its start; ``now`` and ``rates`` are of the last ``interval_s``.

    ``interval_s`` None: there was no sample before, or the store was away meanwhile. ``rates`` are bytes per
    second by transfer. ``faults`` are counts above 0 of what should not happen, by name.
    """

    time_s: float
    interval_s: float | None
    total: Lookups
    now: Lookups | None
    tiers: tuple[Occupancy, ...]
    transfers: dict[str, Moved]
    rates: dict[str, float]
    puts: dict[str, int]
    evictions: dict[str, int]
    live_leases: int
    clients: int
    loads: int
    down: dict[str, str]
    faults: dict[str, int]
    new_faults: dict[str, int]
    branches: tuple[HotBranch, ...] = ()

    def as_dict(self) -> dict[str, object]:
        """Return a JSON-ready copy."""
        return {
            "time_s": round(self.time_s, 3),
            "is_up": True,
            "interval_s": None if self.interval_s is None else round(self.interval_s, 6),
            "now": None if self.now is None else self.now.as_dict(),
            "total": self.total.as_dict(),
            "tiers": {
                tier.name: {
                    "used_bytes": tier.used_bytes,
                    "capacity_bytes": tier.capacity_bytes,
                    "blocks": tier.blocks,
                    "queued_blocks": tier.queued_blocks,
                }
                for tier in self.tiers
            },
            "transfers": {
                name: {
                    "bytes": moved.bytes,
                    "blocks": moved.blocks,
                    "failures": moved.failures,
                    "bytes_per_s": round(self.rates[name], 1) if name in self.rates else None,
                }
                for name, moved in self.transfers.items()
            },
            "puts_blocks": self.puts,
            "evictions_blocks": self.evictions,
            "live_leases": self.live_leases,
            "clients": self.clients,
            "loads": self.loads,
            "down": self.down,
            "faults": self.faults,
            "new_faults": self.new_faults,
            "branches": [branch.as_dict() for branch in self.branches],
        }


def sample(stats: Stats, *, of: str, time_s: float, before: tuple[Stats, float] | None = None) -> Sample:
    """Return the figures of ``stats``, and of the time since ``before``.

    ``of`` is ``fetch`` or ``match``: the lookups that are counted. ``before`` are earlier stats and how many
    seconds ago they were taken; it is left aside if the store has been started anew since.
    """
    if before is not None and (before[1] <= 0 or is_started_anew(before[0], stats)):
        before = None
    total, transfers, faults = Lookups.of(stats.get(of, {})), _transfers(stats), dict(_faults(stats))
    then = {} if before is None else before[0]
    interval_s = None if before is None else before[1]
    earlier = _transfers(then)
    return Sample(
        time_s=time_s,
        interval_s=interval_s,
        total=total,
        now=None if before is None else total.since(Lookups.of(then.get(of, {}))),
        tiers=tuple(Occupancy.of(name, told) for name, told in stats.get("tiers", {}).items()),
        transfers=transfers,
        rates={}
        if interval_s is None
        else {
            name: (moved.bytes - (earlier[name].bytes if name in earlier else 0)) / interval_s
            for name, moved in transfers.items()
        },
        puts=_counts(stats.get("puts_blocks")),
        evictions=_counts(stats.get("evictions_blocks")),
        live_leases=int(stats.get("live_leases", 0)),
        clients=int(stats.get("owners", 0)),
        loads=int(stats.get("loads", 0)),
        down=dict(_down(stats)),
        faults=faults,
        new_faults={} if before is None else _positive(_increase(faults, dict(_faults(then)))),
        branches=tuple(_branches(stats, of)),
    )


def is_started_anew(before: Stats, after: Stats) -> bool:
    """Whether a count is lower than before: then it is another run of the store that counts."""
    return (
        any(
            Lookups.of(after.get(of, {})).requests < Lookups.of(before.get(of, {})).requests
            or Lookups.of(after.get(of, {})).blocks < Lookups.of(before.get(of, {})).blocks
            for of in ("match", "fetch")
        )
        or any(
            moved.bytes < earlier.bytes
            for name, earlier in _transfers(before).items()
            for moved in (_transfers(after).get(name, Moved(0, 0, 0)),)
        )
        or _requests(after) < _requests(before)
    )


def _requests(stats: Stats) -> int:
    return sum(_counts(stats.get("server", {}).get("requests")).values())


def _transfers(stats: Stats) -> dict[str, Moved]:
    return {
        name: Moved(int(told["blocks"]), int(told["bytes"]), sum(_counts(told.get("failures")).values()))
        for name, told in stats.get("transfers", {}).items()
    }


def _branches(stats: Stats, of: str) -> Iterator[HotBranch]:
    """Yield the hottest branches, each behind the one that it leaves.

    A client may name blocks as it likes: those that leave a branch are told once, even if they have its key.
    """
    told = stats.get("branches", {}).get("branches", [])
    names = {(branch["namespace"], branch["key"]) for branch in told}
    leaving: dict[tuple[str, str] | None, list[Stats]] = {}
    for branch in reversed(told):
        parent = (branch["namespace"], branch["parent"])
        leaving.setdefault(parent if parent in names else None, []).append(branch)
    waiting = [(branch, 0) for branch in leaving.pop(None, [])]
    while waiting:
        branch, depth = waiting.pop()
        below = leaving.pop((branch["namespace"], branch["key"]), [])
        waiting += [(at, depth + 1) for at in below]
        lookups, hits = branch[of]["lookups"], branch[of]["hits"]
        yield HotBranch(
            branch["key"],
            branch["namespace"],
            depth,
            lookups,
            hits / lookups if lookups else None,
            branch["blocks"],
            branch["tokens"],
            dict(branch["tiers"]),
            branch["last_use_s"],
        )


def _down(stats: Stats) -> Iterator[tuple[str, str]]:
    """Yield what does not work now, and why."""
    for name, told in stats.get("tiers", {}).items():
        problem = Occupancy.of(name, told).problem
        if problem:
            yield name, problem
    for name in ("records", "encryption"):
        told = stats.get(name, {})
        if told.get("is_on") and not told.get("is_up", True):
            yield name, str(told.get("reason") or "down")


def _faults(stats: Stats) -> Iterator[tuple[str, int]]:
    """Yield counts above 0 of what should not happen."""
    counted: list[tuple[str, object]] = [("overdue slots", stats.get("overdue_slots", 0))]
    counted += [(f"{tier}: corrupt blocks", n) for tier, n in _counts(stats.get("corrupt_blocks")).items()]
    counted += [(f"writes dropped: {why}", n) for why, n in _counts(stats.get("write_drops_blocks")).items()]
    for name, told in stats.get("transfers", {}).items():
        counted += [(f"{name}: {status}", n) for status, n in _counts(told.get("failures")).items()]
    for place, events in _events(stats):
        counted += [(f"{place}: {_spoken(name)}", events.get(name, 0)) for name in _FAULT_EVENTS]
    server, http = stats.get("server", {}), stats.get("http", {})
    counted += [(f"socket: {_spoken(name)}", server.get(name, 0)) for name in _SERVER_FAULTS]
    counted += [(f"http: {_spoken(name)}", http.get(name, 0)) for name in _HTTP_FAULTS]
    for name, count in counted:
        if isinstance(count, int) and count > 0:
            yield name, count


def _events(stats: Stats) -> Iterator[tuple[str, Stats]]:
    for name, told in {**stats.get("tiers", {}), "records": stats.get("records", {})}.items():
        yield name, told.get("events", {})


def _spoken(name: str) -> str:
    return name.replace("_", " ")


def _counts(counted: Stats | None) -> dict[str, int]:
    return {name: int(count) for name, count in (counted or {}).items()}


def _increase(after: Mapping[str, int], before: Mapping[str, int]) -> dict[str, int]:
    return {name: count - before.get(name, 0) for name, count in after.items()}


def _positive(counts: Mapping[str, int]) -> dict[str, int]:
    return {name: count for name, count in counts.items() if count > 0}
