"""StoreWatch: one line when the store goes away, one when it is back, and not more than needed."""

import logging

import pytest

from kvstore.errors import ServerUnavailable
from kvstore.testing import FakeClock
from kvstore_engine_adapter.store_watch import StoreWatch

AWAY = ServerUnavailable("no server answers at /s")


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def watch(clock, caplog):
    caplog.set_level(logging.INFO)
    return StoreWatch("/s", clock=clock)


def lines(caplog):
    return [(record.levelname, record.getMessage()) for record in caplog.records]


def test_a_store_absent_at_the_start_is_warned_of_at_once(watch, caplog):
    watch.note_failure(AWAY)
    ((level, line),) = lines(caplog)
    assert level == "WARNING"
    assert "no server answers at /s" in line


def test_a_store_that_answers_is_no_news(watch, caplog):
    watch.note_answer()
    assert lines(caplog) == []


def test_one_late_answer_is_no_outage(watch, caplog):
    watch.note_answer()
    watch.note_failure(AWAY)
    watch.note_answer()
    assert lines(caplog) == []


def test_a_store_that_is_back_is_said_to_be(watch, clock, caplog):
    watch.note_failure(AWAY)
    clock.advance(7)
    watch.note_answer()
    watch.note_answer()
    assert lines(caplog)[1:] == [("INFO", "store: it answers again after 7 s")]


def test_an_outage_is_repeated_once_a_minute(watch, clock, caplog):
    watch.note_answer()
    for _ in range(130):
        watch.note_failure(AWAY)
        clock.advance(1)
    assert [level for level, _ in lines(caplog)] == ["WARNING"] * 3


def test_a_store_that_comes_and_goes_is_warned_of_once_a_minute(watch, clock, caplog):
    for _ in range(30):
        watch.note_answer()
        watch.note_failure(AWAY)
        watch.note_failure(AWAY)
        clock.advance(1)
    assert [level for level, _ in lines(caplog)] == ["WARNING", "INFO"]
