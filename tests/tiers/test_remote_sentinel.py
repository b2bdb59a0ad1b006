"""RemoteTier behind real sentinels: a master that is found, fails over, and comes back as a replica."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.miss import MissReason
from kvstore.tier import ReadStatus, WriteStatus
from kvstore_tiers.remote_control import Reply
from kvstore_tiers.remote_sentinel import Master, read_master
from kvstore_tiers.resp_stream import RespFault
from tests.redis_sentinel import MASTER, RedisSentinels
from tests.redis_server import RedisServer, wait_replicated
from tests.tiers.blocks import block_id
from tests.tiers.remote_calls import opened, put, statuses, until, until_healed, within

BLOCKS = range(10)


@pytest.fixture
def sentinels(tmp_path: Path) -> Iterator[RedisSentinels]:
    made = RedisSentinels(tmp_path)
    try:
        yield made.start()
    finally:
        made.stop()


async def test_a_failover_is_followed_and_the_former_master_is_left_alone(sentinels: RedisSentinels) -> None:
    async with opened(sentinels.url, sentinel_master=MASTER, timeout_s=0.2) as tier:
        assert await put(tier, *BLOCKS) == [WriteStatus.OK] * 10
        wait_replicated(sentinels.master)
        sentinels.master.pause()
        assert await statuses(tier, 1, seconds=0.1) == [ReadStatus.TIMED_OUT]
        assert await until_healed(tier, 1) == [ReadStatus.OK]
        assert await statuses(tier, *BLOCKS) == [ReadStatus.OK] * 10
        assert await put(tier, *range(10, 20)) == [WriteStatus.OK] * 10
        sentinels.master.resume()
        assert await statuses(tier, *range(20)) == [ReadStatus.OK] * 20
        assert b"role:master" in sentinels.replica.ask(b"INFO", b"replication")


def _calls_itself_master(server: RedisServer) -> bool:
    try:
        return b"role:master" in server.ask(b"INFO", b"replication")
    except OSError:
        return True  # a sentinel ends all its connections when it makes it a replica


async def test_a_master_that_was_made_a_replica_refuses_writes_until_the_new_one_is_known(
    sentinels: RedisSentinels,
) -> None:
    async with opened(sentinels.url, sentinel_master=MASTER, timeout_s=0.2) as tier:
        assert await put(tier, 1) == [WriteStatus.OK]
        sentinels.sentinels[0].ask(b"SENTINEL", b"FAILOVER", MASTER.encode())
        give_up_s = within(20)
        while _calls_itself_master(sentinels.master):
            assert set(await put(tier, 2)) <= {WriteStatus.OK, WriteStatus.UNAVAILABLE, WriteStatus.TIMED_OUT}
            assert within(0) < give_up_s
        while await put(tier, 3) != [WriteStatus.OK]:
            assert within(0) < give_up_s
        assert await statuses(tier, 3) == [ReadStatus.OK]


async def test_one_sentinel_is_enough_and_none_is_an_outage_only_at_the_start(
    sentinels: RedisSentinels, caplog: pytest.LogCaptureFixture
) -> None:
    async with opened(sentinels.url, sentinel_master=MASTER) as tier:
        for sentinel in sentinels.sentinels:
            sentinel.kill()
        assert await put(tier, 1) == [WriteStatus.OK]
    async with opened(sentinels.url, sentinel_master=MASTER) as tier:
        assert "no sentinel names the master" in tier.health().reason
        assert await put(tier, 1) == [WriteStatus.UNAVAILABLE]
        assert (await tier.probe([block_id(1)], deadline_s=within(1))).reason is MissReason.UNAVAILABLE
        sentinels.sentinels[2].start()
        await until(lambda: tier.health().is_up)
        assert await statuses(tier, 1) == [ReadStatus.OK]


async def test_a_master_that_no_sentinel_knows_is_an_outage_with_its_reason(
    sentinels: RedisSentinels,
) -> None:
    async with opened(sentinels.url, sentinel_master="other") as tier:
        assert "ERR No such master with that name" in tier.health().reason


async def test_six_commands_are_all_the_rights_it_needs_behind_sentinels(tmp_path: Path) -> None:
    made = RedisSentinels(tmp_path, "user kv on >pw +sentinel|master", "user default on nopass -@all +@all")
    made.start()
    try:
        rights = [b"~kvstore:*", b"+get", b"+set", b"+del", b"+exists", b"+ping"]
        made.master.ask(b"ACL", b"SETUSER", b"kv", b"on", b">pw", *rights)
        for sentinel in made.sentinels:
            sentinel.ask(b"ACL", b"SETUSER", b"default", b"resetpass", b">other")
        async with opened(made.url, sentinel_master=MASTER, user="kv", password="pw") as tier:
            assert await put(tier, *BLOCKS) == [WriteStatus.OK] * 10
            assert await statuses(tier, *BLOCKS) == [ReadStatus.OK] * 10
            assert tier.counters == {}
    finally:
        made.stop()


def test_the_newest_epoch_wins() -> None:
    assert max(Master(9, "a", 1), Master(10, "b", 1)) == Master(10, "b", 1)


def test_the_description_of_a_master_is_read() -> None:
    reply: Reply = ["name", "m", "ip", "10.0.0.1", "port", "6379", "config-epoch", "12", "odd"]
    assert read_master(reply) == Master(12, "10.0.0.1", 6379)


@pytest.mark.parametrize(
    "reply", [None, 1, "OK", [], ["ip", "h"], ["ip", "h", "port", "x"], ["ip", "", "port", "1"]]
)
def test_what_describes_no_master_is_a_fault(reply: Reply) -> None:
    with pytest.raises(RespFault):
        read_master(reply)
