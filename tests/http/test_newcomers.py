"""More connections than there may be: who makes way, and who does not notice."""

import asyncio
import contextlib
import socket
import ssl

import pytest

from kvstore.auth import Scope
from kvstore.doors import Doors
from kvstore.http import Limits
from kvstore.http.newcomers import Newcomers
from kvstore.testing import FakeClock
from tests.http.http_store import http_store
from tests.http.keyed_store import TENANTS, key_of, keyed_store
from tests.http.raw_client import RawClient, head, until
from tests.tiers.certificates import Authority

TWO = Limits(max_connections=2)


async def admitted(stack, store):
    """A connection whose client has sent a request that it may send."""
    raw = await stack.enter_async_context(RawClient.connected(store.face))
    await raw.say(head("GET", "/v1/identity"))
    assert (await raw.hear_answer())[0] == 200
    return raw


@pytest.fixture(scope="module")
def encrypted(tmp_path_factory):
    """A server's context, and one that trusts it."""
    authority = Authority(tmp_path_factory.mktemp("authority"))
    shown = authority.sign("server", alternative="IP:127.0.0.1")
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(shown.cert, shown.key)
    return server, ssl.create_default_context(cafile=authority.own.cert)


async def test_connections_above_the_cap_are_answered_at_once():
    async with http_store(limits=TWO) as store, contextlib.AsyncExitStack() as stack:
        raws = [await admitted(stack, store) for _ in range(2)]
        await until(lambda: store.counters.open_connections == 2)
        async with RawClient.connected(store.face) as third:
            await third.say(head("GET", "/healthz"))
            answer = await third.hear_all()
            assert answer.startswith(b"HTTP/1.1 503 ")
            assert b'"unavailable"' in answer
        assert store.counters.refused_connections == 1

        raws[0].writer.close()
        await until(lambda: store.counters.open_connections == 1)
        async with RawClient.connected(store.face) as again:
            await again.say(head("GET", "/healthz"))
            assert (await again.hear_answer())[0] == 200


@contextlib.contextmanager
def silent(face, count):
    """TCP connections on which nothing is said."""
    host, _, port = face.url.rpartition("//")[2].rpartition(":")
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(socket.create_connection((host, int(port)))) for _ in range(count)]


async def test_silent_connections_to_a_tls_port_keep_nobody_out(encrypted):
    server, trusting = encrypted
    limits = Limits(max_connections=8)
    async with http_store(limits=limits, doors=Doors(tls=lambda: server)) as store:
        async with RawClient.connected(store.face, ssl=trusting) as before:
            await before.say(head("GET", "/v1/identity"))
            assert (await before.hear_answer())[0] == 200
            with silent(store.face, 50):
                await until(lambda: store.counters.connections == 51)
                for _ in range(20):
                    async with RawClient.connected(store.face, ssl=trusting) as healthy:
                        await healthy.say(head("GET", "/v1/identity"))
                        assert (await healthy.hear_answer())[0] == 200
                await before.say(head("GET", "/v1/identity"))
                assert (await before.hear_answer())[0] == 200
                assert store.counters.refused_connections == 0
                assert store.counters.ended_newcomers >= 43
                assert store.counters.open_connections <= 8
        await until(lambda: store.counters.open_connections == 0)


async def test_silent_connections_to_a_plain_port_keep_nobody_out():
    async with http_store(limits=TWO) as store, contextlib.AsyncExitStack() as stack:
        with silent(store.face, 20):
            await until(lambda: store.counters.connections == 20)
            first = await admitted(stack, store)
            await admitted(stack, store)
            await first.say(head("GET", "/healthz"))
            assert (await first.hear_answer())[0] == 200
        assert store.counters.refused_connections == 0


async def test_a_request_without_a_key_does_not_keep_a_connection_from_making_way():
    async with keyed_store(limits=TWO) as store, contextlib.AsyncExitStack() as stack:
        store.face._listener._newcomers._clock = clock = FakeClock()
        strangers = [await stack.enter_async_context(RawClient.connected(store.face)) for _ in range(2)]
        for stranger in strangers:
            await stranger.say(head("GET", "/v1/identity"))
            assert (await stranger.hear_answer())[0] == 401
        asked = head("GET", "/v1/identity", Authorization=f"Bearer {key_of(TENANTS[0], *Scope)}")
        async with RawClient.connected(store.face) as early:
            await early.say(asked)
            assert (await early.hear_all()).startswith(b"HTTP/1.1 503 ")
        clock.advance(1.0)
        async with RawClient.connected(store.face) as healthy:
            await healthy.say(asked)
            assert (await healthy.hear_answer())[0] == 200
        assert await strangers[0].hear_all() == b""


async def test_a_stop_ends_handshakes_that_do_not_come(encrypted):
    server, _ = encrypted
    async with http_store(doors=Doors(tls=lambda: server)) as store:
        with silent(store.face, 3) as socks:
            await until(lambda: store.counters.open_connections == 3)
            await store.face.stop(drain_s=0)
            assert store.counters.open_connections == 0
            for sock in socks:
                assert await asyncio.to_thread(sock.recv, 1) == b""


def test_the_silent_go_first_and_then_the_oldest_that_had_its_time():
    clock = FakeClock()
    with socket.create_server(("127.0.0.1", 0)) as listener, contextlib.ExitStack() as stack:

        def connected(said):
            theirs = stack.enter_context(socket.create_connection(listener.getsockname()))
            ours, _ = listener.accept()
            stack.enter_context(ours)
            theirs.sendall(said)
            if said:
                ours.recv(1, socket.MSG_PEEK)
            return ours

        newcomers = Newcomers(clock)
        for name, said in (("heard", b"x"), ("silent", b""), ("younger", b"x"), ("known", b"")):
            newcomers.add(name, connected(said))
        newcomers.discard("known")
        assert newcomers.take()[0] == "silent"
        assert newcomers.take() is None
        clock.advance(1.0)
        assert newcomers.take()[0] == "heard"
        assert newcomers.take()[0] == "younger"
        assert newcomers.take() is None
