"""Every route of the table with no key, a bad key, the wrong scope, and another tenant's names.

The cases are made from the table: a route that is added to it is tested without a word here.
"""

from dataclasses import replace

import pytest

from kvstore.auth import Scope
from kvstore.http.routes import ROUTES
from kvstore.http.schemas import STORE_HEAD
from kvstore.keys import Namespace
from tests.http.http_store import BLOCK_BYTES, LAYOUT, framed, hex_keys, http_store, layout_fields, payload
from tests.http.keyed_store import KEYRING, key_of, keyed_store

PAGE = {("GET", "/ui"), ("GET", "/ui/page.css"), ("GET", "/ui/page.js")}
OPEN_TO_ALL = {("GET", "/healthz"), ("GET", "/readyz"), *PAGE}
GUARDED = [route for route in ROUTES if not route.is_public]
ALL = tuple(Scope)
LEASE = "0" * 32
RECORD = "/v1/records/sessions/one"

SPACE = Namespace("m", LAYOUT)
OURS = replace(SPACE, tenant_salt=KEYRING.salt("acme"))
THEIRS = replace(SPACE, tenant_salt=KEYRING.salt("other"))
UNKNOWN = replace(SPACE, model="never opened", tenant_salt=KEYRING.salt("acme"))
TOKENS = list(range(8))


def name_of(route):
    return f"{route.method} {route.path}"


def body_schema(route):
    """The schema of what names a namespace in a body; only a store has it in a frame."""
    return STORE_HEAD if route.path == "/v1/store" else route.body


def names_a_namespace(route):
    schema = body_schema(route)
    return "namespace" in route.parameters or (schema is not None and "namespace" in schema["properties"])


def sample(schema):
    """Return a value that a schema allows, for what a request must hold and no test is about."""
    if "enum" in schema:
        return schema["enum"][0]
    kinds = {"string": "x" * schema.get("minLength", 1), "boolean": False, "array": []}
    kinds |= {kind: schema.get("minimum", 0) for kind in ("integer", "number")}
    if schema["type"] != "object":
        return kinds[schema["type"]]
    return {name: sample(schema["properties"][name]) for name in schema["required"]}


def request_of(route, space, lease=LEASE):
    """Return path and options of a request that the route takes, about the first blocks of a namespace."""
    chain = space.chain(TOKENS)
    names = {"namespace": space.digest.hex(), "key": chain.keys[0].hex(), "lease": lease}
    path = route.path.format(**names, collection="sessions", name="one")
    if route.path == "/v1/events":  # without an end of its own
        path += f"?namespace={space.digest.hex()}&timeout_s=0.05"
    if route.path in ("/v1/size", "/v1/branches"):
        path += f"?namespace={space.digest.hex()}"
    schema = body_schema(route)
    if schema is None:
        return path, {"data": payload(chain.keys[0])} if route.takes_payload else {}
    known = {
        "namespace": space.digest.hex(),
        "keys": hex_keys(chain),
        "model": space.model,
        "policy": "lru",
        "layout": layout_fields(),
    }
    fields = {name: known[name] for name in schema["properties"] if name in known}
    fields |= {name: sample(schema["properties"][name]) for name in schema["required"] if name not in known}
    if route.takes_payload:
        return path, {"data": framed(fields, payload(chain.keys[0]) + payload(chain.keys[1]))}
    return path, {"json": fields}


@pytest.fixture
async def store():
    """Both tenants have opened their namespace, stored the same tokens, and a record of the same name."""
    async with keyed_store() as running:
        for space, tenant in ((OURS, "acme"), (THEIRS, "other")):
            async with running.client(key_of(tenant, *ALL)) as client:
                assert (await client.open()).json["namespace"] == space.digest.hex()
                assert (await client.store(space.chain(TOKENS))).json["stored"] == 2
                assert (await client.ask("PUT", RECORD, data=tenant.encode())).status == 200
        yield running


async def ask(store, key, route, space, **more):
    path, options = request_of(route, space, **more)
    async with store.client(key) as client:
        return await client.ask(route.method, path, **options)


def all_of(answer):
    """Everything that a caller sees, but for the time of day."""
    return answer.status, {name: text for name, text in answer.headers.items() if name != "Date"}, answer.body


def code_of(route, answer):
    """The code of an error; HEAD has no body to say it."""
    return None if route.method == "HEAD" else answer.code


def test_only_health_and_the_page_without_data_are_open_to_all():
    assert {(route.method, route.path) for route in ROUTES if route.is_public} == OPEN_TO_ALL


def test_whatever_changes_or_tells_the_state_of_the_store_needs_admin():
    admin = {route.path for route in ROUTES if route.scope is Scope.ADMIN}

    assert admin == {
        route.path
        for route in ROUTES
        if route.path.startswith("/v1/admin/") or route.path in ("/metrics", "/v1/stats")
    }


def test_every_route_about_blocks_needs_read_or_write_and_names_a_namespace_or_a_lease():
    """Routes without a scope tell a caller only of itself."""
    without_scope = {name_of(route) for route in GUARDED if route.scope is None}

    assert without_scope == {"GET /openapi.json", "GET /v1/identity", "POST /v1/namespaces"}
    about_data = [route for route in ROUTES if route.scope in (Scope.READ, Scope.WRITE)]
    others = [name_of(route) for route in about_data if not names_a_namespace(route)]
    assert [name for name in others if "lease" not in name and "/v1/records/" not in name] == []


@pytest.mark.parametrize("route", [route for route in ROUTES if route.is_public], ids=name_of)
@pytest.mark.parametrize("key", [None, "kvs_bad"])
async def test_what_is_open_to_all_needs_no_key(store, route, key):
    assert (await ask(store, key, route, OURS)).status == 200


@pytest.mark.parametrize("route", GUARDED, ids=name_of)
async def test_without_a_key_or_with_a_bad_one_no_route_answers(store, route):
    answers = [await ask(store, key, route, OURS) for key in (None, "kvs_bad", "", "kvs_acme_rea")]

    assert {answer.status for answer in answers} == {401}
    assert {code_of(route, answer) for answer in answers} <= {"unauthorized", None}
    assert {answer.headers["WWW-Authenticate"] for answer in answers} == {"Bearer"}
    assert len({str(all_of(answer)) for answer in answers}) == 1


@pytest.mark.parametrize("route", [route for route in GUARDED if route.scope], ids=name_of)
async def test_a_key_without_the_scope_is_refused(store, route):
    lacking = [scope for scope in Scope if scope is not route.scope]

    answers = [await ask(store, key_of("acme", scope), route, OURS) for scope in lacking]

    assert [(answer.status, code_of(route, answer)) for answer in answers] == [
        (403, None if route.method == "HEAD" else "forbidden")
    ] * 2


@pytest.mark.parametrize("route", GUARDED, ids=name_of)
async def test_a_key_with_the_scope_is_let_in(store, route):
    scope = route.scope or Scope.READ

    answer = await ask(store, key_of("acme", scope), route, OURS)

    # A lease that does not exist is the one thing that such a request does not find; and there is no key to
    # destroy where blocks are not encrypted.
    others = {"/v1/leases/{lease}": (404,), "/v1/admin/erase": (400,)}
    assert answer.status in others.get(route.path, route.statuses)


@pytest.mark.parametrize("route", [route for route in GUARDED if names_a_namespace(route)], ids=name_of)
async def test_another_tenants_namespace_is_like_one_that_does_not_exist(store, route):
    key = key_of("acme", *ALL)

    foreign, unknown = await ask(store, key, route, THEIRS), await ask(store, key, route, UNKNOWN)

    assert all_of(foreign) == all_of(unknown)
    assert (foreign.status, code_of(route, foreign)) in ((404, "unknown_namespace"), (404, None))


@pytest.mark.parametrize("route", [route for route in GUARDED if "lease}" in route.path], ids=name_of)
async def test_another_tenants_lease_is_like_one_that_does_not_exist(store, route):
    async with store.client(key_of("other", *ALL)) as client:
        chain = THEIRS.chain(TOKENS)
        lease = await client.post("/v1/leases", namespace=chain.namespace.hex(), keys=hex_keys(chain))

        foreign = await ask(store, key_of("acme", *ALL), route, OURS, lease=lease.json["lease"])
        unknown = await ask(store, key_of("acme", *ALL), route, OURS)
        own = await ask(store, key_of("other", *ALL), route, OURS, lease=lease.json["lease"])

    assert all_of(foreign) == all_of(unknown)
    assert (foreign.status, foreign.code, own.status) == (404, "unknown_lease", 200)


async def test_another_tenants_records_are_like_those_that_do_not_exist(store):
    async with store.client(key_of("acme", *ALL)) as ours, store.client(key_of("other", *ALL)) as theirs:
        await ours.ask("PUT", "/v1/records/mine/secret", data=b"x")

        foreign = [
            await theirs.ask("GET", "/v1/records/mine/secret"),
            await theirs.ask("GET", "/v1/records/mine/nothing"),
        ]
        listed = (await theirs.ask("GET", "/v1/records/mine")).json
        dropped = [(await theirs.ask("DELETE", f"/v1/records/mine/{name}")).json for name in ("secret", "no")]
        salted = [
            await theirs.ask(method, RECORD, headers={"KVStore-Tenant-Salt": KEYRING.salt("acme").hex()})
            for method in ("GET", "DELETE", "PUT")
        ]
        own = await theirs.ask("GET", RECORD)

        assert (await ours.ask("GET", "/v1/records/mine/secret")).body == b"x"
    assert all_of(foreign[0]) == all_of(foreign[1])
    assert (foreign[0].status, listed, dropped) == (404, {"records": []}, [{"dropped": False}] * 2)
    assert {(answer.status, answer.code) for answer in salted} == {(403, "forbidden")}
    assert own.body == b"other"


@pytest.mark.parametrize("route", [route for route in GUARDED if route.takes_payload], ids=name_of)
async def test_a_body_is_not_read_before_its_sender_is_known(store, route):
    path, options = request_of(route, OURS)
    async with store.client("kvs_bad") as client:
        before = store.counters.received_bytes
        answer = await client.ask(route.method, path, expect100=True, **options)

    assert answer.status == 401
    assert store.counters.received_bytes == before


@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"])
@pytest.mark.parametrize(
    "path",
    ["/", "/v1", "/v1/nothing", "/v1/admin", "/v1/blocks/x", "/ui/", "/ui/x", "/ui/page.py", "/ui/..%2f"],
)
async def test_there_is_nothing_beside_the_table(store, method, path):
    async with store.client() as client:
        answer = await client.ask(method, path)

    assert answer.status in (404, 405)


async def test_without_keys_the_operator_is_let_in_everywhere():
    async with http_store() as store, store.client() as client:
        await client.open()
        await client.store(SPACE.chain(TOKENS))
        answers = [
            (await client.ask(route.method, path, **options)).status
            for route in ROUTES
            for path, options in [request_of(route, SPACE)]
            if "lease}" not in route.path and route.path != "/v1/admin/erase"
        ]

    assert set(answers) <= {200, 201, 404}  # a block may have been deleted by a request before


@pytest.mark.parametrize("route", GUARDED, ids=name_of)
async def test_without_keys_no_route_answers_what_a_web_page_may_have_sent(route):
    path, options = request_of(route, SPACE)
    async with http_store() as store, store.client() as client:
        answers = [
            await client.ask(route.method, path, headers=headers, **options)
            for headers in ({"Origin": "http://127.0.0.1"}, {"Host": "attacker.example"})
        ]

    assert [answer.status for answer in answers] == [403, 403]


def test_a_block_is_larger_than_what_a_refusal_reads():
    assert BLOCK_BYTES > 4096
