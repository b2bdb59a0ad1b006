"""Hot branches over HTTP: where they lie, and that a tenant is told of its own alone."""

from dataclasses import replace

import pytest

from kvstore.auth import Scope
from kvstore.keys import Namespace
from kvstore.tenant import tenant_of
from tests.http.http_store import LAYOUT, http_store
from tests.http.keyed_store import KEYRING, PUBLIC_MODEL, key_of, keyed_store

OURS = Namespace("m", LAYOUT, tenant_salt=KEYRING.salt("acme"))
THEIRS = replace(OURS, tenant_salt=KEYRING.salt("other"))
SHARED = Namespace(PUBLIC_MODEL, LAYOUT)
PLAIN = Namespace("m", LAYOUT)
PATH = "/v1/branches"


async def use(manager, space, times, num_blocks=3):
    manager.open_namespace(space)
    for _ in range(times):
        await manager.match(space.chain(range(4 * num_blocks)), timeout_s=1)


@pytest.fixture
async def store():
    """Three lookups by one tenant, one by the other, two of a namespace that all share."""
    async with keyed_store() as running:
        for space, times in ((OURS, 3), (THEIRS, 1), (SHARED, 2)):
            await use(running.manager, space, times)
        yield running


async def ask(store, key, path=PATH):
    async with store.client(key) as client:
        return await client.ask("GET", path)


async def test_a_branch_says_how_often_it_was_looked_up_how_deep_it_is_and_where_it_lies():
    async with http_store() as running, running.client() as client:
        namespace = (await client.open()).json["namespace"]
        stored, chain = PLAIN.chain(range(8)), PLAIN.chain(range(16))
        await client.store(stored)
        for asked in (chain, stored, stored):
            await client.post("/v1/match", namespace=namespace, keys=[key.hex() for key in asked.keys])
        await client.post("/v1/fetch", namespace=namespace, keys=[key.hex() for key in stored.keys])

        told = (await client.ask("GET", PATH)).json

    assert (told["is_on"], told["window_s"], told["lookups"], told["sample_ratio"]) == (True, 300, 3, 1)
    hot, cold = told["branches"]
    assert hot.pop("last_use_s") >= 0
    assert hot == {
        "key": stored.keys[-1].hex(),
        "namespace": namespace,
        "tenant": tenant_of(b"").hex(),
        "parent": None,
        "leaves_at_blocks": 0,
        "blocks": 2,
        "tokens": 8,
        "match": {"lookups": 3, "hits": 3},
        "fetch": {"lookups": 1, "hits": 1},
        "tiers": {"dram": 2},
    }
    assert (cold["key"], cold["parent"]) == (chain.keys[-1].hex(), stored.keys[-1].hex())
    assert (cold["blocks"], cold["leaves_at_blocks"], cold["tiers"]) == (4, 2, {"dram": 2})
    assert cold["match"] == {"lookups": 1, "hits": 0}


async def test_a_tenant_is_told_of_its_own_branches_alone(store):
    ours, theirs = [await ask(store, key_of(tenant, Scope.READ)) for tenant in ("acme", "other")]
    named = await ask(store, key_of("acme", Scope.READ), f"{PATH}?namespace={OURS.digest.hex()}")

    assert [at["namespace"] for at in ours.json["branches"]] == [OURS.digest.hex()]
    assert [at["namespace"] for at in theirs.json["branches"]] == [THEIRS.digest.hex()]
    assert (ours.json["lookups"], theirs.json["lookups"]) == (3, 1)
    assert [at["key"] for at in named.json["branches"]] == [at["key"] for at in ours.json["branches"]]
    assert not {"sample_ratio", "lost_samples", "kept_branches"} & set(ours.json)


async def test_the_scope_admin_of_a_tenant_tells_no_more_than_read(store):
    own, admin = [await ask(store, key_of("acme", *scopes)) for scopes in ([Scope.READ], Scope)]

    for answer in (own.json, admin.json):
        for branch in answer["branches"]:
            del branch["last_use_s"]
    assert admin.json == own.json


async def test_no_salt_is_told(store):
    answer = await ask(store, key_of("acme", Scope.READ))

    assert answer.json["branches"][0]["tenant"] == tenant_of(OURS.tenant_salt).hex()
    assert OURS.tenant_salt.hex() not in answer.body.decode()


async def test_a_tenant_is_not_told_of_others_and_of_what_others_share(store):
    key = key_of("acme", Scope.READ)
    theirs = await ask(store, key, f"{PATH}?namespace={THEIRS.digest.hex()}")
    shared = await ask(store, key, f"{PATH}?namespace={SHARED.digest.hex()}")

    assert (theirs.status, theirs.code) == (404, "unknown_namespace")
    assert (shared.status, shared.code) == (403, "forbidden")


async def test_stats_tell_of_as_many_branches_as_the_caller_may_know_of(store):
    answer = await ask(store, key_of("acme", Scope.ADMIN), "/v1/stats")

    assert {at["namespace"] for at in answer.json["branches"]["branches"]} == {OURS.digest.hex()}
    assert {at["namespace"] for at in store.manager.stats()["branches"]["branches"]} == {
        space.digest.hex() for space in (OURS, THEIRS, SHARED)
    }


async def test_the_hottest_come_first_and_as_many_as_are_asked_for(store):
    for number in range(4):
        chain = OURS.chain([number] * 16)
        for _ in range(5 + number):
            await store.manager.match(chain, timeout_s=1)

    answer = await ask(store, key_of("acme", Scope.READ), f"{PATH}?limit=3")

    assert [at["match"]["lookups"] for at in answer.json["branches"]] == [8, 7, 6]


@pytest.mark.parametrize("limit", ["0", "101", "x"])
async def test_a_limit_that_is_none_is_refused(store, limit):
    answer = await ask(store, key_of("acme", Scope.READ), f"{PATH}?limit={limit}")

    assert (answer.status, answer.code) == (400, "bad_request")


async def test_a_namespace_whose_epoch_has_ended_lies_nowhere(store):
    await use(store.manager, OURS, 2)
    await store.manager.advance_epoch("m")

    answer = await ask(store, key_of("acme", Scope.READ))

    assert [at["tiers"] for at in answer.json["branches"]] == [{}]
