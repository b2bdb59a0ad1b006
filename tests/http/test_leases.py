"""Leases over HTTP: how long they last, how many there are, and clients that go away."""

import asyncio
import json
import socket
import ssl

import pytest

from kvstore.auth import Identity
from kvstore.doors import Doors
from kvstore.http import Limits
from kvstore.http.callers import Caller, Callers
from kvstore.testing import FaultyTier, MemoryTier
from tests.http.http_store import SPACE, framed, hex_keys, http_store, layout_fields, long_chain, payload
from tests.http.raw_client import RawClient, head, until
from tests.tiers.certificates import Authority

CHAIN = long_chain(4)
ABOUT = {"namespace": CHAIN.namespace.hex(), "keys": hex_keys(CHAIN)}
OPENING = {"model": SPACE.model, "layout": layout_fields()}


async def test_a_lease_keeps_its_blocks_until_it_is_ended(store, client):
    await client.store(CHAIN)
    lease = (await client.post("/v1/leases", **ABOUT)).json
    assert (lease["blocks"], lease["reason"], lease["lease_s"]) == (4, None, 30.0)
    assert (await client.ask("DELETE", client.block_path(CHAIN))).json == {"dropped": 0}

    path = f"/v1/leases/{lease['lease']}"
    assert (await client.ask("DELETE", path)).json == {"released": True}
    again = await client.ask("DELETE", path)
    assert (again.status, again.code) == (404, "unknown_lease")
    assert (await client.ask("DELETE", client.block_path(CHAIN))).json == {"dropped": 1}


async def test_a_lease_ends_by_itself(store, client):
    await client.store(CHAIN)
    lease = (await client.post("/v1/match", **ABOUT, lease=True, lease_s=0.01)).json
    assert lease["lease_s"] == 0.01
    for _ in range(1000):
        if not store.manager.stats()["live_leases"]:
            break
        await asyncio.sleep(0.01)
    assert store.manager.stats()["live_leases"] == 0
    assert (await client.ask("DELETE", f"/v1/leases/{lease['lease']}")).code == "unknown_lease"


async def test_a_lease_of_nothing_is_none(client):
    assert (await client.post("/v1/leases", **ABOUT)).json["lease"] is None


async def test_a_caller_has_only_so_many_leases():
    async with http_store(limits=Limits(max_leases=2)) as store, store.client() as client:
        await client.open()
        await client.store(CHAIN)
        answers = [(await client.post("/v1/leases", **ABOUT)).json for _ in range(3)]
        assert [answer["blocks"] for answer in answers] == [4, 4, 0]
        assert [answer["lease_reason"] for answer in answers] == [None, None, "quota"]
        assert (answers[2]["lease"], answers[2]["reason"]) == (None, "quota")
        assert store.counters.refused_leases == 1
        await client.ask("DELETE", f"/v1/leases/{answers[0]['lease']}")
        assert (await client.post("/v1/leases", **ABOUT)).json["blocks"] == 4


async def test_a_match_that_can_have_no_lease_is_no_miss():
    async with http_store(limits=Limits(max_leases=1)) as store, store.client() as client:
        await client.open()
        await client.store(CHAIN)
        leased, unleased = [(await client.post("/v1/match", **ABOUT, lease=True)).json for _ in range(2)]
        assert (leased["leased"], leased["lease_reason"]) == (4, None)
        assert (unleased["blocks"], unleased["tiers"], unleased["reason"]) == (4, ["dram"] * 4, None)
        assert (unleased["lease"], unleased["leased"], unleased["lease_reason"]) == (None, 0, "quota")


async def test_a_match_says_that_the_pin_budget_allows_no_lease():
    async with http_store(pin_budget_ratio=2 / 64) as store, store.client() as client:
        await client.open()
        await client.store(CHAIN)
        found = (await client.post("/v1/match", **ABOUT, lease=True)).json
        assert (found["blocks"], found["leased"], found["lease_reason"]) == (4, 2, "quota")


async def test_requests_at_the_same_time_get_no_more_leases_than_there_are():
    shared = FaultyTier(MemoryTier(name="remote", is_shared=True))
    async with http_store(shared, limits=Limits(max_leases=2)) as store, store.client() as client:
        await client.open()
        await client.store(CHAIN[:2])
        await client.post("/v1/admin/flush", timeout_s=10)
        shared.calls.clear()
        shared.hold()
        wanted = {**ABOUT, "lease": True, "timeout_s": 60}
        asked = [asyncio.create_task(client.post("/v1/match", **wanted)) for _ in range(8)]
        await until(lambda: shared.calls.count("probe") == 8)
        shared.let_go()
        answers = [(await answer).json for answer in asked]
        assert [answer["blocks"] for answer in answers] == [2] * 8
        assert sum(answer["lease"] is not None for answer in answers) == 2
        assert store.manager.stats()["live_leases"] == 2


async def test_callers_that_have_nothing_are_forgotten_first(store, monkeypatch):
    monkeypatch.setattr("kvstore.http.callers.MAX_CALLERS", 2)
    callers = Callers(store.manager, Limits(), clock=lambda: 0.0)
    first, second = (Identity(name, name, frozenset(), b"s") for name in ("first", "second"))
    kept: Caller = callers.get(first)
    with kept.request():
        idle = callers.get(second)
        callers.get(Identity("third", "third", frozenset(), b"s"))
        assert callers.get(first) is kept
        assert callers.get(second) is not idle
    callers.end()


async def test_a_name_that_changes_its_tenant_has_nothing_of_the_former(store, client):
    callers = Callers(store.manager, Limits(), clock=lambda: 0.0)
    before = callers.get(Identity("name", "a", frozenset(), b"s"))
    with before.place_for_lease():
        pass
    assert store.manager.stats()["owners"] == 1
    after = callers.get(Identity("name", "b", frozenset(), b"t"))
    assert after is not before
    assert store.manager.stats()["owners"] == 0
    callers.end()


def lease_request(path="/v1/match"):
    fields = ABOUT if path == "/v1/leases" else {**ABOUT, "lease": True}
    body = json.dumps(fields)
    return head("POST", path, Content_Type="application/json", Content_Length=len(body)) + body


@pytest.mark.parametrize("path", ["/v1/match", "/v1/leases"])
async def test_a_lease_of_a_client_that_went_away_before_its_answer_ends_at_once(store, client, path):
    await client.store(CHAIN)
    host, port = store.face.url.removeprefix("http://").split(":")
    for _ in range(20):
        with socket.create_connection((host, int(port))) as gone:
            gone.sendall(lease_request(path).encode())
    await until(lambda: sum(store.counters.requests[name] for name in ("match", "lease")) == 20)
    await until(lambda: store.counters.open_connections == 1)
    assert store.manager.stats()["live_leases"] == 0
    assert (await client.post(path, **ABOUT, **({"lease": True} if path == "/v1/match" else {}))).json[
        "lease"
    ]


async def test_a_lease_whose_answer_lies_unread_at_the_clients_end_ends_at_once(store, client):
    await client.store(CHAIN)
    host, port = store.face.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as gone:
        gone.sendall(lease_request().encode())
        await asyncio.to_thread(gone.recv, 1)
    await until(lambda: store.counters.open_connections == 1)
    assert (store.manager.stats()["live_leases"], store.counters.unread_leases) == (0, 1)


@pytest.mark.parametrize("way", ["closed", "asked again"])
async def test_a_lease_whose_answer_was_read_lasts(store, client, way):
    await client.store(CHAIN)
    async with RawClient.connected(store.face) as raw:
        await raw.say(lease_request())
        status, _ = await raw.hear_answer()
        assert status == 200
        if way == "asked again":
            await raw.say(head("GET", "/healthz"))
            await raw.hear_answer()
            raw.writer.transport.abort()
    await until(lambda: store.counters.open_connections == 1)
    assert (store.manager.stats()["live_leases"], store.counters.unread_leases) == (1, 0)


async def test_a_client_that_goes_away_while_its_match_waits_gets_no_lease():
    shared = FaultyTier(MemoryTier(name="remote", is_shared=True))
    async with http_store(shared) as store, store.client() as client:
        await client.open()
        await client.store(CHAIN[:2])
        await client.post("/v1/admin/flush", timeout_s=10)
        shared.calls.clear()
        shared.hold()
        async with RawClient.connected(store.face) as raw:
            await raw.say(lease_request())
            await until(lambda: "probe" in shared.calls)
        shared.let_go()
        await until(lambda: store.face._num_requests == 0)
        assert store.manager.stats()["live_leases"] == 0


@pytest.fixture(scope="module")
def encrypted(tmp_path_factory):
    """A server's context, and one that trusts it."""
    authority = Authority(tmp_path_factory.mktemp("authority"))
    shown = authority.sign("server", alternative="IP:127.0.0.1")
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(shown.cert, shown.key)
    return server, ssl.create_default_context(cafile=authority.own.cert)


@pytest.mark.parametrize("has_said_goodbye", [True, False])
async def test_over_tls_a_lease_lasts_that_was_read_of_and_no_other(encrypted, has_said_goodbye):
    server, trusting = encrypted
    async with http_store(doors=Doors(tls=lambda: server)) as store, store.client() as client:
        connected = {"ssl": trusting}
        await client.ask("POST", "/v1/namespaces", json=OPENING, **connected)
        about = {"namespace": CHAIN.namespace.hex(), "keys": hex_keys(CHAIN)}
        stored = framed(about, b"".join(map(payload, CHAIN.keys)))
        await client.ask("POST", "/v1/store", data=stored, **connected)
        host, port = store.face.url.removeprefix("https://").split(":")

        def ask(is_read):
            with socket.create_connection((host, int(port))) as plain:
                wrapped = trusting.wrap_socket(plain, server_hostname=host)
                wrapped.sendall(lease_request().encode())
                if is_read:
                    heard = b""
                    while not heard.endswith(b"}"):
                        heard += wrapped.recv(1 << 16)
                    if has_said_goodbye:
                        wrapped.unwrap()
                wrapped.close()

        for is_read in (True, False):
            await asyncio.to_thread(ask, is_read)
            await until(lambda: store.counters.open_connections == 1)
        assert store.manager.stats()["live_leases"] == 1
