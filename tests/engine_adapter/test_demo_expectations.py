"""The demo's judgement: what it accepts and what it calls broken."""

from dataclasses import replace

import numpy as np
import pytest

from kvstore_engine_adapter.demo.expectations import Trial, broken_of_tier, broken_with_redis_stopped
from kvstore_engine_adapter.demo.replica import Answer
from kvstore_engine_adapter.demo.report import report_table
from kvstore_engine_adapter.demo.scenario import DemoReport

COLD = Answer(
    text="Eleanor Marsh.",
    output_tokens=(1, 2, 3),
    prompt_tokens=1050,
    matched_tokens=0,
    tiers={},
    miss_reason="never_seen",
    load_s=0.0,
    prefill_s=2.0,
    ttft_s=2.0,
    first_logits=np.zeros(4, np.float32),
)
HIT = replace(COLD, matched_tokens=992, tiers={"dram": 992}, miss_reason=None, ttft_s=0.2)
TRIAL = Trial("Who?", "replica-b", 1000, HIT, COLD)


def test_a_good_hit_breaks_nothing() -> None:
    assert broken_of_tier("dram", TRIAL) == []


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"text": "Another."}, "answer differs"),
        ({"output_tokens": (1, 2, 4)}, "answer differs"),
        ({"first_logits": np.full(4, 2e-3, np.float32)}, "logits differ"),
        ({"first_logits": np.full(4, np.nan, np.float32)}, "logits differ"),
        ({"first_logits": np.zeros(3, np.float32)}, "logits differ"),
        ({"matched_tokens": 880, "tiers": {"dram": 880}}, "880 tokens matched of 1000"),
        ({"tiers": {"dram": 16, "ssd": 976}}, "16 tokens came from it"),
        ({"ttft_s": 0.5}, "4.0 times sooner"),
    ],
)
def test_each_broken_expectation_is_named(change: dict[str, object], expected: str) -> None:
    trial = replace(TRIAL, answer=replace(HIT, **change))
    broken = broken_of_tier("dram", trial)
    assert len(broken) == 1
    assert expected in broken[0]


def test_a_load_that_was_late_on_a_busy_machine_need_not_be_whole() -> None:
    late = replace(HIT, matched_tokens=864, tiers={"dram": 864}, miss_reason="timed_out", ttft_s=1.0)
    assert broken_of_tier("dram", replace(TRIAL, answer=late)) == []
    assert broken_of_tier("dram", replace(TRIAL, answer=replace(late, matched_tokens=400))) != []
    assert broken_of_tier("dram", replace(TRIAL, answer=replace(late, ttft_s=1.9))) != []


def test_ssd_and_remote_need_only_a_third_of_the_time() -> None:
    answer = replace(HIT, ttft_s=0.5, tiers={"ssd": 992})
    assert broken_of_tier("ssd", replace(TRIAL, answer=answer)) == []


def test_a_late_or_wrong_answer_with_redis_stopped_is_broken() -> None:
    assert broken_with_redis_stopped(replace(TRIAL, answer=COLD)) == []
    late = replace(COLD, ttft_s=5.1, text="x", tiers={"remote": 16})
    assert len(broken_with_redis_stopped(replace(TRIAL, answer=late))) == 3


def test_the_report_is_ok_only_when_everything_was_tried_and_held() -> None:
    report = DemoReport("m.gguf", 1000)
    assert not report.is_ok
    report.trials = dict.fromkeys(("vram", "dram", "ssd", "remote"), TRIAL)
    assert not report.is_ok
    report.redis_stopped = TRIAL
    assert report.is_ok
    report.broken.append("x")
    assert not report.is_ok


def test_the_report_names_each_tier_at_the_top_level_and_in_the_table() -> None:
    report = DemoReport("m.gguf", 1000, trials={"dram": TRIAL}, broken=["dram: too slow"])
    entry = report.to_json()["dram"]
    assert isinstance(entry, dict)
    assert entry["matched_ratio"] == 0.992
    assert entry["speedup"] == 10.0
    assert entry["outputs_equal"] is True
    table = report_table(report)
    assert "992 of 1000" in table
    assert "not as expected: dram: too slow" in table
