"""Events of a real store, as a router reads them that was written for vLLM's."""

import asyncio
import contextlib
import socket
import time
from pathlib import Path

import msgpack
import pytest
import zmq
import zmq.auth

from kvstore.drill.redis_server import redis_obstacle
from kvstore.drill.store_process import PartFailed
from kvstore.errors import InvalidConfig
from kvstore.event_feed import EventBatch
from kvstore.kv_events import HashForm, KvEvent
from kvstore.server_counters import EventCounters
from kvstore.zmq_events import ZmqPublisher
from kvstore.zmq_settings import ZmqSettings, media_words
from tests.metrics.publishing_store import BLOCK_BYTES, MIB, SPACE, PublishingStore, chain_of, hashes, put
from tests.metrics.vllm_events import AllBlocksCleared, BlockRemoved, BlockStored, Subscriber, array_decoder
from tests.redis_server import RedisServer, free_port


def until(subscriber, condition, timeout_s=60):
    """Take in events until a condition holds of the picture that they make."""
    give_up_s = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < give_up_s:
        subscriber.receive()
    assert condition()


@pytest.fixture
def store(tmp_path):
    with PublishingStore(tmp_path) as running:
        yield running


def joined(store, client, subscriber):
    """Have the subscription reach the store: nothing is sent to a subscriber before that."""
    give_up_s, number = time.monotonic() + 60, 0
    while not subscriber.batches and time.monotonic() < give_up_s:
        number -= 1
        put(client, 1_000_000 - number, 1)
        subscriber.receive()
    assert subscriber.batches
    return subscriber


def test_a_router_written_for_vllm_learns_which_tier_has_which_block(store):
    with store.connect() as client, Subscriber(store.endpoint, store.replay) as router:
        joined(store, client, router)
        chain = put(client, 1)
        blocks = hashes(chain)
        until(router, lambda: all(router.holders.get(block) == {"CPU", "STORAGE"} for block in blocks))

        client.demote(chain)
        until(router, lambda: all(router.holders[block] == {"STORAGE"} for block in blocks))
        client.get(chain)
        until(router, lambda: all(router.holders[block] == {"CPU", "STORAGE"} for block in blocks))
        client.drop(chain)
        until(router, lambda: all(router.holders[block] == set() for block in blocks))


@pytest.mark.skipif(bool(redis_obstacle()), reason=redis_obstacle())
def test_a_shared_tier_is_told_of_by_the_word_for_what_others_reach(tmp_path):
    redis = RedisServer(tmp_path)
    redis.start()
    try:
        with (
            PublishingStore(tmp_path / "store", redis=redis) as store,
            store.connect() as client,
            Subscriber(store.endpoint) as router,
        ):
            joined(store, client, router)
            chain = put(client, 1)
            everywhere = {"CPU", "STORAGE", "EXTERNAL"}
            until(router, lambda: all(router.holders.get(block) == everywhere for block in hashes(chain)))
            client.drop(chain)
            until(router, lambda: all(not router.holders[block] for block in hashes(chain)))
    finally:
        redis.kill()


def test_a_stored_chain_is_one_event_with_its_parent(store):
    with store.connect() as client:
        chain = chain_of(1, 6)
        client.put(chain[:4], bytes(4 * BLOCK_BYTES))
        with Subscriber(store.endpoint, store.replay) as router:
            joined(store, client, router)
            client.put(chain[4:], bytes(2 * BLOCK_BYTES))
            until(router, lambda: "STORAGE" in router.holders.get(hashes(chain)[5], ()))
        stored = [
            event
            for batch in router.batches
            for event in batch.events
            if isinstance(event, BlockStored) and event.medium == "CPU"
            if hashes(chain)[5] in event.block_hashes
        ]

    (event,) = stored
    assert event.block_hashes == hashes(chain)[4:]
    assert event.parent_block_hash == hashes(chain)[3]
    assert (event.block_size, event.token_ids, event.lora_id) == (16, [], None)


def test_a_gap_is_filled_by_a_replay(store):
    with (
        store.connect() as client,
        Subscriber(store.endpoint, store.replay) as whole,
        Subscriber(store.endpoint, store.replay) as holed,
    ):
        early = put(client, 1)
        joined(store, client, whole)
        last = hashes(put(client, 2))[3]
        until(whole, lambda: "STORAGE" in whole.holders.get(last, ()))

        replayed = dict(holed.replayed(0))
        for number in sorted(replayed)[::2]:  # what a lossy network brings
            holed.take_in(number, replayed[number])
        missing = min(set(range(max(replayed))) - set(holed.numbers))
        for number, payload in holed.replayed(missing):
            holed.take_in(number, payload)

        assert sorted(replayed) == list(range(len(replayed)))
        assert isinstance(holed.batches[0].events[0], AllBlocksCleared)
        assert holed.batches[0].data_parallel_rank == 0
        assert holed.holders[hashes(early)[0]] == holed.holders[last] == {"CPU", "STORAGE"}


def test_numbers_grow_by_one_and_a_replay_begins_where_it_is_asked_to(store):
    with store.connect() as client, Subscriber(store.endpoint, store.replay) as router:
        joined(store, client, router)
        for number in range(5):
            put(client, number)
        last = hashes(chain_of(4))[3]
        until(router, lambda: "STORAGE" in router.holders.get(last, ()))

        replayed = router.replayed(router.numbers[-1])

        assert router.numbers == list(range(router.numbers[0], router.numbers[-1] + 1))
        assert replayed[0][0] == router.numbers[-1]


def test_a_subscriber_that_never_reads_holds_nobody_up(tmp_path):
    with PublishingStore(tmp_path, dram_bytes=8 * MIB) as store, store.connect() as client:
        with Subscriber(store.endpoint, store.replay) as idle, Subscriber(store.endpoint) as router:
            idle.socket.setsockopt(zmq.RCVHWM, 1)
            joined(store, client, router)
            for number in range(400):
                put(client, number, 8)
            last = hashes(chain_of(399, 8))[7]
            until(router, lambda: "CPU" in router.holders.get(last, ()))
        assert client.stats()["server"]["events"]["lost_blocks"] == 0
        assert client.check() == []


def test_keys_may_be_told_whole_and_under_a_topic(tmp_path):
    more = ("--events-hashes", "bytes", "--events-topic", "kv@pod@m")
    with (
        PublishingStore(tmp_path, more=more) as store,
        store.connect() as client,
        Subscriber(store.endpoint, topic=b"kv@pod") as router,
    ):
        joined(store, client, router)
        chain = put(client, 1)
        until(router, lambda: "CPU" in router.holders.get(bytes(chain.keys[3]), ()))


def test_events_may_be_told_as_arrays_as_llm_d_reads_them(tmp_path):
    more = ("--events-form", "array", "--events-topic", "kv@pod@m")
    decoder = array_decoder()
    with (
        PublishingStore(tmp_path, more=more) as store,
        store.connect() as client,
        Subscriber(store.endpoint, store.replay) as router,
    ):
        chain = put(client, 1)
        client.flush()
        client.drop(chain)
        wanted = {("BlockStored", "CPU"), ("BlockStored", "STORAGE"), ("BlockRemoved", "CPU")}
        seen, give_up_s = set(), time.monotonic() + 60
        while not wanted <= seen and time.monotonic() < give_up_s:
            batches = [decoder.decode(payload) for _, payload in router.replayed(0)]
            events = [event for batch in batches for event in batch.events]
            named = [event for event in events if hasattr(event, "block_hashes")]
            seen = {(type(event).__name__, event.medium) for event in named}
        plain = [msgpack.unpackb(payload)[1] for _, payload in router.replayed(0)]

    assert wanted <= seen
    assert {frozenset(event.block_hashes) for event in named} == {frozenset(hashes(chain))}
    assert plain[0] == [["AllBlocksCleared"]]
    assert plain[1][0] == ["BlockStored", hashes(chain), None, [], 16, None, "CPU", None]


class ToldFeed:
    """A feed whose listener the test speaks to."""

    @contextlib.contextmanager
    def listening(self, listener):
        self.tell = listener
        yield


async def test_a_replay_tells_whoever_misses_lost_changes_that_nothing_holds_any_more(tmp_path):
    feed, settings = ToldFeed(), ZmqSettings(f"ipc://{tmp_path}/e", f"ipc://{tmp_path}/r")
    keys = chain_of(1).keys
    first, second = (KvEvent(True, "CPU", SPACE.digest, [key], None, 16) for key in keys[:2])
    publisher = ZmqPublisher(settings, EventCounters())
    publisher.open()
    try:
        with Subscriber(settings.endpoint, settings.replay) as router:
            async with publisher.publishing(feed):
                feed.tell(EventBatch([first]))
                feed.tell(EventBatch([second], lost={SPACE.digest: 3}))
                replayed = await asyncio.to_thread(router.replayed, 0)
            for number, payload in replayed:
                router.take_in(number, payload)
    finally:
        publisher.close()

    assert router.numbers == [0, 1, 2, 3]
    assert router.holders == {HashForm.INT.of(keys[1]): {"CPU"}}


def test_blocks_of_an_earlier_run_are_told_of_when_their_namespace_opens(tmp_path):
    with PublishingStore(tmp_path) as store, store.connect() as client:
        chain = put(client, 1)
        assert client.flush()
        assert store.terminate() == 0
    with (
        PublishingStore(tmp_path) as store,
        Subscriber(store.endpoint, store.replay) as router,
        store.connect() as client,
    ):
        client.match(chain)
        joined(store, client, router)
        for number, payload in router.replayed(0):
            router.take_in(number, payload)

    assert all("STORAGE" in router.holders[block] for block in hashes(chain))


def test_evicted_blocks_are_told_of_as_removed(tmp_path):
    with (
        PublishingStore(tmp_path, dram_bytes=2 * MIB) as store,
        store.connect() as client,
        Subscriber(store.endpoint, store.replay) as router,
    ):
        joined(store, client, router)
        first = put(client, 0, 64)
        for number in range(1, 16):
            put(client, number, 64)
        last = hashes(first)[63]
        until(router, lambda: last in router.holders and "CPU" not in router.holders[last])
        removed = [
            event
            for batch in router.batches
            for event in batch.events
            if isinstance(event, BlockRemoved) and last in event.block_hashes
        ]

    assert removed[0].medium == "CPU"


@pytest.mark.parametrize(
    "endpoint", ["tcp://0.0.0.0:5557", "tcp://*:5557", "tcp://10.1.2.3:5557", "tcp://[::]:1"]
)
def test_without_authentication_nobody_beyond_this_machine_can_listen(endpoint):
    for settings in (ZmqSettings(endpoint), ZmqSettings("tcp://127.0.0.1:1", endpoint)):
        with pytest.raises(InvalidConfig, match="without authentication: give --events-keys"):
            settings.check()
    ZmqSettings(endpoint, keys=Path("keys")).check()


@pytest.mark.parametrize(
    "endpoint", ["tcp://127.0.0.2:1", "tcp://localhost:5557", "tcp://[::1]:1", "ipc:///run/x"]
)
def test_what_only_this_machine_reaches_needs_no_authentication(endpoint):
    ZmqSettings(endpoint, endpoint).check()


@pytest.mark.parametrize("endpoint", ["udp://127.0.0.1:1", "127.0.0.1:5557", "inproc://events", "tcp://[::1"])
def test_an_endpoint_that_is_none_is_refused(endpoint):
    with pytest.raises(InvalidConfig, match="expected tcp://HOST:PORT or ipc:///PATH"):
        ZmqSettings(endpoint).check()


def test_a_network_that_keeps_others_out_may_stand_in_for_keys():
    ZmqSettings("tcp://*:5557", "tcp://*:5558", is_open=True).check()
    with pytest.raises(InvalidConfig, match="contradict each other"):
        ZmqSettings("tcp://*:5557", keys=Path("keys"), is_open=True).check()


def test_tiers_may_have_other_words():
    assert media_words("ssd=DISK, dram=CPU_PINNED,remote=") == {
        "STORAGE": "DISK",
        "CPU": "CPU_PINNED",
        "EXTERNAL": "",
    }


@pytest.mark.parametrize("text", ["disk=DISK", "ssd", "ssd=a b", "store=X", "ssd=DISK,", "ssd=" + "x" * 33])
def test_a_word_for_a_tier_that_is_none_is_refused(text):
    with pytest.raises(InvalidConfig, match="expected TIER=WORD with one of vram, dram, ssd, remote"):
        media_words(text)


def test_an_endpoint_that_anybody_could_reach_stops_the_start(tmp_path):
    with pytest.raises(PartFailed, match="status 2"), PublishingStore(tmp_path, endpoint="tcp://*:5557"):
        pass

    assert "without authentication: give --events-keys" in (tmp_path / "store.log").read_text()


def test_an_endpoint_that_is_taken_stops_the_start_and_says_so(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        endpoint = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(PartFailed, match="status 2"), PublishingStore(tmp_path, endpoint=endpoint):
            pass

    assert f"{endpoint}: cannot be listened on" in (tmp_path / "store.log").read_text()


def certificates(folder):
    """Make keys of a server, of a client that may listen, and of one that may not; returns their curves."""
    (folder / "clients").mkdir(parents=True)
    _, secret = zmq.auth.create_certificates(folder, "server")
    (folder / "server.key_secret").chmod(0o600)
    server, _ = zmq.auth.load_certificate(secret)
    curves = []
    for name, place in (("router", folder / "clients"), ("stranger", folder)):
        _, path = zmq.auth.create_certificates(place, name)
        curves.append((server, *zmq.auth.load_certificate(path)))
    return curves


def test_with_keys_only_their_owners_listen(tmp_path):
    known, stranger = certificates(tmp_path / "keys")
    more = ("--events-keys", str(tmp_path / "keys"))
    port = free_port()
    with PublishingStore(tmp_path, more=more, endpoint=f"tcp://*:{port}") as store, store.connect() as client:
        endpoint = f"tcp://127.0.0.1:{port}"
        with (
            Subscriber(endpoint, store.replay, curve=known) as router,
            Subscriber(endpoint, store.replay, curve=stranger) as spy,
            Subscriber(endpoint, store.replay) as plain,
        ):
            joined(store, client, router)
            chain = put(client, 1)
            until(router, lambda: "CPU" in router.holders.get(hashes(chain)[3], ()))

            assert router.replayed(0)
            assert (spy.receive(0.5), plain.receive(0.5)) == (False, False)


def test_a_secret_that_others_may_read_stops_the_start(tmp_path):
    certificates(tmp_path / "keys")
    (tmp_path / "keys" / "server.key_secret").chmod(0o644)
    more = ("--events-keys", str(tmp_path / "keys"))

    with pytest.raises(PartFailed, match="status 2"), PublishingStore(tmp_path, more=more):
        pass

    assert "others may read it: chmod 600" in (tmp_path / "store.log").read_text()


def test_a_replay_that_is_asked_for_wrongly_is_not_answered_and_harms_nobody(store):
    with store.connect() as client, Subscriber(store.endpoint, store.replay) as router:
        put(client, 1)
        context = zmq.Context()
        sock = context.socket(zmq.DEALER)
        sock.setsockopt(zmq.LINGER, 0)
        sock.connect(store.replay)
        for frames in ([b""], [b"", b"1"], [b"x", bytes(8)], [b"", bytes(8), b""], [b"", bytes(5000)]):
            sock.send_multipart(frames)
        assert not sock.poll(200)
        sock.close()
        context.term()

        assert router.replayed(0)
