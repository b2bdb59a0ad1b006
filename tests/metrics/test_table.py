import subprocess
import sys

import pytest

from kvstore.counters import Durations, LookupCounters
from kvstore.http.metric_table import METRICS, Kind
from kvstore.http.metrics import metrics_text
from kvstore.miss import MissReason
from kvstore.server_counters import ServerCounters
from tests.metrics.scrape import samples_of


def test_a_word_that_no_label_may_have_is_told_as_other():
    stats = {
        "fetch": {"hits_blocks": {"dram": 3, 'tenant "a"\n': 4, "sk-secret": 5}},
        "http": {"errors": {"not_found": 1, "/etc/passwd": 2}},
    }

    told = samples_of(metrics_text(stats))

    assert told["kvstore_hits_blocks_total", ("operation", "fetch"), ("tier", "dram")] == 3
    assert told["kvstore_hits_blocks_total", ("operation", "fetch"), ("tier", "other")] == 9
    assert told["kvstore_http_errors_total", ("code", "other")] == 2


def test_a_store_that_did_nothing_tells_of_every_miss_that_it_may_come_to():
    told = samples_of(metrics_text({"tiers": {"dram": {}, "ssd": {"is_up": True}}}))

    reasons = {dict(name[1:])["reason"] for name in told if name[0] == "kvstore_misses_blocks_total"}

    assert reasons == {reason.value for reason in MissReason}
    assert told["kvstore_corrupt_blocks_total", ("tier", "ssd")] == 0
    assert told["kvstore_transfers_bytes_total", ("origin", "ssd"), ("target", "dram")] == 0


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)
def test_a_metric_is_named_by_its_kind_and_unit(metric):
    assert metric.name.startswith("kvstore_")
    assert metric.name.endswith("_total") == (metric.kind is Kind.COUNTER)
    assert metric.kind is not Kind.HISTOGRAM or metric.name.endswith("_seconds")
    assert metric.text.endswith(".")


def test_names_are_given_once():
    names = [metric.name for metric in METRICS]

    assert len(names) == len(set(names))


def test_saved_prefill_is_estimated_from_the_speed_that_was_given():
    stats = {
        "fetch": {"hits_tokens": {"dram": 3000, "remote": 500}},
        "server": {"prefill_tokens_per_s": 1000.0},
    }

    told = samples_of(metrics_text(stats))
    untold = samples_of(metrics_text({**stats, "server": {"prefill_tokens_per_s": 0.0}}))

    assert told["kvstore_prefill_saved_seconds_total", ("tier", "dram")] == 3.0
    assert told["kvstore_prefill_saved_seconds_total", ("tier", "remote")] == 0.5
    assert not [name for name in untold if "saved" in name[0]]


def test_durations_are_counted_in_the_class_that_holds_them():
    durations = Durations((0.1, 1.0))

    for duration_s in (0.05, 0.1, 0.5, 7.0):
        durations.note(duration_s)

    assert durations.as_dict() == {"counts": {"0.1": 2, "1": 1, "+Inf": 1}, "seconds": 7.65}


def test_lookups_balance_in_tokens_where_blocks_differ_in_size():
    counters = LookupCounters()

    counters.count(4, ["dram", "ssd"], MissReason.EVICTED, block_tokens=16)
    counters.count(2, ["dram", "dram"], None, block_tokens=128)
    counters.count_hits(3, "remote", block_tokens=32)

    assert counters.is_balanced
    assert counters.hits_tokens == {"dram": 16 + 256, "ssd": 16, "remote": 96}
    assert counters.misses_tokens == {"evicted": 16, "behind_miss": 16}
    assert counters.lookups_tokens == 64 + 256 + 96


def test_a_server_tells_the_memory_of_its_process():
    assert ServerCounters().as_dict()["resident_bytes"] > 1 << 20


@pytest.mark.parametrize("speed", ["0", "-3", "nan", "inf", "fast"])
def test_a_speed_of_prefill_must_be_one(speed):
    words = [sys.executable, "-m", "kvstore.cli", "serve", "--prefill-tokens-per-s", speed]

    ended = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)

    assert (ended.returncode, "--prefill-tokens-per-s" in ended.stderr) == (2, True)
