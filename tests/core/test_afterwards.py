"""Work that answers do not wait for."""

import pytest

from kvstore.afterwards import Afterwards


def test_work_is_done_at_once_unless_it_is_put_off() -> None:
    done: list[int] = []
    afterwards = Afterwards()
    afterwards.do(lambda: done.append(1))
    assert done == [1]


def test_what_was_put_off_is_done_in_its_order() -> None:
    done: list[int] = []
    afterwards = Afterwards()
    afterwards.begin()
    afterwards.do(lambda: done.append(1))
    afterwards.do(lambda: done.append(2))
    assert done == []
    afterwards.settle()
    assert done == [1, 2]


def test_nothing_more_is_put_off_once_it_is_settled() -> None:
    done: list[int] = []
    afterwards = Afterwards()
    afterwards.begin()
    afterwards.settle()
    afterwards.do(lambda: done.append(1))
    afterwards.settle()
    assert done == [1]


def test_work_that_fails_keeps_none_behind_it_from_being_done(caplog: pytest.LogCaptureFixture) -> None:
    done: list[int] = []
    afterwards = Afterwards()
    afterwards.begin()
    afterwards.do(lambda: 1 // 0)
    afterwards.do(lambda: done.append(2))
    afterwards.settle()
    assert done == [2]
    assert "ZeroDivisionError" in caplog.text
