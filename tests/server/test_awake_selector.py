"""AwakeSelector: looks again before it sleeps, and sleeps all the same."""

import os
import selectors
import socket
from collections.abc import Callable, Iterator

import pytest

from kvstore.awake_selector import AwakeSelector

needs_cores = pytest.mark.skipif(
    len(os.sched_getaffinity(0)) < 2, reason="it does not stay awake on one core"
)


class Ticks:
    """A clock that advances by 1 at each reading, and does something at one of them."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.when_s = -1.0
        self.then: Callable[[], object] = lambda: None

    def __call__(self) -> float:
        self.now_s += 1
        if self.now_s == self.when_s:
            self.then()
        return self.now_s


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


def _woken(selector: AwakeSelector, ends: tuple[socket.socket, socket.socket]) -> None:
    """Have it see one event, so that it is awake."""
    ours, theirs = ends
    selector.register(ours, selectors.EVENT_READ)
    theirs.send(b"x")
    assert len(selector.select()) == 1
    ours.recv(1)


@needs_cores
def test_after_an_event_it_finds_the_next_without_sleeping(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    clock = Ticks()
    with AwakeSelector(awake_s=10, clock=clock) as selector:
        _woken(selector, ends)
        clock.when_s, clock.then = clock.now_s + 4, lambda: ends[1].send(b"y")

        ready = selector.select(20)

        assert [key.fileobj for key, _ in ready] == [ends[0]]
        assert clock.now_s < 10


def test_it_sleeps_once_nothing_has_happened_for_its_time(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    clock = Ticks()
    with AwakeSelector(awake_s=10, clock=clock) as selector:
        _woken(selector, ends)

        is_awake_s = selector._awake_until_s - (clock.now_s + 1)
        assert selector.select(is_awake_s + 0.001) == []
        looked_until_s = clock.now_s
        assert looked_until_s >= selector._awake_until_s
        assert selector.select(0.001) == []

        assert clock.now_s <= looked_until_s + 2


@needs_cores
def test_being_awake_keeps_no_timer_waiting(ends: tuple[socket.socket, socket.socket]) -> None:
    clock = Ticks()
    with AwakeSelector(awake_s=1, clock=clock) as selector:
        _woken(selector, ends)
        selector.stay_awake(1000)
        asked_s = clock.now_s

        assert selector.select(5) == []

        assert asked_s + 5 <= clock.now_s <= asked_s + 8


def test_it_returns_at_once_when_told_not_to_wait(ends: tuple[socket.socket, socket.socket]) -> None:
    clock = Ticks()
    with AwakeSelector(awake_s=10, clock=clock) as selector:
        _woken(selector, ends)
        asked_s = clock.now_s

        assert selector.select(0) == []

        assert clock.now_s == asked_s


def test_it_wakes_from_its_sleep(ends: tuple[socket.socket, socket.socket]) -> None:
    with AwakeSelector(awake_s=0) as selector:
        selector.register(ends[0], selectors.EVENT_READ)
        ends[1].send(b"x")

        assert len(selector.select(None)) == 1


@needs_cores
def test_it_stays_awake_for_an_event_that_is_expected(ends: tuple[socket.socket, socket.socket]) -> None:
    clock = Ticks()
    with AwakeSelector(awake_s=1, clock=clock) as selector:
        _woken(selector, ends)
        selector.stay_awake(20)
        clock.when_s, clock.then = clock.now_s + 10, lambda: ends[1].send(b"y")

        ready = selector.select(None)

        assert [key.fileobj for key, _ in ready] == [ends[0]]


def test_on_one_core_it_never_stays_awake(ends: tuple[socket.socket, socket.socket]) -> None:
    clock = Ticks()
    with AwakeSelector(awake_s=0, clock=clock) as selector:
        selector.register(ends[0], selectors.EVENT_READ)
        selector.stay_awake(1000)

        assert selector.select(0.001) == []
