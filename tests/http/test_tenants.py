"""Tenants over HTTP: nobody learns of another's blocks, whatever is asked."""

import random
from dataclasses import replace

import pytest

from kvstore.auth import Scope
from kvstore.keys import Namespace
from tests.http.http_store import LAYOUT, hex_keys, layout_fields, payload
from tests.http.keyed_store import KEYRING, PUBLIC_MODEL, key_of, keyed_store

ALL = tuple(Scope)
PLAIN = Namespace("m", LAYOUT)
OURS, THEIRS = (replace(PLAIN, tenant_salt=KEYRING.salt(tenant)) for tenant in ("acme", "other"))
SHARED = Namespace(PUBLIC_MODEL, LAYOUT)
PROBES = 1000


@pytest.fixture
async def store():
    async with keyed_store(blocks=256) as running:
        yield running


@pytest.fixture
async def ours(store):
    async with store.client(key_of("acme", Scope.READ, *ALL[1:])) as client:
        yield client


@pytest.fixture
async def theirs(store):
    async with store.client(key_of("other", *ALL)) as client:
        yield client


def seen(answer):
    return answer.status, {name: text for name, text in answer.headers.items() if name != "Date"}, answer.body


async def test_the_salt_comes_from_who_opens(ours, theirs):
    fields = {"model": "m", "layout": layout_fields()}
    answers = [(await client.post("/v1/namespaces", **fields)).json for client in (ours, theirs)]

    assert [answer["namespace"] for answer in answers] == [OURS.digest.hex(), THEIRS.digest.hex()]
    assert [answer["tenant_salt"] for answer in answers] == [
        OURS.tenant_salt.hex(),
        THEIRS.tenant_salt.hex(),
    ]


@pytest.mark.parametrize("salt", [THEIRS.tenant_salt, b"guess", OURS.tenant_salt[:-1]])
async def test_a_salt_of_another_is_refused(ours, salt):
    answer = await ours.open(tenant_salt=salt.hex())

    assert (answer.status, answer.code) == (403, "forbidden")
    assert salt.hex() not in answer.body.decode()


async def test_the_tenants_own_salt_may_be_sent(ours):
    answer = await ours.open(tenant_salt=OURS.tenant_salt.hex())

    assert (answer.status, answer.json["namespace"]) == (200, OURS.digest.hex())


async def test_two_tenants_with_the_same_tokens_share_nothing(ours, theirs):
    await ours.open()
    await theirs.open()
    await theirs.store(THEIRS.chain(range(8)))

    head, bodies = await ours.fetch(OURS.chain(range(8)))

    assert (head["blocks"], bodies) == (0, [])


async def test_probes_of_what_another_stored_and_of_what_nobody_did_look_the_same(ours, theirs):
    """One thousand probes by the same tokens: nothing in status, headers or body tells which are stored."""
    random_tokens = random.Random(7)
    prompts = [[random_tokens.randrange(1 << 32) for _ in range(4)] for _ in range(PROBES)]
    stored = prompts[: PROBES // 2]
    await ours.open()
    await theirs.open()
    for tokens in stored[:200]:
        await theirs.store(THEIRS.chain(tokens))

    answers = {"stored": set(), "not stored": set()}
    for number, tokens in enumerate(prompts):
        kind = "stored" if number < 200 else "not stored"
        chain = OURS.chain(tokens)
        answer = (
            await ours.get_block(chain)
            if number % 2
            else await ours.post("/v1/match", namespace=OURS.digest.hex(), tokens=tokens)
        )
        answers[kind].add(repr(seen(answer)))

    assert answers["stored"] == answers["not stored"]
    assert len(answers["stored"]) == 2  # one answer of each of the two operations


async def test_probes_by_another_tenants_own_names_look_like_names_of_nothing(ours, theirs):
    """A tenant that knows another's salt, and so its names, learns nothing by them either."""
    await ours.open()
    await theirs.open()
    await theirs.store(THEIRS.chain(range(8)))
    nothing = replace(THEIRS, model="never opened")

    answers = [
        [
            seen(await ours.get_block(chain)),
            seen(await ours.ask("HEAD", ours.block_path(chain))),
            seen(await ours.ask("DELETE", ours.block_path(chain))),
            seen(await ours.put_block(chain)),
            seen(await ours.store(chain)),
            *[
                seen(await ours.post(path, namespace=chain.namespace.hex(), keys=hex_keys(chain)))
                for path in ("/v1/match", "/v1/exists", "/v1/fetch", "/v1/prefetch", "/v1/why", "/v1/leases")
            ],
        ]
        for chain in (THEIRS.chain(range(8)), nothing.chain(range(8)))
    ]

    assert answers[0] == answers[1]
    assert {status for status, _, _ in answers[0]} == {404}
    head, bodies = await theirs.fetch(THEIRS.chain(range(8)))
    assert head["blocks"] == 2
    assert bodies == [payload(key) for key in THEIRS.chain(range(8)).keys]


async def test_an_administrator_of_one_tenant_drops_no_blocks_of_another(ours, theirs):
    await theirs.open()
    chain = THEIRS.chain(range(8))
    await theirs.store(chain)

    answer = await ours.post("/v1/admin/drop", namespace=chain.namespace.hex(), keys=hex_keys(chain))

    assert (answer.status, answer.code) == (404, "unknown_namespace")
    assert (await theirs.fetch(chain))[0]["blocks"] == 2


async def test_a_public_namespace_is_shared_where_the_configuration_names_its_model(ours, theirs):
    for client in (ours, theirs):
        opened = (await client.open(SHARED, public=True)).json
        assert (opened["namespace"], opened["tenant_salt"]) == (SHARED.digest.hex(), "")
    chain = SHARED.chain(range(4))

    await theirs.store(chain)

    assert (await ours.get_block(chain)).body == payload(chain.keys[0])


async def test_a_public_namespace_of_another_model_is_refused(ours):
    answer = await ours.open(PLAIN, public=True)

    assert (answer.status, answer.code) == (403, "forbidden")


async def test_a_namespace_without_salt_that_the_operator_opened_is_no_tenants(store, ours):
    store.manager.open_namespace(PLAIN)
    unknown = replace(PLAIN, model="never opened")

    found, absent = [await ours.get_block(space.chain(range(4))) for space in (PLAIN, unknown)]

    assert seen(found) == seen(absent)
    assert found.status == 404


async def test_blocks_that_all_share_are_deleted_by_no_tenant(ours):
    await ours.open(SHARED, public=True)
    chain = SHARED.chain(range(4))
    await ours.store(chain)

    answer = await ours.ask("DELETE", ours.block_path(chain))

    assert (answer.status, answer.code) == (403, "forbidden")
    assert (await ours.get_block(chain)).status == 200


async def test_why_does_not_tell_whose_blocks_pressed():
    """Another tenant's blocks push ours out; the report says so and not which namespace it was."""
    chain = OURS.chain(range(4))
    async with (
        keyed_store(blocks=8, high_water_ratio=1.0, low_water_ratio=1.0) as store,
        store.client(key_of("acme", *ALL)) as ours,
        store.client(key_of("other", *ALL)) as theirs,
    ):
        await ours.open()
        await theirs.open()
        await ours.store(chain)
        for first in range(0, 32, 4):
            await theirs.store(THEIRS.chain(range(first, first + 4)))

        answer = await ours.post("/v1/why", namespace=OURS.digest.hex(), keys=hex_keys(chain))
        (known,) = await store.manager.why(chain)

    (report,) = answer.json["blocks"]
    assert known.pressed_by == THEIRS.digest.hex()[:12]
    assert report["pressed_by"] == "others"
    assert known.pressed_by not in answer.body.decode()


async def test_stats_metrics_and_namespaces_tell_no_salts(ours, theirs):
    await ours.open()
    await theirs.open()

    texts = [
        (await ours.get(path)).body.decode() for path in ("/v1/stats", "/metrics", "/v1/admin/namespaces")
    ]

    for salt in (OURS.tenant_salt, THEIRS.tenant_salt):
        assert not [text for text in texts if salt.hex() in text or str(salt) in text]
