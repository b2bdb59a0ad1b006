"""Lookups, leases and the store's own state over HTTP."""

import io
from dataclasses import replace

import pytest

from kvstore.http.routes import ROUTES
from kvstore.keys import Namespace
from kvstore.layout import KVLayout
from tests.http.http_store import (
    BLOCK_BYTES,
    BLOCK_TOKENS,
    LAYOUT,
    SPACE,
    hex_keys,
    layout_fields,
    long_chain,
)

CHAIN = long_chain(4)
ABOUT = {"namespace": CHAIN.namespace.hex(), "keys": hex_keys(CHAIN)}


async def test_opening_a_namespace_gives_the_digest_that_clients_compute(client):
    opened = await client.open(replace(SPACE, weights="w1", epoch=3), weights="w1", epoch=3)
    assert opened.json == {
        "namespace": replace(SPACE, weights="w1", epoch=3).digest.hex(),
        "tenant_salt": "",
        "block_bytes": BLOCK_BYTES,
    }


@pytest.mark.parametrize(
    "change",
    [
        {"model": 1},
        {"layout": {**layout_fields(), "dtype": "int3"}},
        {"layout": {**layout_fields(), "num_layers": 0}},
        {"layout": {**layout_fields(), "num_layers": True}},
        {"layout": {**layout_fields(), "num_layers": 65535, "head_dim": 1 << 20}},
        {"layout": {**layout_fields(), "order": "\n"}},
        {"layout": []},
        {"weights": "\ud800"},
        {"weights": "é" * 4096},
        {"tenant_salt": "abc"},
        {"epoch": -1},
        {"epoch": 1 << 63},
        {"surprise": 1},
    ],
)
async def test_a_namespace_that_cannot_be_is_refused(client, change):
    answer = await client.post("/v1/namespaces", **{"model": "m", "layout": layout_fields(), **change})
    assert (answer.status, answer.code) == (400, "bad_request")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"\xff",
        b"[]",
        b"null",
        b'{"namespace": NaN}',
        b'{"namespace": "a", "namespace": "b"}',
        b"[" * 50_000,
        b'{"keys": ' + b"1" * 5000 + b"}",
    ],
)
async def test_a_body_that_is_not_the_json_it_should_be_is_refused(client, data):
    answer = await client.ask("POST", "/v1/match", data=data, headers={"Content-Type": "application/json"})
    assert (answer.status, answer.code) == (400, "bad_request")


@pytest.mark.parametrize("is_chunked", [False, True])
async def test_a_json_body_above_its_limit_is_refused(client, is_chunked):
    async def pieces():
        yield b"[" * (1 << 20)
        yield b"["

    data = pieces() if is_chunked else io.BytesIO(b"[" * ((1 << 20) + 1))
    answer = await client.ask("POST", "/v1/match", data=data, headers={"Content-Type": "application/json"})
    assert (answer.status, answer.code) == (413, "too_large")


async def test_match_counts_the_leading_blocks(client):
    await client.store(CHAIN[:3])
    found = await client.post("/v1/match", **ABOUT)
    assert found.json == {"blocks": 3, "tiers": ["dram"] * 3, "reason": "never_seen"}


async def test_tokens_name_the_same_blocks_as_their_keys(client):
    await client.store(CHAIN)
    tokens = list(range(4 * BLOCK_TOKENS))
    for more in ({}, {"lease": True}):
        found = await client.post("/v1/match", namespace=ABOUT["namespace"], tokens=[*tokens, 99], **more)
        assert (found.json["blocks"], found.json["reason"]) == (4, None)


@pytest.mark.parametrize(
    "change",
    [
        {"tokens": [1]},
        {"keys": None},
        {"tokens": [1 << 32]},
        {"tokens": [1.5]},
        {"tokens": [-1]},
        {"keys": ["A" * 64]},
    ],
)
async def test_blocks_that_are_named_badly_are_refused(client, change):
    body = {name: value for name, value in (ABOUT | change).items() if value is not None}
    assert (await client.post("/v1/match", **body)).code == "bad_request"


async def test_tokens_begin_at_the_first_block(client):
    answer = await client.post(
        "/v1/match", namespace=ABOUT["namespace"], tokens=[1], start=1, parent="0" * 64
    )
    assert answer.code == "bad_request"


async def test_more_blocks_than_a_request_may_name_are_refused(client):
    keys = [f"{number:064x}" for number in range(10_001)]
    assert (await client.post("/v1/match", namespace=ABOUT["namespace"], keys=keys)).code == "bad_request"
    assert (await client.post("/v1/match", namespace=ABOUT["namespace"], keys=keys[:-1])).json["blocks"] == 0
    tokens = list(range(10_001 * BLOCK_TOKENS))
    assert (await client.post("/v1/match", namespace=ABOUT["namespace"], tokens=tokens)).code == "too_large"


async def test_exists_answers_for_each_key_alone(client):
    await client.store(CHAIN[:1])
    await client.store(CHAIN[2:3], start=2, parent=CHAIN.keys[1].hex())
    assert (await client.post("/v1/exists", **ABOUT)).json == {"present": [True, False, True, False]}


async def test_prefetch_says_how_many_blocks_are_in_memory(client):
    await client.store(CHAIN[:2])
    assert (await client.post("/v1/prefetch", **ABOUT)).json == {"blocks": 2}


async def test_why_reports_on_every_block(client):
    await client.store(CHAIN[:1])
    blocks = (await client.post("/v1/why", **ABOUT)).json["blocks"]
    assert [block["reason"] for block in blocks] == [None, "never_seen", "never_seen", "never_seen"]
    assert blocks[0]["tiers"] == ["dram"]


async def test_every_route_about_blocks_answers_an_unopened_namespace_alike(client):
    elsewhere = {"namespace": "0" * 64, "keys": ABOUT["keys"]}
    bodies = set()
    for route in ROUTES:
        if route.body is not None and "keys" in route.body["properties"]:
            more = {"hints": {}} if "hints" in route.body["required"] else {}
            answer = await client.post(route.path, **elsewhere, **more)
        elif "key" in route.parameters and route.method != "HEAD":
            answer = await client.ask(route.method, route.path.format(namespace="0" * 64, key="1" * 64))
        else:
            continue
        assert answer.status == 404, route.path
        bodies.add(answer.body)
    assert len(bodies) == 1


def text_members(schema, path=()):
    """Where in a body a text may be."""
    for name, member in schema.get("properties", {}).items():
        if member["type"] == "string":
            yield (*path, name)
        elif member["type"] == "object":
            yield from text_members(member, (*path, name))
        elif member["type"] == "array" and member["items"]["type"] == "string":
            yield (*path, name, 0)


async def test_half_of_a_surrogate_pair_is_refused_in_every_text(store, client):
    whole = {**ABOUT, "model": "m", "layout": layout_fields()}
    for route in ROUTES:
        for path in text_members(route.body or {}):
            body = {name: value for name, value in whole.items() if name in route.body["properties"]}
            at = body
            for name in path[:-1]:
                at[name] = at = list(at[name]) if isinstance(at.get(name), list) else dict(at.get(name) or {})
            at[path[-1]] = "\ud800"
            answer = await client.post(route.path, **body)
            assert (answer.status, answer.code) == (400, "bad_request"), (route.path, path)
    assert store.manager.stats()["epochs"] == {}
    assert [space.model for space in store.manager.namespaces()] == ["m"]


async def test_an_epoch_of_a_name_that_is_too_long_is_refused(client):
    assert (await client.post("/v1/admin/epoch", model="é" * 4096)).code == "bad_request"


async def test_the_operator_says_who_it_is(client):
    assert (await client.get("/v1/identity")).json == {
        "name": "local",
        "tenant": "",
        "scopes": ["admin", "read", "write"],
    }


async def test_stats_and_metrics_count_what_was_done(client):
    await client.store(CHAIN)
    await client.post("/v1/match", **ABOUT)
    await client.get("/nothing/here")

    stats = (await client.get("/v1/stats")).json
    metrics = await client.get("/metrics")
    lines = metrics.body.decode().splitlines()

    assert stats["http"]["requests"]["match"] == 1
    assert stats["http"]["errors"] == {"not_found": 1}
    assert metrics.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
    for line in (
        'kvstore_tier_blocks{tier="dram"} 4',
        'kvstore_hits_blocks_total{operation="match",tier="dram"} 4',
        'kvstore_puts_blocks_total{result="stored"} 4',
        'kvstore_http_requests_total{operation="store"} 1',
        'kvstore_http_errors_total{code="not_found"} 1',
        "kvstore_live_leases 0",
    ):
        assert line in lines
    samples = [line.split(" ")[0] for line in lines if not line.startswith("#")]
    assert len(samples) == len(set(samples))


async def test_the_administrators_operations(client):
    await client.store(CHAIN)

    assert (await client.post("/v1/admin/flush", timeout_s=5)).json == {"flushed": True}
    assert (await client.post("/v1/admin/check", sample_blocks=10)).json == {"problems": []}
    assert (await client.post("/v1/admin/demote", **ABOUT)).json == {"demoted": 0}
    assert (await client.post("/v1/admin/drop", **ABOUT)).json == {"dropped": 4}
    (listed,) = (await client.get("/v1/admin/namespaces")).json["namespaces"]
    assert (listed["model"], "tenant_salt" in listed) == ("m", False)
    assert listed["layout"]["num_layers"] == LAYOUT.num_layers
    assert (await client.post("/v1/admin/epoch", model="m")).json == {"epoch": 1}
    assert (await client.post("/v1/match", **ABOUT)).json["reason"] == "other_epoch"


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/", 404, "not_found"),
        ("GET", "/v1/blocks", 404, "not_found"),
        ("GET", "/v1/blocks/" + "0" * 64 + "/..%2f" + "0" * 64, 400, "bad_request"),
        ("GET", "/v1/blocks/../../healthz", 200, None),
        ("GET", "/v1/match", 405, "method_not_allowed"),
        ("OPTIONS", "/v1/match", 405, "method_not_allowed"),
        ("TRACE", "/healthz", 405, "method_not_allowed"),
        ("POST", "/healthz", 405, "method_not_allowed"),
    ],
)
async def test_what_there_is_not_is_said(client, method, path, status, code):
    answer = await client.ask(method, path)
    assert answer.status == status
    assert code is None or answer.code == code
    assert answer.headers.get("Allow") == {"/v1/match": "POST", "/healthz": "GET, HEAD"}.get(
        path if status == 405 else ""
    )


async def test_naming_parts_that_hold_nothing_costs_no_memory(store, client):
    space = Namespace(model="parts", layout=KVLayout("uint8", 32, BLOCK_TOKENS, 8, 2))
    await client.open(space)
    about = {"namespace": space.digest.hex(), "keys": ["1" * 64]}
    for first in range(31):
        for last in range(first + 1, 32):
            assert (await client.post("/v1/match", **about, part=[first, last, 0, 1])).status == 200
    assert len(store.manager._state.directory._shelves) == 0
