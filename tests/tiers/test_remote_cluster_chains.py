"""Chains spread over a cluster with one of three masters dead: served as far as they go, and explained."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest

from kvstore.checksum import checksum
from kvstore.keys import BlockKey, Namespace, PrefixChain
from kvstore.layout import KVLayout
from kvstore.manager import BlockManager
from kvstore.miss import MissReason
from kvstore.tier import BlockId
from kvstore_tiers.dram import DramTier
from kvstore_tiers.remote import RemoteTier
from kvstore_tiers.remote_cluster import key_slot
from tests.redis_cluster import RedisCluster
from tests.redis_server import RedisServer
from tests.tiers.remote_calls import NAMES

BLOCK_BYTES = 8192
SPACE = Namespace(model="m", layout=KVLayout.opaque(block_bytes=BLOCK_BYTES, block_tokens=4))
NUM_BLOCKS = 40


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[RedisCluster]:
    made = RedisCluster(tmp_path)
    try:
        yield made.start()
    finally:
        made.stop()


@asynccontextmanager
async def opened(cluster: RedisCluster) -> AsyncIterator[tuple[BlockManager, DramTier]]:
    dram = DramTier(capacity_bytes=64 * BLOCK_BYTES)
    manager = BlockManager(dram, [RemoteTier(cluster.url, timeout_s=0.2)])
    await manager.open()
    manager.open_namespace(SPACE)
    try:
        yield manager, dram
    finally:
        await manager.close()


async def put(cluster: RedisCluster, chain: PrefixChain) -> None:
    """Store a chain on the cluster alone."""
    async with opened(cluster) as (manager, dram):
        owner = manager.new_owner()
        reserved = await manager.reserve(chain, owner=owner, timeout_s=5)
        slots = [slot.slot for slot in reserved.slots]
        async with dram.writing(slots, BLOCK_BYTES) as buffers:
            for key, buffer in zip(chain.keys, buffers, strict=True):
                np.asarray(buffer)[:BLOCK_BYTES] = content(key)
        sums = [checksum(content(key)) for key in chain.keys]
        assert all(manager.commit(chain, slots, owner=owner, checksums=sums))
        assert await manager.flush(timeout_s=10)


def content(key: BlockKey) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    return np.frombuffer(key * (BLOCK_BYTES // len(key)), np.uint8)


def is_on(cluster: RedisCluster, node: RedisServer, key: BlockKey) -> bool:
    block = BlockId(SPACE.digest, SPACE.layout.whole, key)
    return cluster.owner(key_slot(NAMES.of(block))) is node


def chain_that_begins_elsewhere(cluster: RedisCluster, node: RedisServer) -> tuple[PrefixChain, int]:
    """Return a chain whose first blocks, at least four, lie on other nodes, and how many those are."""
    for first in range(0, 10_000_000, 1000):
        chain = SPACE.chain(range(first, first + 4 * NUM_BLOCKS))
        place = [is_on(cluster, node, key) for key in chain.keys].index(True)
        if place >= 4:
            return chain, place
    raise AssertionError("no such chain")


async def settled(manager: BlockManager, chain: PrefixChain, *, seconds: float = 20) -> None:
    """Wait until the node that has gone is known to be."""
    give_up_s = asyncio.get_running_loop().time() + seconds
    while (await manager.match(chain, timeout_s=1)).reason is not MissReason.BREAKER_OPEN:
        assert asyncio.get_running_loop().time() < give_up_s
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("end", [RedisServer.kill, RedisServer.pause])
async def test_a_chain_is_served_up_to_the_first_block_of_a_dead_master(
    cluster: RedisCluster, end: Callable[[RedisServer], None]
) -> None:
    dead = cluster.masters[0]
    chain, served = chain_that_begins_elsewhere(cluster, dead)
    await put(cluster, chain)
    async with opened(cluster) as (manager, dram):
        assert len((await manager.match(chain, timeout_s=5)).tiers) == NUM_BLOCKS
        end(dead)
        found = await manager.match(chain, timeout_s=1)
        assert found.tiers == ("remote",) * served
        await settled(manager, chain)
        fetched = await manager.fetch(chain, owner=manager.new_owner(), timeout_s=5)
        assert fetched.reason is MissReason.BREAKER_OPEN
        assert [block.origin for block in fetched.blocks] == ["remote"] * served
        async with dram.reading([block.slot for block in fetched.blocks], BLOCK_BYTES) as buffers:
            for key, buffer in zip(chain.keys, buffers, strict=False):
                assert np.array_equal(np.asarray(buffer)[:BLOCK_BYTES], content(key))


async def test_each_block_behind_a_dead_master_is_explained_by_itself(cluster: RedisCluster) -> None:
    dead = cluster.masters[0]
    chain = SPACE.chain(range(4 * NUM_BLOCKS))
    await put(cluster, chain[: NUM_BLOCKS // 2])
    async with opened(cluster) as (manager, _):
        dead.kill()
        await settled(manager, chain)
        reports = await manager.why(chain, timeout_s=5)
        for number, report in enumerate(reports):
            if is_on(cluster, dead, report.key):
                assert (report.tiers, report.reason) == ((), MissReason.BREAKER_OPEN)
            elif number < NUM_BLOCKS // 2:
                assert (report.tiers, report.reason) == (("remote",), None)
            else:
                assert (report.tiers, report.reason) == ((), MissReason.NEVER_SEEN)
