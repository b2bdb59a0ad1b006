"""Python's collector in a store's process: it never looks at all that is stored, and no garbage stays."""

import asyncio
import gc
import weakref

import pytest

from kvstore import KVLayout, KVStore, Namespace, Timeouts
from kvstore.config import Config
from kvstore.garbage import HeapKeeper
from kvstore.idle_work import IdleWork
from kvstore.running import serving
from kvstore.testing import FakeClock

SPACE = Namespace("garbage", KVLayout.opaque(block_bytes=4096, block_tokens=1))
PATIENT = Timeouts(match_s=30, fetch_s=30, put_s=30, control_s=30)
MANY = 100_000


class Node:
    """Something that may refer to itself."""

    def __init__(self):
        self.other = None


def cycle():
    one, other = Node(), Node()
    one.other, other.other = other, one
    return one


class Ended:
    """Connections that have ended so far."""

    count = 0

    def __call__(self):
        return self.count


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def ended():
    return Ended()


@pytest.fixture
def keeper(clock, ended):
    keeper = HeapKeeper(ended, clock=clock, cpu_clock=lambda: 0.0)
    with keeper.keeping():
        yield keeper


def test_objects_that_stay_are_set_aside_and_never_looked_at_again(keeper):
    looked_at = []

    def note(phase, info):
        if phase == "start":
            looked_at.append(len(gc.get_objects(generation=2)) if info["generation"] == 2 else 0)

    gc.callbacks.append(note)
    try:
        kept = []
        for number in range(MANY):
            kept.append([number])
            if number % 5000 == 0:
                keeper.tick()
    finally:
        gc.callbacks.remove(note)
    assert keeper.num_full == 1
    assert len(kept) == MANY
    assert max(looked_at) < MANY // 4


def test_garbage_that_was_never_set_aside_is_collected_at_the_next_tick(keeper):
    known = weakref.ref(cycle())
    while not gc.get_count()[2] and known() is not None:
        _ = [[number] for number in range(1000)]
    keeper.tick()
    assert known() is None


def test_cycles_set_aside_go_in_a_calm_second_once_enough_connections_have_ended(keeper, clock, ended):
    alive = cycle()
    known = weakref.ref(alive)
    gc.freeze()
    del alive
    clock.advance(2.0)
    keeper.tick()
    assert known() is not None
    ended.count = 1_000_000
    clock.advance(2.0)
    keeper.tick()
    assert known() is None


def test_a_busy_process_collects_everything_only_when_that_is_long_overdue(clock, ended):
    keeper = HeapKeeper(ended, clock=clock, cpu_clock=clock)
    with keeper.keeping():
        ended.count = 260
        clock.advance(2.0)
        keeper.tick()
        assert keeper.num_full == 1
        ended.count = 100_000_000
        clock.advance(2.0)
        keeper.tick()
        assert keeper.num_full == 2


def test_garbage_does_not_grow_however_many_connections_come_and_go(keeper, clock, ended):
    known = []
    for _ in range(10):
        alive = [cycle() for _ in range(100)]
        known += map(weakref.ref, alive)
        gc.freeze()
        del alive
        ended.count += 100_000
        clock.advance(2.0)
        keeper.tick()
    assert sum(ref() is not None for ref in known) <= 100


def test_the_collector_is_as_it_was_afterwards(clock, ended):
    before = gc.get_threshold()
    with HeapKeeper(ended, clock=clock).keeping():
        assert gc.get_threshold() != before
    assert gc.get_threshold() == before
    assert gc.get_freeze_count() == 0


def test_young_garbage_goes_in_an_idle_moment_and_what_stays_is_set_aside(clock, ended):
    idle_work, kept, known = IdleWork(), [], []
    with HeapKeeper(ended, idle_work=idle_work, clock=clock).keeping():
        before = gc.get_freeze_count()
        for _ in range(20):
            kept += [[number] for number in range(1000)]
            known.append(weakref.ref(cycle()))
            assert idle_work.is_left
            idle_work.step()
            assert not idle_work.is_left
        assert sum(ref() is not None for ref in known) == 0
        assert gc.get_freeze_count() - before > 10_000
        assert len(gc.get_objects(generation=2)) == 0
    assert not idle_work.is_left


def test_where_nothing_is_idle_python_collects_by_itself_and_a_tick_sets_aside(clock, ended):
    keeper = HeapKeeper(ended, idle_work=IdleWork(), clock=clock)
    with keeper.keeping():
        kept = [[number] for number in range(50_000)]
        known = weakref.ref(cycle())
        keeper.tick()
        assert known() is None
        assert len(gc.get_objects(generation=2)) == 0
        assert gc.get_freeze_count() > len(kept)


def set_aside_while_connected(address):
    with KVStore.connect(address, timeouts=PATIENT) as client:
        client.open_namespace(SPACE)
        client.put(SPACE.chain(range(8)), bytes(8 * 4096))
        gc.collect()
        gc.freeze()
        assert client.match(SPACE.chain(range(8))).blocks == 8


async def all_ended(server, count):
    while server.num_ended_connections() < count:  # noqa: ASYNC110 (nobody is told of it)
        await asyncio.sleep(0.01)


async def test_a_connection_that_was_set_aside_leaves_no_garbage_when_it_ends(tmp_path):
    tiers = {"dram": {"capacity_bytes": 4 << 20}}
    config = Config.from_dict({"tiers": tiers, "http": {"listen": "127.0.0.1:0"}})
    async with serving(config, socket_path=tmp_path / "kv.sock") as server:
        for address in (tmp_path / "kv.sock", server.http_url):
            await asyncio.to_thread(set_aside_while_connected, address)
        await asyncio.wait_for(all_ended(server, 2), 60)
        gc.unfreeze()
        gc.set_debug(gc.DEBUG_SAVEALL)
        try:
            gc.collect()
            left = {type(found).__name__ for found in gc.garbage}
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
    assert left.isdisjoint({"Connection", "Guard", "Protocol", "_SelectorSocketTransport"})
