"""The demo's result as a table for people."""

from kvstore_engine_adapter.demo.expectations import Trial
from kvstore_engine_adapter.demo.scenario import DemoReport

_HEAD = (
    "hit in",
    "replica",
    "tokens reused",
    "first token",
    "without a store",
    "sooner",
    "same answer",
    "logits",
)


def report_table(report: DemoReport) -> str:
    """Return the table, what did not hold, and the verdict."""
    rows = [_HEAD, *(_row(tier, trial) for tier, trial in report.trials.items())]
    if report.redis_stopped is not None:
        rows.append(_row("(redis stopped)", report.redis_stopped))
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEAD))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    lines.insert(1, "  ".join("-" * width for width in widths))
    lines += [f"not as expected: {line}" for line in report.broken]
    verdict = "every expectation held" if report.is_ok else "the demo found a problem"
    lines.append(
        f"{report.model}, document of {report.document_tokens} tokens: {verdict}, {report.seconds:.0f} s"
    )
    return "\n".join(line.rstrip() for line in lines)


def _row(tier: str, trial: Trial) -> tuple[str, ...]:
    return (
        tier,
        trial.replica,
        f"{trial.answer.matched_tokens} of {trial.shared_tokens}",
        f"{trial.answer.ttft_s:.3f} s",
        f"{trial.cold.ttft_s:.3f} s",
        f"{trial.speedup:.1f} x",
        "yes" if trial.outputs_equal else "no",
        f"{trial.max_logit_diff:.1e}",
    )
