"""The figures of one run as SVG, readable on a light and on a dark ground."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

from measure.asked import TINY, number
from measure.page import size_text
from measure.record import Record

# A grey that stands out from white and from black by more than 4 to 1.
_INK = "#7d7d7d"
_OWN = "#e4572e"
_PEERS = {
    "memcpy": "#7d7d7d",
    "bare": "#7d7d7d",
    "redis": "#2f8fd6",
    "redis_tuned": "#1aa5a5",
    "redis_raw": "#7a86e0",
    "files": "#a07a55",
    "lmdb": "#54a24b",
    "mooncake": "#c264c9",
    "lmcache": "#d69e1f",
}
_MARKS = {"memcpy": "", "bare": "", "kvstore": "o"}

_STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "data_plane",
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 9,
    "text.color": _INK,
    "axes.edgecolor": _INK,
    "axes.labelcolor": _INK,
    "axes.titlecolor": _INK,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": _INK,
    "grid.alpha": 0.25,
    "legend.frameon": False,
}

_PANELS = (
    ("fetch_into", True, "fetch_into, in batches"),
    ("fetch_into", False, "fetch_into, one block at a time"),
    ("put", True, "put, in batches"),
    ("put", False, "put, one block at a time"),
)


def draw(record: Record, folder: Path) -> list[Path]:
    """Draw GB/s and latency by block size into a folder; returns the files."""
    with mpl.rc_context(_STYLE):
        return [
            _draw(record, folder / "data_plane_speed.svg", _PANELS, "gb_per_s", "GB/s"),
            _draw(record, folder / "data_plane_latency.svg", _PANELS[1::2], "p50_us", "us, median and p99"),
        ]


def _draw(record: Record, path: Path, panels: Sequence[tuple[str, bool, str]], key: str, unit: str) -> Path:
    figure = Figure(figsize=(9, 3.2 * (len(panels) // 2) + 0.8), layout="constrained")
    axes = figure.subplots(len(panels) // 2, 2, sharey=True, squeeze=False).flat
    lines: dict[str, Any] = {}  # Any: matplotlib's artists
    for at, (op, is_batch, title) in zip(axes, panels, strict=True):
        for peer in dict.fromkeys(str(row["peer"]) for row in record.results):
            line = _draw_peer(at, record, peer, op, is_batch, key)
            if line is not None:
                lines.setdefault(peer, line)
        at.set_title(title)
        at.set_yscale("log")
        at.yaxis.set_major_formatter("{x:g}")
        at.set_ylabel(unit)
    figure.legend(lines.values(), lines.keys(), loc="outside lower center", ncols=5)
    figure.savefig(path, format="svg", transparent=True, metadata={"Date": None})
    return path


def _draw_peer(at: Any, record: Record, peer: str, op: str, is_batch: bool, key: str) -> Any:
    """Draw one peer's line; None if it has none. Any: matplotlib's axes and artists."""
    name = {"memcpy": "copy", "bare": "round_trip_and_copy"}.get(peer, op)
    rows = [row for row in record.results if (row["peer"], row["op"]) == (peer, name)]
    rows = [row for row in rows if (row["batch"] != 1) == is_batch and row["block_bytes"] != TINY]
    rows = [row for row in rows if row["gb_per_s"] is not None]
    if not rows:
        return None
    rows.sort(key=lambda row: number(row, "block_bytes") or 0)
    x = [number(row, "block_bytes") for row in rows]
    y = [number(row, key) for row in rows]
    color = _PEERS.get(peer, _OWN)
    width = 2.4 if peer == "kvstore" else 1.3
    style = {"memcpy": "--", "bare": ":"}.get(peer, "-")
    (line,) = at.plot(x, y, style, color=color, linewidth=width, marker=_MARKS.get(peer, "."), markersize=5)
    if key == "p50_us":
        at.plot(x, [number(row, "p99_us") for row in rows], "_", color=color, markersize=8)
        at.vlines(x, y, [number(row, "p99_us") for row in rows], color=color, linewidth=0.6, alpha=0.6)
    at.set_xscale("log", base=2)
    at.set_xticks(x, [size_text(row["block_bytes"]) for row in rows])
    at.minorticks_off()
    return line
