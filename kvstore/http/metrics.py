"""Prometheus text of a store's stats, and the page that describes it: both made of the table of metrics."""

from collections.abc import Iterable, Iterator, Mapping

from kvstore.http.metric_table import BOUND, METRICS, Kind, Metric

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def metrics_text(stats: Mapping[str, object]) -> str:
    """Return the metrics of one snapshot of stats."""
    lines: list[str] = []
    for metric in METRICS:
        found = [
            f"{name}{_labels(labels)} {value}"
            for name, labels, value in _series(metric, metric.samples(stats))
        ]
        if found:
            about = [f"# HELP {metric.name} {metric.text}", f"# TYPE {metric.name} {metric.kind.value}"]
            lines += [*about, *found]
    return "\n".join(lines) + "\n"


def metrics_reference() -> str:
    """Return ``docs/metrics.md``'s table: every metric, its labels and what it tells."""
    rows = [
        f"| `{metric.name}` | {metric.kind.value} | {_label_names(metric)} | {metric.text} |"
        for metric in METRICS
    ]
    sets = {label.name + str(label.values) + label.text: label for at in METRICS for label in at.labels}
    closed = [
        f"| `{label.name}` | {', '.join(f'`{value}`' for value in label.values) or label.text} |"
        for label in sets.values()
    ]
    return "\n".join(
        [
            "| metric | kind | labels | meaning |",
            "|---|---|---|---|",
            *rows,
            "",
            "## Values of labels",
            "",
            "A word that is not among them is told as `other`. Those in words are closed too.",
            "",
            "| label | values |",
            "|---|---|",
            *closed,
            "",
        ]
    )


def _label_names(metric: Metric) -> str:
    return ", ".join(f"`{label.name}`" for label in metric.labels) or "none"


def _series(
    metric: Metric, samples: Mapping[tuple[str, ...], float]
) -> Iterator[tuple[str, dict[str, str], float]]:
    """Yield each line's name, labels and number."""
    names = [label.name for label in metric.labels]
    for values, value in samples.items():
        labels = dict(zip(names, values, strict=True))
        if metric.kind is not Kind.HISTOGRAM:
            yield metric.name, labels, value
            continue
        bound = labels.pop(BOUND.name)
        if bound == "sum":
            yield f"{metric.name}_sum", labels, value
            continue
        yield f"{metric.name}_bucket", {**labels, BOUND.name: bound}, value
        if bound == "+Inf":
            yield f"{metric.name}_count", labels, value


def _labels(labels: Mapping[str, str]) -> str:
    if not labels:
        return ""
    return "{" + _joined(f'{name}="{_escaped(value)}"' for name, value in labels.items()) + "}"


def _joined(parts: Iterable[str]) -> str:
    return ",".join(parts)


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
