"""The one table of metrics: their names, kinds and labels, and where in a store's stats each is read.

Nothing is counted here, and nothing on the way of a block knows of it: the store keeps plain integers, and
a scrape reads them. Labels come from closed sets; a word that its set does not have is told as ``other``, so
that no key, tenant or path can become a label.
"""

import enum
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import product

from kvstore.http.refusal import ErrorCode
from kvstore.miss import MissReason
from kvstore.sizing import MULTIPLES
from kvstore.tier import Medium, ReadStatus, WriteStatus

Stats = Mapping[str, object]
Values = Iterable[tuple[tuple[str, ...], float]]
"""Samples of one metric: the values of its labels, in their order, and the number."""

OTHER = "other"


class Kind(enum.Enum):
    """What Prometheus calls the type of a metric."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class LabelSet:
    """A label and the values it may have. Without ``values`` they are those that ``text`` names."""

    name: str
    values: tuple[str, ...]
    text: str = ""

    def known(self, value: str) -> str:
        """Return the value if the set has it."""
        return value if value in self.values or not self.values else OTHER


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric. ``read`` finds its samples in the stats; of a histogram, the classes and sums.

    ``zeros`` returns the label values that are told even while nothing was counted: what appears with its
    first event is missed by ``increase``.
    """

    name: str
    kind: Kind
    text: str
    labels: tuple[LabelSet, ...]
    read: Callable[[Stats], Values]
    zeros: Callable[[Stats], Iterable[tuple[str, ...]]] = lambda _: ()

    def samples(self, stats: Stats) -> dict[tuple[str, ...], float]:
        """Return the numbers by the values of the labels."""
        found: dict[tuple[str, ...], float] = dict.fromkeys(self.zeros(stats), 0)
        for words, number in self.read(stats):
            values = tuple(label.known(word) for label, word in zip(self.labels, words, strict=True))
            found[values] = found.get(values, 0) + number
        return found


BOUND = LabelSet("le", (), "upper bounds in seconds")
_TIER = LabelSet("tier", tuple(medium.value for medium in Medium))
_ORIGIN = LabelSet("origin", _TIER.values)
_TARGET = LabelSet("target", _TIER.values)
_LOOKUP = LabelSet("operation", ("match", "fetch"))
_REASON = LabelSet("reason", tuple(reason.value for reason in MissReason))
_PUT_RESULT = LabelSet("result", ("stored", "present", "duplicate", "dropped", "over_quota"))
_EVICTION = LabelSet("cause", ("space", "demoted", "epoch", "lost", "format"))
_DROP = LabelSet(
    "cause",
    ("queue_full", "left_top", "stopped", *(at.value for at in WriteStatus if at is not WriteStatus.OK)),
)
_FAILURE = LabelSet("status", tuple(dict.fromkeys(at.value for at in (*ReadStatus, *WriteStatus))))
_LEASE_EVENT = LabelSet(
    "event", ("granted", "renewed", "expired", "stale_releases", "stale_renewals", "stale_returns")
)
_CODE = LabelSet("code", tuple(code.value for code in ErrorCode))
_SIZE_OF = LabelSet("of", ("dram", "all"))
_SIZE = LabelSet("size", tuple(MULTIPLES))
_OUTCOME = LabelSet("outcome", (), "the outcomes of record writes")
_PLACE = LabelSet("place", (), "where records are read, and how that ends")
_ABSENT = LabelSet("reason", (), "why records are absent")
_RECORD_EVENT = LabelSet("event", (), "the events of records in stats.md")
_ROUTE = LabelSet("operation", (), "the operations of openapi.json")
_SPAN_RESULT = LabelSet("result", ("exported", "failed", "dropped"))
_GATE = LabelSet("result", (), "how the gate decides")
_MESSAGE = LabelSet("kind", (), "the messages of wire.md")


def metrics() -> tuple[Metric, ...]:
    """Return the table."""
    return (
        *_lookup_metrics(),
        *_block_metrics(),
        *_transfer_metrics(),
        *_tier_metrics(),
        *_size_metrics(),
        *_record_metrics(),
        *_http_metrics(),
        *_server_metrics(),
    )


def _lookup_metrics() -> Iterable[Metric]:
    for unit in ("requests", "blocks", "tokens"):
        member = "requests" if unit == "requests" else f"lookups_{unit}"
        yield Metric(
            f"kvstore_lookups_{unit}_total",
            Kind.COUNTER,
            {"requests": "Lookups", "blocks": "Blocks looked up", "tokens": "Tokens of the blocks looked up"}[
                unit
            ]
            + ". match asks what is stored, fetch takes it.",
            (_LOOKUP,),
            _of_operations(member),
        )
    for unit in ("blocks", "tokens"):
        for ending, label, text in (
            ("hits", _TIER, f"{unit.capitalize()} found, by the tier they were found in."),
            (
                "misses",
                _REASON,
                f"{unit.capitalize()} not found: docs/misses.md. Hits and misses are lookups.",
            ),
        ):
            yield Metric(
                f"kvstore_{ending}_{unit}_total",
                Kind.COUNTER,
                text,
                (_LOOKUP, label),
                _of_lookups(f"{ending}_{unit}"),
                _lookup_zeros(label),
            )
    for member, text in (
        ("blocks", "Blocks asked for by exists."),
        ("present", "Blocks among them that are."),
    ):
        name = "kvstore_exists_blocks_total" if member == "blocks" else "kvstore_exists_present_blocks_total"
        yield Metric(name, Kind.COUNTER, text, (), _single(member, "exists"), lambda _: [()])
    yield Metric(
        "kvstore_prefill_saved_seconds_total",
        Kind.COUNTER,
        "Estimate of the prefill time that fetched blocks saved, before the time of loading them:"
        " their tokens by the speed given as --prefill-tokens-per-s, without which this is not told.",
        (_TIER,),
        _saved_seconds,
    )


def _block_metrics() -> Iterable[Metric]:
    yield Metric(
        "kvstore_puts_blocks_total",
        Kind.COUNTER,
        "Blocks of puts, by how they ended; over_quota are among the dropped.",
        (_PUT_RESULT,),
        _by("puts_blocks"),
        lambda _: product(_PUT_RESULT.values),
    )
    yield Metric(
        "kvstore_evictions_blocks_total",
        Kind.COUNTER,
        "Blocks that left a tier though nobody dropped them.",
        (_TIER, _EVICTION),
        _by_pair("evictions_blocks"),
        lambda stats: product(nested(stats, "tiers"), _EVICTION.values),
    )
    yield Metric(
        "kvstore_write_drops_blocks_total",
        Kind.COUNTER,
        "Blocks not written to a tier.",
        (_TIER, _DROP),
        _by_pair("write_drops_blocks"),
        lambda stats: product(_lower(stats), _DROP.values),
    )
    yield Metric(
        "kvstore_corrupt_blocks_total",
        Kind.COUNTER,
        "Damaged copies found, and never served.",
        (_TIER,),
        _by("corrupt_blocks"),
        lambda stats: product(nested(stats, "tiers")),
    )
    yield Metric(
        "kvstore_lease_events_total",
        Kind.COUNTER,
        "What happened to leases; expired and stale ones point to clients that are too slow.",
        (_LEASE_EVENT,),
        _by("lease_events"),
        lambda _: product(_LEASE_EVENT.values),
    )
    for member, text in (
        ("live_leases", "Leases not ended."),
        ("overdue_slots", "Slots lent to writers for longer than a lease lasts."),
        (
            "lent_ahead_bytes",
            "Slots lent to clients, or at hand for them, for puts to come, padding included.",
        ),
        ("owners", "Owners of leases: connections and requests."),
        ("loads", "Reads from slower tiers under way."),
    ):
        yield Metric(f"kvstore_{member}", Kind.GAUGE, text, (), _single(member))
    yield Metric(
        "kvstore_direct_blocks_total",
        Kind.COUNTER,
        "Blocks found that clients read in shared memory without asking, and told of.",
        (),
        _single("direct_blocks"),
    )


def _transfer_metrics() -> Iterable[Metric]:
    for member in ("blocks", "bytes", "seconds"):
        text = "Moves between tiers, in seconds of waiting, several of which may overlap."
        yield Metric(
            f"kvstore_transfers_{member}_total",
            Kind.COUNTER,
            text if member == "seconds" else f"Moves between tiers, in {member}.",
            (_ORIGIN, _TARGET),
            _of_transfers(member),
            _crossings,
        )
    yield Metric(
        "kvstore_transfers_failures_total",
        Kind.COUNTER,
        "Blocks whose move between tiers failed.",
        (_ORIGIN, _TARGET, _FAILURE),
        lambda stats: [
            ((*about, status), number(count))
            for about, told in _transfers(stats)
            for status, count in nested(told, "failures").items()
        ],
    )
    yield Metric(
        "kvstore_transfer_batch_seconds",
        Kind.HISTOGRAM,
        "How long the moves of batches of blocks took.",
        (_ORIGIN, _TARGET, BOUND),
        lambda stats: [
            sample
            for about, told in _transfers(stats)
            for sample in _classes(about, nested(told, "batches"), number(told.get("seconds")))
        ],
    )


def _tier_metrics() -> Iterable[Metric]:
    for member, name, text in (
        ("capacity_bytes", "capacity_bytes", "Bytes that the tier may hold; 0: unknown here."),
        ("used_bytes", "used_bytes", "Bytes in use, padding included."),
        ("blocks", "blocks", "Blocks in the tier."),
        (
            "is_up",
            "up_ratio",
            "1 if the tier is worth asking; 0 while its breaker is open, or it is not there.",
        ),
        ("queued_blocks", "queued_blocks", "Blocks waiting to be written to the tier."),
    ):
        yield Metric(f"kvstore_tier_{name}", Kind.GAUGE, text, (_TIER,), _of_tiers(member))
    for members, name, text in (
        (("faults", "io_faults"), "kvstore_tier_faults_total", "Calls to the tier's medium that failed."),
        (("breaker_opened",), "kvstore_tier_breaker_opened_total", "How often a breaker opened."),
        (
            ("written_bytes",),
            "kvstore_disk_written_bytes_total",
            "Bytes written to disks, slot padding included.",
        ),
    ):
        yield Metric(
            name,
            Kind.COUNTER,
            text,
            (_TIER,),
            _of_tier_events(members),
            _lower_zeros(only=Medium.SSD.value if name.startswith("kvstore_disk") else None),
        )
    yield Metric(
        "kvstore_encryption_up_ratio",
        Kind.GAUGE,
        "1 if the keys that blocks are encrypted with can be had; not told without encryption.",
        (),
        _single("is_up", "encryption"),
    )


def _size_metrics() -> Iterable[Metric]:
    yield Metric(
        "kvstore_size_curve_hit_ratio",
        Kind.GAUGE,
        "Estimate of the share of lookups that would hit if the tier, or all of this node's together, had"
        " this multiple of its size: docs/sizing.md. Not told while it would rest on too few samples.",
        (_SIZE_OF, _SIZE),
        lambda stats: [
            ((of, size), number(ratio))
            for of in _SIZE_OF.values
            for size, ratio in nested(stats, "size_curve", "hit_ratio", of).items()
            if ratio is not None
        ],
    )
    for member, text in (
        (
            "samples",
            "Sampled lookups that the estimates rest on; older than an hour they count half, and so on.",
        ),
        ("sampled_blocks", "Blocks that are sampled now."),
    ):
        name = f"kvstore_size_curve_{member}"
        yield Metric(name, Kind.GAUGE, text, (), _single(member, "size_curve"))
    yield Metric(
        "kvstore_size_curve_lost_blocks_total",
        Kind.COUNTER,
        "Blocks of lookups and puts that the estimates leave out: too many came at once.",
        (),
        _single("lost_blocks", "size_curve"),
    )


def _record_metrics() -> Iterable[Metric]:
    for member, name, text in (
        ("records", "kvstore_records", "Records kept on this node, copies of shared ones included."),
        ("used_bytes", "kvstore_records_used_bytes", "What they count for."),
        ("capacity_bytes", "kvstore_records_capacity_bytes", "What they may count for."),
    ):
        yield Metric(name, Kind.GAUGE, text, (), _of_record_space(member))
    yield Metric(
        "kvstore_records_up_ratio", Kind.GAUGE, "1 if records are served.", (), _single("is_up", "records")
    )
    for member, label, text in (
        ("puts", _OUTCOME, "Puts of records, by how they ended."),
        ("gets", _PLACE, "Reads of records, by where they were read, or how they ended."),
        ("absent", _ABSENT, "Records that were asked for and are not there."),
        ("events", _RECORD_EVENT, "What happened to records beside that: docs/stats.md."),
    ):
        yield Metric(f"kvstore_records_{member}_total", Kind.COUNTER, text, (label,), _by(member, "records"))


def _http_metrics() -> Iterable[Metric]:
    yield Metric(
        "kvstore_http_open_connections",
        Kind.GAUGE,
        "HTTP connections now.",
        (),
        _single("open_connections", "http"),
    )
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
        yield Metric(f"kvstore_http_{member}_total", Kind.COUNTER, text, (), _single(member, "http"))
    for member, label, text in (
        ("requests", _ROUTE, "Requests."),
        ("errors", _CODE, "Requests answered with an error."),
        ("gate", _GATE, "Requests let in and turned away."),
    ):
        zeros = product(label.values) if label.values else ()
        yield Metric(
            f"kvstore_http_{member}_total", Kind.COUNTER, text, (label,), _by(member, "http"), _always(zeros)
        )


def _server_metrics() -> Iterable[Metric]:
    yield Metric(
        "kvstore_clients",
        Kind.GAUGE,
        "Clients connected to the Unix socket now.",
        (),
        _single("open_connections", "server"),
    )
    for member, text in (
        ("connections", "Clients that connected to the socket."),
        ("refused_connections", "Connections to the socket that were refused."),
        ("protocol_errors", "Connections ended for what they sent."),
        ("silent_greetings", "Connections that said nothing and made way for others."),
        ("idle_ended", "Idle connections that made way for others."),
        ("slow_readers", "Clients dropped for not reading their answers."),
        ("lingering", "Clients that were disconnected while they held something."),
        ("failed_requests", "Requests that the store could not answer, by its own fault."),
        ("corrupt_reports", "Reports of clients that a block's bytes were wrong."),
    ):
        yield Metric(f"kvstore_server_{member}_total", Kind.COUNTER, text, (), _single(member, "server"))
    yield Metric(
        "kvstore_server_requests_total",
        Kind.COUNTER,
        "Requests on the socket.",
        (_MESSAGE,),
        _by("requests", "server"),
    )
    yield Metric(
        "kvstore_events_listeners",
        Kind.GAUGE,
        "Publishers and HTTP streams that are told of changed blocks.",
        (),
        _single("listeners", "server", "events"),
    )
    for member, text in (
        ("batches", "Batches of events told."),
        ("blocks", "Changes of blocks told."),
        ("lost_blocks", "Changes of blocks that found no room and were not told."),
        ("replays", "Replays of events answered."),
    ):
        name = f"kvstore_events_{member}_total"
        yield Metric(name, Kind.COUNTER, text, (), _single(member, "server", "events"))
    yield Metric(
        "kvstore_trace_spans_total",
        Kind.COUNTER,
        "Spans of traces that the collector took, did not take, or that found no room to wait.",
        (_SPAN_RESULT,),
        lambda stats: [
            ((result,), number(nested(stats, "server", "traces").get(result)))
            for result in (_SPAN_RESULT.values if nested(stats, "server", "traces") else ())
        ],
    )
    yield Metric(
        "kvstore_process_resident_bytes",
        Kind.GAUGE,
        "Memory of the process that is resident, the arena included.",
        (),
        _single("resident_bytes", "server"),
    )
    yield Metric(
        "kvstore_event_loop_delay_seconds",
        Kind.HISTOGRAM,
        "How late the event loop was when it was asked, twice a second.",
        (BOUND,),
        lambda stats: _classes(
            (),
            nested(nested(stats, "server"), "loop_delay", "counts"),
            number(nested(stats, "server", "loop_delay").get("seconds")),
        ),
    )


def nested(stats: Mapping[str, object], *names: str) -> dict[str, object]:
    """Return a table inside tables; an empty one where there is none."""
    found: object = stats
    for name in names:
        found = found.get(name) if isinstance(found, Mapping) else None
    return {str(key): value for key, value in found.items()} if isinstance(found, Mapping) else {}


def number(value: object) -> float:
    """Return a count, a ratio, or 1 for what is true; 0 for what is no number."""
    if isinstance(value, bool):
        return int(value)
    return value if isinstance(value, int | float) else 0


def _lower(stats: Stats) -> list[str]:
    return [
        name for name, told in nested(stats, "tiers").items() if isinstance(told, dict) and "is_up" in told
    ]


def _always(values: Iterable[tuple[str, ...]]) -> Callable[[Stats], Iterable[tuple[str, ...]]]:
    told = tuple(values)
    return lambda _: told


def _single(member: str, *tables: str) -> Callable[[Stats], Values]:
    def read(stats: Stats) -> Values:
        table = nested(stats, *tables)
        return [((), number(table[member]))] if member in table else []

    return read


def _by(member: str, *tables: str) -> Callable[[Stats], Values]:
    return lambda stats: [((word,), number(count)) for word, count in nested(stats, *tables, member).items()]


def _by_pair(member: str) -> Callable[[Stats], Values]:
    return lambda stats: [
        ((tier, cause), number(count))
        for about, count in nested(stats, member).items()
        for tier, _, cause in [about.partition("/")]
    ]


def _of_operations(member: str) -> Callable[[Stats], Values]:
    return lambda stats: [((kind,), number(nested(stats, kind).get(member))) for kind in _LOOKUP.values]


def _of_lookups(member: str) -> Callable[[Stats], Values]:
    return lambda stats: [
        ((kind, word), number(count))
        for kind in _LOOKUP.values
        for word, count in nested(stats, kind, member).items()
    ]


def _lookup_zeros(label: LabelSet) -> Callable[[Stats], Iterable[tuple[str, ...]]]:
    return lambda stats: product(_LOOKUP.values, nested(stats, "tiers") if label is _TIER else label.values)


def _saved_seconds(stats: Stats) -> Values:
    speed = number(nested(stats, "server").get("prefill_tokens_per_s"))
    counts = nested(stats, "fetch", "hits_tokens") if speed > 0 else {}
    return [((tier,), number(tokens) / speed) for tier, tokens in counts.items()]


def _of_tiers(member: str) -> Callable[[Stats], Values]:
    return lambda stats: [
        ((name,), number(told[member]))
        for name, told in nested(stats, "tiers").items()
        if isinstance(told, dict) and told.get(member) is not None
    ]


def _of_tier_events(members: Iterable[str]) -> Callable[[Stats], Values]:
    def read(stats: Stats) -> Values:
        for name in nested(stats, "tiers"):
            events = nested(stats, "tiers", name, "events")
            for member in members:
                if member in events:
                    yield (name,), number(events[member])

    return read


def _lower_zeros(*, only: str | None) -> Callable[[Stats], Iterable[tuple[str, ...]]]:
    return lambda stats: [(name,) for name in _lower(stats) if only in (None, name)]


def _of_record_space(member: str) -> Callable[[Stats], Values]:
    def read(stats: Stats) -> Values:
        table = nested(stats, "records", "copies") or nested(stats, "records")
        return [((), number(table[member]))] if member in table else []

    return read


def _of_transfers(member: str) -> Callable[[Stats], Values]:
    return lambda stats: [(about, number(told.get(member))) for about, told in _transfers(stats)]


def _transfers(stats: Stats) -> Iterable[tuple[tuple[str, str], dict[str, object]]]:
    transfers = nested(stats, "transfers")
    for about in transfers:
        origin, _, target = about.partition("->")
        yield (origin, target), nested(transfers, about)


def _crossings(stats: Stats) -> Iterable[tuple[str, ...]]:
    tiers, lower = nested(stats, "tiers"), _lower(stats)
    for top in (name for name in tiers if name not in lower):
        for below in lower:
            yield from ((top, below), (below, top))


def _classes(about: tuple[str, ...], counts: Mapping[str, object], seconds: float) -> Values:
    """Yield the classes of a histogram, each with all that are below, and the sum under ``sum``."""
    so_far: float = 0
    for bound, count in counts.items():
        so_far += number(count)
        yield (*about, bound), so_far
    if counts:
        yield (*about, "sum"), seconds


METRICS = metrics()
"""The table, in the order that a scrape tells it."""
