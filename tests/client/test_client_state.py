"""Patience with a dead server, counters and namespaces of a client."""

import os
import signal

import pytest

from kvstore import KVLayout, MissReason, Namespace, Part, Timeouts
from kvstore.client_state import ClientState
from kvstore.errors import InvalidConfig, InvalidLayout, InvalidRequest, ServerUnavailable, TimedOut
from kvstore.keys import PrefixChain

NAMESPACE = Namespace("tiny", KVLayout.opaque(block_bytes=64, block_tokens=4))


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_a_failed_connection_is_not_tried_again_at_once_and_the_pause_doubles_to_a_second() -> None:
    clock = Clock()
    state = ClientState(Timeouts(), clock)
    pauses_s = []
    for _ in range(8):
        state.note_not_connected()
        with pytest.raises(ServerUnavailable, match="trying again"):
            state.check_may_connect()
        failed_s = clock.now_s
        while not state.may_connect:
            clock.now_s += 0.005
        pauses_s.append(round(clock.now_s - failed_s, 2))

    assert pauses_s == [0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.0, 1.0]


def test_a_connection_ends_the_pause() -> None:
    state = ClientState(Timeouts(), Clock())
    state.note_not_connected()

    state.note_connected(b"a" * 16)

    state.check_may_connect()
    assert state.may_connect


def test_another_instance_is_a_restart_and_the_same_one_is_not() -> None:
    state = ClientState(Timeouts(), Clock())
    for instance in (b"a", b"a", b"b"):
        state.note_connected(instance)

    assert (state.stats.connects, state.stats.server_restarts) == (3, 1)


def test_failures_are_counted_by_kind_and_become_reasons() -> None:
    state = ClientState(Timeouts(), Clock())

    reasons = [state.note_away(TimedOut("late")), state.note_away(ServerUnavailable("gone"))]

    assert reasons == [MissReason.TIMED_OUT, MissReason.UNAVAILABLE]
    assert (state.stats.timeouts, state.stats.unavailable) == (1, 1)


def test_a_chain_of_other_blocks_or_an_impossible_part_is_refused() -> None:
    state = ClientState(Timeouts())
    state.open_namespace(NAMESPACE)
    of_eight = PrefixChain(NAMESPACE.digest, NAMESPACE.chain(range(8)).keys, 8)

    with pytest.raises(InvalidRequest, match="blocks of 8 tokens"):
        state.length_bytes(of_eight, None)
    with pytest.raises(InvalidLayout):
        state.length_bytes(NAMESPACE.chain(range(8)), Part(0, 2, 0, 1))


@pytest.mark.parametrize("timeout_s", [0, -1, float("nan")])
def test_a_timeout_that_is_not_positive_is_refused(timeout_s: float) -> None:
    with pytest.raises(InvalidConfig, match="timeout_s"):
        Timeouts().for_data(timeout_s)


def test_a_forked_child_does_not_wait_for_a_lock_that_a_thread_of_its_parent_holds() -> None:
    state = ClientState(Timeouts(), Clock())
    with state._lock():
        child = os.fork()
        if not child:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(30)
            state.note_not_connected()
            state.open_namespace(NAMESPACE)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    state.open_namespace(NAMESPACE)
