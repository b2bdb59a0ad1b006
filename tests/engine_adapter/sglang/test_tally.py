"""What a backend tells in the log, and how often."""

import logging

import pytest

from kvstore.testing import FakeClock
from kvstore_engine_adapter.counts import Counts
from kvstore_engine_adapter.sglang.tally import Tally


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


def test_counts_are_told_once_per_interval_and_only_when_they_have_changed(
    clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    counts = Counts()
    tally = Tally(logging.getLogger("tally"), counts, clock=clock)
    for _ in range(5):
        counts.add("lookups")
        tally.tell()
    clock.advance(10)
    tally.tell()
    clock.advance(10)
    tally.tell()
    assert [one.message for one in caplog.records] == [
        "kvstore: since the start: lookups 1",
        "kvstore: since the start: lookups 5",
    ]
    assert tally.counts() == {"lookups": 5}


def test_what_is_left_is_told_at_the_end(clock: FakeClock, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    counts = Counts()
    tally = Tally(logging.getLogger("tally"), counts, clock=clock)
    tally.tell()
    counts.add("faults")
    tally.tell(at_once=True)
    assert [one.message for one in caplog.records] == ["kvstore: since the start: faults 1"]


def test_faults_are_logged_once_per_interval(clock: FakeClock, caplog: pytest.LogCaptureFixture) -> None:
    tally = Tally(logging.getLogger("tally"), Counts(), clock=clock)
    tally.note_fault(ValueError("one"))
    tally.note_fault(ValueError("two"))
    clock.advance(10)
    tally.note_fault(ValueError("three"))
    assert [str(one.exc_info[1]) for one in caplog.records if one.exc_info] == ["one", "three"]
