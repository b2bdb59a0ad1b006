"""A block manager that a trace drives stores and serves the same blocks as the policy's simulation."""

import asyncio
import itertools
import json
import random
from pathlib import Path

import numpy as np
import pytest

from kvstore.checksum import checksum
from kvstore.keys import Namespace
from kvstore.layout import KVLayout
from kvstore.manager import BlockManager
from kvstore.miss import MissReason
from kvstore.policy import PolicyCache, policy_named
from kvstore.state import ManagerSettings
from kvstore_tiers.dram import DramTier

BLOCK_BYTES = 4096
SPACE = Namespace(model="trace", layout=KVLayout.opaque(block_bytes=BLOCK_BYTES, block_tokens=1))
PAYLOAD = np.zeros(BLOCK_BYTES, dtype=np.uint8)
PAYLOAD_SUM = checksum(PAYLOAD)
CAPACITY_BLOCKS = 200
NUM_REQUESTS = 600


def conversations(seed):
    """Requests of a chat service: (instant, tokens), where turns extend their conversation's chain."""
    rng, now_s, fresh = random.Random(seed), 0.0, iter(range(1, 1 << 30))
    open_chats, requests = [], []
    for _ in range(NUM_REQUESTS):
        now_s += rng.expovariate(3)
        if open_chats and rng.random() < 0.5:
            # Most go on soon, some late, and the last block of a turn was partial.
            index = len(open_chats) - 1 - min(int(rng.expovariate(0.2)), len(open_chats) - 1)
            tokens = open_chats.pop(index)[:-1]
        else:
            tokens = [0] * rng.randint(1, 3)
        tokens = tokens + [next(fresh) for _ in range(rng.randint(1, 12))]
        requests.append((now_s, tokens))
        if rng.random() < 0.8:
            open_chats.append(tokens)
    return requests


def simulate(name, requests, *, capacity_blocks=CAPACITY_BLOCKS):
    """Hit blocks of every request, and what is stored at the end."""
    capacity_bytes = capacity_blocks * BLOCK_BYTES
    cache = PolicyCache(policy_named(name)(capacity_bytes), capacity_bytes)
    hits, refused = [], 0
    for now_s, tokens in requests:
        served = cache.serve(SPACE.chain(tokens).keys, size_bytes=BLOCK_BYTES, now_s=now_s)
        hits.append(served.hit_blocks)
        refused += len(served.refused)
    return hits, refused


async def drive(name, requests, *, capacity_blocks=CAPACITY_BLOCKS):
    """The same through fetches and puts."""
    now = [0.0]
    manager = BlockManager(
        DramTier(capacity_bytes=capacity_blocks * BLOCK_BYTES),
        [],
        settings=ManagerSettings(high_water_ratio=1.0, lease_s=1e9),
        new_policy=policy_named(name),
        clock=lambda: now[0],
    )
    await manager.open()
    manager.open_namespace(SPACE)
    owner = manager.new_owner()
    hits, refused = [], 0
    for now_s, tokens in requests:
        now[0] = now_s
        chain = SPACE.chain(tokens)
        fetched = await manager.fetch(chain, owner=owner, timeout_s=0.0)
        hits.append(len(fetched.blocks))
        if fetched.lease is not None:
            manager.release(fetched.lease, owner=owner)
        reserved = await manager.reserve(chain, owner=owner, timeout_s=0.0)
        if reserved.reason is not None:
            assert reserved.reason is MissReason.NOT_ADMITTED
            if not refused:
                (*_, last) = await manager.why(chain)
                assert last.reason is MissReason.NOT_ADMITTED
            refused += len(chain) - reserved.present - len(reserved.slots)
        if reserved.slots:
            first = reserved.slots[0].position
            part = chain[first : first + len(reserved.slots)]
            slots = [slot.slot for slot in reserved.slots]
            manager.putter.publish(part, slots, owner=owner, checksums=[PAYLOAD_SUM] * len(slots))
    assert manager.stats()["puts_blocks"].get("not_admitted", 0) == refused
    assert await manager.check(sample_blocks=0) == []
    await manager.close()
    return hits, refused


@pytest.mark.parametrize("name", ["lru", "gittins"])
@pytest.mark.parametrize("seed", [1, 2])
def test_the_manager_hits_the_same_blocks_as_the_simulation(name, seed):
    requests = conversations(seed)

    hits, refused = simulate(name, requests)
    live_hits, live_refused = asyncio.run(drive(name, requests))

    assert live_hits == hits
    assert live_refused == refused
    assert (refused > 0) == (name == "gittins")
    assert sum(hits) > 0


def recorded():
    """The first requests of the conversation trace, if it is beside the checkout."""
    for folder in Path(__file__).resolve().parents:
        path = folder / "shared" / "data" / "traces" / "mooncake_conversation.jsonl"
        if path.is_file():
            with path.open() as lines:
                requests = [json.loads(line) for line in itertools.islice(lines, 3000)]
            return [(request["timestamp"] / 1000, request["hash_ids"]) for request in requests]
    return None


@pytest.mark.skipif(recorded() is None, reason="shared/data/traces is not beside the checkout")
@pytest.mark.parametrize("name", ["lru", "gittins"])
def test_the_manager_hits_the_same_blocks_of_a_recorded_trace(name):
    requests = recorded()

    hits, refused = simulate(name, requests, capacity_blocks=1000)
    live_hits, live_refused = asyncio.run(drive(name, requests, capacity_blocks=1000))

    assert live_hits == hits
    assert live_refused == refused
    # Of the trace alone, whatever drives it: the policy's definition.
    assert name != "lru" or sum(hits) == 3273
