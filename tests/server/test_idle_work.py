"""IdleWork: pieces are done in order, when somebody says that there is nothing else to do."""

import logging
import selectors
import socket

import pytest

from kvstore.awake_selector import AwakeSelector
from kvstore.idle_work import IdleWork


def test_without_turns_work_is_done_at_once() -> None:
    idle_work, done, due = IdleWork(), list[str](), [3]

    def chore() -> None:
        done.append("chore")
        due[0] -= 1

    idle_work.do(lambda: done.append("piece"))
    idle_work.keep_up(chore, is_due=lambda: due[0] > 0)
    assert done == ["piece"]
    idle_work.note_due()

    assert done == ["piece", "chore", "chore", "chore"]
    assert not idle_work.is_left


def test_with_turns_pieces_and_chores_are_done_one_at_a_time_by_turns() -> None:
    idle_work, done = IdleWork(), list[str]()
    idle_work.take_turns()
    for name in ("a", "b"):
        idle_work.keep_up(lambda name=name: done.append(name), is_due=lambda: True)  # type: ignore[misc]
    for name in ("1", "2", "3"):
        idle_work.do(lambda name=name: done.append(name))  # type: ignore[misc]
    idle_work.note_due()
    assert done == []
    for _ in range(8):
        idle_work.step()

    assert done == ["a", "1", "b", "2", "a", "3", "b", "a"]


def test_a_chore_that_was_given_up_is_done_no_more() -> None:
    idle_work, done = IdleWork(), list[str]()
    idle_work.keep_up(done.clear, is_due=lambda: True)
    idle_work.give_up(done.clear)

    assert not idle_work.is_left


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

    def work() -> None:
        clock_s[0] += 1
        done.append(clock_s[0])

    with AwakeSelector(0.0, clock=lambda: clock_s[0]) as selector:
        for _ in range(100):
            selector.idle_work.do(work)
        assert selector.select(2.5) == []

        assert len(done) <= 4


def test_a_chore_that_failed_is_done_no_more() -> None:
    idle_work = IdleWork()
    idle_work.take_turns()
    idle_work.keep_up(lambda: 1 / 0, is_due=lambda: True)
    assert idle_work.is_left
    idle_work.step()

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


def test_a_chore_that_others_did_between_two_looks_ends_no_loop() -> None:
    for timeout in (None, 0.0, 0.001):
        with AwakeSelector(0.0) as selector:
            ours, theirs = _ends(selector)
            with ours, theirs:
                theirs.send(b"x")
                due = iter([True, False])
                selector.idle_work.keep_up(bool, is_due=lambda due=due: next(due))  # type: ignore[misc]

                assert selector.select(timeout)


def test_what_is_left_at_the_end_is_left_undone() -> None:
    idle_work, done = IdleWork(), list[str]()
    idle_work.take_turns()
    idle_work.do(lambda: done.append("late"))
    idle_work.leave_undone()

    assert not idle_work.is_left
    assert done == []
