"""What repeats in the log: once per interval, with the number of those that were kept back."""

import asyncio
import io
import logging

import pytest

from kvstore.log_limit import LimitedTracebacks, limit_loop_errors
from kvstore.testing import FakeClock


def fail(kind):
    raise kind


def other_place(kind):
    raise kind


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def limited(caplog, clock):
    limit = LimitedTracebacks(clock)
    caplog.handler.addFilter(limit)
    yield caplog
    caplog.handler.removeFilter(limit)


def log_failures(count, place=fail, kind=MemoryError):
    for number in range(count):
        try:
            place(kind)
        except kind:
            logging.getLogger("test").exception("request %d failed", number)


def test_a_traceback_is_logged_once_per_interval(limited, clock):
    log_failures(100)
    assert limited.messages == ["request 0 failed"]

    clock.advance(10)
    log_failures(2)
    assert limited.messages == ["request 0 failed", "request 0 failed (99 more were not logged)"]


def test_every_handler_logs_what_one_of_them_logs(clock):
    logger = logging.getLogger()
    streams = [io.StringIO(), io.StringIO()]
    handlers = [logging.StreamHandler(stream) for stream in streams]
    others, logger.handlers = logger.handlers, handlers
    try:
        with LimitedTracebacks.installed():
            log_failures(3)
        assert [handler.filters for handler in handlers] == [[], []]
    finally:
        logger.handlers = others
    for stream in streams:
        assert stream.getvalue().count("request 0 failed") == 1
        assert "request 1 failed" not in stream.getvalue()


def test_another_fault_is_not_kept_back_by_the_first(limited):
    log_failures(5)
    log_failures(5, place=other_place)
    log_failures(5, kind=KeyError)
    assert len(limited.messages) == 3


def test_what_has_no_traceback_is_not_kept_back(limited):
    for _ in range(5):
        logging.getLogger("test").error("no traceback")
    assert len(limited.messages) == 5


def test_the_number_of_places_is_bounded(limited):
    for number in range(200):
        log_failures(1, kind=type(f"Kind{number}", (Exception,), {}))
    assert 64 <= len(limited.messages) <= 66


async def test_an_event_loop_logs_a_fault_of_its_callbacks_once_per_interval(limited, clock):
    loop = asyncio.get_running_loop()
    limit_loop_errors(loop, clock)
    for _ in range(50):
        loop.call_soon(fail, MemoryError)
    await asyncio.sleep(0)
    clock.advance(10)
    loop.call_soon(fail, MemoryError)
    await asyncio.sleep(0)
    assert len(limited.messages) == 2
    assert "(49 more were not logged)" in limited.messages[1]
