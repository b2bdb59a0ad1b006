"""Events of a real store as the routers of docs/events.md decode them, with the options given there."""

import time

import pytest

from kvstore.drill.redis_server import redis_obstacle
from kvstore.kv_events import HashForm
from tests.metrics.publishing_store import PublishingStore, hashes, put
from tests.metrics.routers import AIBrix, Conductor, Dynamo, LlmD, Refused
from tests.metrics.vllm_events import END_OF_REPLAY, Subscriber
from tests.redis_server import RedisServer

pytestmark = pytest.mark.skipif(bool(redis_obstacle()), reason=redis_obstacle())


@pytest.fixture(scope="module")
def redis(tmp_path_factory):
    server = RedisServer(tmp_path_factory.mktemp("r"))
    server.start()
    yield server
    server.kill()


def recorded(folder, redis, *more, num_media=3):
    """Have a store tell of a chain that is put in two steps, written down and dropped.

    Returns the chain, and the frames (topic, number, payload) of its whole run.
    """
    with (
        PublishingStore(folder, redis=redis, more=more) as store,
        store.connect() as client,
        Subscriber(store.endpoint, store.replay) as router,
    ):
        put(client, 1, 2)
        chain = put(client, 1, 4)
        assert client.flush()
        client.drop(chain)
        give_up_s = time.monotonic() + 60
        frames = []
        while sum(b"BlockRemoved" in at[2] for at in frames) < 1 or _removals(frames) < num_media:
            assert time.monotonic() < give_up_s
            frames = replayed(router)
    return chain, frames


def _removals(frames):
    return sum(payload.count(b"BlockRemoved") for _, _, payload in frames)


def replayed(router):
    """Ask for everything as a DEALER; returns (topic, number, payload) of each batch before the end."""
    frames = []
    for topic, number, payload in router.frames(0):
        if number == END_OF_REPLAY:
            # What ends it: llm-d looks for the empty payload, vLLM's example for the number.
            assert payload == b""
            return frames
        frames.append((topic, int.from_bytes(number, "big"), payload))
    raise AssertionError("a replay without an end")


def taken(router, frames):
    """Return what a router keeps of all batches; it refuses none."""
    return [event for _, _, payload in frames for event in router.decode(payload)]


def media(events, kind):
    """Return the media of events that stored, or removed, at least one block."""
    return {event.medium for event in events if event.kind == kind}


def assert_whole(events, names, *, block_size=16):
    """The first thing told is that nothing holds; blocks come in order, each behind the one before it."""
    assert events[0].kind == "cleared"
    assert {block for event in events if event.kind == "stored" for block in event.blocks} == set(names)
    for event in events:
        if event.kind == "stored":
            first = names.index(event.blocks[0])
            assert list(event.blocks) == names[first : first + len(event.blocks)]
            assert event.parent == (names[first - 1] if first else None)
            assert event.block_size == block_size


@pytest.mark.parametrize(
    ("form", "takes_maps"),
    [("array", False), ("array", True), ("map", True)],
    ids=["kv-cache", "router", "maps"],
)
@pytest.mark.parametrize("told", ["int", "bytes"])
def test_llm_d_learns_pod_model_and_tiers(tmp_path, redis, form, takes_maps, told):
    options = ("--events-topic", "kv@10.0.0.7@org/model", "--events-form", form, "--events-hashes", told)
    chain, frames = recorded(tmp_path, redis, *options)
    router = LlmD(takes_maps=takes_maps)
    events = taken(router, frames)

    assert {router.source(topic) for topic, _, _ in frames} == {("10.0.0.7", "org/model")}
    assert [number for _, number, _ in frames] == list(range(len(frames)))
    assert_whole(events, hashes(chain))
    assert media(events, "stored") == media(events, "removed") == {"cpu", "storage", "external"}


def test_llm_d_before_the_router_reads_no_maps(tmp_path, redis):
    _, frames = recorded(tmp_path, redis)

    with pytest.raises(Refused, match="a map"):
        taken(LlmD(takes_maps=False), frames)


@pytest.mark.parametrize("form", ["map", "array"])
@pytest.mark.parametrize("is_late", [False, True])
def test_dynamo_files_blocks_under_its_tiers(tmp_path, redis, form, is_late):
    words = ("--events-media", "dram=CPU_PINNED,ssd=DISK")
    chain, frames = recorded(tmp_path, redis, "--events-form", form, *words)
    events = taken(Dynamo(is_late=is_late), frames)

    assert_whole(events, hashes(chain))
    assert media(events, "stored") == media(events, "removed") == {"host", "disk", "external"}
    # It publishes no block whose tokens did not come with it.
    assert {event.num_tokens for event in events} == {0}


def test_dynamo_reads_no_whole_keys_and_takes_words_that_it_does_not_know_for_the_gpu(tmp_path, redis):
    (tmp_path / "whole").mkdir()
    _, whole = recorded(tmp_path / "whole", redis, "--events-hashes", "bytes")
    _, plain = recorded(tmp_path, redis)

    with pytest.raises(Refused, match="no integer"):
        taken(Dynamo(is_late=True), whole)
    assert "device" in media(taken(Dynamo(is_late=False), plain), "stored")
    assert media(taken(Dynamo(is_late=True), plain), "stored") == {"host", "disk", "external"}


def test_aibrix_is_told_of_one_tier_so_that_removed_means_gone(tmp_path, redis):
    options = ("--events-form", "array", "--events-media", "ssd=,remote=")
    chain, frames = recorded(tmp_path, redis, *options, num_media=1)
    events = taken(AIBrix(), frames)

    assert_whole(events, [int(HashForm.SIGNED.of(key)) for key in chain.keys])
    assert media(events, "stored") == {"CPU"}
    assert sum(len(event.blocks) for event in events if event.kind == "removed") == 4


def test_aibrix_may_read_maps_in_later_versions_only(tmp_path, redis):
    _, frames = recorded(tmp_path, redis)

    assert taken(AIBrix(takes_maps=True), frames)
    with pytest.raises(Refused, match="no array"):
        taken(AIBrix(), frames)


def test_the_conductor_files_blocks_of_a_publisher_that_is_registered_as_sglang(tmp_path, redis):
    options = ("--events-hashes", "signed", "--events-media", "ssd=DISK,remote=")
    chain, frames = recorded(tmp_path, redis, *options, num_media=2)
    events = taken(Conductor("SGLang", block_size=16), frames)

    assert_whole(events, [int(HashForm.SIGNED.of(key)) for key in chain.keys])
    assert media(events, "stored") == media(events, "removed") == {"cpu", "disk"}


def test_the_conductor_passes_over_the_tiers_of_a_publisher_that_is_registered_as_vllm(tmp_path, redis):
    _, frames = recorded(tmp_path, redis)

    assert [event.kind for event in taken(Conductor("vLLM", block_size=16), frames)] == ["cleared"]
