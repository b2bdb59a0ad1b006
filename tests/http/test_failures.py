"""Faults of the server itself: an answer that says nothing of them, a log that says all, and life goes on."""

import pytest

from kvstore.errors import CorruptBlock, TierFull, TierUnavailable
from kvstore.testing import FaultyTier, MemoryTier
from tests.http.http_store import hex_keys, http_store, long_chain, payload
from tests.http.raw_client import RawClient, head

CHAIN = long_chain(3)
ABOUT = {"namespace": CHAIN.namespace.hex(), "keys": hex_keys(CHAIN)}


def failing(error):
    async def fail(*_, **__):
        raise error

    return fail


@pytest.mark.parametrize("error", [RuntimeError("secret detail"), CorruptBlock("secret detail")])
async def test_a_fault_is_told_without_its_details_and_logged(store, client, monkeypatch, caplog, error):
    with monkeypatch.context() as broken:
        broken.setattr(store.manager, "match", failing(error))
        answer = await client.post("/v1/match", **ABOUT)
    assert (answer.status, answer.code) == (500, "internal")
    assert b"secret" not in answer.body
    assert "secret detail" in caplog.text
    assert (await client.post("/v1/match", **ABOUT)).status == 200
    assert store.counters.errors.pop("internal") == 1


@pytest.mark.parametrize("error", [TierFull("dram: full"), TierUnavailable("ssd: gone")])
async def test_a_tier_that_cannot_do_it_is_unavailable(store, client, monkeypatch, error):
    monkeypatch.setattr(store.manager, "advance_epoch", failing(error))
    answer = await client.post("/v1/admin/epoch", model="m")
    assert (answer.status, answer.code, answer.json["error"]["message"]) == (503, "unavailable", str(error))


async def test_an_answer_that_fails_half_way_is_not_ended_as_if_it_were_whole(
    store, client, monkeypatch, caplog
):
    await client.store(CHAIN)
    answer = store.dram.generation
    calls = []

    def generation(slot):
        calls.append(slot)
        if len(calls) == 2:
            raise RuntimeError("half-way")
        return answer(slot)

    monkeypatch.setattr(store.dram, "generation", generation)
    async with RawClient.connected(store.face) as raw:
        monkeypatch.setattr("kvstore.http.payloads._STEP_BYTES", 1024)
        calls.clear()
        await raw.say(head("GET", client.block_path(CHAIN)))
        heard = await raw.hear_all()
    monkeypatch.undo()
    assert heard.startswith(b"HTTP/1.1 200 ")
    assert heard.count(b"HTTP/1.1") == 1
    assert len(heard.partition(b"\r\n\r\n")[2]) < len(payload(CHAIN.keys[0]))
    assert "half-way" in caplog.text
    assert store.counters.errors.pop("internal") == 1


async def test_metrics_tell_of_moves_and_evictions():
    tier = FaultyTier(MemoryTier(name="ssd", capacity_bytes=1 << 20))
    async with http_store(tier) as store, store.client() as client:
        await client.open()
        await client.store(CHAIN)
        await client.post("/v1/admin/flush", timeout_s=10)
        last = {
            "namespace": ABOUT["namespace"],
            "keys": ABOUT["keys"][2:],
            "start": 2,
            "parent": ABOUT["keys"][1],
        }
        assert (await client.post("/v1/admin/demote", **last)).json == {"demoted": 1}
        lines = (await client.get("/metrics")).body.decode().splitlines()
    for line in (
        'kvstore_transfers_blocks_total{origin="dram",target="ssd"} 3',
        'kvstore_tier_up_ratio{tier="ssd"} 1',
        'kvstore_tier_queued_blocks{tier="ssd"} 0',
    ):
        assert line in lines
