import asyncio
import contextlib
import json

import pytest

from kvstore.auth import Keyring, Scope
from kvstore.event_feed import EventBatch, EventFeed
from kvstore.http.events import _QUEUE_BLOCKS, _QUEUE_EVENTS, Mailbox
from kvstore.http.limits import Limits
from kvstore.keys import Namespace
from kvstore.kv_events import KvEvent
from tests.http.http_store import LAYOUT, hex_keys, http_store
from tests.http.keyed_store import KEYRING, key_of, keyed_store

OURS, THEIRS = (
    Namespace(model="m", layout=LAYOUT, tenant_salt=KEYRING.salt(tenant)) for tenant in ("acme", "other")
)


@contextlib.asynccontextmanager
async def stream(client, query=""):
    """Yield a function that returns the next event, as (kind, data)."""
    async with client.session.get(f"/v1/events{query}", headers=client._headers) as response:
        assert response.status == 200
        assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
        assert (await response.content.readline()).startswith(b":")  # from now on it listens

        async def next_event():
            kind = "message"
            while line := (await response.content.readline()).decode().rstrip():
                if line.startswith("event: "):
                    kind = line.removeprefix("event: ")
                if line.startswith("data: "):
                    await response.content.readline()
                    return kind, json.loads(line.removeprefix("data: "))
            return await next_event() if not response.content.at_eof() else None

        assert await response.content.readline() == b"\n"
        yield next_event


async def test_a_tenant_is_told_of_its_own_blocks_alone():
    async with (
        keyed_store() as store,
        store.client(key_of("acme", Scope.READ, Scope.WRITE, Scope.ADMIN)) as ours,
        store.client(key_of("other", Scope.READ, Scope.WRITE, Scope.ADMIN)) as theirs,
    ):
        await ours.open(OURS)
        await theirs.open(THEIRS)
        async with stream(ours) as next_event:
            await theirs.store(THEIRS.chain([9, 9, 9, 9]))
            chain = OURS.chain(list(range(8)))
            await ours.store(chain)

            kind, told = await asyncio.wait_for(next_event(), 30)
            assert kind == "message"
            assert told == {
                "namespace": OURS.digest.hex(),
                "type": "BlockStored",
                "block_hashes": hex_keys(chain),
                "parent_block_hash": None,
                "token_ids": [],
                "block_size": 4,
                "lora_id": None,
                "medium": "CPU",
                "lora_name": None,
            }
            await ours.post("/v1/drop", namespace=OURS.digest.hex(), keys=hex_keys(chain))
            removed = [(await asyncio.wait_for(next_event(), 30))[1] for _ in range(1)]
            assert {block for event in removed for block in event["block_hashes"]} == set(hex_keys(chain))
            assert {event["type"] for event in removed} == {"BlockRemoved"}


async def test_a_stream_may_be_of_one_namespace_and_ends_when_it_is_told_to():
    other = Namespace(model="n", layout=LAYOUT)
    async with http_store() as store, store.client() as client:
        digests = [(await client.open(space)).json["namespace"] for space in (other, Namespace("m", LAYOUT))]
        async with stream(client, f"?namespace={digests[0]}&timeout_s=1") as next_event:
            await client.store(Namespace("m", LAYOUT).chain(list(range(4))))
            await client.store(other.chain(list(range(4))))
            told = await asyncio.wait_for(next_event(), 30)
            assert told[1]["namespace"] == digests[0]
            assert await asyncio.wait_for(next_event(), 30) is None


async def test_a_stream_ends_when_its_key_is_removed():
    keyrings = [KEYRING]
    async with (
        keyed_store(keyring=lambda: keyrings[-1]) as store,
        store.client(key_of("acme", Scope.READ)) as client,
        stream(client) as next_event,
    ):
        keyrings.append(Keyring(bytes(range(32)), []))

        assert await asyncio.wait_for(next_event(), 30) is None


async def test_a_foreign_namespace_has_no_stream():
    async with keyed_store() as store, store.client(key_of("acme", Scope.READ)) as client:
        answer = await client.get(f"/v1/events?namespace={THEIRS.digest.hex()}")

    assert (answer.status, answer.code) == (404, "unknown_namespace")


async def test_nothing_is_noted_while_nobody_listens():
    async with http_store() as store, store.client() as client:
        await client.open()
        directory = store.manager._state.directory
        assert directory.changes is None
        async with stream(client, "?timeout_s=0.2"):
            assert directory.changes is not None
        await until(lambda: directory.changes is None)


async def test_a_stop_ends_streams():
    async with http_store() as store, store.client() as client, stream(client) as next_event:
        await asyncio.wait_for(store.face.stop(), 30)

        assert await asyncio.wait_for(next_event(), 30) is None


async def test_a_head_request_has_no_stream():
    async with http_store() as store, store.client() as client:
        assert (await asyncio.wait_for(client.ask("HEAD", "/v1/events"), 30)).status == 200


async def until(condition, meanwhile=lambda: None):
    async with asyncio.timeout(60):
        while not condition():
            meanwhile()
            await asyncio.sleep(0.01)


class Admitting:
    """What a mailbox asks of a call of somebody who may know everything."""

    identity = None

    def __init__(self):
        self.service = self.tenancy = self.manager = self

    def admits(self, identity, namespace):
        return True

    def namespace(self, digest):
        return digest


@pytest.fixture
def event():
    return KvEvent(True, "CPU", OURS.digest, OURS.chain(list(range(8))).keys, None, 4)


def test_a_client_that_does_not_read_loses_events_and_is_told_how_many_blocks(event):
    mailbox = Mailbox(Admitting(), None)

    for _ in range(_QUEUE_EVENTS + 3):
        mailbox.take_in(EventBatch([event]))
    mailbox.take_in(EventBatch([], {OURS.digest: 5}))

    told = mailbox.empty().decode()
    assert told.startswith('event: lost\ndata: {"blocks": 11}\n\n')
    assert told.count("BlockStored") == _QUEUE_EVENTS
    assert mailbox.empty() == b""


def test_what_waits_for_a_client_is_bounded_in_blocks_too():
    mailbox = Mailbox(Admitting(), None)
    keys = OURS.chain(list(range(4))).keys * 512
    event = KvEvent(True, "CPU", OURS.digest, keys, None, 4)

    for _ in range(_QUEUE_BLOCKS // 512 + 2):
        mailbox.take_in(EventBatch([event]))

    assert mailbox.empty().decode().startswith('event: lost\ndata: {"blocks": 1024}\n\n')
    mailbox.take_in(EventBatch([event]))
    assert mailbox.empty().decode().startswith("data: ")


def test_what_many_clients_are_told_is_written_once(event):
    batch = EventBatch([event, event])
    mailboxes = [Mailbox(Admitting(), None) for _ in range(3)]
    for mailbox in mailboxes:
        mailbox.take_in(batch)
    told = [mailbox.empty() for mailbox in mailboxes]
    batch.texts[0] = "kept"
    mailboxes[0].take_in(batch)

    assert len(set(told)) == 1
    assert told[0].count(b"data: ") == 2
    assert mailboxes[0].empty().startswith(b"kept")


async def test_between_two_clients_that_are_told_others_have_their_turn():
    feed = EventFeed(None)
    happened = []

    async def be_told():
        await feed.take_turn()
        happened.append("told")

    async def ask(times):
        for _ in range(times):
            happened.append("asked")
            await asyncio.sleep(0)

    await asyncio.gather(*[be_told() for _ in range(10)], ask(100))

    assert "told told" not in " ".join(happened)
    assert happened.count("told") == 10


async def test_a_client_that_stops_reading_is_dropped_and_the_feed_forgets_it():
    async with http_store(limits=Limits(stall_s=0.2)) as store, store.client() as client:
        await client.open()
        host, port = store.face.url.removeprefix("http://").split(":")
        _reader, writer = await asyncio.open_connection(host, int(port), limit=1)
        writer.write(b"GET /v1/events HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        feed = store.face._service.feed
        await until(lambda: feed._listeners)
        batch = EventBatch([lots()])
        await until(lambda: not feed._listeners, lambda: [listen(batch) for listen in feed._listeners])
        writer.close()
        assert store.counters.slow_clients == 1


def lots():
    space = Namespace("m", LAYOUT)
    return KvEvent(True, "CPU", space.digest, space.chain([1] * 4000).keys, None, 4)


async def test_a_full_queue_is_told_as_a_gap():
    async with http_store() as store, store.client() as client:
        await client.open()
        batches = []
        feed = EventFeed(store.manager)
        with feed.listening(batches.append):
            feed._changes._limit = 2
            await client.store(Namespace("m", LAYOUT).chain(list(range(20))))
            await until(lambda: batches)
    digest = Namespace("m", LAYOUT).digest

    assert sum(batch.lost.get(digest, 0) for batch in batches) == 3
    assert sum(len(event.keys) for batch in batches for event in batch.events) == 2


async def test_a_subscriber_is_told_of_what_it_lost_and_not_of_what_others_did():
    async with (
        keyed_store() as store,
        store.client(key_of("acme", Scope.READ, Scope.WRITE, Scope.ADMIN)) as ours,
        store.client(key_of("other", Scope.READ, Scope.WRITE, Scope.ADMIN)) as theirs,
    ):
        await ours.open(OURS)
        await theirs.open(THEIRS)
        async with stream(ours) as our_events, stream(theirs) as their_events:
            store.face._service.feed._changes._limit = 2
            await ours.store(OURS.chain(list(range(20))))
            assert await asyncio.wait_for(our_events(), 30) == ("lost", {"blocks": 3})
            # The first that the other one hears of is its own.
            await theirs.store(THEIRS.chain([9, 9, 9, 9]))
            kind, told = await asyncio.wait_for(their_events(), 30)
            assert (kind, told["namespace"]) == ("message", THEIRS.digest.hex())
