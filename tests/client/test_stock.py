"""Slots lent ahead as a connection keeps them: when it asks for some, uses them, and gives them back."""

import math

import pytest

from kvstore.messages import Stored, UnusedSlot
from kvstore.stock import Stock
from kvstore.testing import FakeClock
from kvstore.wire import AHEAD_BYTES

LENT_US = 30_000_000


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def stock(clock: FakeClock) -> Stock:
    """Of a connection that has put once, just now."""
    made = Stock(clock=clock)
    made.begin_put(4096, 1)
    return made


def _slots(count: int, first: int = 1) -> tuple[UnusedSlot, ...]:
    return tuple(UnusedSlot(4096 * at, 1) for at in range(first, first + count))


def _fill(
    stock: Stock, clock: FakeClock, count: int, length_bytes: int = 4096, lent_us: int = LENT_US
) -> None:
    stock.add(length_bytes, Stored(count, slots=_slots(count), lent_us=lent_us), clock())


def test_slots_are_asked_for_only_while_puts_follow_each_other(clock: FakeClock) -> None:
    stock = Stock(clock=clock)
    assert stock.begin_put(4096, 8) == []
    assert stock.wanted(4096, 8) == 0
    clock.advance(0.5)
    stock.begin_put(4096, 8)
    assert stock.wanted(4096, 8) == 8
    clock.advance(2)
    stock.begin_put(4096, 8)
    assert stock.wanted(4096, 8) == 0


def test_no_more_are_asked_for_than_may_be_lent(stock: Stock) -> None:
    stock.begin_put(4096, 1)

    assert stock.wanted(4096, AHEAD_BYTES // 4096) == AHEAD_BYTES // 4096
    assert stock.wanted(4096, AHEAD_BYTES // 4096 + 1) == 0
    assert stock.wanted(1, AHEAD_BYTES // 4096 + 1) == 0
    assert stock.wanted(8 * AHEAD_BYTES, 1) == 1
    assert stock.wanted(8 * AHEAD_BYTES, 2) == 0


def test_a_put_takes_as_many_as_it_has_blocks_or_none(stock: Stock, clock: FakeClock) -> None:
    _fill(stock, clock, 8)

    assert stock.begin_put(4096, 9) == []
    assert stock.begin_put(8192, 1) == []
    assert stock.begin_put(4096, 5) == list(_slots(5))
    assert stock.wanted(4096, 5) == 2
    assert stock.begin_put(4096, 4) == []
    assert stock.begin_put(4096, 3) == list(_slots(3, 6))
    assert stock.idle_from_s == math.inf
    assert stock.wanted(4096, 3) == 3


@pytest.mark.parametrize(("lent_us", "idle_s"), [(LENT_US, 5.0), (1_000_000, 0.5)])
def test_what_lies_unused_is_not_used_and_goes_back_well_before_its_time(
    stock: Stock, clock: FakeClock, lent_us: int, idle_s: float
) -> None:
    _fill(stock, clock, 2, lent_us=lent_us)
    assert stock.idle_from_s == clock() + idle_s
    clock.advance(idle_s / 2)
    assert stock.take_idle() == []
    _fill(stock, clock, 1, lent_us=lent_us)
    clock.advance(idle_s / 2)

    assert stock.begin_put(4096, 1) == []
    assert stock.take_idle() == [*_slots(2), *_slots(1)]
    assert stock.take_idle() == []
    assert stock.idle_from_s == math.inf


def test_after_a_put_of_which_some_was_stored_before_none_is_used_or_asked_for(
    stock: Stock, clock: FakeClock
) -> None:
    _fill(stock, clock, 4)
    stock.note_present(1)
    assert stock.begin_put(4096, 2) == []
    assert stock.wanted(4096, 8) == 0
    stock.note_present(0)
    assert len(stock.begin_put(4096, 2)) == 2


def test_slots_for_blocks_of_another_length_make_room(stock: Stock, clock: FakeClock) -> None:
    half = AHEAD_BYTES // 2
    _fill(stock, clock, 1, half)
    assert stock.make_room(4096, 8) == []
    assert stock.make_room(half, 1) == []
    assert stock.make_room(half + 4096, 1) == list(_slots(1))
    assert stock.make_room(half + 4096, 1) == []


def test_an_answer_without_slots_changes_nothing(stock: Stock, clock: FakeClock) -> None:
    stock.add(4096, Stored(1), clock())

    assert stock.idle_from_s == math.inf
    assert stock.begin_put(4096, 1) == []
