"""A live BlockManager that a trace drives hits and stores what the replay says, to the block."""

import asyncio
import io
import random

import pytest

from kvstore.keys import BlockKey, Namespace, PrefixChain
from kvstore.layout import KVLayout
from kvstore.manager import BlockManager
from kvstore.policy import policy_named
from kvstore.policy_plan import PolicyPlan
from kvstore.replay import ProgressBar, ReplayPlan, TierSize, policy_of, read_trace, replay
from kvstore.state import ManagerSettings, WriteMode
from kvstore_tiers.dram import DramTier
from tests.core.gated_tier import GatedTier
from tests.replay.traces import PUBLISHED, needs_published_trace, trace_of

BLOCK_BYTES = 4096
SPACE = Namespace(model="m", layout=KVLayout.opaque(block_bytes=BLOCK_BYTES, block_tokens=4))


def conversations(requests, seed):
    """A trace of conversations under three prompts: some go on, some end, some come back late."""
    chance = random.Random(seed)
    running, fresh = [], 1000
    chains = []
    for _ in range(requests):
        if not running or chance.random() < 0.4:
            first = 100 * chance.randrange(3)
            running.append(list(range(first, first + 2 + first // 50)))
        chain = running.pop(max(len(running) - 1 - int(chance.expovariate(0.3)), 0))
        length = chance.randint(0, 5)
        chain = [*chain, *range(fresh, fresh + length)]
        fresh += length
        chains.append(chain)
        if chance.random() < 0.75:
            running.append(chain)
    return trace_of(*chains, gap_s=0.7)


async def live(trace, policy, capacity):
    """Do with a manager what a client does with each request; returns (hit blocks, stored blocks)."""
    now_s = [0.0]
    manager = BlockManager(
        DramTier(capacity_bytes=capacity * BLOCK_BYTES, staging_bytes=0),
        [],
        settings=ManagerSettings(timeout_s=5.0, high_water_ratio=1.0, low_water_ratio=1.0),
        new_policy=policy_named(policy),
        clock=lambda: now_s[0],
    )
    await manager.open()
    space, owner = manager.open_namespace(SPACE), manager.new_owner()
    hits = stored = 0
    for blocks, at_s in zip(trace.chains(), trace.arrival_s.tolist(), strict=True):
        now_s[0] = at_s
        keys = tuple(BlockKey(number.to_bytes(32, "little")) for number in blocks)
        chain = PrefixChain(space, keys, block_tokens=4)
        fetched = await manager.fetch(chain, owner=owner)
        hits += len(fetched.blocks)
        reserved = await manager.reserve(chain, owner=owner, timeout_s=0.0)
        if reserved.slots:
            places = [slot.slot for slot in reserved.slots]
            run = chain[reserved.slots[0].position : reserved.slots[-1].position + 1]
            stored += sum(manager.commit(run, places, owner=owner, checksums=[0] * len(run)))
            manager.return_slots(places, owner=owner)
        if fetched.lease is not None:
            manager.release(fetched.lease, owner=owner)
    assert await manager.check(sample_blocks=0) == []
    await manager.close()
    return hits, stored


def replayed(trace, policy, capacity):
    (result,) = replay(trace, ReplayPlan([policy_of(policy)], [capacity]), ProgressBar(io.StringIO()))
    return result.hit_blocks, result.written_blocks


@pytest.mark.parametrize("policy", ["lru", "gittins"])
@pytest.mark.parametrize("capacity", [30, 100, 400])
def test_a_live_manager_hits_and_stores_what_the_replay_says(policy, capacity):
    trace = conversations(400, seed=capacity)

    assert asyncio.run(live(trace, policy, capacity)) == replayed(trace, policy, capacity)


@needs_published_trace
@pytest.mark.parametrize("policy", ["lru", "gittins"])
def test_so_it_does_on_the_published_trace(policy):
    trace = read_trace(str(PUBLISHED), max_requests=400)

    assert asyncio.run(live(trace, policy, 1000)) == replayed(trace, policy, 1000)


async def live_tiers(trace, policies, sizes):
    """As ``live``, with a tier below that what leaves memory is written to; returns hit blocks."""
    now_s = [0.0]
    below = GatedTier("ssd", capacity_blocks=sizes[1])
    manager = BlockManager(
        DramTier(capacity_bytes=sizes[0] * BLOCK_BYTES, staging_bytes=0),
        [below],
        settings=ManagerSettings(
            timeout_s=60.0, high_water_ratio=1.0, low_water_ratio=1.0, write_mode=WriteMode.BACK
        ),
        new_policy=PolicyPlan.parse(f"{policies[0]}, ssd={policies[1]}"),
        clock=lambda: now_s[0],
    )
    await manager.open()
    space, owner = manager.open_namespace(SPACE), manager.new_owner()
    hits = 0
    for blocks, at_s in zip(trace.chains(), trace.arrival_s.tolist(), strict=True):
        now_s[0] = at_s
        keys = tuple(BlockKey(number.to_bytes(32, "little")) for number in blocks)
        chain = PrefixChain(space, keys, block_tokens=4)
        hits += (await manager.match(chain)).blocks
        fetched = await manager.fetch(chain, owner=owner)
        reserved = await manager.reserve(chain, owner=owner)
        if reserved.slots:
            places = [slot.slot for slot in reserved.slots]
            run = chain[reserved.slots[0].position : reserved.slots[-1].position + 1]
            manager.commit(run, places, owner=owner, checksums=None)
            manager.return_slots(places, owner=owner)
        if fetched.lease is not None:
            manager.release(fetched.lease, owner=owner)
        await manager.flush(timeout_s=60.0)
    assert await manager.check(sample_blocks=0) == []
    await manager.close()
    return hits


@pytest.mark.parametrize("policies", [("lru", "lru"), ("gittins", "gittins"), ("lru", "gittins")])
def test_a_live_manager_of_two_tiers_hits_about_what_the_replay_says(policies):
    trace, sizes = conversations(400, seed=7), (40, 160)
    tiers = [TierSize("dram", sizes[0]), TierSize("ssd", sizes[1])]

    hits = asyncio.run(live_tiers(trace, policies, sizes))

    plan = ReplayPlan([policy_of("+".join(policies))], [], tiers)
    (result,) = replay(trace, plan, ProgressBar(io.StringIO()))
    # Several blocks leave memory at a time, and are written in batches: not to the block.
    assert hits == pytest.approx(result.hit_blocks, rel=0.1)
