"""Every policy keeps the law, and those that a library has too agree with it."""

import cachetools
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.policy import POLICIES, LruPolicy, NamespacePolicies, Offer, PolicyCache, policy_named
from kvstore.tier import StorageKey
from tests.contract.policy_law import CAPACITY, PolicyLaw


class TestFifo(PolicyLaw):
    new_policy = staticmethod(policy_named("fifo"))
    keeps_parents = False


class TestLru(PolicyLaw):
    new_policy = staticmethod(policy_named("lru"))


class TestLru2(PolicyLaw):
    new_policy = staticmethod(policy_named("lru-2"))
    keeps_parents = False


class TestSlru(PolicyLaw):
    new_policy = staticmethod(policy_named("slru"))
    keeps_parents = False


class TestArc(PolicyLaw):
    new_policy = staticmethod(policy_named("arc"))
    keeps_parents = False


class TestS3Fifo(PolicyLaw):
    new_policy = staticmethod(policy_named("s3-fifo"))
    keeps_parents = False


class TestSieve(PolicyLaw):
    new_policy = staticmethod(policy_named("sieve"))
    keeps_parents = False


class TestWTinyLfu(PolicyLaw):
    new_policy = staticmethod(policy_named("w-tinylfu"))
    keeps_parents = False

    def test_an_offer_whose_last_block_comes_most_often_loses_its_end_first(self):
        policy = self.new_policy(CAPACITY)
        stored = [StorageKey(bytes([9, index])) for index in range(CAPACITY)]
        policy.insert(stored, size_bytes=1, now_s=0.0)
        first, last = StorageKey(b"\x00"), StorageKey(b"\x00\x01")
        for _ in range(3):
            policy.offer(Offer((last,), 1, first), now_s=1.0)

        named = list(policy.candidates(now_s=2.0, offer=Offer((first, last), 1, None)))

        assert [block for block in named if block in (first, last)] == [last]


class TestLfu(PolicyLaw):
    new_policy = staticmethod(policy_named("lfu"))
    keeps_parents = False


class TestGittins(PolicyLaw):
    new_policy = staticmethod(policy_named("gittins"))


class TestNamespacePolicies(PolicyLaw):
    new_policy = staticmethod(lambda size: NamespacePolicies(LruPolicy(size), {b"n" * 32: LruPolicy(size)}))


def test_every_policy_that_a_configuration_can_name_is_held_to_the_law():
    classes = [one for one in globals().values() if isinstance(one, type) and issubclass(one, PolicyLaw)]

    held = {type(one.new_policy(1)) for one in classes if one.new_policy is not None}

    assert held == {*POLICIES.values(), NamespacePolicies}


numbers = st.lists(st.integers(0, 30), max_size=300)


@pytest.mark.parametrize(
    ("name", "library"),
    [("lru", cachetools.LRUCache), ("fifo", cachetools.FIFOCache)],
)
@settings(max_examples=60, deadline=None)
@given(uses=numbers)
def test_a_library_stores_the_same_blocks(name, library, uses):
    cache, other = PolicyCache(policy_named(name)(8), 8), library(8)

    for now_s, number in enumerate(uses):
        key = StorageKey(b"%d" % number)
        hit_blocks = cache.serve([key], now_s=float(now_s)).hit_blocks
        assert hit_blocks == (other.get(key) is not None)
        other.setdefault(key, True)
        assert {key for key in other if key in cache} == set(other)


@settings(max_examples=60, deadline=None)
@given(uses=numbers)
def test_lfu_evicts_what_a_library_counts_least(uses):
    cache, counted = PolicyCache(policy_named("lfu")(8), 8), {}

    for now_s, number in enumerate(uses):
        key = StorageKey(b"%d" % number)
        served = cache.serve([key], now_s=float(now_s))
        for gone in served.evicted:
            assert counted.pop(gone) <= min(counted.values(), default=0) + 0 or not counted
        counted[key] = counted.get(key, 0) + 1
