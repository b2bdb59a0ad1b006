"""Whoever is too slow, too many, too big or too fast; and whoever goes away."""

import asyncio
import contextlib
import io
import json

import pytest

from kvstore.auth import Scope
from kvstore.http import Limits
from kvstore.http.limits import TokenBucket, connection_cap
from kvstore.keys import Namespace
from kvstore.layout import KVLayout
from tests.http.http_store import BLOCK_BYTES, hex_keys, http_store, long_chain, payload
from tests.http.keyed_store import TENANTS, key_of, keyed_store
from tests.http.raw_client import RawClient, head, until

CHAIN = long_chain(4)
ABOUT = {"namespace": CHAIN.namespace.hex(), "keys": hex_keys(CHAIN)}
QUICK = Limits(header_s=0.5, idle_s=0.6, stall_s=0.6, body_bytes_per_s=1 << 20)
BIG = Namespace(model="big", layout=KVLayout.opaque(block_bytes=16 << 20, block_tokens=4))


@pytest.mark.parametrize("data", ["", "GET", "GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\nA: b"])
async def test_a_connection_whose_first_header_does_not_come_is_closed(data):
    async with http_store(limits=QUICK) as store, RawClient.connected(store.face) as raw:
        await raw.say(data)
        assert await raw.hear_all() == b""
        await until(lambda: store.counters.open_connections == 0)
        assert store.counters.slow_clients == 1


async def test_a_header_that_trickles_in_is_not_waited_for():
    async with http_store(limits=Limits(header_s=0.5)) as store, RawClient.connected(store.face) as raw:
        await raw.say(head("GET", "/healthz"))
        assert (await raw.hear_answer())[0] == 200
        for letter in "GET /healthz HTTP/1.1\r\nA: " + "a" * 1000:
            await raw.say(letter)
            await asyncio.sleep(0.02)
            if not store.counters.open_connections:
                break
        assert store.counters.slow_clients == 1


async def test_an_idle_connection_is_closed_and_is_not_called_slow():
    async with http_store(limits=QUICK) as store, RawClient.connected(store.face) as raw:
        await raw.say(head("GET", "/healthz"))
        assert (await raw.hear_answer())[0] == 200
        assert await raw.hear_all() == b""
        assert store.counters.slow_clients == 0


async def test_a_client_that_sends_no_body_gets_no_slot(store, client):
    async with RawClient.connected(store.face) as raw:
        await raw.say(head("PUT", client.block_path(CHAIN), Content_Length=BLOCK_BYTES))
        await until(lambda: store.counters.requests["put_block"] == 1)
        await client.get("/healthz")
        assert store.dram.used_bytes == 0


@pytest.mark.parametrize("num_bytes", [0, 1, BLOCK_BYTES - 1])
async def test_a_body_that_stalls_gives_its_slot_back(num_bytes):
    async with http_store(limits=QUICK) as store, store.client() as client:
        await client.open()
        async with RawClient.connected(store.face) as raw:
            await raw.say(head("PUT", client.block_path(CHAIN), Content_Length=BLOCK_BYTES))
            await raw.say(b"x" * num_bytes)
            status, _ = await raw.hear_answer()
            assert status == 408
            assert await raw.hear_all() == b""
        assert store.counters.slow_clients == 1
        assert store.dram.used_bytes == 0


async def test_a_body_below_the_lowest_rate_is_not_waited_for():
    limits = Limits(stall_s=0.5, body_bytes_per_s=1 << 20)
    async with http_store(limits=limits) as store, store.client() as client:
        await client.open()
        async with RawClient.connected(store.face) as raw:
            await raw.say(head("PUT", client.block_path(CHAIN), Content_Length=BLOCK_BYTES))
            answer = asyncio.create_task(raw.hear_answer())
            while not answer.done():
                await raw.say(b"x")
                await asyncio.sleep(0.05)
            assert (await answer)[0] == 408


async def test_an_answer_that_nobody_reads_ends_its_lease():
    limits = Limits(stall_s=0.3)
    async with http_store(blocks=8192, limits=limits) as store, store.client() as client:
        await client.open(BIG)
        chain = BIG.chain([1, 2, 3, 4])
        data = payload(chain.keys[0], 16 << 20)
        await client.put_block(chain, data=io.BytesIO(data))
        async with RawClient.connected(store.face) as raw:
            await raw.say(head("GET", client.block_path(chain)))
            await until(lambda: store.manager.stats()["live_leases"] == 1)
            await until(lambda: store.manager.stats()["live_leases"] == 0)
            assert len(await raw.hear_all()) < len(data)
        assert store.counters.slow_clients == 1


def test_the_cap_stays_below_the_limit_on_descriptors():
    assert connection_cap(1024, max_fds=None, others=256) == 1024
    assert connection_cap(1024, max_fds=65_536, others=256) == 1024
    assert connection_cap(1024, max_fds=1024, others=256) == 704
    assert connection_cap(1024, max_fds=64, others=256) == 8


async def test_a_key_has_only_so_many_requests_under_way():
    keys = [key_of(tenant, *Scope) for tenant in TENANTS]
    async with keyed_store(limits=Limits(max_requests=1)) as store, contextlib.AsyncExitStack() as stack:
        first, second = [await stack.enter_async_context(store.client(key)) for key in keys]
        about = {**ABOUT, "namespace": (await first.open()).json["namespace"]}
        path = f"/v1/blocks/{about['namespace']}/{about['keys'][0]}"
        async with RawClient.connected(store.face) as raw:
            await raw.say(head("PUT", path, Content_Length=BLOCK_BYTES, Authorization=f"Bearer {keys[0]}"))
            await until(lambda: store.counters.requests["put_block"] == 1)
            refused = await first.post("/v1/match", **about)
            assert (refused.status, refused.code, refused.headers["Retry-After"]) == (
                429,
                "too_many_requests",
                "1",
            )
            assert (await second.open()).status == 200
            assert (await first.get("/readyz")).status == 200
            await raw.say(payload(CHAIN.keys[0]))
            assert (await raw.hear_answer())[0] == 201
        assert (await first.post("/v1/match", **about)).status == 200


async def test_a_caller_begins_only_so_many_requests_a_second():
    async with http_store(limits=Limits(requests_per_s=0.001)) as store, store.client() as client:
        assert (await client.open()).status == 200
        refused = await client.open()
        assert (refused.status, refused.code) == (429, "too_many_requests")
        assert 900 < int(refused.headers["Retry-After"]) <= 1000


def test_a_bucket_gives_a_seconds_worth_at_once_and_then_its_rate():
    now_s = 0.0
    bucket = TokenBucket(4.0, lambda: now_s)
    assert [bucket.take() for _ in range(5)] == [0, 0, 0, 0, 1]
    now_s = 0.5
    assert [bucket.take() for _ in range(3)] == [0, 0, 1]
    now_s = 1000.0
    assert [bucket.take() for _ in range(5)] == [0, 0, 0, 0, 1]


@pytest.mark.parametrize(
    "data",
    [
        "GET /" + "a" * 5000 + " HTTP/1.1\r\nHost: h\r\n\r\n",
        "GET /healthz HTTP/1.1\r\nHost: h\r\nA: " + "a" * 9000 + "\r\n\r\n",
        "GET /healthz HTTP/1.1\r\nHost: h\r\n" + "".join(f"A{n}: b\r\n" for n in range(100)) + "\r\n",
    ],
    ids=["line", "field", "fields"],
)
async def test_a_header_above_the_limit_is_refused(store, data):
    async with RawClient.connected(store.face) as raw:
        await raw.say(data)
        assert (await raw.hear_all()).startswith(b"HTTP/1.0 400 ")
    assert store.counters.malformed_requests == 1


async def test_a_client_that_goes_away_leaves_nothing_behind(store, client):
    await client.store(CHAIN[:1])
    body = b"x" * 100
    for request in (
        head("PUT", client.block_path(CHAIN, 1), Content_Length=BLOCK_BYTES).encode() + body,
        head("PUT", client.block_path(CHAIN, 1), Transfer_Encoding="chunked").encode() + b"64\r\n" + body,
        head("POST", "/v1/store", Content_Length=10_000).encode() + b"\0\1\0\0{",
        head("POST", "/v1/match", Content_Length=10_000).encode() + b"{",
    ):
        async with RawClient.connected(store.face) as raw:
            await raw.say(request)
            await until(lambda: store.face._num_requests == 1)
        await until(lambda: store.counters.open_connections == 1)
        assert store.manager.stats()["owners"] == 0
    assert store.dram.used_bytes == BLOCK_BYTES
    assert store.face._num_requests == 0


async def test_a_slot_that_was_taken_back_is_not_written_to_again():
    async with http_store(lease_s=1.0) as store, store.client() as client:
        await client.open()
        async with RawClient.connected(store.face) as raw:
            await raw.say(head("PUT", client.block_path(CHAIN), Content_Length=BLOCK_BYTES))
            await raw.say(payload(CHAIN.keys[0])[:100])
            await until(lambda: store.dram.used_bytes == BLOCK_BYTES)
            await asyncio.sleep(1.2)
            await raw.say(b"y")
            await until(lambda: store.dram.used_bytes == 0)
            await client.put_block(CHAIN, 1)
            await raw.say(b"y" * (BLOCK_BYTES - 101))
            status, body = await raw.hear_answer()
        assert (status, json.loads(body)["dropped"], json.loads(body)["reason"]) == (200, 1, "timed_out")
        assert json.loads(body)["doubtful"] == [0]
        assert (await client.get_block(CHAIN)).status == 404
        assert (await client.get_block(CHAIN, 1)).body == payload(CHAIN.keys[1])


async def test_a_block_whose_lease_ends_while_it_is_sent_is_cut_short():
    async with http_store(blocks=8192, lease_s=2.0) as store, store.client() as client:
        await client.open(BIG)
        chain = BIG.chain([1, 2, 3, 4])
        await client.put_block(chain, data=io.BytesIO(payload(chain.keys[0], 16 << 20)))
        async with RawClient.connected(store.face) as raw:
            await raw.say(head("GET", client.block_path(chain)))
            await until(lambda: store.manager.stats()["live_leases"] == 1)
            await until(lambda: store.manager.stats()["live_leases"] == 0)
            assert (
                await client.post("/v1/admin/drop", namespace=BIG.digest.hex(), keys=hex_keys(chain))
            ).json == {"dropped": 1}
            heard = await raw.hear_all()
        assert 0 < len(heard) < 16 << 20
        await until(lambda: store.face._num_requests == 0)


async def test_a_block_that_changes_while_it_is_sent_is_cut_short():
    async with http_store(blocks=8192) as store, store.client() as client:
        await client.open(BIG)
        chain = BIG.chain([1, 2, 3, 4])
        await client.put_block(chain, data=io.BytesIO(payload(chain.keys[0], 16 << 20)))
        async with RawClient.connected(store.face) as raw:
            await raw.say(head("GET", client.block_path(chain)))
            await until(lambda: store.counters.sent_bytes > 0)
            view = store.dram.arena.view
            view.slot(view.format.slots_offset, 16 << 20)[-1] ^= 1
            heard = await raw.hear_all()
        assert len(heard) < 16 << 20
        assert store.counters.damaged_blocks == 1


async def test_of_an_answer_that_is_given_up_nothing_waits_to_be_sent():
    async with http_store(blocks=8192) as store, store.client() as client:
        await client.open(BIG)
        chain = BIG.chain([1, 2, 3, 4])
        await client.put_block(chain, data=io.BytesIO(payload(chain.keys[0], 16 << 20)))

        def sending():
            guards = store.face._listener._guards.values()
            return [guard for guard in guards if guard._transport.get_write_buffer_size()]

        async with RawClient.connected(store.face) as raw:
            await raw.say(head("GET", client.block_path(chain)))
            await until(sending)
            (guard,) = sending()
            transport = guard._transport
            guard.inner._task_handler.cancel()  # as a shut-down does
            await until(lambda: not store.manager.stats()["owners"])
            assert transport.get_write_buffer_size() == 0


async def test_before_it_is_open_only_its_health_is_told():
    async with http_store(is_started=False) as store, store.client() as client:
        assert (await client.get("/healthz")).json == {"status": "ok"}
        ready = await client.get("/readyz")
        assert (ready.status, ready.json) == (503, {"status": "starting"})
        refused = await client.post("/v1/match", **ABOUT)
        assert (refused.status, refused.code, refused.headers["Retry-After"]) == (503, "unavailable", "1")
        store.face.start()
        assert (await client.get("/readyz")).json == {"status": "ready"}


async def test_requests_under_way_are_answered_before_the_end_and_new_ones_refused():
    async with http_store() as store, store.client() as client:
        await client.open()
        async with RawClient.connected(store.face) as raw:
            await raw.say(head("PUT", client.block_path(CHAIN), Content_Length=BLOCK_BYTES))
            await raw.say(payload(CHAIN.keys[0])[:100])
            await until(lambda: store.dram.used_bytes == BLOCK_BYTES)
            stopping = asyncio.create_task(store.face.stop(drain_s=30))
            await asyncio.sleep(0)

            refused = await client.post("/v1/match", **ABOUT)
            assert (refused.status, refused.code) == (503, "unavailable")
            assert (await client.get("/readyz")).json == {"status": "draining"}

            await raw.say(payload(CHAIN.keys[0])[100:])
            assert (await raw.hear_answer())[0] == 201
            await stopping


async def test_a_request_that_does_not_end_is_given_up_at_the_end():
    async with http_store() as store, store.client() as client:
        await client.open()
        async with RawClient.connected(store.face) as raw:
            await raw.say(head("PUT", client.block_path(CHAIN), Content_Length=BLOCK_BYTES))
            await raw.say(b"x")
            await until(lambda: store.dram.used_bytes == BLOCK_BYTES)
            await store.face.stop(drain_s=0.05)
            assert await raw.hear_all() == b""
        assert store.dram.used_bytes == 0


async def test_only_of_a_body_of_known_length_large_pieces_are_read(store, client):
    async with RawClient.connected(store.face) as raw:
        await raw.say(head("GET", "/healthz"))
        await raw.hear_answer()
        (guard,) = [
            guard for guard in store.face._listener._guards.values() if guard._is_idle and guard is not None
        ][-1:]
        before = len(guard.get_buffer(-1))
        await raw.say(head("PUT", client.block_path(CHAIN), Content_Length=BLOCK_BYTES))
        await until(lambda: store.counters.requests["put_block"] == 1)
        within = len(guard.get_buffer(-1))
        await raw.say(payload(CHAIN.keys[0]))
        await raw.hear_answer()
        after = len(guard.get_buffer(-1))
        await raw.say(head("PUT", client.block_path(CHAIN), Transfer_Encoding="chunked"))
        await until(lambda: store.counters.requests["put_block"] == 2)
        assert len(guard.get_buffer(-1)) == before == after < within
