"""LoadPolicy: what loading and prefill are expected to take, and which is chosen."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore_engine_adapter.load_policy import LoadPolicy, LoadSpeed, PrefillSpeed

TOKENS = 16


def policy(**block_s):
    made = LoadPolicy(TOKENS, 1 << 20, PrefillSpeed(token_s=0.001))
    made.speeds = {tier: LoadSpeed(call_s=0.0, block_s=seconds) for tier, seconds in block_s.items()}
    return made


def test_blocks_in_place_are_always_used():
    assert policy(slow=10.0).blocks_worth_loading(["vram"] * 3 + ["slow"] * 5) == 3


def test_all_blocks_are_loaded_where_that_is_quicker():
    assert policy(dram=0.001).blocks_worth_loading(["vram", "dram", "dram"]) == 3


def test_a_slow_tier_behind_a_quick_one_is_left_out():
    assert policy(dram=0.001, remote=0.1).blocks_worth_loading(["dram"] * 4 + ["remote"] * 4) == 4


def test_a_few_slow_blocks_before_many_quick_ones_are_loaded():
    assert policy(remote=0.02, dram=0.001).blocks_worth_loading(["remote"] * 2 + ["dram"] * 10) == 12


def test_loading_that_is_hardly_quicker_is_not_worth_it():
    assert policy(dram=0.0155).blocks_worth_loading(["dram"] * 8) == 0


def test_the_longer_the_context_the_more_loading_saves():
    made = LoadPolicy(TOKENS, 1 << 20, PrefillSpeed(token_s=0.001, context_s=0.000_01))
    made.speeds["dram"] = LoadSpeed(call_s=0.0, block_s=0.03)
    assert made.blocks_worth_loading(["dram"] * 10) == 0
    assert made.blocks_worth_loading(["dram"] * 400) == 400


def test_a_tier_that_is_passed_over_is_tried_again_after_a_while():
    made = policy(remote=0.1)
    tries = next(n for n in range(100) if made.blocks_worth_loading(["remote"] * 8))
    assert 5 < tries < 40


def test_the_time_of_a_call_is_told_from_that_of_its_blocks():
    speed = LoadSpeed(call_s=0.001, block_s=0.0001)
    for blocks in (1, 60, 4, 30, 2, 50) * 5:
        speed.note(blocks, 0.020 + 0.0005 * blocks)
    assert speed.expected_s(1) == pytest.approx(0.0205, rel=0.1)
    assert speed.expected_s(100) == pytest.approx(0.07, rel=0.1)


@given(st.lists(st.tuples(st.integers(1, 500), st.floats(0, 10)), max_size=60), st.integers(1, 500))
def test_no_load_is_expected_to_take_no_time_or_less(loads, blocks):
    speed = LoadSpeed(call_s=0.001, block_s=0.001)
    for count, seconds in loads:
        speed.note(count, seconds)
    assert 0 < speed.expected_s(blocks) < 1e6


def test_one_outlier_moves_the_expectation_by_a_bounded_factor():
    speed = LoadSpeed(call_s=0.001, block_s=0.001)
    before = speed.expected_s(10)
    speed.note(10, 1000.0)
    assert speed.expected_s(10) < 8 * before


def test_a_load_from_two_tiers_teaches_both_in_proportion():
    made = policy(dram=0.001, remote=0.01)
    before = {tier: made.speeds[tier].expected_s(10) for tier in ("dram", "remote")}
    made.note_load(["vram"] * 5 + ["dram"] * 10 + ["remote"] * 10, 2 * sum(before.values()))
    assert made.speeds["dram"].expected_s(10) > before["dram"]
    assert made.speeds["remote"].expected_s(10) > before["remote"]


def test_prefill_follows_what_passes_take():
    speed = PrefillSpeed(token_s=0.001, context_s=0.000_001)
    for _ in range(30):
        speed.note(speed.expected_s(100, 64), 3 * (0.001 * 64 + 0.000_001 * 64 * 132))
    assert speed.factor == pytest.approx(3.0, rel=0.05)
