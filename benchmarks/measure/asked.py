"""What the data plane is meant to reach, and what was seen of it in one run."""

from collections.abc import Iterator
from dataclasses import dataclass

from measure.figures import Row
from measure.load import COPIERS, FEW_KEYS
from measure.lookups import CHAIN_TOKENS, EXISTS_KEYS, MATCH_KEYS, SMALL_BLOCK_BYTES
from measure.record import Record

LARGE, SMALL, TINY = 2 << 20, 64 << 10, 4096
BATCH = 64
OVERHEAD_BATCHES = (64, 1024)

FIXED_US, BLOCK_US = 100, 2
"""What a request of several blocks may take beyond the copy: once, and for each block."""


@dataclass(frozen=True)
class Line:
    """One claim. ``is_reached`` is None if it was not measured."""

    what: str
    asked: str
    seen: str
    is_reached: bool | None


@dataclass(frozen=True)
class Bound:
    """How one value is read and written: at least (or at most) so much, in so many decimals of a unit."""

    value: float
    is_least: bool
    unit: str = ""
    decimals: int = 2

    def line(self, what: str, seen: float | None) -> Line:
        """Compare."""
        asked = f"{'at least' if self.is_least else 'at most'} {self.text(self.value)}"
        if seen is None:
            return Line(what, asked, "not measured", None)
        is_reached = seen >= self.value if self.is_least else seen <= self.value
        return Line(what, asked, self.text(seen), is_reached)

    def text(self, value: float) -> str:
        """Write a value."""
        return f"{value:.{self.decimals}f}{self.unit}"


def lines(record: Record) -> list[Line]:
    """Every claim, in the order of the page."""
    return [
        *_speed(record),
        *_small(record),
        *_overhead(record),
        *_lookups(record),
        *_load(record),
        *_peers(record),
    ]


def number(row: Row | None, key: str, scale: float = 1.0) -> float | None:
    """Return a row's value; None without the row."""
    value = None if row is None else row.get(key)
    return value * scale if isinstance(value, int | float) else None


def _speed(record: Record) -> Iterator[Line]:
    for op, batch, least, what in (
        ("fetch_into", BATCH, 0.75, "fetch_into, verified"),
        ("fetch_into_unchecked", BATCH, 0.95, "fetch_into, checks off"),
        ("put", BATCH, 0.70, "put, verified"),
        ("fetch_into", 1, 0.55, "fetch_into, verified"),
        ("put", 1, 0.55, "put, verified"),
    ):
        seen = number(record.row("kvstore", op, LARGE, batch), "ratio_to_memcpy")
        how = f"batches of {batch}" if batch > 1 else "one at a time"
        yield Bound(least, is_least=True).line(f"{what}, 2 MiB, {how}: ratio to memcpy", seen)
    seen = number(record.row("kvstore", "view", LARGE, BATCH), "ratio_to_memcpy")
    text = "not measured" if seen is None else f"{seen:.2f} of memcpy's speed, which a copy cannot exceed"
    yield Line(
        f"view, 2 MiB, batches of {BATCH}", "no payload copy", text, None if seen is None else seen > 1
    )


def _small(record: Record) -> Iterator[Line]:
    row = record.row("kvstore", "fetch_into", SMALL, 1)
    what = "fetch_into, 64 KiB, one at a time"
    yield Bound(1.5, is_least=False).line(
        f"{what}: p50 to that of a bare round trip and copy", number(row, "ratio_to_bare")
    )
    yield Bound(3, is_least=False).line(f"{what}: p99 to p50", number(row, "p99_to_p50"))


def _overhead(record: Record) -> Iterator[Line]:
    for batch in OVERHEAD_BATCHES:
        most = Bound(FIXED_US + BLOCK_US * batch, is_least=False, unit=" us", decimals=0)
        for op in ("fetch_into", "put"):
            seen = number(record.row("kvstore", op, TINY, batch), "overhead_us")
            yield most.line(f"{op}, {batch} blocks of 4 KiB: beyond memcpy", seen)


def _lookups(record: Record) -> Iterator[Line]:
    blocks = CHAIN_TOKENS // 16
    for what, most, row in (
        ("match of 6 250 keys", 1.2, _small_row(record, f"match_{MATCH_KEYS}", MATCH_KEYS)),
        ("exists of 1 000 keys", 0.4, _small_row(record, f"exists_{EXISTS_KEYS}", EXISTS_KEYS)),
        ("chain of 100 000 tokens, an array", 3.0, record.row("kvstore", "chain_of_array", 0, blocks)),
        ("chain of 100 000 tokens, a list", 3.0, record.row("kvstore", "chain_of_list", 0, blocks)),
    ):
        yield Bound(most, is_least=False, unit=" ms").line(f"{what}: p50", number(row, "p50_us", 1e-3))


def _small_row(record: Record, op: str, count: int) -> Row | None:
    return record.row("kvstore", op, SMALL_BLOCK_BYTES, count)


def _load(record: Record) -> Iterator[Line]:
    most = Bound(5, is_least=False, unit=" ms")
    for copiers in COPIERS[1:]:
        for keys in (FEW_KEYS, MATCH_KEYS):
            row = _small_row(record, f"match_{keys}_beside_{copiers}", keys)
            clients = f"{copiers} client" + ("s" if copiers > 1 else "")
            yield most.line(
                f"match of {keys:,} keys while {clients} copy: p99".replace(",", " "),
                number(row, "p99_us", 1e-3),
            )


def _peers(record: Record) -> Iterator[Line]:
    for peer, name, least in (
        ("mooncake", "Mooncake Store over TCP", 5.0),
        ("redis", "redis-py", 5.0),
        ("lmcache", "LMCache's server over shared memory", 1.0),
    ):
        for batch in (BATCH, 1):
            for op in ("put", "fetch_into"):
                own = number(record.row("kvstore", op, LARGE, batch), "p50_us")
                theirs = number(record.row(peer, op, LARGE, batch), "p50_us")
                seen = None if own is None or theirs is None else theirs / own
                how = f"batches of {batch}" if batch > 1 else "one at a time"
                yield Bound(least, is_least=True, unit=" times", decimals=1).line(
                    f"{op}, 2 MiB, {how}: speed to that of {name}", seen
                )
