"""ComingBack: how long the loop stays awake for a client that copies."""

import pytest

from kvstore.coming_back import ComingBack
from kvstore.testing import FakeClock

MIB = 1 << 20


class Loop:
    """A loop's time, and how long it was told to stay awake."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.awake_s: list[float] = []
        self.client = ComingBack(self.awake_s.append, clock=self.clock)

    def exchange(self, copy_bytes: int, away_s: float, *, is_certain: bool = False) -> float:
        """Tell the client something, and hear it again after a while; returns how long that was awaited."""
        self.awake_s.clear()
        self.client.told(copy_bytes, is_certain=is_certain)
        self.clock.advance(away_s)
        self.client.heard()
        return sum(self.awake_s)


def test_nobody_waits_for_a_client_that_was_not_heard_before() -> None:
    assert Loop().exchange(64 << 10, 50e-6) == 0.0


def test_a_message_that_is_sure_to_follow_is_waited_for_from_the_first_time() -> None:
    assert Loop().exchange(64 << 10, 50e-6, is_certain=True) > 60e-6


@pytest.mark.parametrize("copy_bytes", [4096, 64 << 10, 2 * MIB])
def test_who_came_back_at_once_is_waited_for_until_it_has_copied_and_come(copy_bytes: int) -> None:
    loop = Loop()
    away_s = copy_bytes / 10e9 + 150e-6
    loop.exchange(copy_bytes, away_s)
    assert away_s < loop.exchange(copy_bytes, away_s) < away_s + 100e-6


def test_a_time_that_was_long_once_changes_little() -> None:
    loop = Loop()
    for _ in range(3):
        loop.exchange(4096, 100e-6)
    loop.exchange(4096, 5.0)
    assert 100e-6 < loop.exchange(4096, 100e-6) < 200e-6


def test_who_stays_away_is_not_waited_for_any_more() -> None:
    loop = Loop()
    loop.exchange(4096, 100e-6)
    for _ in range(4):
        loop.exchange(4096, 0.01)
    assert loop.exchange(4096, 0.01) == 0.0


def test_after_a_long_copy_the_loop_may_sleep() -> None:
    loop = Loop()
    for _ in range(3):
        assert loop.exchange(64 * MIB, 0.007, is_certain=True) == 0.0


def test_a_message_that_follows_no_answer_says_nothing() -> None:
    loop = Loop()
    loop.exchange(4096, 100e-6)
    loop.clock.advance(10)
    loop.client.heard()
    assert 100e-6 < loop.exchange(4096, 100e-6) < 200e-6
