"""Bodies are bounded before they are read, on every route, and together."""

import asyncio
import json

import pytest

from kvstore.http import Limits
from kvstore.http.routes import ROUTES
from tests.http.http_store import http_store
from tests.http.raw_client import RawClient, head, until

MIB = 1 << 20
JSON_ROUTES = [route for route in ROUTES if route.body is not None]
RECORD = "/v1/records/c/n"
NUM_CLIENTS = 100


def path_of(route):
    return route.path.replace("{namespace}", "0" * 64).replace("{key}", "0" * 64)


def pending_bytes(store):
    return store.face.pending_body_bytes


@pytest.mark.parametrize("route", JSON_ROUTES, ids=lambda route: route.name)
async def test_a_body_that_is_said_to_be_too_long_is_refused_unread(store, route):
    async with RawClient.connected(store.face) as raw:
        await raw.say(head(route.method, path_of(route), Content_Length=MIB + 1, Expect="100-continue"))
        status, body = await raw.hear_answer()

    assert (status, json.loads(body)["error"]["code"]) == (413, "too_large")
    assert store.counters.received_bytes == 0


async def test_a_value_of_a_record_that_is_said_to_be_too_long_is_refused_unread(store):
    async with RawClient.connected(store.face) as raw:
        await raw.say(head("PUT", RECORD, Content_Length=MIB + 1))
        assert (await raw.hear_answer())[0] == 413

    assert store.counters.received_bytes == 0


async def test_100_clients_with_bodies_that_are_too_long_take_no_more_than_the_limit(store, client):
    highest = 0

    async def watch():
        nonlocal highest
        while True:
            highest = max(highest, pending_bytes(store))
            await asyncio.sleep(0)

    async def send(number):
        async with RawClient.connected(store.face) as raw:
            if number % 2:
                await raw.say(head("POST", "/v1/match", Content_Length=1 << 40))
            else:
                await raw.say(head("POST", "/v1/match", Transfer_Encoding="chunked"))
            answer = asyncio.create_task(raw.hear_answer())
            for _ in range(64):
                if answer.done():
                    break
                piece = b" " * 65536
                await raw.say(piece if number % 2 else b"10000\r\n" + piece + b"\r\n")
            return (await answer)[0]

    watching = asyncio.create_task(watch())
    statuses = await asyncio.gather(*(send(number) for number in range(NUM_CLIENTS)))
    watching.cancel()

    assert set(statuses) <= {413, 503}
    assert statuses.count(413) >= NUM_CLIENTS // 2
    assert highest <= Limits().max_pending_body_bytes
    assert store.counters.received_bytes <= NUM_CLIENTS // 2 * 2 * MIB
    await until(lambda: pending_bytes(store) == 0)
    assert (await client.open()).status == 200


async def test_bodies_under_way_share_the_memory_for_them_and_give_it_back():
    limits = Limits(max_pending_body_bytes=MIB)
    async with http_store(limits=limits) as store, store.client() as client:
        async with RawClient.connected(store.face) as slow:
            await slow.say(head("POST", "/v1/match", Content_Length=MIB) + " " * (MIB - 100))
            await until(lambda: pending_bytes(store) == MIB - 100)
            refused = await client.open()
            assert (refused.status, refused.code, refused.headers["Retry-After"]) == (503, "unavailable", "1")
            assert store.counters.refused_bodies == 1
        await until(lambda: pending_bytes(store) == 0)
        assert (await client.open()).status == 200
        assert pending_bytes(store) == 0
