"""The figures that kvstore top shows, from stats."""

import copy

import pytest

from kvstore.cli.store_figures import Lookups, is_started_anew, sample
from kvstore.cli.top_view import Marks, size, whole
from kvstore.cli.watching import MAX_SAMPLES, Outage, Watch
from kvstore.errors import ServerUnavailable

NOTHING = {"requests": 0, "lookups_blocks": 0, "hits_blocks": {}, "misses_blocks": {}}
STATS = {
    "tiers": {
        "dram": {"medium": "dram", "capacity_bytes": 100, "used_bytes": 25, "blocks": 5},
        "remote": {
            "medium": "remote",
            "capacity_bytes": 0,
            "used_bytes": 0,
            "is_up": False,
            "reason": "cannot connect",
            "queued_blocks": 3,
            "events": {"faults": 2, "breaker_opened": 1, "written_bytes": 999},
        },
    },
    "live_leases": 1,
    "overdue_slots": 0,
    "owners": 2,
    "loads": 3,
    "match": NOTHING,
    "fetch": {
        "requests": 4,
        "lookups_blocks": 40,
        "hits_blocks": {"dram": 20, "remote": 10},
        "misses_blocks": {"evicted": 1, "behind_miss": 9},
    },
    "transfers": {"dram->remote": {"blocks": 3, "bytes": 3000, "failures": {"unavailable": 7}}},
    "corrupt_blocks": {"remote": 1},
    "write_drops_blocks": {"remote/queue_full": 5},
    "server": {"requests": {"stats": 9}, "protocol_errors": 2},
}


def later(*, hits=0, misses=0, moved_bytes=0):
    stats = copy.deepcopy(STATS)
    stats["fetch"]["requests"] += 1
    stats["fetch"]["lookups_blocks"] += hits + misses
    stats["fetch"]["hits_blocks"]["dram"] += hits
    stats["fetch"]["misses_blocks"]["evicted"] += misses
    stats["transfers"]["dram->remote"]["bytes"] += moved_bytes
    stats["corrupt_blocks"]["remote"] += 1
    stats["server"]["requests"]["stats"] += 1
    return stats


def told(key, parent, lookups, namespace="n"):
    counted = {"lookups": lookups, "hits": 0}
    return {
        "key": key,
        "namespace": namespace,
        "parent": parent,
        "fetch": counted,
        "match": counted,
        "blocks": 1,
        "tokens": 16,
        "tiers": {},
        "last_use_s": 0.0,
    }


def branches_of(*branches):
    found = sample({**STATS, "branches": {"branches": branches}}, of="fetch", time_s=0.0).branches
    return [(branch.key, branch.depth, branch.lookups) for branch in found]


def test_branches_come_behind_those_that_they_leave():
    shown = branches_of(told("a", None, 9), told("b", None, 8), told("c", "a", 5), told("d", "c", 2))
    assert shown == [("a", 0, 9), ("c", 1, 5), ("d", 2, 2), ("b", 0, 8)]


def test_a_branch_that_has_the_key_of_what_it_leaves_is_shown_once():
    assert branches_of(told("a", None, 9), told("a", "a", 5)) == [("a", 0, 9), ("a", 1, 5)]


def test_a_branch_leaves_none_of_another_namespace():
    assert branches_of(told("a", None, 9), told("b", "a", 5, "other")) == [("a", 0, 9), ("b", 0, 5)]


def test_ratios_are_of_all_blocks_that_were_asked_for():
    total = sample(STATS, of="fetch", time_s=0.0).total

    assert (total.ratio(), total.ratio("dram"), total.ratio("ssd")) == (0.75, 0.5, 0.0)
    assert sum(total.hits.values()) + sum(total.misses.values()) == total.blocks


def test_where_nothing_was_asked_for_there_is_no_ratio():
    assert sample(STATS, of="match", time_s=0.0).total.ratio() is None


def test_between_two_stats_only_what_happened_there_counts():
    taken = sample(later(hits=6, misses=2, moved_bytes=500), of="fetch", time_s=9.0, before=(STATS, 2.0))

    assert taken.now == Lookups(1, 8, {"dram": 6, "remote": 0}, {"evicted": 2, "behind_miss": 0})
    assert taken.rates == {"dram->remote": 250.0}
    assert taken.new_faults == {"remote: corrupt blocks": 1}


def test_faults_are_what_should_not_happen_and_nothing_else():
    taken = sample(STATS, of="fetch", time_s=0.0)

    assert taken.down == {"remote": "cannot connect"}
    assert taken.faults == {
        "remote: corrupt blocks": 1,
        "writes dropped: remote/queue_full": 5,
        "dram->remote: unavailable": 7,
        "remote: faults": 2,
        "remote: breaker opened": 1,
        "socket: protocol errors": 2,
    }


@pytest.mark.parametrize(
    "change",
    [
        lambda stats: stats["fetch"].update(requests=3),
        lambda stats: stats["fetch"].update(lookups_blocks=39),
        lambda stats: stats.update(transfers={}),
        lambda stats: stats["server"].update(requests={"stats": 8}),
    ],
)
def test_a_count_that_is_lower_shows_another_run_of_the_store(change):
    after = copy.deepcopy(STATS)
    change(after)

    assert is_started_anew(STATS, after)
    assert not is_started_anew(STATS, later())
    taken = sample(after, of="fetch", time_s=0.0, before=(STATS, 1.0))
    assert (taken.now, taken.rates, taken.interval_s) == (None, {}, None)


def test_stats_of_a_store_that_tells_less_are_shown_all_the_same():
    taken = sample({}, of="fetch", time_s=0.0, before=({}, 1.0))

    assert (taken.total, taken.tiers, taken.faults) == (Lookups(0, 0, {}, {}), (), {})


class Store:
    """Answers in turn with what it is given; None: it does not answer."""

    def __init__(self, *answers):
        self.answers = list(answers)

    def stats(self):
        answer = self.answers.pop(0)
        if answer is None:
            raise ServerUnavailable("gone:\n away")
        return answer


def watching(*answers):
    seconds = iter(range(1000))
    return Watch(
        Store(*answers).stats, of="fetch", clock=lambda: float(next(seconds)), wall_clock=lambda: 50.0
    )


def test_an_outage_is_told_and_nothing_is_said_of_the_time_between():
    watch = watching(STATS, None, None, later(hits=6), later(hits=6))

    taken = [watch.first(), *(watch.next() for _ in range(4))]

    assert taken[1] == Outage(50.0, 50.0, "gone: away")
    assert taken[3].now is None
    assert taken[4].now == Lookups(0, 0, {"dram": 0, "remote": 0}, {"evicted": 0, "behind_miss": 0})
    assert watch.back_since_s() == 50.0
    assert watch.last_sample() is taken[4]


def test_the_first_sample_is_not_waited_for():
    with pytest.raises(ServerUnavailable):
        watching(None).first()


def test_old_samples_are_forgotten():
    watch = watching(*([STATS] * (MAX_SAMPLES + 5)))
    for _ in range(MAX_SAMPLES + 5):
        watch.next()

    assert len(watch.history) == MAX_SAMPLES


def test_lines_and_bars_show_extremes_and_gaps():
    marks = Marks.of("utf-8")

    assert marks.line([None, 0.0, 0.5, 1.0], 3) == "▁▅█"
    assert marks.line([None, 1.0], 9) == "·█"
    assert [marks.bar(ratio, 4) for ratio in (0.0, 0.001, 0.5, 1.0, 7.0)] == [
        "░░░░",
        "█░░░",
        "██░░",
        "████",
        "████",
    ]
    assert marks.bar(None, 4) == ""


def test_sizes_and_counts_are_short_to_read():
    assert [size(number) for number in (0, 1023, 1024, 3 << 30)] == ["0 B", "1023 B", "1.0 KiB", "3.0 GiB"]
    assert whole(1234567) == "1 234 567"
