"""One block at a time over HTTP: stored, fetched, refused, forgotten."""

import io

import pytest

from kvstore.keys import Namespace
from kvstore.layout import KVLayout
from tests.http.http_store import BLOCK_BYTES, chain_of, http_store, long_chain, payload, sum_text

CHAIN = chain_of(1, 2, 3, 4)


async def test_a_block_comes_back_as_it_was_put(client):
    put = await client.put_block(CHAIN)
    got = await client.get_block(CHAIN)

    assert (put.status, put.json) == (
        201,
        {"stored": 1, "present": 0, "dropped": 0, "doubtful": [], "reason": None},
    )
    assert (got.status, got.body) == (200, payload(CHAIN.keys[0]))
    assert got.headers["KVStore-Checksum"] == sum_text(got.body) == put.headers["KVStore-Checksum"]
    assert got.headers["KVStore-Origin"] == "dram"


async def test_a_block_of_many_steps_comes_back_as_it_was_put():
    space = Namespace(model="big", layout=KVLayout.opaque(block_bytes=3 << 20, block_tokens=4))
    chain = chain_of(1, 2, 3, 4, space=space)
    data = payload(chain.keys[0], 3 << 20)
    async with http_store(blocks=1024) as store, store.client() as client:
        await client.open(space)
        assert (await client.put_block(chain, data=io.BytesIO(data))).status == 201
        got = await client.get_block(chain)

    assert got.body == data
    assert store.counters.sent_bytes == len(data)
    assert store.counters.received_bytes > len(data)


async def test_a_block_that_is_there_is_not_stored_again(client):
    await client.put_block(CHAIN)
    again = await client.put_block(CHAIN)

    assert (again.status, again.json) == (
        200,
        {"stored": 0, "present": 1, "dropped": 0, "doubtful": [], "reason": None},
    )


async def test_a_miss_says_why(client):
    got = await client.get_block(CHAIN)
    assert (got.status, got.code, got.json["reason"]) == (404, "miss", "never_seen")
    assert got.headers["KVStore-Reason"] == "never_seen"

    await client.put_block(CHAIN)
    gone = await client.ask("DELETE", client.block_path(CHAIN))
    assert (gone.status, gone.json) == (200, {"dropped": 1})
    assert (await client.get_block(CHAIN)).json["reason"] == "dropped"


async def test_head_tells_size_and_tier_without_a_body(client):
    missing = await client.ask("HEAD", client.block_path(CHAIN))
    await client.put_block(CHAIN)
    found = await client.ask("HEAD", client.block_path(CHAIN))

    assert (missing.status, missing.headers["KVStore-Reason"]) == (404, "never_seen")
    assert (found.status, found.body, found.headers["Content-Length"]) == (200, b"", str(BLOCK_BYTES))
    assert found.headers["KVStore-Origin"] == "dram"


async def test_a_later_block_of_a_chain_is_named_with_its_parent(client):
    chain = long_chain(3)
    for index in range(3):
        assert (await client.put_block(chain, index)).status == 201

    assert [(await client.get_block(chain, index)).status for index in range(3)] == [200, 200, 200]


async def test_a_part_of_a_block_is_a_payload_of_its_own(store, client):
    layout = KVLayout("uint8", num_layers=2, block_tokens=4, num_kv_heads=2, head_dim=8)
    space = Namespace(model="parts", layout=layout)
    await client.open(space)
    chain = chain_of(1, 2, 3, 4, space=space)
    path, data = client.block_path(chain, part="0,1,0,2"), bytes(range(128))

    assert (await client.ask("PUT", path, data=data)).status == 201
    assert (await client.get(path)).body == data
    assert (await client.get_block(chain)).status == 404
    assert (await client.get_block(chain, part="0,3,0,2")).code == "bad_request"
    assert (await client.get_block(chain, part="0,3,0")).code == "bad_request"


@pytest.mark.parametrize("length_bytes", [0, 1, BLOCK_BYTES - 1, BLOCK_BYTES + 1, 3 * BLOCK_BYTES])
@pytest.mark.parametrize("is_chunked", [False, True])
async def test_a_payload_of_another_length_is_not_stored(client, length_bytes, is_chunked):
    async def pieces():
        yield b"x" * length_bytes

    put = await client.put_block(CHAIN, data=pieces() if is_chunked else b"x" * length_bytes)

    assert (put.status, put.code) == (400, "bad_request")
    assert (await client.get_block(CHAIN)).status == 404


async def test_a_payload_may_come_in_chunks_of_any_size(client):
    data = payload(CHAIN.keys[0])

    async def pieces():
        for start in range(0, BLOCK_BYTES, 999):
            yield data[start : start + 999]

    assert (await client.put_block(CHAIN, data=pieces())).status == 201
    assert (await client.get_block(CHAIN)).body == data


async def test_a_payload_with_another_checksum_is_not_stored(client):
    put = await client.put_block(CHAIN, headers={"KVStore-Checksum": "0" * 16})
    assert (put.status, put.code) == (400, "checksum_mismatch")
    assert (await client.get_block(CHAIN)).status == 404

    right = {"KVStore-Checksum": sum_text(payload(CHAIN.keys[0]))}
    assert (await client.put_block(CHAIN, headers=right)).status == 201


@pytest.mark.parametrize("text", ["", "123", "G" * 16, "0" * 17, "0x00000000000000"])
async def test_a_checksum_that_is_none_is_refused(client, text):
    put = await client.put_block(CHAIN, headers={"KVStore-Checksum": text})
    assert (put.status, put.code) == (400, "bad_request")


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ({"Content-Encoding": "gzip"}, "unsupported_media_type"),
        ({"Content-Type": "application/json"}, "unsupported_media_type"),
        ({"Expect": "200-ok"}, "expectation_failed"),
    ],
)
async def test_a_payload_that_is_not_plain_is_refused(client, headers, code):
    assert (await client.put_block(CHAIN, headers=headers)).code == code


async def test_a_put_that_finds_no_room_is_dropped_and_says_so():
    async with (
        http_store(blocks=1, high_water_ratio=1.0, low_water_ratio=1.0) as store,
        store.client() as client,
    ):
        await client.open()
        first, second = chain_of(1, 2, 3, 4), chain_of(5, 6, 7, 8)
        await client.put_block(first)
        lease = (
            await client.post("/v1/leases", namespace=first.namespace.hex(), keys=[first.keys[0].hex()])
        ).json

        put = await client.ask("PUT", client.block_path(second, timeout_s=0), data=payload(second.keys[0]))
        assert (put.status, put.json) == (
            200,
            {"stored": 0, "present": 0, "dropped": 1, "doubtful": [0], "reason": "no_room"},
        )

        assert (await client.ask("DELETE", f"/v1/leases/{lease['lease']}")).status == 200
        assert (await client.put_block(second)).status == 201


@pytest.mark.parametrize(
    "query",
    [
        "start=1",
        "parent=" + "0" * 64,
        "start=-1&parent=" + "0" * 64,
        "start=4294967296",
        "start=1.0",
        "start=x",
        "timeout_s=61",
        "timeout_s=nan",
        "timeout_s=1e400",
        "unknown=1",
        "timeout_s=1&timeout_s=2",
        "key=1",
    ],
)
async def test_a_query_that_makes_no_sense_is_refused(client, query):
    answer = await client.get(f"{client.block_path(CHAIN)}?{query}")
    assert (answer.status, answer.code) == (400, "bad_request")


async def test_a_block_put_by_a_client_that_waits_to_continue_is_stored(client):
    assert (await client.put_block(CHAIN, expect100=True)).status == 201


async def test_a_client_that_waits_to_continue_hears_of_a_refusal_at_once(client):
    elsewhere = chain_of(
        1, 2, 3, 4, space=Namespace(model="unopened", layout=KVLayout.opaque(block_bytes=8, block_tokens=4))
    )
    refused = await client.put_block(elsewhere, expect100=True)
    assert (refused.status, refused.code) == (404, "unknown_namespace")
