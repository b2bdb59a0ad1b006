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
    verdict = "every promise was kept" if report.is_ok else "A PROMISE WAS BROKEN"
    lines.append(
        f"seed {report.seed}: {verdict}: {sums['tries']} tries, {sums['wrong_bytes']} wrong bytes,"
        f" {sums['lost_durable']} lost, {sums['over_deadline']} over deadline, {report.seconds:.0f} s"
    )
    return "\n".join(lines)


def _cells(row: tuple[str, ...], widths: list[int]) -> list[str]:
    first = row[0].ljust(widths[0])
    return [first, *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
