"""Prometheus text from a store's stats. Labels come from closed sets: tiers, reasons, operations, codes."""

from collections.abc import Iterator, Mapping

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def metrics_text(stats: Mapping[str, object]) -> str:
    """Return the metrics of one snapshot of stats."""
    lines: list[str] = []
    for name, kind, text, samples in _families(stats):
        found = [f"{name}{_labels(labels)} {value}" for labels, value in samples]
        if found:
            lines += [f"# HELP {name} {text}", f"# TYPE {name} {kind}", *found]
    return "\n".join(lines) + "\n"


Samples = list[tuple[dict[str, str], float]]


def _families(stats: Mapping[str, object]) -> Iterator[tuple[str, str, str, Samples]]:
    tiers = _nested(stats, "tiers")
    for member, name, text in (
        ("capacity_bytes", "kvstore_tier_capacity_bytes", "Bytes that the tier may hold."),
        ("used_bytes", "kvstore_tier_used_bytes", "Bytes in use, padding included."),
        ("blocks", "kvstore_tier_blocks", "Blocks in the tier."),
        ("is_up", "kvstore_tier_up_ratio", "1 if the tier is worth asking."),
        ("queued_blocks", "kvstore_tier_queued_blocks", "Blocks waiting to be written to the tier."),
    ):
        yield name, "gauge", text, _member_of_each(tiers, member)
    for member, text in (
        ("live_leases", "Leases not ended."),
        ("owners", "Owners of leases: connections and requests."),
        ("loads", "Reads from slower tiers under way."),
    ):
        yield f"kvstore_{member}", "gauge", text, _single(stats, member)
    yield from _lookups(stats)
    yield from _events(stats)
    yield from _transfers(stats)
    yield from _records(_nested(stats, "records"))
    yield from _http(_nested(stats, "http"))


def _lookups(stats: Mapping[str, object]) -> Iterator[tuple[str, str, str, Samples]]:
    by_kind = {kind: _nested(stats, kind) for kind in ("match", "fetch")}
    yield (
        "kvstore_lookups_blocks_total",
        "counter",
        "Blocks asked for.",
        [({"operation": kind}, _number(told.get("lookups_blocks"))) for kind, told in by_kind.items()],
    )
    for member, label, text in (
        ("hits", "tier", "Blocks found."),
        ("misses", "reason", "Blocks not served."),
    ):
        samples = [
            ({"operation": kind, label: word}, _number(count))
            for kind, told in by_kind.items()
            for word, count in _nested(told, f"{member}_blocks").items()
        ]
        yield f"kvstore_{member}_blocks_total", "counter", text, samples


def _events(stats: Mapping[str, object]) -> Iterator[tuple[str, str, str, Samples]]:
    for member, name, label, text in (
        ("puts_blocks", "kvstore_puts_blocks_total", "result", "Blocks of puts, by how they ended."),
        ("corrupt_blocks", "kvstore_corrupt_blocks_total", "tier", "Damaged copies found."),
        ("lease_events", "kvstore_lease_events_total", "event", "Leases that expired or ended late."),
    ):
        yield name, "counter", text, _by(label, _nested(stats, member))
    for member, name, text in (
        ("evictions_blocks", "kvstore_evictions_blocks_total", "Blocks that left a tier."),
        ("write_drops_blocks", "kvstore_write_drops_blocks_total", "Blocks not written to a tier."),
    ):
        samples: Samples = []
        for about, count in _nested(stats, member).items():
            tier, _, cause = about.partition("/")
            samples.append(({"tier": tier, "cause": cause}, _number(count)))
        yield name, "counter", text, samples


def _transfers(stats: Mapping[str, object]) -> Iterator[tuple[str, str, str, Samples]]:
    transfers = _nested(stats, "transfers")
    for member in ("blocks", "bytes", "seconds"):
        samples: Samples = []
        for about in transfers:
            origin, _, target = about.partition("->")
            labels = {"origin": origin, "target": target}
            samples.append((labels, _number(_nested(transfers, about).get(member))))
        yield f"kvstore_transfers_{member}_total", "counter", f"Moves between tiers, in {member}.", samples


def _records(records: Mapping[str, object]) -> Iterator[tuple[str, str, str, Samples]]:
    copies = _nested(records, "copies")
    for member, text in (
        ("records", "Records kept on this node, copies of shared ones included."),
        ("used_bytes", "What they count for."),
        ("capacity_bytes", "What they may count for."),
    ):
        name = "kvstore_records" if member == "records" else f"kvstore_records_{member}"
        yield name, "gauge", text, _single(copies or records, member)
    yield "kvstore_records_up_ratio", "gauge", "1 if records are served.", _single(records, "is_up")
    for member, label, text in (
        ("puts", "outcome", "Puts of records, by how they ended."),
        ("gets", "place", "Reads of records, by where they were read, or how they ended."),
        ("absent", "reason", "Records that were asked for and are not there."),
        ("events", "event", "What happened to records beside that: docs/stats.md."),
    ):
        yield f"kvstore_records_{member}_total", "counter", text, _by(label, _nested(records, member))


def _http(http: Mapping[str, object]) -> Iterator[tuple[str, str, str, Samples]]:
    yield "kvstore_http_open_connections", "gauge", "HTTP connections now.", _single(http, "open_connections")
    for member, text in (
        ("connections", "HTTP connections taken."),
        ("refused_connections", "HTTP connections refused: too many."),
        ("ended_newcomers", "Connections that had shown nothing yet and made way for new ones."),
        ("failed_handshakes", "Connections that ended in their TLS handshake."),
        ("slow_clients", "HTTP clients dropped for being slow."),
        ("malformed_requests", "Requests that were not HTTP."),
        ("damaged_blocks", "Blocks found damaged before or while they were sent."),
        ("refused_leases", "Leases not granted: the caller had as many as it may."),
        ("unread_leases", "Leases ended since the client went away before it read of them."),
        ("refused_bodies", "Bodies refused: those of other requests took all the memory for them."),
        ("received_bytes", "Bytes of bodies taken in."),
        ("sent_bytes", "Payload bytes sent."),
    ):
        yield f"kvstore_http_{member}_total", "counter", text, _single(http, member)
    for member, label, text in (
        ("requests", "operation", "Requests."),
        ("errors", "code", "Requests answered with an error."),
        ("gate", "result", "Requests let in and turned away."),
    ):
        yield f"kvstore_http_{member}_total", "counter", text, _by(label, _nested(http, member))


def _nested(stats: Mapping[str, object], name: str) -> dict[str, object]:
    found = stats.get(name)
    return {str(key): value for key, value in found.items()} if isinstance(found, dict) else {}


def _member_of_each(tables: Mapping[str, object], member: str) -> Samples:
    values = {name: table.get(member) for name, table in tables.items() if isinstance(table, dict)}
    return [({"tier": name}, _number(value)) for name, value in values.items() if value is not None]


def _single(stats: Mapping[str, object], name: str) -> Samples:
    return [({}, _number(stats[name]))] if name in stats else []


def _by(label: str, counts: Mapping[str, object]) -> Samples:
    return [({label: word}, _number(count)) for word, count in counts.items()]


def _number(value: object) -> float:
    if isinstance(value, bool):
        return int(value)
    return value if isinstance(value, int | float) else 0


def _labels(labels: Mapping[str, str]) -> str:
    if not labels:
        return ""
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items()) + "}"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
