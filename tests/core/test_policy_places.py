"""Policies by tier and by namespace: from the configuration, and changed while the store runs."""

import dataclasses

import pytest

from kvstore.config_sections import StoreConfig
from kvstore.config_values import BadValue
from kvstore.errors import InvalidConfig, InvalidRequest
from kvstore.policy import POLICIES, GittinsPolicy, LruPolicy, NamespacePolicies, Offer
from kvstore.policy_keeping import policies_of
from kvstore.policy_plan import POLICY_NAMES, PolicyPlan, plan_text
from kvstore.tier import StorageKey
from tests.core.gated_tier import GatedTier
from tests.core.manager_harness import SPACE, running

OTHER = dataclasses.replace(SPACE, model="other")
HEX = SPACE.digest.hex()


def test_a_plan_can_name_every_policy_and_no_other():
    assert set(POLICY_NAMES) == set(POLICIES)


def test_the_rule_that_says_more_of_a_place_holds():
    plan = PolicyPlan.parse(f"lru, ssd=arc, {HEX}=fifo, {HEX}@ssd=s3fifo")

    assert (plan.of_tier("dram"), plan.of_tier("ssd")) == ("lru", "arc")
    assert plan.own_of("dram") == {SPACE.digest: "fifo"}
    assert plan.own_of("ssd") == {SPACE.digest: "s3-fifo"}
    assert PolicyPlan.parse(str(plan)) == plan


def test_a_later_rule_ends_those_for_parts_of_its_place():
    plan = PolicyPlan.parse(f"lru, ssd=arc, {HEX}@ssd=fifo")

    assert str(plan.amended("ssd=lfu")) == "lru, ssd=lfu"
    assert str(plan.amended("dram=lfu")) == f"lru, ssd=arc, dram=lfu, {HEX}@ssd=fifo"
    assert str(plan.amended(f"{HEX}=sieve")) == f"lru, ssd=arc, {HEX}=sieve"
    assert str(plan.amended("gittins")) == "gittins"


def test_default_takes_the_rules_of_a_place_away_and_no_others():
    plan = PolicyPlan.parse(f"lru, ssd=arc, {HEX}=fifo, {HEX}@ssd=lfu")

    assert str(plan.amended(f"{HEX}@ssd=default")) == f"lru, ssd=arc, {HEX}=fifo"
    assert str(plan.amended(f"{HEX}=default")) == "lru, ssd=arc"
    assert str(plan.amended("ssd=default")) == f"lru, {HEX}=fifo"
    assert plan.amended(f"{OTHER.digest.hex()}=default") == plan


def test_namespaces_that_lose_their_rules_make_room_for_others():
    digests = [f"{number:064x}" for number in range(33)]
    full = PolicyPlan.parse(",".join(f"{digest}=lru" for digest in digests[:32]))

    with pytest.raises(InvalidConfig, match="at most 32"):
        full.amended(f"{digests[32]}=lru")
    assert full.amended(f"{digests[0]}=default,{digests[32]}=lru")


@pytest.mark.parametrize(
    "text",
    [
        "default",
        "",
        "belady",
        "ssd=",
        "=lru",
        "a b=lru",
        f"{HEX[1:]}=lru",
        f"{HEX}@=lru" * 2,
        "x@ssd=lru",
        "lru," * 2000,
    ],
)
def test_what_is_no_plan_is_refused(text):
    with pytest.raises(InvalidConfig, match="policy"):
        PolicyPlan.parse(text)


def test_a_plan_names_so_many_namespaces_at_most():
    with pytest.raises(InvalidConfig, match="at most 32 namespaces"):
        PolicyPlan.parse(", ".join(plan_text("lru", namespace=bytes([n]) * 32) for n in range(33)))


def test_a_configuration_takes_a_text_or_a_list():
    rule = next(field for field in dataclasses.fields(StoreConfig) if field.name == "policy").metadata["rule"]

    assert rule.read("s3fifo") == "s3-fifo"
    assert rule.read(["gittins", "ssd=lru"]) == rule.read("gittins,ssd = lru") == "gittins, ssd=lru"
    for wrong in (7, [], ["lru", 7], "nvme,"):
        with pytest.raises(BadValue, match=r"expected one of fifo, .*DIGEST@TIER"):
            rule.read(wrong)


async def test_a_tier_that_there_is_not_has_no_policy():
    with pytest.raises(InvalidRequest, match="no tier 'nvme' that has one, expected one of ssd"):
        policies_of([GatedTier("ssd")], PolicyPlan.parse("nvme=lru"))
    async with running(GatedTier("ssd")) as harness:
        with pytest.raises(InvalidRequest, match="expected one of dram, ssd"):
            await harness.manager.change_policy("nvme=lru")
        assert harness.manager.stats()["policy"] == "gittins"


@pytest.mark.parametrize("own", POLICIES)
async def test_tiers_and_namespaces_change_their_policies_and_lose_no_block(own):
    chains = [space.chain(list(range(start, start + 16))) for space in (SPACE, OTHER) for start in (0, 100)]
    async with running(GatedTier("ssd"), blocks=16, high_water_ratio=1.0) as harness:
        manager = harness.manager
        manager.open_namespace(OTHER)
        for chain in chains:
            await harness.put(chain)
        await manager.flush(timeout_s=30)
        leased = await manager.fetch(chains[0], owner=harness.owner)
        kept = manager.policy_of("dram")

        for text in (f"ssd={own}", f"{HEX}={own}", f"{OTHER.digest.hex()}@dram=lru", f"ssd=fifo, {HEX}=arc"):
            await manager.change_policy(text)
            assert await manager.check() == []
            assert [(await manager.match(chain)).blocks for chain in chains] == [4] * 4
        stats = manager.stats()

        assert stats["policy"].startswith(f"gittins, ssd=fifo, {HEX}=arc")
        assert stats["tiers"]["ssd"]["policy"] == "fifo"
        assert stats["tiers"]["ssd"]["namespace_policies"] == {HEX: "arc"}
        assert stats["tiers"]["dram"]["namespace_policies"] == {HEX: "arc", OTHER.digest.hex(): "lru"}
        for start in (300, 400, 500):
            await harness.put(OTHER.chain(list(range(start, start + 16))))
            await harness.put(SPACE.chain(list(range(start, start + 16))))
        assert (await manager.match(chains[0])).tiers == ("dram",) * 4
        manager.release(leased.lease, owner=harness.owner)
        assert (await manager.change_policy("gittins")).startswith("gittins, ssd=fifo")
        assert type(manager.policy_of("dram")) is GittinsPolicy is not kept


async def test_a_tier_that_a_change_says_nothing_of_keeps_its_policy():
    async with running(GatedTier("ssd"), blocks=16) as harness:
        dram = harness.manager.policy_of("dram")

        await harness.manager.change_policy("ssd=lru")

        assert harness.manager.policy_of("dram") is dram
        assert await harness.manager.change_policy("gittins") == "gittins, ssd=lru"


async def test_what_was_learned_outlives_a_change_that_leaves_the_kind():
    async with running(GatedTier("ssd"), blocks=16) as harness:
        for _ in range(3):
            await harness.put(SPACE.chain(list(range(16))))
            await harness.fetch(SPACE.chain(list(range(16))))
        learned = sum(sum(used) for _, used, _ in harness.manager.policy_of("dram").to_state()["classes"])

        await harness.manager.change_policy(f"{OTHER.digest.hex()}=lru")

        after = harness.manager.policy_of("dram").to_state()["classes"]
        assert sum(sum(used) for _, used, _ in after) == learned > 0


def named(space, numbers):
    return [StorageKey(number.to_bytes(8, "little") * 4 + space) for number in numbers]


A, B, C = (bytes([n]) * 32 for n in (1, 2, 3))


def filled(num_a, num_b):
    policy = NamespacePolicies(LruPolicy(), {A: LruPolicy(), B: LruPolicy()})
    for space, number in ((A, num_a), (B, num_b)):
        for block in named(space, range(number)):
            policy.insert([block], size_bytes=10, now_s=0.0)
    return policy


def test_what_is_needed_is_taken_from_every_group_in_proportion_to_what_it_stores():
    policy = filled(300, 100)

    for _ in range(100):
        policy.evict(next(iter(policy.candidates(now_s=1.0))), now_s=1.0)

    own = policy.own
    assert (len(own[A]), len(own[B])) == (pytest.approx(225, abs=3), pytest.approx(75, abs=3))


def test_room_that_a_namespace_makes_of_its_own_spares_it_nothing_later():
    policy = filled(100, 100)
    for number in range(50):
        mine = next(iter(policy.candidates_of(A, now_s=1.0)))
        policy.evict(mine, now_s=1.0)
        policy.insert(named(A, [1000 + number]), size_bytes=10, now_s=1.0)

    for _ in range(40):
        policy.evict(next(iter(policy.candidates(now_s=2.0))), now_s=2.0)

    assert len(policy.own[A]) == pytest.approx(len(policy.own[B]), abs=2)


def test_a_namespace_that_comes_later_begins_with_what_it_brings():
    policy = filled(100, 0)
    for _ in range(60):
        policy.evict(next(iter(policy.candidates(now_s=1.0))), now_s=1.0)
    policy.insert(named(B, range(40)), size_bytes=10, now_s=2.0)

    for _ in range(40):
        policy.evict(next(iter(policy.candidates(now_s=3.0))), now_s=3.0)

    assert len(policy.own[B]) == pytest.approx(20, abs=2)


def test_an_offer_competes_with_its_own_namespace():
    policy = NamespacePolicies(LruPolicy(), {A: GittinsPolicy()})
    policy.insert(named(C, range(4)), size_bytes=1, now_s=0.0)
    offered = named(A, [7, 8])

    names = list(policy.candidates(now_s=1.0, offer=Offer(offered, 1)))

    assert set(names) <= {*named(C, range(4)), *offered}
    assert policy.may_refuse


async def test_a_namespace_at_its_quota_gives_blocks_of_its_own():
    plan = f"lru, {HEX}=fifo"
    async with running(blocks=16, namespace_quota_ratio=0.5, high_water_ratio=1.0) as harness:
        manager = harness.manager
        manager.open_namespace(OTHER)
        await manager.change_policy(plan)
        await harness.put(OTHER.chain(list(range(16))))
        for start in range(0, 800, 100):
            await harness.put(SPACE.chain(list(range(start, start + 16))))

        assert (await manager.match(OTHER.chain(list(range(16))))).blocks == 4
        assert len(manager.policy_of("dram").own[SPACE.digest]) == 8


async def test_what_memory_would_refuse_is_stored_where_a_tier_below_has_room():
    async with running(GatedTier("ssd"), blocks=8, high_water_ratio=1.0) as harness:
        manager = harness.manager
        hot = SPACE.chain(list(range(32)))
        for _ in range(4):
            await harness.put(hot)
            await harness.fetch(hot)
        await manager.flush(timeout_s=30)
        before = manager.stats()["puts_blocks"].get("not_admitted", 0)

        for start in range(1000, 1400, 100):
            await harness.put(SPACE.chain(list(range(start, start + 16))))
            await manager.flush(timeout_s=30)

        assert manager.stats()["puts_blocks"].get("not_admitted", 0) == before
        for start in range(1000, 1400, 100):
            assert (await manager.match(SPACE.chain(list(range(start, start + 16))))).blocks == 4
