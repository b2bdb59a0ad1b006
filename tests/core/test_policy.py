"""The order of LRU and FIFO, and how policies are named."""

import pytest

from kvstore.errors import InvalidConfig
from kvstore.policy import LruPolicy, policy_named
from kvstore.tier import StorageKey


def block(number):
    return StorageKey(bytes([number]) * 40)


def apply(policy, steps):
    for verb, numbers in steps:
        blocks = [block(number) for number in numbers]
        if verb == "insert":
            policy.insert(blocks, size_bytes=1, now_s=0.0)
        else:
            policy.touch(blocks, now_s=0.0)


def order(policy):
    return list(policy.candidates(now_s=0.0))


def test_lru_names_the_least_recently_used_first():
    policy = LruPolicy()

    apply(policy, [("insert", [1]), ("insert", [2]), ("insert", [3]), ("touch", [1])])

    assert order(policy) == [block(2), block(3), block(1)]


def test_lru_touches_a_chain_tail_first():
    policy = LruPolicy()

    apply(policy, [("insert", [1, 2, 3])])

    assert order(policy) == [block(3), block(2), block(1)]


def test_lru_files_new_blocks_below_those_they_continue():
    policy = LruPolicy()

    apply(policy, [("insert", [1, 2]), ("touch", [1, 2])])
    policy.insert([block(3), block(4)], size_bytes=1, now_s=0.0, parent=block(2))

    assert order(policy) == [block(4), block(3), block(2), block(1)]


def test_fifo_files_a_chain_head_first_and_ignores_uses():
    policy = policy_named("fifo")(0)

    apply(policy, [("insert", [1, 2]), ("insert", [3]), ("touch", [1, 2])])

    assert order(policy) == [block(1), block(2), block(3)]


def test_an_unknown_policy_is_named_with_those_that_exist():
    with pytest.raises(InvalidConfig, match="'belady' is unknown, expected one of fifo, lru"):
        policy_named("belady")
