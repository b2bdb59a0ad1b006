"""The law of every policy, and the order of LRU."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import InvalidConfig
from kvstore.policy import POLICIES, LruPolicy, policy_named
from kvstore.tier import StorageKey

names = st.integers(0, 15)
operations = st.lists(
    st.one_of(
        st.tuples(st.just("insert"), st.lists(names, max_size=4, unique=True)),
        st.tuples(st.just("touch"), st.lists(names, max_size=4, unique=True)),
        st.tuples(st.just("remove"), st.lists(names, min_size=1, max_size=1)),
    ),
    max_size=40,
)


def block(number):
    return StorageKey(bytes([number]) * 40)


def apply(policy, steps):
    for verb, numbers in steps:
        blocks = [block(number) for number in numbers]
        policy.remove(blocks[0]) if verb == "remove" else getattr(policy, verb)(blocks)


@pytest.mark.parametrize("name", sorted(POLICIES))
@given(steps=operations)
def test_candidates_are_exactly_the_blocks_that_were_inserted_and_not_removed(name, steps):
    policy = policy_named(name)()
    expected = set()
    for verb, numbers in steps:
        if verb == "insert":
            expected |= {block(number) for number in numbers}
        if verb == "remove":
            expected -= {block(numbers[0])}

    apply(policy, steps)

    candidates = list(policy.candidates())
    assert sorted(candidates) == sorted(expected)
    assert len(policy) == len(expected)


def test_lru_names_the_least_recently_used_first():
    policy = LruPolicy()

    apply(policy, [("insert", [1]), ("insert", [2]), ("insert", [3]), ("touch", [1])])

    assert list(policy.candidates()) == [block(2), block(3), block(1)]


def test_lru_names_the_tail_of_a_chain_before_its_head():
    policy = LruPolicy()

    apply(policy, [("insert", [1, 2, 3])])

    assert list(policy.candidates()) == [block(3), block(2), block(1)]


def test_an_unknown_policy_is_named_with_those_that_exist():
    with pytest.raises(InvalidConfig, match="'belady' is unknown, expected one of lru"):
        policy_named("belady")
