"""RemoteTier on a real cluster: masters that die, replicas that take over, slots that move."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.miss import MissReason
from kvstore.tier import ReadStatus, WriteStatus
from kvstore_tiers.remote_cluster import SlotRange, key_slot, read_slots
from kvstore_tiers.remote_control import Reply
from kvstore_tiers.resp_stream import RespFault
from tests.redis_cluster import RedisCluster
from tests.redis_server import RedisServer, wait_replicated
from tests.tiers.blocks import block_id
from tests.tiers.remote_calls import NAMES, opened, put, statuses, until, until_healed, within

BLOCKS = range(60)


def slot_of(number: int) -> int:
    return key_slot(NAMES.of(block_id(number)))


def held_by(cluster: RedisCluster, node: RedisServer) -> list[int]:
    return [number for number in BLOCKS if cluster.owner(slot_of(number)) is node]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[RedisCluster]:
    made = RedisCluster(tmp_path)
    try:
        yield made.start()
    finally:
        made.stop()


@pytest.fixture
def replicated(tmp_path: Path) -> Iterator[RedisCluster]:
    made = RedisCluster(tmp_path, num_replicas=3)
    try:
        yield made.start()
    finally:
        made.stop()


async def test_blocks_are_spread_over_the_masters_and_read_back(cluster: RedisCluster) -> None:
    async with opened(cluster.url) as tier:
        assert await put(tier, *BLOCKS) == [WriteStatus.OK] * 60
        assert await statuses(tier, *BLOCKS) == [ReadStatus.OK] * 60
        assert (await tier.probe([block_id(number) for number in range(61)], deadline_s=within(5))).tiers == [
            *["remote"] * 60,
            None,
        ]
        await tier.drop([block_id(number) for number in range(30)])
        assert await statuses(tier, *BLOCKS) == [ReadStatus.ABSENT] * 30 + [ReadStatus.OK] * 30
        assert tier.counters == {}
    assert [len(held_by(cluster, node)) for node in cluster.masters] == [
        held_by_server(node) + sum(number < 30 for number in held_by(cluster, node))
        for node in cluster.masters
    ]


def held_by_server(node: RedisServer) -> int:
    return int(node.ask(b"DBSIZE")[1:])


@pytest.mark.alone
async def test_a_killed_master_costs_only_its_own_blocks_until_it_is_back(cluster: RedisCluster) -> None:
    dead = cluster.masters[0]
    lost = held_by(cluster, dead)
    kept = [number for number in BLOCKS if number not in lost]
    async with opened(cluster.url, timeout_s=0.2) as tier:
        await put(tier, *BLOCKS)
        dead.kill()
        for _ in range(5):
            began_s = time.monotonic()
            found = dict(zip(BLOCKS, await statuses(tier, *BLOCKS, seconds=1), strict=True))
            assert time.monotonic() - began_s < 1
            assert [found[number] for number in lost] == [ReadStatus.UNAVAILABLE] * len(lost)
            assert [found[number] for number in kept] == [ReadStatus.OK] * len(kept)
            written = dict(zip(BLOCKS, await put(tier, *BLOCKS), strict=True))
            assert [written[number] for number in lost] == [WriteStatus.UNAVAILABLE] * len(lost)
            assert [written[number] for number in kept] == [WriteStatus.OK] * len(kept)
        assert tier.health().is_up
        dead.start()
        assert await until_healed(tier, lost[0]) == [ReadStatus.ABSENT]
        assert await put(tier, *BLOCKS) == [WriteStatus.OK] * 60
        assert await statuses(tier, *BLOCKS) == [ReadStatus.OK] * 60


@pytest.mark.alone
async def test_a_stopped_master_costs_its_blocks_a_deadline_and_the_others_nothing(
    cluster: RedisCluster,
) -> None:
    stopped = cluster.masters[1]
    lost = held_by(cluster, stopped)
    kept = [number for number in BLOCKS if number not in lost]
    async with opened(cluster.url, timeout_s=0.2) as tier:
        await put(tier, *BLOCKS)
        stopped.pause()
        began_s = time.monotonic()
        found = dict(zip(BLOCKS, await statuses(tier, *BLOCKS, seconds=0.3), strict=True))
        assert time.monotonic() - began_s < 0.5
        assert [found[number] for number in kept] == [ReadStatus.OK] * len(kept)
        assert [found[number] for number in lost] == [ReadStatus.TIMED_OUT] * len(lost)
        probe = await tier.probe([block_id(lost[0])], deadline_s=within(1))
        assert probe.reason is MissReason.BREAKER_OPEN
        stopped.resume()
        assert await until_healed(tier, lost[0]) == [ReadStatus.OK]
        assert await statuses(tier, *BLOCKS) == [ReadStatus.OK] * 60


async def test_a_replica_that_takes_over_is_found_and_serves(replicated: RedisCluster) -> None:
    dead = replicated.masters[2]
    lost = held_by(replicated, dead)
    async with opened(replicated.url, timeout_s=0.2) as tier:
        await put(tier, *BLOCKS)
        for master in replicated.masters:
            wait_replicated(master)
        dead.kill()
        assert (await statuses(tier, lost[0]))[0] is ReadStatus.UNAVAILABLE
        assert await until_healed(tier, lost[0]) == [ReadStatus.OK]
        assert await put(tier, *lost) == [WriteStatus.OK] * len(lost)
        assert await statuses(tier, *BLOCKS) == [ReadStatus.OK] * 60


async def test_moved_slots_are_followed_within_the_call(cluster: RedisCluster) -> None:
    source, target, other = cluster.masters
    moving = held_by(cluster, source)[:3]
    async with opened(cluster.url) as tier:
        for number in moving:
            slot = b"%d" % slot_of(number)
            for node in (target, source, other):
                node.ask(b"CLUSTER", b"SETSLOT", slot, b"NODE", cluster.node_id(target))
        assert await put(tier, *moving) == [WriteStatus.OK] * 3
        assert tier.counters["redirected"] == 3
        assert await statuses(tier, *moving) == [ReadStatus.OK] * 3
        assert tier.counters == {"redirected": 3}
    assert held_by_server(source) == 0
    assert held_by_server(target) == 3


async def test_a_slot_on_its_way_is_asked_for_at_both_ends(cluster: RedisCluster) -> None:
    source, target, _ = cluster.masters
    number = held_by(cluster, source)[0]
    slot = b"%d" % slot_of(number)
    async with opened(cluster.url) as tier:
        target.ask(b"CLUSTER", b"SETSLOT", slot, b"IMPORTING", cluster.node_id(source))
        source.ask(b"CLUSTER", b"SETSLOT", slot, b"MIGRATING", cluster.node_id(target))
        assert await statuses(tier, number) == [ReadStatus.ABSENT]
        assert await put(tier, number) == [WriteStatus.OK]
        assert await statuses(tier, number) == [ReadStatus.OK]
        assert (await tier.probe([block_id(number)], deadline_s=within(5))).tiers == ["remote"]
        await tier.drop([block_id(number)])
        assert await statuses(tier, number) == [ReadStatus.ABSENT]
        assert tier.counters == {"redirected": 6}
        assert held_by_server(source) == 0


async def test_a_cluster_that_is_absent_at_the_start_is_found_when_it_comes(
    cluster: RedisCluster, caplog: pytest.LogCaptureFixture
) -> None:
    for node in cluster.nodes:
        node.kill()
    async with opened(cluster.url) as tier:
        assert not tier.health().is_up
        assert "not reachable yet: no node has a map of the cluster" in caplog.text
        assert await statuses(tier, 1) == [ReadStatus.UNAVAILABLE]
        assert (await tier.probe([block_id(1)], deadline_s=within(1))).reason is MissReason.UNAVAILABLE
        for node in cluster.nodes:
            node.start()
        await until(lambda: tier.health().is_up)
        assert await until_healed(tier, 1) == [ReadStatus.ABSENT]


async def test_a_single_url_to_a_cluster_is_a_miss_and_says_what_to_write(
    cluster: RedisCluster, caplog: pytest.LogCaptureFixture
) -> None:
    foreign = held_by(cluster, cluster.masters[1])[0]
    async with opened(cluster.masters[0].url) as tier:
        assert await statuses(tier, foreign) == [ReadStatus.UNAVAILABLE]
    assert "write redis+cluster:// in the url" in caplog.text


async def test_seven_commands_are_all_the_rights_it_needs_on_a_cluster(cluster: RedisCluster) -> None:
    rights = [b"+get", b"+set", b"+del", b"+exists", b"+ping", b"+asking", b"+cluster|slots"]
    for node in cluster.nodes:
        node.ask(b"ACL", b"SETUSER", b"kv", b"reset", b"on", b">pw", b"~kvstore:*", *rights)
        for words in ([b"EVAL", b"return 1", b"0"], [b"CONFIG", b"GET", b"*"], [b"KEYS", b"*"]):
            assert b"no permissions" in node.ask(b"ACL", b"DRYRUN", b"kv", *words)
        assert b"no permissions" in node.ask(b"ACL", b"DRYRUN", b"kv", b"CLUSTER", b"RESET")
    source, target, _ = cluster.masters
    number = held_by(cluster, source)[0]
    async with opened(cluster.url, user="kv", password="pw") as tier:
        assert await put(tier, *BLOCKS) == [WriteStatus.OK] * 60
        assert await statuses(tier, *BLOCKS) == [ReadStatus.OK] * 60
        assert tier.counters == {}
        await tier.drop([block_id(number)])
        slot = b"%d" % slot_of(number)
        target.ask(b"CLUSTER", b"SETSLOT", slot, b"IMPORTING", cluster.node_id(source))
        source.ask(b"CLUSTER", b"SETSLOT", slot, b"MIGRATING", cluster.node_id(target))
        assert await put(tier, number) == [WriteStatus.OK]
        assert await statuses(tier, number) == [ReadStatus.OK]
        assert tier.counters == {"redirected": 2}


# Slots


def test_key_slots_are_those_of_the_cluster_specification(cluster: RedisCluster) -> None:
    keys = [b"foo", b"123456789", b"{user1000}.following", b"foo{}{bar}", b"foo{{bar}}zap", b"foo{bar}{zap}"]
    keys += [b"", b"{", b"}{", b"{a", b"kvstore:1:00:00"]
    for key in keys:
        assert cluster.nodes[0].ask(b"CLUSTER", b"KEYSLOT", key) == b":%d\r\n" % key_slot(key)


def test_a_node_without_a_host_is_at_the_asked_host() -> None:
    reply: Reply = [
        [0, 99, ["", 7000, "id"]],
        [100, 200, [None, 7001]],
        [201, 300, ["10.0.0.1", 7002, "x"], []],
    ]
    assert read_slots(reply, asked=("seed", 1)) == [
        SlotRange(0, 99, ("seed", 7000)),
        SlotRange(100, 200, ("seed", 7001)),
        SlotRange(201, 300, ("10.0.0.1", 7002)),
    ]


@pytest.mark.parametrize(
    "reply",
    [
        *(None, 1, "OK", [], [1], [[0, 5]], [[5, 0, ["h", 1]]], [[0, 16384, ["h", 1]]], [["0", 1, ["h", 1]]]),
        *([[0, 1, ["h", "1"]]], [[0, 1, "h"]]),
    ],
)
def test_what_is_no_map_of_slots_is_a_fault(reply: Reply) -> None:
    with pytest.raises(RespFault):
        read_slots(reply, asked=("seed", 1))
