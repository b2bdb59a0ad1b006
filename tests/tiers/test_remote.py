"""RemoteTier against a real server: faults, refusals, replies that were tampered with, logins."""

import asyncio
import logging
import random
import socket
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.errors import InvalidConfig
from kvstore.tier import HEADER_BYTES, ReadStatus, WriteStatus
from kvstore_tiers.remote import RemoteTier
from kvstore_tiers.resp import RespConnection
from kvstore_tiers.resp_address import AddressLookup, RespAddress, SocketAddress
from kvstore_tiers.resp_stream import RespFault
from tests.black_hole import black_hole
from tests.redis_server import RedisServer, free_port
from tests.tiers.blocks import block_id
from tests.tiers.remote_calls import LENGTH, NAMES, opened, put, statuses, until, until_healed, within
from tests.tiers.reply_proxy import Mangle, ReplyProxy


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path / "redis").start()
    yield server
    server.stop()


# A server that stops, dies, comes back, is full


@pytest.mark.alone
async def test_a_stopped_server_costs_one_deadline_then_nothing_and_heals(redis: RedisServer) -> None:
    async with opened(redis.url) as tier:
        await put(tier, *range(8))
        redis.pause()
        began_s = time.monotonic()
        assert await statuses(tier, *range(8), seconds=0.05) == [ReadStatus.TIMED_OUT] * 8
        assert time.monotonic() - began_s < 0.3
        assert tier.health().reason == "no answer in time"
        began_s = time.monotonic()
        for _ in range(20):
            assert await statuses(tier, 1) == [ReadStatus.UNAVAILABLE]
            assert await put(tier, 1) == [WriteStatus.UNAVAILABLE]
            assert (await tier.probe([block_id(1)], deadline_s=within(1))).tiers == [None]
        assert time.monotonic() - began_s < 0.2
        redis.resume()
        assert await until_healed(tier, 1) == [ReadStatus.OK]
        assert tier.health().is_up
        assert await statuses(tier, *range(8)) == [ReadStatus.OK] * 8


async def test_a_silence_as_long_as_the_timeout_opens_the_breaker_at_once(redis: RedisServer) -> None:
    async with opened(redis.url, timeout_s=0.1) as tier:
        await put(tier, 1)
        redis.pause()
        assert await put(tier, 2) == [WriteStatus.TIMED_OUT]
        assert not tier.health().is_up
        redis.resume()


@pytest.mark.alone
async def test_calls_end_by_their_deadline_also_when_all_threads_are_stuck(redis: RedisServer) -> None:
    async with opened(redis.url, timeout_s=1.0, num_connections=2) as tier:
        await put(tier, *range(4))
        redis.pause()
        stuck = [asyncio.create_task(statuses(tier, *range(4), seconds=1)) for _ in range(4)]
        await asyncio.sleep(0)
        began_s = time.monotonic()
        assert await statuses(tier, 1, seconds=0.05) == [ReadStatus.TIMED_OUT]
        assert time.monotonic() - began_s < 0.3
        await asyncio.gather(*stuck)
        redis.resume()


async def test_reads_do_not_wait_behind_stuck_writes(redis: RedisServer) -> None:
    proxy = ReplyProxy(redis.port)
    async with opened(proxy.url, timeout_s=1.0, num_connections=1) as tier:
        await put(tier, 1)
        # The reply to SET and the fence behind it may come in one piece or in two.
        proxy.mangle = lambda data: b"" if data.startswith(b"+OK") or b"fence-" in data else data
        writing = asyncio.create_task(put(tier, 2))
        await asyncio.sleep(0)
        assert await statuses(tier, 1, seconds=0.5) == [ReadStatus.OK]
        assert await writing == [WriteStatus.TIMED_OUT]
    proxy.stop()


async def test_a_killed_server_is_unavailable_and_empty_when_it_is_back(redis: RedisServer) -> None:
    async with opened(redis.url) as tier:
        await put(tier, 1, 2)
        redis.kill()
        for _ in range(4):
            assert await statuses(tier, 1, 2) == [ReadStatus.UNAVAILABLE] * 2
        assert "refused" in tier.health().reason
        redis.start()
        assert await until_healed(tier, 1) == [ReadStatus.ABSENT]
        assert await put(tier, 1) == [WriteStatus.OK]


async def test_a_connection_gone_stale_while_idle_costs_no_miss(redis: RedisServer) -> None:
    async with opened(redis.url) as tier:
        await put(tier, *range(8))
        redis.ask(b"CLIENT", b"KILL", b"TYPE", b"normal")
        assert await statuses(tier, *range(8)) == [ReadStatus.OK] * 8


async def test_opening_without_a_server_is_a_warning(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    server = RedisServer(tmp_path / "redis")
    async with opened(server.url) as tier:
        assert "not reachable yet: cannot connect: Connection refused" in caplog.text
        assert not tier.health().is_up
        assert await statuses(tier, 1) == [ReadStatus.UNAVAILABLE]
        server.start()
        assert await until_healed(tier, 1) == [ReadStatus.ABSENT]
    server.stop()


async def test_a_server_at_its_memory_limit_answers_full_and_still_serves(tmp_path: Path) -> None:
    options = ("--maxmemory", "3mb", "--maxmemory-policy", "noeviction")
    server = RedisServer(tmp_path / "redis", *options).start()
    async with opened(server.url) as tier:
        found = await put(tier, 0)
        assert found == [WriteStatus.OK]
        # What is on its way counts against the limit too, so any of these may be refused.
        found += await put(tier, *range(1, 40))
        assert found.count(WriteStatus.FULL) >= 10
        assert set(found) == {WriteStatus.OK, WriteStatus.FULL}
        assert tier.counters["full"] == found.count(WriteStatus.FULL)
        assert tier.health().is_up
        stored = [number for number, status in enumerate(found) if status is WriteStatus.OK]
        assert await statuses(tier, *stored) == [ReadStatus.OK] * len(stored)
    server.stop()


async def test_a_read_only_replica_is_unavailable_for_writes(redis: RedisServer, tmp_path: Path) -> None:
    replica = RedisServer(tmp_path / "replica", "--replicaof", f"127.0.0.1 {redis.port}").start()
    async with opened(replica.url) as tier:
        for _ in range(5):
            assert await put(tier, 1) == [WriteStatus.UNAVAILABLE]
        assert tier.health().is_up
        assert await statuses(tier, 1) == [ReadStatus.ABSENT]
    replica.stop()


async def test_a_user_who_may_not_write_is_refused(redis: RedisServer) -> None:
    redis.ask(b"ACL", b"SETUSER", b"reader", b"on", b">pw", b"~*", b"+get", b"+exists")
    async with opened(f"redis://reader@127.0.0.1:{redis.port}/0", password="pw") as tier:
        assert await put(tier, 1) == [WriteStatus.REFUSED]
        assert await statuses(tier, 1) == [ReadStatus.ABSENT]
        assert tier.counters["refused"] == 1


@pytest.mark.parametrize("more", [[b"+ping"], []], ids=["with ping", "without ping"])
async def test_five_commands_are_all_the_rights_it_needs(redis: RedisServer, more: list[bytes]) -> None:
    rights = [b"+get", b"+set", b"+del", b"+exists", *more]
    redis.ask(b"ACL", b"SETUSER", b"kv", b"reset", b"on", b">pw", b"~kvstore:*", *rights)
    for words in ([b"EVAL", b"return 1", b"0"], [b"CONFIG", b"GET", b"*"], [b"KEYS", b"*"], [b"FLUSHALL"]):
        assert b"no permissions" in redis.ask(b"ACL", b"DRYRUN", b"kv", *words)
    assert b"no permissions" in redis.ask(b"ACL", b"DRYRUN", b"kv", b"GET", b"other:key")
    async with opened(f"redis://kv@127.0.0.1:{redis.port}/0", password="pw", ttl_s=60) as tier:
        assert await put(tier, 1) == [WriteStatus.OK]
        assert await statuses(tier, 1) == [ReadStatus.OK]
        assert (await tier.probe([block_id(1)], deadline_s=within(5))).tiers == ["remote"]
        await tier.drop([block_id(1)])
        assert await statuses(tier, 1) == [ReadStatus.ABSENT]
        redis.pause()
        assert await statuses(tier, 1, seconds=0.05) == [ReadStatus.TIMED_OUT]
        redis.resume()
        assert await until_healed(tier, 1) == [ReadStatus.ABSENT]


async def test_a_time_to_live_is_set_on_the_server(redis: RedisServer) -> None:
    async with opened(redis.url, ttl_s=60) as tier:
        await put(tier, 1)
    left_ms = int(redis.ask(b"PTTL", NAMES.of(block_id(1)))[1:])
    assert 50_000 < left_ms <= 60_000


# Content that is not what it should be


async def test_a_flipped_bit_is_found_and_the_copy_deleted(redis: RedisServer) -> None:
    async with opened(redis.url) as tier:
        dice = random.Random(5)
        await put(tier, 1)
        key = NAMES.of(block_id(1))
        sound = redis.ask(b"GET", key)
        assert len(sound) == HEADER_BYTES + LENGTH
        for _ in range(200):
            damaged = bytearray(sound)
            damaged[dice.choice([dice.randrange(HEADER_BYTES), dice.randrange(len(sound))])] ^= (
                1 << dice.randrange(8)
            )
            redis.ask(b"SET", key, bytes(damaged))
            assert await statuses(tier, 1) == [ReadStatus.CORRUPT]
            assert await statuses(tier, 1) == [ReadStatus.ABSENT]


@pytest.mark.parametrize("length", [0, 1, HEADER_BYTES - 1, HEADER_BYTES, HEADER_BYTES + 7, 300_000])
async def test_a_value_of_another_length_is_corrupt_and_the_stream_stays_in_step(
    redis: RedisServer, length: int
) -> None:
    async with opened(redis.url, num_connections=1) as tier:
        await put(tier, 0, 1, 2)
        value = redis.ask(b"GET", NAMES.of(block_id(1)))
        redis.ask(b"SET", NAMES.of(block_id(1)), (value * 4)[:length])
        assert await statuses(tier, 0, 1, 2) == [ReadStatus.OK, ReadStatus.CORRUPT, ReadStatus.OK]
        assert tier.counters.get("faults", 0) == 0


async def test_a_sound_block_under_another_key_is_not_served(redis: RedisServer) -> None:
    async with opened(redis.url) as tier:
        await put(tier, 1)
        redis.ask(b"SET", NAMES.of(block_id(2)), redis.ask(b"GET", NAMES.of(block_id(1))))
        assert await statuses(tier, 1, 2) == [ReadStatus.OK, ReadStatus.MISMATCH]


async def test_a_key_of_another_type_is_no_hit(redis: RedisServer) -> None:
    async with opened(redis.url) as tier:
        redis.ask(b"LPUSH", NAMES.of(block_id(1)), b"x")
        assert await statuses(tier, 1) == [ReadStatus.MISMATCH]
        assert tier.health().is_up


def cut_after(limit_bytes: int) -> Mangle:
    seen = 0

    def mangle(data: bytes) -> bytes | None:
        nonlocal seen
        seen += len(data)
        return data if seen <= limit_bytes else None

    return mangle


def with_garbage_in_front(data: bytes) -> bytes | None:
    return b"\x00garbage\r\n" + data


def doubled(data: bytes) -> bytes | None:
    return data + data


def without_the_first_byte(data: bytes) -> bytes | None:
    return data[1:]


def without_a_byte_in_the_middle(data: bytes) -> bytes | None:
    return data[: len(data) // 2] + data[len(data) // 2 + 1 :]


def with_a_huge_length(data: bytes) -> bytes | None:
    return data.replace(b"$100192", b"$9999999999", 1)


def with_a_negative_length(data: bytes) -> bytes | None:
    return data.replace(b"$100192", b"$-00192", 1)


def with_no_number(data: bytes) -> bytes | None:
    return data.replace(b"$100192", b"$1e5", 1)


def with_an_endless_line(data: bytes) -> bytes | None:
    return b"+" + b"x" * len(data)


def a_push(data: bytes) -> bytes | None:
    return b">2\r\n+invalidate\r\n*0\r\n" + data


MANGLES = [
    *(cut_after(0), cut_after(150_000), with_garbage_in_front, doubled, without_the_first_byte, a_push),
    *(without_a_byte_in_the_middle, with_a_huge_length, with_a_negative_length, with_no_number),
    with_an_endless_line,
]


@pytest.mark.parametrize("mangle", MANGLES, ids=lambda mangle: mangle.__name__)
async def test_replies_that_were_tampered_with_are_never_wrong_and_end_the_connection(
    redis: RedisServer, mangle: Mangle
) -> None:
    proxy = ReplyProxy(redis.port)
    async with opened(proxy.url, num_connections=1) as tier:
        await put(tier, *range(6))
        before = proxy.num_connections
        proxy.mangle = mangle
        began_s = time.monotonic()
        found = await statuses(tier, *range(6), seconds=1)
        assert time.monotonic() - began_s < 2
        assert ReadStatus.OK not in found[-1:]
        proxy.mangle = lambda data: data
        await until_healed(tier, 0)
        assert proxy.num_connections > before
        await put(tier, *range(6))
        assert await statuses(tier, *range(6)) == [ReadStatus.OK] * 6
    proxy.stop()


async def test_random_damage_to_the_stream_is_never_served(redis: RedisServer) -> None:
    proxy = ReplyProxy(redis.port)
    dice = random.Random(3)

    def flip(data: bytes) -> bytes | None:
        if dice.random() < 0.9:
            return data
        damaged = bytearray(data)
        damaged[dice.randrange(min(len(data), 300))] ^= 1 << dice.randrange(8)
        return bytes(damaged)

    proxy.mangle = flip
    options = {"breaker_backoff_s": 0.001, "breaker_backoff_max_s": 0.001}
    async with opened(redis.url, timeout_s=10) as sound, opened(proxy.url, **options) as tier:
        found: Counter[ReadStatus] = Counter()
        for _ in range(60):
            # Those that seemed damaged were deleted.
            assert await put(sound, *range(6), length=LENGTH) == [WriteStatus.OK] * 6
            await until(lambda: tier.health().is_up)
            found.update(await statuses(tier, *range(6), seconds=1))
        assert found[ReadStatus.OK] > 10
        assert found[ReadStatus.CORRUPT] > 10
    proxy.stop()


# Addresses and logins


async def test_probe_stops_at_the_window_with_the_first_absent_block(redis: RedisServer) -> None:
    async with opened(redis.url) as tier:
        await put(tier, *range(300), length=10)
        probe = await tier.probe([block_id(number) for number in range(600)], deadline_s=within(5))
        assert probe.tiers[:300] == ["remote"] * 300
        assert probe.tiers[300:] == [None] * 300
        assert probe.num_known == 512
        whole = await tier.probe([block_id(number) for number in range(512)], deadline_s=within(5))
        assert whole.num_known is None


async def test_a_unix_socket_and_a_password_of_its_own(tmp_path: Path) -> None:
    server = RedisServer(tmp_path / "r", password="sesame").start()
    async with opened(f"unix://{server.socket_path}?db=3", password="sesame") as tier:
        assert await put(tier, 1) == [WriteStatus.OK]
        assert await statuses(tier, 1) == [ReadStatus.OK]
    server.stop()


async def test_credentials_are_in_no_message(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    server = RedisServer(tmp_path / "r", password="sesame").start()
    url = f"redis://somebody:wrongsecret@127.0.0.1:{server.port}/0"
    async with opened(url) as tier:
        assert await statuses(tier, 1) == [ReadStatus.UNAVAILABLE]
        assert "the server refused the login: WRONGPASS" in tier.health().reason
    assert "wrongsecret" not in caplog.text + repr(RespAddress.parse(url)) + str(RespAddress.parse(url))
    server.stop()


@pytest.mark.parametrize(
    "url",
    ["", "http://x", "redis://", "redis://h:99999", "redis://h/x", "unix://relative", "unix:///" + "x" * 200],
)
def test_a_bad_url_is_refused_without_quoting_it(url: str) -> None:
    with pytest.raises(InvalidConfig, match="remote: the url"):
        RemoteTier(url)


def test_a_url_may_hold_everything() -> None:
    address = RespAddress.parse("rediss://us%40er:p%3Aw@[::1]:7000/5")
    assert address == RespAddress("::1", 7000, "", 5, is_tls=True, user="us@er", password="p:w")
    assert str(address) == "rediss://[::1]:7000/5"


def test_every_address_of_a_name_is_tried(redis: RedisServer) -> None:
    class TwoAddresses(AddressLookup):
        def find(self, timeout_s: float) -> list[SocketAddress]:
            return [(socket.AF_INET, ("127.0.0.1", free_port())), *super().find(timeout_s)]

    address = RespAddress.parse(redis.url)
    connection = RespConnection.connect(
        address, TwoAddresses(address), timeout_s=1, deadline_s=within(1), clock=time.monotonic
    )
    assert connection.is_quiet()
    connection.close()


def test_an_address_that_swallows_everything_does_not_hide_the_next_one(redis: RedisServer) -> None:
    address = RespAddress.parse(redis.url)
    with black_hole() as silent:

        class SilentFirst(AddressLookup):
            def find(self, timeout_s: float) -> list[SocketAddress]:
                return [(socket.AF_INET, silent), *super().find(timeout_s)]

        connection = RespConnection.connect(
            address, SilentFirst(address), timeout_s=6, deadline_s=within(6), clock=time.monotonic
        )
    assert connection.is_quiet()
    connection.close()


@pytest.mark.parametrize("host", ["a" * 70, "x..y", "nul\0"])
def test_a_host_that_no_resolver_takes_is_a_fault(host: str) -> None:
    address = RespAddress.parse("redis://h").at(host, 6379)
    lookup = AddressLookup(address)
    with pytest.raises(RespFault, match="cannot connect"):
        RespConnection.connect(address, lookup, timeout_s=5, deadline_s=within(5), clock=time.monotonic)
    lookup.close()


async def test_a_name_that_does_not_resolve_is_a_fault_in_time() -> None:
    began_s = time.monotonic()
    async with opened("redis://no-such-host.invalid:1/0", timeout_s=0.2) as tier:
        assert not tier.health().is_up
    assert time.monotonic() - began_s < 5
