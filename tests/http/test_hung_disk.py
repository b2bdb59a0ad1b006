"""A disk that hangs below memory: every request is answered in its time, and what needs no disk at once."""

import asyncio

import pytest

from kvstore.keys import Namespace
from kvstore.layout import KVLayout
from kvstore.state import WriteMode
from kvstore.testing import FakeClock, FaultyTier, MemoryTier
from tests.http.http_store import BLOCK_BYTES, hex_keys, http_store, long_chain, payload
from tests.http.raw_client import until

CHAIN = long_chain(2)
LARGE_BYTES = 4 << 20
"""More than lies between a client and a server that does not read."""

LARGE = Namespace(model="large", layout=KVLayout.opaque(block_bytes=LARGE_BYTES, block_tokens=4))
ABOUT = {"namespace": CHAIN.namespace.hex(), "keys": hex_keys(CHAIN)}


def large_chain(first, tokens):
    return LARGE.chain(list(range(first, first + tokens)))


def large_payloads(count):
    return [bytes(LARGE_BYTES)] * count


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


async def test_the_sender_of_a_body_does_not_answer_for_the_time_that_the_disk_takes():
    tier = FaultyTier(MemoryTier(name="ssd", capacity_bytes=4 * LARGE_BYTES))
    blocks = 2 * LARGE_BYTES // BLOCK_BYTES
    async with http_store(tier, blocks=blocks, write_mode=WriteMode.BACK) as store, store.client() as client:
        await client.open(LARGE)
        tier.hold()
        await client.store(large_chain(0, 8), large_payloads(2))
        store.face._service.clock = clock = FakeClock()
        storing = asyncio.create_task(client.store(large_chain(100, 4), large_payloads(1), timeout_s=60))
        await until(lambda: store.manager.stats()["owners"] == 1)
        clock.advance(60)
        tier.let_go()

        stored = await storing
        assert (stored.status, stored.json["stored"]) == (200, 1)
        assert store.counters.slow_clients == 0
