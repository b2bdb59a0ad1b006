"""Succession: whose a block is while one policy takes over from another."""

from kvstore.policy import LruPolicy
from kvstore.succession import Succession
from kvstore.tier import StorageKey

OLD, FRESH = [StorageKey(bytes([at]) * 64) for at in range(4)], StorageKey(b"f" * 64)


def test_what_comes_once_the_predecessor_names_no_more_is_the_successors():
    before, after = LruPolicy(1 << 20), LruPolicy(1 << 20)
    before.insert(OLD, size_bytes=4096, now_s=0.0)
    both = Succession(before, after)
    both.remove(OLD[0])  # so that fewer are taken than there were
    taken = both.take(8, now_s=1.0)
    both.adopt(taken, [None] * len(taken), size_bytes=4096, now_s=1.0)
    assert both.take(8, now_s=2.0) == []

    both.insert([FRESH], size_bytes=4096, now_s=2.0)
    assert FRESH in after
    assert FRESH not in before
