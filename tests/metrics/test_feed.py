"""When the feed tells what changed: soon after a pause, in a steady pace while changes go on, else never."""

import asyncio

import pytest

from kvstore.changes import CopyChanges
from kvstore.event_feed import _GATHER_S, _PACE_S, _SLICE_BLOCKS, EventFeed
from kvstore.keys import BlockKey, NamespaceDigest
from kvstore.tier import Medium

SPACE = NamespaceDigest(b"n" * 32)


def keys_of(count, start=0):
    return tuple(BlockKey(number.to_bytes(32, "big")) for number in range(start, start + count))


class NotingManager:
    """What a feed asks of a manager."""

    def __init__(self):
        self.changes = None
        self.ready = {}

    def note_changes(self, changes):
        self.changes = changes

    def media(self):
        return {"dram": Medium.DRAM}

    def namespace(self, digest):
        return None

    def ready_copies(self, namespace):
        return iter([(True, "dram", namespace, (key,), None) for key in self.ready[namespace]])

    def put(self, keys):
        self.changes.note_ready("dram", SPACE, keys, None)


class HandLoop(asyncio.AbstractEventLoop):
    """An event loop of timers alone, run by hand."""

    def __init__(self):
        self.now_s = 1000.0
        self.timers = []

    def time(self):
        return self.now_s

    def get_debug(self):
        return False

    def call_at(self, when_s, callback):
        handle = asyncio.Handle(callback, (), self)
        self.timers.append((when_s, handle))
        return handle

    def call_soon(self, callback):
        return self.call_at(self.now_s, callback)

    def run_next(self):
        """Run the only timer that there is; returns when that was due, from now."""
        ((when_s, handle),) = self.timers
        self.timers.clear()
        waited_s, self.now_s = when_s - self.now_s, when_s
        handle._run()
        return waited_s


@pytest.fixture
def hand_loop():
    loop = HandLoop()
    asyncio._set_running_loop(loop)
    yield loop
    asyncio._set_running_loop(None)


@pytest.fixture
def manager():
    return NotingManager()


def told_keys(batches):
    return [key for batch in batches for event in batch.events for key in event.keys]


def test_while_nothing_changes_nothing_is_due(manager, hand_loop):
    with EventFeed(manager).listening(lambda batch: None):
        assert hand_loop.timers == []
        manager.put(keys_of(1))
        hand_loop.run_next()

        assert hand_loop.timers == []


def test_what_comes_after_a_pause_is_told_a_moment_later_with_what_followed_it(manager, hand_loop):
    batches = []
    with EventFeed(manager).listening(batches.append):
        manager.put(keys_of(1))
        manager.changes.note_gone("dram", SPACE, keys_of(1)[0])
        manager.put(keys_of(2, start=1))

        assert hand_loop.run_next() == pytest.approx(_GATHER_S)
    assert told_keys(batches) == [*keys_of(1), *keys_of(1), *keys_of(2, start=1)]
    assert len(batches) == 1


def test_changes_that_go_on_are_told_in_a_steady_pace(manager, hand_loop):
    batches = []
    with EventFeed(manager).listening(batches.append):
        manager.put(keys_of(1))
        hand_loop.run_next()
        waited_s = []
        for number in range(1, 4):
            manager.put(keys_of(1, start=number))
            waited_s.append(hand_loop.run_next())

    assert waited_s == pytest.approx([_PACE_S] * 3)
    assert told_keys(batches) == [*keys_of(4)]


def test_many_changes_are_told_in_slices_between_which_others_have_their_turn(manager, hand_loop):
    batches = []
    with EventFeed(manager).listening(batches.append):
        manager.put(keys_of(2 * _SLICE_BLOCKS + 1))
        hand_loop.run_next()
        assert told_keys(batches) == [*keys_of(_SLICE_BLOCKS)]
        assert [hand_loop.run_next(), hand_loop.run_next()] == [0, 0]

        assert hand_loop.timers == []
    assert told_keys(batches) == [*keys_of(2 * _SLICE_BLOCKS + 1)]


def test_blocks_of_a_namespace_that_opens_are_told_without_any_change(manager, hand_loop):
    batches = []
    manager.ready[SPACE] = keys_of(3)
    with EventFeed(manager).listening(batches.append):
        manager.changes.note_opened(SPACE)
        while hand_loop.timers:
            hand_loop.run_next()

    assert told_keys(batches) == [*keys_of(3)]


def test_after_the_last_listener_left_nothing_is_due(manager, hand_loop):
    with EventFeed(manager).listening(lambda batch: None):
        manager.put(keys_of(1))

    assert manager.changes is None
    assert [handle.cancelled() for _, handle in hand_loop.timers] == [True]


def test_a_listener_that_fails_keeps_no_later_change_from_being_told(manager, hand_loop, caplog):
    batches = []

    def listen(batch):
        batches.append(batch)
        assert len(batches) > 1, "the first fails"

    with EventFeed(manager).listening(listen):
        manager.put(keys_of(_SLICE_BLOCKS + 1))
        hand_loop.run_next()
        assert hand_loop.run_next() == pytest.approx(_PACE_S)

    assert "telling of changed blocks failed" in caplog.text
    assert told_keys(batches) == [*keys_of(_SLICE_BLOCKS + 1)]


def test_whoever_waits_hears_of_the_first_change_alone():
    calls = []
    changes = CopyChanges(limit=3, on_first=lambda: calls.append(len(changes)))
    changes.note_ready("dram", SPACE, (), None)
    changes.note_ready("dram", SPACE, keys_of(1), None)
    changes.note_gone("dram", SPACE, keys_of(1)[0])
    changes.note_ready("dram", SPACE, keys_of(2), None)
    assert calls == [0]

    changes.take(1)
    changes.note_gone("dram", SPACE, keys_of(1)[0])
    assert calls == [0]
    changes.take(9)
    changes.note_gone("dram", SPACE, keys_of(1)[0])

    assert calls == [0, 0]
