"""Hit rate against capacity as SVG, one line for each policy, readable on a light and on a dark ground."""

import math
from collections.abc import Mapping, Sequence
from xml.sax.saxutils import escape

from kvstore.replay.lru_curve import LruCurve
from kvstore.replay.outcome import BOUND, ReplayResult

_WIDTH, _HEIGHT = 760, 430
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 130, 40, 56
# A grey that stands out from white and from black by more than 4 to 1; the bound is drawn in it, dashed.
_INK = "#7d7d7d"
_COLORS = (
    "#2f8fd6",
    "#54a24b",
    "#c264c9",
    "#d69e1f",
    "#1aa5a5",
    "#a07a55",
    "#7a86e0",
    "#d45d8c",
    "#8a9a2b",
    "#5f9ea0",
)
_OWN = "#e4572e"
_LABEL_PX = 14

Point = tuple[float, float]


def draw_curves(
    results: Sequence[ReplayResult],
    *,
    title: str,
    lru: LruCurve | None = None,
    own_policy: str = "gittins",
) -> str:
    """Return an SVG of hit blocks in percent by capacity; ``own_policy`` stands out.

    ``lru``: the line of that policy goes through all capacities, not only those that were replayed.
    """
    lines: dict[str, list[Point]] = {}
    for result in results:
        lines.setdefault(result.policy, []).append((result.capacity_blocks, 100 * result.block_hit_ratio))
    for points in lines.values():
        points.sort()
    frame = _Frame.around([point for points in lines.values() for point in points])
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}"'
        f' font-family="sans-serif" font-size="12" fill="{_INK}">',
        f"<title>{escape(title)}</title>",
        f'<text x="{_LEFT}" y="22" font-size="14">{escape(title)}</text>',
        *frame.axes(),
    ]
    labels = _label_places({name: frame.place(points[-1])[1] for name, points in lines.items()})
    colors = iter(_COLORS * (len(lines) // len(_COLORS) + 1))
    for name, points in lines.items():
        color = _INK if name == BOUND else _OWN if name == own_policy else next(colors)
        path = _all_points(lru, points, results[0]) if name == "lru" and lru is not None else points
        parts += _line(
            frame, name, path, points, color=color, label_y=labels[name], is_own=name == own_policy
        )
    return "\n".join([*parts, "</svg>"]) + "\n"


def _all_points(lru: LruCurve, points: Sequence[Point], result: ReplayResult) -> list[Point]:
    """Return what LRU hits between the first and the last of some points, in percent by capacity."""
    first, last = points[0][0], points[-1][0]
    between = [capacity for capacity in lru.capacities() if first < capacity < last]
    share = 100 / max(result.block_accesses, 1)
    return [(size, share * lru.at(int(size))[0]) for size in (first, *between, last)]


def _line(
    frame: "_Frame",
    name: str,
    line: Sequence[Point],
    points: Sequence[Point],
    *,
    color: str,
    label_y: float,
    is_own: bool,
) -> list[str]:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in map(frame.place, line))
    places = list(map(frame.place, points))
    style = f'fill="none" stroke="{color}" stroke-width="{2.6 if is_own else 1.5}"'
    if name == BOUND:
        style += ' stroke-dasharray="6 4"'
    last_x = places[-1][0]
    return [
        f'<polyline points="{path}" {style}/>',
        *(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.6" fill="{color}"/>' for x, y in places),
        f'<text x="{last_x + 10:.1f}" y="{label_y + 4:.1f}" fill="{color}">{escape(name)}</text>',
    ]


def _label_places(wanted: Mapping[str, float]) -> dict[str, float]:
    """Return heights of labels near those wanted, none over another."""
    placed: dict[str, float] = {}
    free_from = -math.inf
    for name in sorted(wanted, key=lambda name: wanted[name]):
        placed[name] = max(wanted[name], free_from)
        free_from = placed[name] + _LABEL_PX
    overhang = max(free_from - _LABEL_PX - (_HEIGHT - _BOTTOM), 0.0) if placed else 0.0
    return {name: y - overhang for name, y in placed.items()}


class _Frame:
    """The scales: capacity, logarithmic, against percent from 0."""

    def __init__(self, low: float, high: float, top: float) -> None:
        self._low, self._high, self._top = math.log(low), math.log(high), top

    @classmethod
    def around(cls, points: Sequence[Point]) -> "_Frame":
        capacities = [x for x, _ in points]
        low, high = max(min(capacities), 1), max(max(capacities), 1)
        if low == high:
            low, high = low / 2, high * 2
        step = _step(max(1.0, *(y for _, y in points)))
        top = max(step * math.ceil(max(y for _, y in points) / step), step)
        return cls(low, high, top)

    def place(self, point: Point) -> Point:
        width, height = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM
        along = (math.log(max(point[0], 1)) - self._low) / (self._high - self._low)
        return _LEFT + width * along, _HEIGHT - _BOTTOM - height * point[1] / self._top

    def axes(self) -> list[str]:
        parts = []
        step = _step(self._top)
        for tick in range(round(self._top / step) + 1):
            x, y = self.place((math.exp(self._low), tick * step))
            parts.append(
                f'<path d="M{x:.1f} {y:.1f}H{_WIDTH - _RIGHT}" stroke="{_INK}" stroke-opacity="0.3"/>'
                f'<text x="{x - 8:.1f}" y="{y + 4:.1f}" text-anchor="end">{tick * step:g} %</text>'
            )
        for capacity in self._capacity_ticks():
            x, y = self.place((capacity, 0))
            parts.append(
                f'<path d="M{x:.1f} {y:.1f}v5" stroke="{_INK}"/>'
                f'<text x="{x:.1f}" y="{y + 19:.1f}" text-anchor="middle">{_short(capacity)}</text>'
            )
        middle = (_LEFT + _WIDTH - _RIGHT) / 2
        parts.append(f'<text x="{middle}" y="{_HEIGHT - 14}" text-anchor="middle">capacity, blocks</text>')
        return parts

    def _capacity_ticks(self) -> list[float]:
        low, high = math.exp(self._low) * 0.999, math.exp(self._high) * 1.001
        decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        factors = (1, 2, 5) if len(decades) <= 4 else (1,)
        ticks = [factor * 10.0**decade for decade in decades for factor in factors]
        return [tick for tick in ticks if low <= tick <= high] or [math.exp(self._low)]


def _step(top: float) -> float:
    """Return a round distance of about five ticks below ``top``."""
    rough = max(top, 1e-9) / 5
    decade = 10.0 ** math.floor(math.log10(rough))
    return next(factor * decade for factor in (1, 2, 5, 10) if factor * decade >= rough * 0.999)


def _short(capacity: float) -> str:
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if capacity >= limit:
            return f"{capacity / limit:g}{unit}"
    return f"{capacity:g}"
