"""The order of LRU and FIFO, and how policies are named."""

import pytest

from kvstore.config import load_config
from kvstore.errors import InvalidConfig
from kvstore.policy import (
    NO_HINT,
    POLICIES,
    GittinsPolicy,
    Hint,
    LruPolicy,
    Offer,
    PolicyCache,
    cohorts,
    gittins,
    policy_named,
    ranked,
)
from kvstore.policy.block_classes import new_class, trailing_class
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


def test_a_configuration_can_name_every_policy(tmp_path):
    for name in POLICIES:
        path = tmp_path / f"{name}.toml"
        path.write_text(f'[store]\npolicy = "{name}"\n')
        assert load_config(path, environ={}).store.policy == name


def learned_from(now_s):
    """A policy that saw one kind of block come back after a second, and another never."""
    policy, start_s = policy_named("gittins")(1 << 30), now_s
    cache = PolicyCache(policy, 200)
    for turn in range(400):
        first = StorageKey(b"a%d" % (turn // 2))
        cache.serve([first, StorageKey(b"b%d" % turn)], now_s=start_s + turn)
        cache.serve([first], now_s=start_s + turn + 0.5)
    return policy


def test_what_gittins_learned_is_worth_the_same_in_a_new_one():
    old = learned_from(0.0)

    new = policy_named("gittins")(1 << 30)
    new.from_state(old.to_state())

    again = policy_named("gittins")(1 << 30)
    again.from_state(new.to_state())
    saved, resaved = new.to_state()["classes"], again.to_state()["classes"]
    assert [one[0] for one in saved] == [one[0] for one in resaved]
    assert all(one[1] == other[1] for one, other in zip(saved, resaved, strict=True))
    assert sum(sum(one[1]) for one in saved) > 0


@pytest.mark.parametrize(
    "state",
    [
        {},
        {"version": 2, "classes": []},
        {"version": 1, "classes": [[]]},
        {"version": 1, "classes": [[[0, 0, 0], [], []]]},
        {"version": 1, "classes": [[[0, 0, 0, "x"], [0.0] * 28, [0.0] * 28]]},
        {"version": 1, "classes": [[[0, 0, 0, 0], [0.0] * 27, [0.0] * 28]]},
        {"version": 1, "classes": [[[0, 0, 0, 0], [float("nan")] * 28, [0.0] * 28]]},
        {"version": 1, "classes": [[[0, 0, 0, 0], [0.0] * 28, [-1.0] * 28]]},
    ],
)
def test_a_state_that_is_none_is_refused(state):
    policy = policy_named("gittins")(1 << 30)

    with pytest.raises(ValueError):
        policy.from_state(state)

    assert policy.to_state()["classes"] == []


def test_a_session_that_is_over_leaves_before_older_ones():
    policy = policy_named("gittins")(1 << 30)
    policy.insert([block(1)], size_bytes=1, now_s=0.0)
    policy.insert([block(2)], size_bytes=1, now_s=2.0, hint=Hint(ends_session=True))

    assert list(policy.candidates(now_s=3.0)) == [block(2), block(1)]


def test_what_is_expected_soon_stays_longer_than_what_is_newer():
    policy = policy_named("gittins")(1 << 30)
    policy.insert([block(1)], size_bytes=1, now_s=0.0, hint=Hint(next_use_s=60.0))
    policy.insert([block(2)], size_bytes=1, now_s=5.0)

    assert list(policy.candidates(now_s=10.0)) == [block(2), block(1)]


@pytest.mark.parametrize("hint", [Hint(priority=2), Hint(saves_s_per_byte=4e-9)])
def test_priority_and_saved_seconds_weigh(hint):
    policy = policy_named("gittins")(1 << 30)
    policy.insert([block(3)], size_bytes=1, now_s=0.0, hint=Hint(saves_s_per_byte=1e-9))
    policy.insert([block(1)], size_bytes=1, now_s=0.0, hint=hint)
    policy.insert([block(2)], size_bytes=1, now_s=0.5)

    order = list(policy.candidates(now_s=0.6))

    assert order.index(block(1)) > order.index(block(2))


def test_a_parent_is_a_candidate_as_soon_as_its_last_child_is_named():
    policy = policy_named("gittins")(1 << 30)
    policy.insert([block(1), block(2)], size_bytes=1, now_s=0.0)
    policy.insert([block(3)], size_bytes=1, now_s=50.0)

    assert list(policy.candidates(now_s=60.0)) == [block(2), block(1), block(3)]


def test_adopted_blocks_keep_their_parents():
    policy = policy_named("gittins")(1 << 30)

    policy.adopt([block(2), block(1)], [block(1), None], size_bytes=1, now_s=0.0)

    assert list(policy.candidates(now_s=1.0)) == [block(2), block(1)]


def ghosts_of(policy):
    """How many blocks a policy remembers that are not stored."""
    places = ("_ghosts", "_last", "_recent_ghosts", "_frequent_ghosts", "_offered")
    return sum(len(getattr(policy, place, ())) for place in places)


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_what_is_remembered_of_blocks_that_left_is_bounded(name, monkeypatch):
    monkeypatch.setattr(gittins, "_MIN_GHOSTS", 100)
    monkeypatch.setattr(ranked, "_MIN_HISTORIES", 100)
    cache = PolicyCache(policy_named(name)(20), 20)

    for number in range(3000):
        cache.serve([StorageKey(b"%d" % number)], now_s=float(number))

    assert len(cache) == 20
    assert ghosts_of(cache.policy) <= 160


def test_offers_that_come_to_nothing_are_forgotten(monkeypatch):
    monkeypatch.setattr(gittins, "_MAX_OFFERED", 10)
    policy = policy_named("gittins")(1 << 30)

    for number in range(100):
        policy.offer(Offer([StorageKey(b"%d" % number)], 1), now_s=0.0)

    assert ghosts_of(policy) == 10
    assert len(policy) == 0


def test_uses_alone_are_not_remembered_one_by_one(monkeypatch):
    monkeypatch.setattr(cohorts, "_SPARE_EMPTY", 10)
    policy = GittinsPolicy()
    policy.insert([block(1), block(2)], size_bytes=1, now_s=0.0)

    for _ in range(1000):
        policy.touch([block(1), block(2)], now_s=0.5)

    assert policy._cohorts._num_cohorts == sum(map(len, policy._cohorts._by_age)) <= 24


def test_an_offer_of_any_length_competes(monkeypatch):
    monkeypatch.setattr(gittins, "_MAX_OFFERED", 10)
    policy = GittinsPolicy()
    policy.insert([block(250)], size_bytes=1, now_s=0.0)
    offer = Offer([block(number) for number in range(200)], 1)
    policy.offer(offer._replace(blocks=offer.blocks[:150]), now_s=1.0)
    policy.offer(offer, now_s=2.0)

    named = list(policy.candidates(now_s=2.0, offer=offer))
    policy.refuse(offer, now_s=2.0)

    assert block(250) in named
    assert len(policy) == 1


def test_after_a_quiet_night_blocks_come_of_age_in_steps(monkeypatch):
    monkeypatch.setattr(cohorts, "_MAX_MOVES", 7)
    stepwise, at_once = GittinsPolicy(), GittinsPolicy()
    for number in range(100):
        for policy in (stepwise, at_once):
            policy.insert([block(number)], size_bytes=1, now_s=number / 10)
    for now_s in range(10, 20_000, 100):
        list(at_once.candidates(now_s=float(now_s)))

    orders = [list(stepwise.candidates(now_s=20_000.0)) for _ in range(20)]
    ages = [[len(cohorts) for cohorts in policy._cohorts._by_age] for policy in (stepwise, at_once)]

    assert all(sorted(order) == [block(number) for number in range(100)] for order in orders)
    assert orders[-1] == list(at_once.candidates(now_s=20_000.0))
    assert ages[0] == ages[1]


def test_the_last_blocks_of_short_and_long_requests_are_told_apart_as_those_before_them_are():
    short, long = trailing_class(1, 3, NO_HINT), trailing_class(1, 30, NO_HINT)

    assert short != long
    assert {short, long}.isdisjoint({new_class(1, 3, NO_HINT), new_class(1, 30, NO_HINT)})


def test_lru_orders_a_chain_that_came_in_pieces_tail_first():
    policy = LruPolicy()
    chain = [StorageKey(index.to_bytes(2, "big")) for index in range(192)]
    for start in range(0, 192, 64):
        parent = chain[start - 1] if start else None
        policy.insert(chain[start : start + 64], size_bytes=1, now_s=0.0, parent=parent)

    assert list(policy.candidates(now_s=1.0)) == chain[::-1]


def test_gittins_names_children_first_that_it_adopted_before_their_parents():
    policy = GittinsPolicy(64)
    chain = [StorageKey(bytes([index])) for index in range(64)]
    parents = [None, *chain]
    for end in range(64, 0, -16):
        blocks = chain[end - 16 : end][::-1]
        policy.adopt(blocks, parents[end - 16 : end][::-1], size_bytes=1, now_s=0.0)

    assert list(policy.candidates(now_s=1.0)) == chain[::-1]


def test_gittins_adopts_blocks_that_claim_each_other_as_parents_without_a_circle():
    policy = GittinsPolicy(64)
    one, other = StorageKey(b"one"), StorageKey(b"other")
    policy.adopt([one], [other], size_bytes=1, now_s=0.0)
    policy.adopt([other], [one], size_bytes=1, now_s=0.0)

    assert set(policy.candidates(now_s=1.0)) == {one, other}
