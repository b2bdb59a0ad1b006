"""The tables of docs/data_plane.md, made of the figures of one run.

Each stands between ``<!-- begin NAME -->`` and ``<!-- end NAME -->``; the text around is written by hand.
"""

import re
from collections.abc import Callable, Sequence
from pathlib import Path

from measure.asked import OVERHEAD_BATCHES, TINY, lines, number
from measure.figures import Row
from measure.load import COPIERS, FEW_KEYS
from measure.lookups import MATCH_KEYS, SMALL_BLOCK_BYTES
from measure.record import Record


def rewrite(page: Path, record: Record) -> None:
    """Replace the tables of a page."""
    page.write_text(with_tables(page.read_text(), record))


def with_tables(text: str, record: Record) -> str:
    """Return the text of a page with the tables of a run.

    Raises:
        ValueError: the page has no place for one of them.
    """
    for name, table in TABLES.items():
        between = re.compile(rf"(<!-- begin {name} -->\n).*?(<!-- end {name} -->)", re.DOTALL)
        if not between.search(text):
            raise ValueError(f"the page has no table {name}")
        made = table(record)
        text = between.sub(lambda found, made=made: f"{found[1]}{made}{found[2]}", text)
    return text


def asked_table(record: Record) -> str:
    """What is asked, what was seen."""
    words = {True: "yes", False: "**no**", None: ""}
    cells = [[line.what, line.asked, line.seen, words[line.is_reached]] for line in lines(record)]
    return table(["", "asked", "seen", "reached"], cells)


def speed_table(op: str, is_batch: bool) -> Callable[[Record], str]:
    """Return what makes the table of GB/s and ratios to memcpy of one operation, by peer and block size."""

    def make(record: Record) -> str:
        rows = [row for row in blocks_of(record, op) if (row["batch"] != 1) == is_batch]
        sizes = sorted({(row["block_bytes"], row["batch"]) for row in rows})
        copies = {size: record.row("memcpy", "copy", *size) for size in sizes}
        cells = [["memcpy", *(_speed(copies[size]) for size in sizes)]]
        for peer in dict.fromkeys(row["peer"] for row in rows):
            cells.append([f"`{peer}`", *(_speed(record.row(peer, op, *size)) for size in sizes)])
        heads = [size_text(block_bytes) + (f" x {batch}" if is_batch else "") for block_bytes, batch in sizes]
        return table(["", *heads], cells)

    return make


def latency_table(record: Record) -> str:
    """p50 and p99 of one block at a time, by peer and operation."""
    rows = [row for row in record.results if row["batch"] == 1 and row["gb_per_s"] is not None]
    sizes = sorted({row["block_bytes"] for row in rows})
    cells = []
    for peer, op in dict.fromkeys((row["peer"], row["op"]) for row in rows):
        found = [record.row(peer, op, size, 1) for size in sizes]
        cells.append(
            [f"`{peer}`", str(op).replace("_", " ") if peer == "bare" else str(op), *map(_times, found)]
        )
    return table(["", "", *map(size_text, sizes)], cells)


def cpu_table(record: Record) -> str:
    """CPU seconds of client and server for each GB, in batches."""
    rows = [row for row in record.results if row["batch"] != 1 and row["block_bytes"] != TINY]
    rows = [row for row in rows if row["cpu_s_per_gb"] is not None]
    sizes = sorted({(row["block_bytes"], row["batch"]) for row in rows})
    cells = []
    for peer, op in dict.fromkeys((row["peer"], row["op"]) for row in rows):
        found = [record.row(peer, op, *size) for size in sizes]
        cells.append([f"`{peer}`", str(op), *(_text(number(row, "cpu_s_per_gb"), 2) for row in found)])
    return table(["", "", *(f"{size_text(size)} x {batch}" for size, batch in sizes)], cells)


def overhead_table(record: Record) -> str:
    """Time of requests of small blocks beyond the copy."""
    cells = []
    for op in ("fetch_into", "fetch_into_unchecked", "put", "view"):
        found = [record.row("kvstore", op, TINY, batch) for batch in OVERHEAD_BATCHES]
        each = [(number(row, "overhead_us"), number(row, "overhead_us_per_block")) for row in found]
        cells.append([op, *(f"{_text(over, 0)} us, {_text(per_block, 1)} us" for over, per_block in each)])
    return table(["", *(f"{batch} blocks, each" for batch in OVERHEAD_BATCHES)], cells)


def lookup_table(record: Record) -> str:
    """p50 and p99 of match, exists and chain."""
    rows = [row for row in record.results if str(row["op"]).startswith(("match_", "exists_", "chain_"))]
    rows = [row for row in rows if "beside" not in str(row["op"])]
    ops = list(dict.fromkeys(str(row["op"]) for row in rows))
    cells = []
    for peer in dict.fromkeys(row["peer"] for row in rows):
        by_op = {row["op"]: row for row in rows if row["peer"] == peer}
        cells.append([f"`{peer}`", *(_times(by_op.get(op)) for op in ops)])
    return table(["", *(op.replace("_", " ") for op in ops)], cells)


def load_table(record: Record) -> str:
    """p50 and p99 beside copying clients."""
    cells = []
    for peer, op, size in (
        ("kvstore", f"match_{FEW_KEYS}", (SMALL_BLOCK_BYTES, FEW_KEYS)),
        ("kvstore", f"match_{MATCH_KEYS}", (SMALL_BLOCK_BYTES, MATCH_KEYS)),
        ("bare", "round_trip", (0, 1)),
    ):
        found = [record.row(peer, f"{op}_beside_{copiers}", *size) for copiers in COPIERS]
        cells.append([f"`{peer}`", op.replace("_", " "), *map(_times, found)])
    speeds = [number(row, "copiers_gb_per_s") for row in found]
    cells.append(["", "what they copied, GB/s", *("" if not speed else _text(speed, 1) for speed in speeds)])
    return table(["", "", *(f"beside {copiers}" for copiers in COPIERS)], cells)


def versions_line(record: Record) -> str:
    """What the run was made with."""
    versions = ", ".join(f"{name} {version}" for name, version in sorted(record.versions.items()))
    left_out = "".join(f" Left out: {name}: {reason}." for name, reason in record.left_out.items())
    how = f"{record.cores} cores, {record.rounds} rounds, load average before them {record.load}"
    return f"{how}; {versions}.{left_out}\n"


TABLES: dict[str, Callable[[Record], str]] = {
    "versions": versions_line,
    "asked": asked_table,
    "fetch in batches": speed_table("fetch_into", is_batch=True),
    "put in batches": speed_table("put", is_batch=True),
    "fetch singly": speed_table("fetch_into", is_batch=False),
    "put singly": speed_table("put", is_batch=False),
    "latency": latency_table,
    "cpu": cpu_table,
    "overhead": overhead_table,
    "lookups": lookup_table,
    "load": load_table,
}


def blocks_of(record: Record, op: str) -> list[Row]:
    """Return the rows of blocks put or fetched, without those of the smallest, which show the overhead."""
    return [row for row in record.results if row["op"] == op and row["block_bytes"] != TINY]


def table(heads: Sequence[str], cells: Sequence[Sequence[str]]) -> str:
    """Write a table in Markdown."""
    lines = [[f" {cell} " if cell else " " for cell in row] for row in (heads, *cells)]
    return "".join(f"|{'|'.join(line)}|\n" for line in (lines[0], ["---"] * len(heads), *lines[1:]))


def size_text(num_bytes: object) -> str:
    """Write a block's size."""
    assert isinstance(num_bytes, int)
    return f"{num_bytes >> 20} MiB" if num_bytes >= 1 << 20 else f"{num_bytes >> 10} KiB"


def _speed(row: Row | None) -> str:
    speed, ratio = number(row, "gb_per_s"), number(row, "ratio_to_memcpy")
    return "" if speed is None or ratio is None else f"{speed:.2f} ({ratio:.2f})"


def _times(row: Row | None) -> str:
    p50, p99 = number(row, "p50_us"), number(row, "p99_us")
    if p50 is None or p99 is None:
        return ""
    scale, unit = (1e-3, "ms") if p50 >= 1000 else (1.0, "us")
    decimals = 0 if p50 >= 100 and unit == "us" else 1
    return f"{_text(p50 * scale, decimals)}, {_text(p99 * scale, decimals)} {unit}"


def _text(value: float | None, decimals: int) -> str:
    return "" if value is None else f"{value:.{decimals}f}"
