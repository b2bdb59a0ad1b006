"""The drill's result as a table for people."""

from kvstore.drill.drill import DrillReport

_HEAD = ("fault", "tries", "calls", "served", "wrong bytes", "lost", "over deadline", "violations", "seconds")


def report_table(report: DrillReport) -> str:
    """Return one row per kind of fault, and a last line with the sums."""
    rows: list[tuple[str, ...]] = [_HEAD]
    for name, kind in report.faults.items():
        if kind.skipped:
            rows.append((name, "-", "-", "-", "-", "-", "-", "-", "skipped"))
            continue
        counts = (kind.tries, kind.calls, kind.blocks_served, kind.wrong_bytes, kind.lost)
        rows.append(
            (name, *map(str, counts), str(kind.over_deadline), str(kind.violations), f"{kind.seconds:.1f}")
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEAD))]
    lines = ["  ".join(_cells(row, widths)).rstrip() for row in rows]
    lines.insert(1, "  ".join("-" * width for width in widths))
    lines += [f"skipped {name}: {kind.skipped}" for name, kind in report.faults.items() if kind.skipped]
    sums = report.as_dict()
    lines.append(
        f"seed {report.seed}: {_verdict(report)}: {sums['tries']} tries, {sums['wrong_bytes']} wrong bytes,"
        f" {sums['lost_durable']} lost, {sums['over_deadline']} over deadline, {report.seconds:.0f} s"
    )
    return "\n".join(lines)


def _verdict(report: DrillReport) -> str:
    """Say what was kept, and of how many kinds of fault that is known."""
    tried, skipped = report.kinds_tried, report.kinds_skipped
    if not report.is_ok:
        return f"A PROMISE WAS BROKEN ({tried} kinds of fault tried, {skipped} skipped)"
    if not tried:
        return f"nothing was tried, {skipped} kinds of fault skipped"
    if skipped:
        return f"every promise was kept in the {tried} kinds of fault tried, {skipped} skipped"
    return f"every promise was kept in all {tried} kinds of fault"


def _cells(row: tuple[str, ...], widths: list[int]) -> list[str]:
    first = row[0].ljust(widths[0])
    return [first, *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
