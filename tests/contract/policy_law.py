"""The law of every eviction policy: what a tier's owner relies on, whatever the policy prefers."""

import msgpack
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvstore.policy import NO_HINT, Hint, Offer, PolicyCache
from kvstore.tier import StorageKey

CAPACITY = 24
MAX_GHOSTS = 524_288


def block(path):
    """The block at the end of a path of branches: equal paths, equal chains."""
    return StorageKey(bytes(path) or b"root")


def chain(branches):
    return [block(branches[: end + 1]) for end in range(len(branches))]


chains = st.lists(st.integers(0, 2), min_size=1, max_size=7).map(chain)
hints = st.sampled_from(
    [
        NO_HINT,
        Hint(ends_session=True),
        Hint(is_one_off=True),
        Hint(next_use_s=30.0),
        Hint(priority=3, output_tokens=20),
        Hint(saves_s_per_byte=1e-9),
    ]
)
requests = st.lists(
    st.tuples(chains, st.sampled_from([1, 2, 3]), st.floats(0, 500), hints, st.integers(0, 9)), max_size=60
)


def law(max_examples):
    # The same test runs for every policy, each in a class of its own.
    return settings(
        max_examples=max_examples, deadline=None, suppress_health_check=[HealthCheck.differing_executors]
    )


class PolicyLaw:
    """Every policy's tests are a subclass that sets ``new_policy``; textbook FIFO knows no parents."""

    new_policy = None
    keeps_parents = True

    def serve(self, steps, check):
        cache = PolicyCache(self.new_policy(CAPACITY), CAPACITY)
        sizes, now_s = {}, 0.0
        for blocks, size_bytes, pause_s, hint, dice in steps:
            now_s += pause_s
            # A block has one size for good.
            size_bytes = sizes.setdefault(blocks[0], size_bytes)
            if dice == 0:
                cache.drop(blocks[::-1])
                served = None
            else:
                served = cache.serve(blocks, size_bytes=size_bytes, now_s=now_s, hint=hint)
            check(cache, served, blocks, now_s)
        return cache

    @law(20)
    @given(steps=requests)
    def test_never_more_is_stored_than_there_is_room_for(self, steps):
        def check(cache, served, blocks, now_s):
            assert cache.used_bytes <= CAPACITY

        self.serve(steps, check)

    @law(20)
    @given(steps=requests)
    def test_candidates_are_the_stored_blocks_each_once(self, steps):
        def check(cache, served, blocks, now_s):
            candidates = list(cache.policy.candidates(now_s=now_s))
            assert len(candidates) == len(cache) == len(cache.policy)
            assert len(set(candidates)) == len(candidates)
            assert all(name in cache and name in cache.policy for name in candidates)

        self.serve(steps, check)

    @law(20)
    @given(steps=requests)
    def test_what_is_told_is_what_happened(self, steps):
        def check(cache, served, blocks, now_s):
            if served is None:
                assert not any(name in cache or name in cache.policy for name in blocks)
                return
            assert all(name in cache for name in blocks[: served.hit_blocks] if name not in served.evicted)
            assert not set(served.written) & set(served.refused) - set(served.evicted)
            assert not any(name in cache for name in served.refused if name not in served.written)

        self.serve(steps, check)

    @law(20)
    @given(steps=requests)
    def test_no_parent_leaves_before_its_child(self, steps):
        def check(cache, served, blocks, now_s):
            for name in cache.policy.candidates(now_s=now_s) if self.keeps_parents else ():
                assert len(name) == 1 or name[:-1] in cache

        # A block that is dropped by itself orphans its children.
        self.serve([(*step[:4], 1) for step in steps], check)

    @law(20)
    @given(steps=requests, offered=chains)
    def test_an_offer_is_refused_from_its_end_and_changes_nothing_stored(self, steps, offered):
        cache = self.serve(steps, lambda *_: None)
        now_s = sum(step[2] for step in steps)
        missing = [name for name in offered if name not in cache]
        offer = Offer(missing, 1, offered[len(offered) - len(missing) - 1] if missing != offered else None)
        before = set(cache.policy.candidates(now_s=now_s))

        if missing:
            cache.policy.offer(offer, now_s=now_s)
        named = list(cache.policy.candidates(now_s=now_s, offer=offer if missing else None))

        refused = [name for name in named if name in missing]
        assert refused == missing[::-1][: len(refused)]
        assert set(named) - set(refused) == before
        assert set(cache.policy.candidates(now_s=now_s)) == before

    @law(10)
    @given(steps=requests)
    def test_the_same_requests_give_the_same_order(self, steps):
        orders = []
        for _ in range(2):
            cache = self.serve(steps, lambda *_: None)
            orders.append(list(cache.policy.candidates(now_s=1e6)))

        assert orders[0] == orders[1]

    @law(20)
    @given(steps=requests)
    def test_what_it_learned_goes_through_msgpack_into_a_new_one(self, steps):
        cache = self.serve(steps, lambda *_: None)

        saved = msgpack.packb(cache.policy.to_state())
        fresh = self.new_policy(CAPACITY)
        fresh.from_state(msgpack.unpackb(saved))

        assert len(fresh) == 0
        assert len(saved) < 1 << 20

    def test_unknown_blocks_are_ignored(self):
        policy = self.new_policy(CAPACITY)

        policy.touch([block([9])], now_s=1.0)
        policy.evict(block([9]), now_s=1.0)
        policy.remove(block([9]))

        assert len(policy) == 0
        assert block([9]) not in policy
        assert list(policy.candidates(now_s=2.0)) == []

    def test_a_request_that_is_larger_than_the_tier_stores_its_head_or_less(self):
        cache = PolicyCache(self.new_policy(CAPACITY), CAPACITY)
        blocks = chain([1] * (CAPACITY + 9))

        cache.serve(blocks, now_s=1.0)

        assert len(cache) == CAPACITY
        assert not self.keeps_parents or cache.leading(blocks) == CAPACITY

    @pytest.mark.parametrize("is_evicted", [False, True])
    def test_a_removed_block_comes_back_as_a_new_one(self, is_evicted):
        policy = self.new_policy(CAPACITY)
        policy.insert([block([1])], size_bytes=1, now_s=1.0)

        if is_evicted:
            policy.evict(block([1]), now_s=2.0)
        policy.remove(block([1]))

        assert list(policy.candidates(now_s=3.0)) == []
        policy.insert([block([1])], size_bytes=1, now_s=4.0)
        assert list(policy.candidates(now_s=4.0)) == [block([1])]
