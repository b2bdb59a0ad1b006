"""Records over HTTP: versions as ETags, conditions, refusals with their codes, and what a body may be."""

import io

import pytest

from kvstore.records import MAX_RECORD_BYTES, MAX_TTL_S
from tests.http.http_store import http_store, sum_text

PATH = "/v1/records/sessions/resp_1"


@pytest.fixture
async def client():
    async with http_store() as store, store.client() as connected:
        yield connected


async def put(client, data=b"value", path=PATH, **headers):
    return await client.ask("PUT", path, data=data, headers=headers)


async def test_a_value_comes_back_with_its_version_and_its_time(client):
    stored = await put(client)
    got = await client.get(PATH)

    assert stored.status == got.status == 200
    assert got.body == b"value"
    assert got.headers["Etag"] == stored.headers["Etag"] == f'"{stored.json["version"]}"'
    assert got.headers["KVStore-Checksum"] == sum_text(b"value")
    assert (got.headers["KVStore-Place"], got.headers["KVStore-Current"]) == ("memory", "true")
    assert MAX_TTL_S - 60 < float(got.headers["KVStore-Expires-In"]) <= MAX_TTL_S
    assert got.headers["Content-Type"] == "application/octet-stream"


async def test_head_says_the_same_without_the_value(client):
    stored = await put(client)

    head = await client.ask("HEAD", PATH)

    assert (head.status, head.body, head.headers["Etag"]) == (200, b"", stored.headers["Etag"])
    assert (await client.ask("HEAD", "/v1/records/sessions/none")).status == 404


async def test_if_match_names_the_version_that_is_replaced(client):
    first = await put(client)

    second = await put(client, b"two", **{"If-Match": first.headers["Etag"]})
    late = await put(client, b"three", **{"If-Match": first.headers["Etag"]})

    assert second.status == 200
    assert (late.status, late.code, late.json["outcome"]) == (412, "conflict", "conflict")
    assert late.headers["Etag"] == second.headers["Etag"]
    assert late.json["version"] == second.json["version"]
    assert (await client.get(PATH)).body == b"two"


async def test_if_none_match_wants_no_record(client):
    first = await put(client, **{"If-None-Match": "*"})
    again = await put(client, **{"If-None-Match": "*"})
    await client.ask("DELETE", PATH)
    gone = await put(client, **{"If-Match": first.headers["Etag"]})

    assert (first.status, again.status, gone.status) == (200, 412, 412)
    assert (gone.json["version"], "Etag" in gone.headers) == (0, False)


@pytest.mark.parametrize(
    "headers",
    [
        {"If-Match": "*"},
        {"If-Match": "7"},
        {"If-Match": '"0"'},
        {"If-Match": '"-1"'},
        {"If-Match": 'W/"7"'},
        {"If-Match": '"7", "8"'},
        {"If-Match": '"99999999999999999"'},
        {"If-None-Match": '"7"'},
        {"If-Match": '"7"', "If-None-Match": "*"},
        {"KVStore-Write": "xyz"},
        {"KVStore-Tenant-Salt": "xyz"},
        {"KVStore-Checksum": "xyz"},
    ],
    ids=str,
)
async def test_a_condition_of_another_form_is_refused_and_nothing_is_stored(client, headers):
    answer = await put(client, **headers)

    assert (answer.status, answer.code) == (400, "bad_request")
    assert (await client.get(PATH)).status == 404


async def test_a_record_that_is_not_there_says_why(client):
    missing = await client.get(PATH)
    await put(client)
    dropped = await client.ask("DELETE", PATH)
    gone = await client.get(PATH)

    assert (missing.status, missing.code, missing.json["reason"]) == (404, "no_record", "never_seen")
    assert missing.headers["KVStore-Reason"] == "never_seen"
    assert dropped.json == {"dropped": True}
    assert (gone.code, gone.json["reason"]) == ("no_record", "dropped")
    assert (await client.ask("DELETE", PATH)).json == {"dropped": False}


async def test_a_record_is_not_deleted_on_a_condition_that_nobody_looks_at(client):
    first = await put(client)

    answer = await client.ask("DELETE", PATH, headers={"If-Match": first.headers["Etag"]})

    assert (answer.status, answer.code) == (400, "bad_request")
    assert (await client.get(PATH)).status == 200


async def test_the_same_put_again_is_the_same_put(client):
    token = {"KVStore-Write": "ab" * 16, "If-None-Match": "*"}

    first, again = await put(client, **token), await put(client, **token)

    assert first.status == again.status == 200
    assert first.json["version"] == again.json["version"]


async def test_a_value_above_the_limit_is_refused_before_it_is_read(client):
    answer = await put(client, io.BytesIO(bytes(MAX_RECORD_BYTES + 1)))

    assert (answer.status, answer.code) == (413, "too_large")
    assert (await put(client, bytes(MAX_RECORD_BYTES))).status == 200


async def test_a_value_with_another_checksum_is_not_stored(client):
    answer = await put(client, **{"KVStore-Checksum": sum_text(b"another")})

    assert (answer.status, answer.code) == (400, "checksum_mismatch")
    assert (await client.get(PATH)).status == 404


@pytest.mark.parametrize("query", ["ttl_s=0", "ttl_s=-1", "ttl_s=9999999", "ttl_s=x", "ttl=1", "version=1"])
async def test_a_time_out_of_range_or_an_unknown_parameter_is_refused(client, query):
    assert (await put(client, path=f"{PATH}?{query}")).code == "bad_request"


@pytest.mark.parametrize("name", ["..", "%2e%2e", "a%2Fb", "-x", "%00", "x" * 201, "%F0%9F%98%80"])
async def test_a_name_of_another_form_is_refused(client, name):
    answers = [
        await client.ask(method, f"http://{client.session._base_url.authority}/v1/records/c/{name}")
        for method in ("GET", "PUT", "DELETE")
    ]

    assert {answer.status for answer in answers} <= {400, 404, 405}
    assert (await client.get("/v1/records/c")).json == {"records": []}


async def test_records_are_listed_in_pages_by_name(client):
    for name in ("b", "a2", "a1"):
        await put(client, path=f"/v1/records/mine/{name}")

    whole = (await client.get("/v1/records/mine")).json["records"]
    page = (await client.get("/v1/records/mine?prefix=a&after=a1&limit=1")).json["records"]

    assert [record["name"] for record in whole] == ["a1", "a2", "b"]
    assert [record["name"] for record in page] == ["a2"]
    assert whole[0]["value_bytes"] == 5
    for query in ("limit=0", "limit=1001", "prefix=..", "after=%00", "tag=1"):
        assert (await client.get(f"/v1/records/mine?{query}")).code == "bad_request"


async def test_over_quota_the_answer_is_507():
    async with http_store(record_quota_bytes=8192) as store, store.client() as client:
        statuses = [(await put(client, path=f"/v1/records/c/n{number}")).status for number in range(3)]
        refused = await put(client, path="/v1/records/c/more")

    assert statuses == [200, 200, 507]
    assert (refused.code, refused.json["outcome"]) == ("quota", "quota")


async def test_stats_and_metrics_tell_of_records(client):
    await put(client)
    await client.get(PATH)
    await client.get("/v1/records/sessions/none")

    stats = (await client.get("/v1/stats")).json["records"]
    metrics = (await client.get("/metrics")).body.decode()

    assert (stats["puts"], stats["absent"], stats["records"]) == ({"stored": 1}, {"never_seen": 1}, 1)
    assert 'kvstore_records_puts_total{outcome="stored"} 1' in metrics
    assert 'kvstore_records_gets_total{place="memory"} 1' in metrics
    assert 'kvstore_records_absent_total{reason="never_seen"} 1' in metrics
    assert "kvstore_records_used_bytes 4096" in metrics
