"""A disk that hangs below memory: every request is answered in its time, and what needs no disk at once."""

import asyncio

import pytest

from kvstore.testing import FaultyTier, MemoryTier
from tests.http.http_store import hex_keys, http_store, long_chain, payload

CHAIN = long_chain(2)
ABOUT = {"namespace": CHAIN.namespace.hex(), "keys": hex_keys(CHAIN)}


@pytest.fixture
async def hung():
    """A store of which one block is on the disk alone and another in memory too; the disk hangs."""
    tier = FaultyTier(MemoryTier(name="ssd", capacity_bytes=1 << 20))
    async with http_store(tier) as store, store.client() as client:
        await client.open()
        await client.store(CHAIN)
        assert (await client.post("/v1/admin/flush", timeout_s=10)).json == {"flushed": True}
        below = {**ABOUT, "keys": ABOUT["keys"][1:], "start": 1, "parent": ABOUT["keys"][0]}
        assert (await client.post("/v1/admin/demote", **below)).json == {"demoted": 1}
        tier.hold()
        yield store, client, below
        tier.let_go()
        await asyncio.sleep(0)


async def test_a_block_on_it_is_a_miss_in_time(hung):
    _, client, _ = hung
    got = await client.get_block(CHAIN, 1, timeout_s=0.05)
    assert (got.status, got.json["reason"]) == (404, "timed_out")

    head, _ = await client.fetch(CHAIN, timeout_s=0.05)
    assert (head["blocks"], head["reason"]) == (1, "timed_out")


async def test_what_is_in_memory_is_served(hung):
    _, client, _ = hung
    assert (await client.get_block(CHAIN)).body == payload(CHAIN.keys[0])
    assert (await client.post("/v1/match", **ABOUT)).json["tiers"] == ["dram", "ssd"]
    assert (await client.get("/readyz")).status == 200


async def test_operations_that_wait_for_it_are_not_waited_for(hung):
    store, client, below = hung
    dropped = await client.post("/v1/admin/drop", **below, timeout_s=0)
    assert (dropped.status, dropped.code) == (504, "timed_out")
    assert store.face._service.late_work.num_late == 1


async def test_a_client_that_goes_away_while_it_waits_leaves_nothing(hung):
    store, client, _ = hung
    waiting = asyncio.create_task(client.get_block(CHAIN, 1, timeout_s=60))
    async with asyncio.timeout(30):
        while not store.counters.requests["get_block"]:  # noqa: ASYNC110 (what is waited for is no event)
            await asyncio.sleep(0.005)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        while store.face._num_requests:  # noqa: ASYNC110 (what is waited for is no event)
            await asyncio.sleep(0.005)
    assert store.manager.stats()["owners"] == 0
