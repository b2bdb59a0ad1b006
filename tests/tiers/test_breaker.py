"""CircuitBreaker on a fake clock."""

import pytest

from kvstore.testing import FakeClock
from kvstore_tiers.breaker import CircuitBreaker


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def breaker(clock: FakeClock) -> CircuitBreaker:
    return CircuitBreaker(clock=clock, max_faults=3, delay_s=1.0, max_delay_s=4.0)


def test_faults_in_a_row_open_it(breaker: CircuitBreaker) -> None:
    assert [breaker.failed("reset") for _ in range(3)] == [False, False, True]
    assert not breaker.allows()
    assert not breaker.is_up()
    assert breaker.reason == "reset"


def test_a_success_between_faults_keeps_it_closed(breaker: CircuitBreaker) -> None:
    for _ in range(5):
        breaker.failed("reset")
        breaker.failed("reset")
        breaker.succeeded()
    assert breaker.allows()


def test_one_timeout_opens_it(breaker: CircuitBreaker) -> None:
    assert breaker.failed("silence", is_timeout=True)
    assert not breaker.allows()


def test_after_the_delay_exactly_one_call_is_the_probe(breaker: CircuitBreaker, clock: FakeClock) -> None:
    breaker.failed("silence", is_timeout=True)
    clock.advance(1.0)
    assert breaker.is_up()
    assert [breaker.allows(), breaker.allows()] == [True, False]
    assert not breaker.is_up()


def test_a_successful_probe_closes_it(breaker: CircuitBreaker, clock: FakeClock) -> None:
    breaker.failed("silence", is_timeout=True)
    clock.advance(1.0)
    breaker.allows()
    breaker.succeeded()
    assert [breaker.allows(), breaker.allows()] == [True, True]
    assert breaker.reason == ""


def test_failed_probes_double_the_delay_up_to_a_limit(breaker: CircuitBreaker, clock: FakeClock) -> None:
    breaker.failed("silence", is_timeout=True)
    waited = []
    for _ in range(4):
        start_s = clock.now_s
        while not breaker.allows():
            clock.advance(0.5)
        waited.append(clock.now_s - start_s)
        breaker.failed("silence", is_timeout=True)
    assert waited == [1.0, 2.0, 4.0, 4.0]
    assert breaker.times_opened == 1


def test_a_delay_that_is_ended_leaves_the_next_call_to_probe(
    breaker: CircuitBreaker, clock: FakeClock
) -> None:
    breaker.end_delay()
    assert [breaker.allows(), breaker.allows()] == [True, True]
    breaker.failed("silence", is_timeout=True)
    breaker.end_delay()
    assert [breaker.allows(), breaker.allows()] == [True, False]
    breaker.failed("silence", is_timeout=True)
    assert breaker.delay_s == 2.0
    assert not breaker.allows()


def test_an_abandoned_probe_leaves_the_next_call_to_probe(breaker: CircuitBreaker, clock: FakeClock) -> None:
    breaker.failed("silence", is_timeout=True)
    clock.advance(1.0)
    breaker.allows()
    breaker.abandoned()
    assert breaker.allows()


def test_a_probe_that_is_never_reported_is_replaced_after_the_delay(
    breaker: CircuitBreaker, clock: FakeClock
) -> None:
    breaker.failed("silence", is_timeout=True)
    clock.advance(1.0)
    breaker.allows()
    clock.advance(1.0)
    assert breaker.allows()


def test_late_faults_of_calls_from_before_do_not_prolong_it(
    breaker: CircuitBreaker, clock: FakeClock
) -> None:
    breaker.failed("silence", is_timeout=True)
    clock.advance(0.9)
    breaker.failed("silence", is_timeout=True)
    clock.advance(0.1)
    assert breaker.allows()
