"""IdleWork: pieces are done in order, when somebody says that there is nothing else to do."""

import logging
import selectors
import socket

import pytest

from kvstore.awake_selector import AwakeSelector
from kvstore.idle_work import IdleWork


def test_without_turns_work_is_done_at_once_and_again_as_long_as_it_says_so() -> None:
    idle_work, done = IdleWork(), [3]

    def count_down() -> bool:
        done.append(done[-1] - 1)
        return done[-1] > 0

    idle_work.do(count_down)

    assert done == [3, 2, 1, 0]
    assert not idle_work.is_left


def test_with_turns_one_piece_is_done_at_a_time_and_one_that_goes_on_comes_again() -> None:
    idle_work, done = IdleWork(), list[str]()
    idle_work.take_turns()
    again = iter([True, False])

    def long() -> bool:
        done.append("long")
        return next(again)

    idle_work.do(long)
    idle_work.do(lambda: done.append("short"))
    assert done == []
    while idle_work.is_left:
        idle_work.step()

    assert done == ["long", "short", "long"]


def test_of_more_than_thousands_the_oldest_are_left_undone() -> None:
    idle_work, done = IdleWork(), list[int]()
    idle_work.take_turns()
    for number in range(5000):
        idle_work.do(lambda number=number: done.append(number))  # type: ignore[misc]
    while idle_work.is_left:
        idle_work.step()

    assert done == list(range(5000 - 4096, 5000))


def test_a_piece_that_fails_is_logged_and_keeps_none_behind_it(caplog: pytest.LogCaptureFixture) -> None:
    idle_work, done = IdleWork(), list[str]()
    idle_work.take_turns()
    idle_work.do(lambda: 1 / 0)
    idle_work.do(lambda: done.append("next"))
    with caplog.at_level(logging.ERROR):
        idle_work.step()
        idle_work.step()

    assert done == ["next"]
    assert "idle moment failed" in caplog.text


def _ends(selector: AwakeSelector) -> tuple[socket.socket, socket.socket]:
    ours, theirs = socket.socketpair()
    selector.register(ours, selectors.EVENT_READ)
    return ours, theirs


@pytest.mark.parametrize("awake_s", [0.0, 60e-6])
def test_a_selector_works_before_it_waits_and_stops_as_something_is_ready(awake_s: float) -> None:
    done = list[int]()
    with AwakeSelector(awake_s) as selector:
        ours, theirs = _ends(selector)
        with ours, theirs:
            selector.idle_work.do(lambda: done.append(1))
            selector.idle_work.do(lambda: theirs.send(b"x"))
            selector.idle_work.do(lambda: done.append(3))
            ready = selector.select()
            assert ([key.fileobj for key, _ in ready], done) == ([ours], [1])
            assert selector.idle_work.is_left
            ours.recv(1)

            assert selector.select(0.0) == []
            assert done == [1]
            assert selector.select(0.001) == []
            assert done == [1, 3]


def test_work_keeps_no_timer_waiting() -> None:
    clock_s, done = [0.0], list[float]()

    def work() -> bool:
        clock_s[0] += 1
        done.append(clock_s[0])
        return True

    with AwakeSelector(0.0, clock=lambda: clock_s[0]) as selector:
        selector.idle_work.do(work)
        assert selector.select(2.5) == []

        assert len(done) <= 4


def test_a_chore_is_done_before_anything_else_when_it_is_due_and_no_more_once_it_failed() -> None:
    idle_work, done, due = IdleWork(), list[str](), [True]
    idle_work.take_turns()

    def chore() -> None:
        done.append("chore")
        if len(done) > 2:
            raise OSError
        due[0] = False

    idle_work.keep_up(chore, is_due=lambda: due[0])
    idle_work.do(lambda: done.append("piece"))
    idle_work.step()
    idle_work.step()
    assert (done, idle_work.is_left) == (["chore", "piece"], False)
    due[0] = True
    assert idle_work.is_left
    idle_work.step()

    assert done == ["chore", "piece", "chore"]
    assert not idle_work.is_left


def test_a_chore_that_others_did_since_it_was_seen_to_be_due_is_no_failure(
    caplog: pytest.LogCaptureFixture,
) -> None:
    idle_work, due = IdleWork(), iter([True, False])
    idle_work.take_turns()
    idle_work.keep_up(bool, is_due=lambda: next(due))
    assert idle_work.is_left
    with caplog.at_level(logging.ERROR):
        idle_work.step()  # as where Python collected by itself between the two looks

    assert caplog.text == ""


def test_a_loop_that_is_never_idle_does_a_piece_now_and_then() -> None:
    clock_s, done = [0.0], list[float]()
    with AwakeSelector(0.0, clock=lambda: clock_s[0]) as selector:
        ours, theirs = _ends(selector)
        with ours, theirs:
            theirs.send(b"x")
            for _ in range(100):
                selector.idle_work.do(lambda: done.append(clock_s[0]))
                assert selector.select(0.0 if len(done) % 2 else None)
                clock_s[0] += 0.001

    assert 9 <= len(done) <= 11
