"""Gittins, run by run, decides and knows what a plain form that goes block by block does, to the last bit."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.policy import NO_HINT, GittinsPolicy, Hint, Offer, PolicyCache, gittins
from kvstore.policy.hazards import NUM_AGES, index_table
from kvstore.tier import StorageKey
from tests.core.plain_gittins import PlainGittins, plain_index_table, state_of

CAPACITY = 24


def chain_of(branches):
    return [StorageKey(b"k" + bytes(branches[: end + 1])) for end in range(len(branches))]


CHAINS = st.lists(st.integers(0, 1), min_size=1, max_size=9).map(chain_of)
HINTS = st.sampled_from(
    [NO_HINT, NO_HINT, Hint(ends_session=True), Hint(is_one_off=True), Hint(priority=2, output_tokens=20)]
)
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["serve", "serve", "serve", "store", "insert", "drop", "refuse", "hint"]),
        CHAINS,
        st.sampled_from([0.0, 0.1, 1.3, 7.7, 400.1]),
        HINTS,
        st.integers(0, 8),
    ),
    min_size=1,
    max_size=50,
)


def told(policy, steps):
    """What a policy decides of some steps."""
    cache, now_s, decided = PolicyCache(policy, CAPACITY), 0.1, []
    for verb, blocks, pause_s, hint, dice in steps:
        now_s += pause_s
        if verb == "serve":
            decided.append(cache.serve(blocks, now_s=now_s, hint=hint))
        elif verb == "store":
            decided.append(cache.store(blocks[dice:], now_s=now_s, hint=hint))
        elif verb == "insert":  # whatever is stored of them already
            policy.insert(blocks, size_bytes=1, now_s=now_s, hint=hint, is_use=dice % 2 == 0)
            cache._sizes.update(dict.fromkeys(blocks, 1))
            cache.used_bytes = len(cache)
        elif verb == "drop":
            cache.drop(blocks[dice:])
        elif verb == "refuse":
            cache.pass_by(Offer(blocks, 1, None, hint), now_s=now_s)
        else:
            policy.note_hint(blocks, now_s=now_s, hint=hint)
    return decided, list(policy.candidates(now_s=now_s + 1.0)), state_of(policy)


@pytest.mark.parametrize(("rebuild_requests", "min_ghosts"), [(2, 65_536), (7, 5)])
def test_a_run_of_blocks_is_handled_as_its_blocks_one_by_one(rebuild_requests, min_ghosts):
    @settings(max_examples=100, deadline=None)
    @given(steps=STEPS)
    def check(steps):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(gittins, "_REBUILD_REQUESTS", rebuild_requests)
            patch.setattr(gittins, "_MIN_GHOSTS", min_ghosts)
            patch.setattr(gittins, "_MANY_GHOSTS", 4 * min_ghosts)
            assert told(GittinsPolicy(CAPACITY), steps) == told(PlainGittins(CAPACITY), steps)

    check()


@given(
    hazards=st.lists(
        st.lists(st.floats(0, 1e3), min_size=NUM_AGES, max_size=NUM_AGES), min_size=1, max_size=4
    )
)
def test_what_a_slot_is_worth_is_the_same_for_all_ages_at_once_as_for_each_by_itself(hazards):
    table = np.array(hazards)

    assert index_table(table).tolist() == plain_index_table(table).tolist()


def test_a_chain_that_names_a_block_twice_is_no_fault():
    policy = GittinsPolicy(CAPACITY)
    one, other = StorageKey(b"one"), StorageKey(b"other")

    policy.insert([one, other, one], size_bytes=1, now_s=0.0)
    policy.insert([other, one], size_bytes=1, now_s=1.0)

    assert len(policy) == 2
