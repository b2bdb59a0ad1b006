"""What ``kvstore top`` shows, drawn with Rich: for 80 columns and up, with and without colour."""

import sys
import time
from collections.abc import Iterable, Mapping, Sequence

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from kvstore.cli.store_figures import Lookups, Occupancy, Sample
from kvstore.cli.terminal_keys import TerminalKeys
from kvstore.cli.watching import Outage, Watch

_PLAIN_WIDTH = 80
_MAX_ROWS = 8
_LEAST_MISSES_WIDTH = 36
_MAX_STEPS = 3
"""Steps to the right that a branch is told at."""

_KEY_LETTERS = 12
_HEAD_WIDTH = 49
"""What the first line has beside the address."""

_BINARY_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def print_once(watch: Watch, address: str) -> None:
    """Print the state as plain text, 80 columns wide where the output is no terminal."""
    console = Console(
        file=sys.stdout,
        no_color=True,
        highlight=False,
        width=None if sys.stdout.isatty() else _PLAIN_WIDTH,
        force_terminal=False,
    )
    console.print(view(watch, address, width=console.width, marks=Marks.of(sys.stdout.encoding)))


def show_live(watch: Watch, address: str, *, interval_s: float) -> None:
    """Show the state and what becomes of it, until q is pressed.

    Raises:
        KVStoreError: the store does not answer the first time.
    """
    watch.first()
    console = Console(highlight=False)
    marks = Marks.of(console.encoding)

    def drawn() -> RenderableType:
        return view(watch, address, width=console.width, marks=marks, interval_s=interval_s)

    live = Live(drawn(), console=console, screen=True, auto_refresh=False)
    with TerminalKeys() as keys:
        try:
            # An interrupt while it starts would leave the terminal as Live has made it: it ends only itself.
            live.start(refresh=True)
            while not keys.wait(interval_s, "qQ"):
                watch.next()
                live.update(drawn(), refresh=True)
        finally:
            live.stop()


class Marks:
    """The letters that bars and lines are drawn with."""

    def __init__(self, *, levels: str, full: str, empty: str, gap: str) -> None:
        self.levels = levels
        self.full = full
        self.empty = empty
        self.gap = gap

    @classmethod
    def of(cls, encoding: str | None) -> "Marks":
        """Return block elements where the output can hold them, else plain letters."""
        if (encoding or "").lower().replace("-", "") in ("utf8", "utf16", "utf32"):
            return cls(levels="▁▂▃▄▅▆▇█", full="█", empty="░", gap="·")
        return cls(levels="_.-~=+*#", full="#", empty=".", gap=" ")

    def line(self, ratios: Sequence[float | None], width: int) -> str:
        """Return one letter per ratio, the latest ``width``; None: nothing is known."""
        top = len(self.levels) - 1
        shown = ratios[-width:]
        return "".join(self.gap if at is None else self.levels[round(at * top)] for at in shown)

    def bar(self, ratio: float | None, width: int) -> str:
        """Return a bar of which ``ratio`` is full; anything above 0 shows."""
        if ratio is None:
            return ""
        part = min(1.0, max(0.0, ratio))
        num_full = max(1 if part else 0, round(part * width))
        return self.full * num_full + self.empty * (width - num_full)


def view(
    watch: Watch, address: str, *, width: int, marks: Marks, interval_s: float | None = None
) -> RenderableType:
    """Return what is shown: most important first, since a low terminal cuts off the end."""
    taken = watch.last_sample()
    parts: list[RenderableType] = [_head(watch, _shortened(address, width - _HEAD_WIDTH), interval_s)]
    if taken is None:
        return Group(*parts)
    parts += [
        _faults(taken),
        Text(),
        _hit_rates(watch, taken, width, marks),
        Text(),
        _occupancy(taken, width, marks),
        Text(),
        _two_columns(_transfers(taken), _misses(taken, marks, width), width),
        Text(),
        _activity(taken),
        *([Text(), _branches(watch, taken, width)] if taken.branches else []),
    ]
    return Group(*parts)


def _head(watch: Watch, address: str, interval_s: float | None) -> Text:
    latest = watch.history[-1]
    text = Text(overflow="fold")
    text.append("kvstore top", style="bold")
    text.append(f"  {address}  ")
    if isinstance(latest, Outage):
        since = time.strftime("%H:%M:%S", time.localtime(latest.since_s))
        text.append(f"AWAY since {since}", style="bold red")
        text.append(f"\n{latest.problem}\n", style="red")
        text.append("It is asked again; the figures are from before.")
        return text
    text.append("up", style="bold green")
    text.append(time.strftime("  %H:%M:%S", time.localtime(latest.time_s)))
    if interval_s is not None:
        text.append(f"  every {interval_s:g} s, q ends")
    back_s = watch.back_since_s()
    if back_s is not None:
        text.append(time.strftime("\nback since %H:%M:%S", time.localtime(back_s)), style="yellow")
    return text


def _shortened(address: str, width: int) -> str:
    return address if len(address) <= width else f"...{address[3 - width :]}"


def _faults(taken: Sample) -> RenderableType:
    if not taken.down and not taken.faults:
        return Text("Faults  none", style="green")
    table = _table(("Faults", "left"), ("", "left"))
    for name, why in list(taken.down.items())[:_MAX_ROWS]:
        table.add_row(Text(f"{name} down", style="bold red"), Text(why, style="red"))
    worst = sorted(taken.faults.items(), key=lambda item: (-taken.new_faults.get(item[0], 0), -item[1]))
    for name, count in worst[:_MAX_ROWS]:
        new = taken.new_faults.get(name, 0)
        table.add_row(
            Text(whole(count), style="yellow"),
            Text(name + (f"  +{whole(new)} in this sample" if new else "")),
        )
    if len(worst) > _MAX_ROWS:
        table.add_row("", f"and {len(worst) - _MAX_ROWS} more: kvstore stats")
    return table


def _hit_rates(watch: Watch, taken: Sample, width: int, marks: Marks) -> RenderableType:
    table = _table(
        (f"Hit rate ({watch.of})", "left"), ("now", "right"), ("total", "right"), ("blocks", "right")
    )
    room = max(10, width - 51)
    table.add_column("over time, to now", justify="left", width=room, no_wrap=True, overflow="crop")
    names = list(dict.fromkeys([*(tier.name for tier in taken.tiers), *taken.total.hits]))
    for name in (None, *names):
        hits = sum(taken.total.hits.values()) if name is None else taken.total.hits.get(name, 0)
        table.add_row(
            Text("all tiers" if name is None else name, style="bold" if name is None else ""),
            percent(None if taken.now is None else taken.now.ratio(name)),
            percent(taken.total.ratio(name)),
            whole(hits),
            Text(marks.line(_ratios(watch, name), room), style="cyan"),
        )
    return table


def _ratios(watch: Watch, name: str | None) -> list[float | None]:
    return [
        None if isinstance(taken, Outage) or taken.now is None else taken.now.ratio(name)
        for taken in watch.history
    ]


def _occupancy(taken: Sample, width: int, marks: Marks) -> RenderableType:
    table = _table(("Occupancy", "left"))
    room = max(8, width - 62)
    table.add_column("", width=room, no_wrap=True, overflow="crop")
    for heading in ("", "used", "of", "blocks", "queued"):
        table.add_column(heading, justify="right", no_wrap=True, overflow="crop")
    for tier in taken.tiers:
        table.add_row(
            tier.name,
            Text(marks.bar(tier.ratio, room), style=_fullness(tier)),
            percent(tier.ratio),
            size(tier.used_bytes),
            size(tier.capacity_bytes) if tier.capacity_bytes else "no limit",
            "" if tier.blocks is None else whole(tier.blocks),
            whole(tier.queued_blocks),
        )
    return table


def _fullness(tier: Occupancy) -> str:
    return "red" if tier.problem else "blue"


def _transfers(taken: Sample) -> Table:
    table = _table(("Transfers", "left"), ("now", "right"), ("total", "right"))
    sizes = {name: moved.bytes for name, moved in taken.transfers.items()}
    for name in _largest(sizes):
        rate = taken.rates.get(name)
        table.add_row(name, "-" if rate is None else f"{size(rate)}/s", size(sizes[name]))
    if not taken.transfers:
        table.add_row("none yet", "", "")
    return table


def _misses(taken: Sample, marks: Marks, width: int) -> Table:
    table = _table(("Misses", "left"), ("now", "right"), ("total", "right"))
    all_misses = sum(taken.total.misses.values())
    room = min(20, width // 2 - _LEAST_MISSES_WIDTH)
    if room > 0:
        table.add_column("", width=room, no_wrap=True, overflow="crop")
    for name in _largest(taken.total.misses):
        count = taken.total.misses[name]
        row: list[RenderableType] = [name, _per_second(taken.now, taken.interval_s, name), whole(count)]
        if room > 0:
            row.append(Text(marks.bar(count / all_misses, room), style="magenta"))
        table.add_row(*row)
    if not taken.total.misses:
        table.add_row("none", "", "")
    return table


def _per_second(now: Lookups | None, interval_s: float | None, reason: str) -> str:
    if now is None or interval_s is None:
        return "-"
    return f"{short(now.misses.get(reason, 0) / interval_s)}/s"


def _largest(sizes: Mapping[str, int]) -> list[str]:
    return sorted(sizes, key=lambda name: -sizes[name])[:_MAX_ROWS]


def _activity(taken: Sample) -> Text:
    evicted: dict[str, int] = {}
    for name, count in taken.evictions.items():
        tier = name.partition("/")[0]
        evicted[tier] = evicted.get(tier, 0) + count
    text = Text(overflow="fold")
    text.append("Leases ", style="bold").append(whole(taken.live_leases))
    text.append("   Clients ", style="bold").append(whole(taken.clients))
    text.append("   Loads ", style="bold").append(whole(taken.loads))
    asked = taken.total.requests
    text.append(f"   Lookups of {whole(asked)} {'request' if asked == 1 else 'requests'}", style="bold")
    text.append("\nPuts ", style="bold").append(_listed(taken.puts.items()))
    text.append("   Evicted ", style="bold").append(_listed(evicted.items()))
    return text


def _branches(watch: Watch, taken: Sample, width: int) -> RenderableType:
    """Return the hottest prefixes: digests, never what they say."""
    headings = (("Hot branches", "left"), (f"{watch.of}es", "right"), ("whole", "right"), ("tokens", "right"))
    table = _table(*headings)
    table.add_column("where, blocks", width=max(14, width - 60), no_wrap=True, overflow="crop")
    table.add_column("used", justify="right", no_wrap=True)
    for branch in taken.branches:
        table.add_row(
            f"{'  ' * min(branch.depth, _MAX_STEPS)}{branch.key[:_KEY_LETTERS]}",
            whole(branch.lookups),
            percent(branch.hit_ratio),
            whole(branch.tokens),
            ", ".join(f"{tier} {whole(blocks)}" for tier, blocks in branch.tiers.items()) or "nowhere",
            _ago(branch.last_use_s),
        )
    return table


def _ago(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def _listed(counts: Iterable[tuple[str, int]]) -> str:
    return ", ".join(f"{whole(count)} {name}" for name, count in counts if count) or "none"


def _two_columns(left: Table, right: Table, width: int) -> RenderableType:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(width=width // 2 - 3)
    table.add_column()
    table.add_row(left, right)
    return table


def _table(*columns: tuple[str, str]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    for heading, side in columns:
        table.add_column(
            heading, justify="right" if side == "right" else "left", no_wrap=True, overflow="crop"
        )
    return table


def percent(ratio: float | None) -> str:
    """Return a ratio as a percentage; a dash if there is none."""
    return "-" if ratio is None else f"{ratio * 100:.1f} %"


def whole(count: int) -> str:
    """Return a count with its digits in groups."""
    return f"{count:,}".replace(",", " ")


def short(number: float) -> str:
    """Return a rate in few letters."""
    return f"{number:.1f}" if number < 100 else whole(round(number))


def size(number_bytes: float) -> str:
    """Return a number of bytes in the unit in which it has up to four digits."""
    at = float(number_bytes)
    for unit in _BINARY_UNITS:
        if at < 1024 or unit == _BINARY_UNITS[-1]:
            return f"{at:.0f} {unit}" if unit == "B" else f"{at:.1f} {unit}"
        at /= 1024
    raise AssertionError("the last unit takes all")
