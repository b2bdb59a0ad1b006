"""Load or compute, measured from an engine's steps."""

from kvstore_engine_adapter.load_policy import LoadPolicy, PrefillSpeed
from kvstore_engine_adapter.step_speeds import StepSpeeds

TOKENS = 32


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def made() -> tuple[StepSpeeds, LoadPolicy, Clock]:
    clock = Clock()
    policy = LoadPolicy(TOKENS, 1 << 20, PrefillSpeed(token_s=0.001))
    return StepSpeeds(policy, clock=clock), policy, clock


def prefill(speeds: StepSpeeds, clock: Clock, *, token_s: float, times: int = 30) -> None:
    for _ in range(times):
        speeds.note_step(256)
        clock.now_s += 256 * token_s
        speeds.note_step(1)
        clock.now_s += token_s
    speeds.note_step(1)


def test_a_fast_engine_computes_and_a_slow_one_loads() -> None:
    speeds, policy, clock = made()
    policy.note_load(["remote"] * 8, 0.1)
    prefill(speeds, clock, token_s=1e-6)
    assert speeds.blocks_worth_loading(["remote"] * 8, 8) == 0
    speeds, _, clock = made()
    prefill(speeds, clock, token_s=0.01)
    assert speeds.blocks_worth_loading(["remote"] * 8, 8) == 8


def test_short_steps_and_pauses_say_nothing_of_prefill() -> None:
    speeds, policy, clock = made()
    for _ in range(10):
        speeds.note_step(8)
        clock.now_s += 5
    for _ in range(10):
        speeds.note_step(0)
        clock.now_s += 5
        speeds.note_step(256)
        clock.now_s += 100
    assert policy.prefill.factor == 1.0


def test_loads_that_brought_everything_tell_what_loads_take() -> None:
    speeds, policy, clock = made()
    before_s = policy.expected_load_s(["dram"] * 8)
    for name in "abcdefghij":
        speeds.begin_load(name, ["dram"] * 8)
        clock.now_s += 1.0
        speeds.end_load(name, is_whole=True)
    assert policy.expected_load_s(["dram"] * 8) > 10 * before_s
    slow_s = policy.expected_load_s(["dram"] * 8)
    speeds.begin_load("k", ["dram"] * 8)
    speeds.end_load("k", is_whole=False)
    speeds.end_load("nobody", is_whole=True)
    assert policy.expected_load_s(["dram"] * 8) == slow_s


def test_blocks_of_unknown_tiers_are_taken_for_those_of_the_last_known_one() -> None:
    speeds, _, _ = made()
    assert speeds.blocks_worth_loading([], 5) == 5
    assert speeds.blocks_worth_loading(["dram"], 5) == 5
