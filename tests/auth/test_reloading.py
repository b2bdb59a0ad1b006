"""Reloaded and Watcher: values that follow their files."""

import logging
import threading

import pytest

from kvstore.errors import InvalidConfig
from kvstore.reloading import Reloaded, Watcher

WAIT_S = 30.0


def number_of(content):
    if not content.isdigit():
        raise InvalidConfig("is no number")
    return int(content)


def following(path):
    return Reloaded("numbers", path.read_bytes, number_of)


@pytest.fixture
def path(tmp_path):
    made = tmp_path / "number"
    made.write_bytes(b"1")
    return made


def test_a_value_follows_its_content(path):
    value = following(path)
    path.write_bytes(b"2")

    assert value.refresh()
    assert (value.value, value.num_reloads) == (2, 1)


def test_content_that_did_not_change_makes_no_new_value(path):
    value = following(path)
    path.write_bytes(b"1")

    assert not value.refresh()
    assert value.num_reloads == 0


def test_content_that_cannot_be_used_changes_nothing_and_is_said_once(path, caplog):
    value = following(path)
    path.write_bytes(b"?")

    refreshed = [value.refresh() for _ in range(3)]

    assert refreshed == [False, False, False]
    assert (value.value, value.num_failures) == (1, 1)
    assert caplog.text.count("cannot be used, so what was loaded stays: is no number") == 1


def test_a_value_recovers_from_content_that_could_not_be_used(path):
    value = following(path)
    path.write_bytes(b"?")
    value.refresh()
    path.write_bytes(b"3")

    assert value.refresh()
    assert value.value == 3


def test_content_that_is_as_before_ends_a_failure(path):
    value = following(path)
    for content in (b"?", b"1", b"?"):
        path.write_bytes(content)
        value.refresh()

    assert value.num_failures == 2


def test_the_first_content_must_be_usable(path):
    path.write_bytes(b"?")

    with pytest.raises(InvalidConfig, match="is no number"):
        following(path)


def test_a_watcher_refreshes_until_it_is_stopped(path):
    changed = threading.Event()

    def announce(content):
        if content == b"2":
            changed.set()
        return number_of(content)

    value = Reloaded("numbers", path.read_bytes, announce)
    watcher = Watcher([value], interval_s=0.001)
    watcher.start()
    path.write_bytes(b"2")

    assert changed.wait(WAIT_S)
    watcher.stop()
    watcher.stop()
    assert "kvstore-reload" not in [thread.name for thread in threading.enumerate()]


def test_a_watcher_survives_what_nobody_expected(path, caplog):
    seen = threading.Event()
    calls = []

    def read():
        calls.append(1)
        if len(calls) == 2:
            raise ZeroDivisionError
        if len(calls) > 2:
            seen.set()
        return b"1"

    watcher = Watcher([Reloaded("numbers", read, number_of)], interval_s=0.001)
    with caplog.at_level(logging.ERROR):
        watcher.start()
        assert seen.wait(WAIT_S)
        watcher.stop()

    assert "ZeroDivisionError" in caplog.text


def test_a_watcher_of_nothing_needs_no_thread():
    watcher = Watcher([])
    watcher.start()

    assert "kvstore-reload" not in [thread.name for thread in threading.enumerate()]
    watcher.stop()


def test_a_file_system_that_hangs_holds_up_neither_values_nor_the_end(path):
    held, reading = threading.Event(), threading.Event()
    calls = []

    def read():
        calls.append(1)
        if len(calls) > 1:
            reading.set()
            held.wait(WAIT_S)
        return b"1"

    value = Reloaded("numbers", read, number_of)
    watcher = Watcher([value], interval_s=0.001, join_patience_s=0.01)
    watcher.start()
    assert reading.wait(WAIT_S)

    assert value.value == 1
    watcher.stop()

    held.set()
