"""Records in Redis when it is frozen, killed, emptied, full, failed over, or holds what nobody put."""

import asyncio
import random
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvstore.errors import TierUnavailable
from kvstore.records import RecordAbsence, RecordKey, RecordOutcome, RecordPlace
from kvstore.tenant import TenantId, tenant_of
from kvstore_tiers.record_format import charge_bytes, record_id
from kvstore_tiers.record_remote import RIGHTS
from kvstore_tiers.record_shared import (
    COPY_LIFE_S,
    SharedEnd,
    SharedNames,
    SharedStatus,
    StoreRequest,
    head_or_none,
)
from tests.record_kit import ANN, BOB, MIB, Kit, Store
from tests.redis_cluster import RedisCluster
from tests.redis_sentinel import MASTER, RedisSentinels
from tests.redis_server import RedisServer

SHORT_S = 0.5
NAMES = SharedNames("kvstore", tenant_of(ANN))


def key_of(name: str) -> bytes:
    return NAMES.of(record_id(RecordKey("c", name, ANN)))


@pytest.fixture(params=["clear", "sealed"])
def kit(request: pytest.FixtureRequest, tmp_path: Path, redis: RedisServer) -> Kit:
    return Kit(tmp_path, redis.url, request.param == "sealed")


@pytest.fixture
async def pair(kit: Kit) -> AsyncIterator[tuple[Store, Store]]:
    async with kit.store("a") as one, kit.store("b") as other:
        yield one, other
        assert [await store.check(sample_records=100) for store in (one, other)] == [[], []]


async def until_up(store: Store) -> None:
    async with asyncio.timeout(30):
        while True:
            if store.stats()["is_up"]:
                return
            await asyncio.sleep(0.01)


# Outages


async def test_while_redis_is_frozen_copies_are_served_and_no_put_goes_through(
    pair: tuple[Store, Store], redis: RedisServer
) -> None:
    one, other = pair
    first = await one.set("n", b"1")
    redis.pause()

    write = await one.set("n", b"2", first.version, timeout_s=SHORT_S)
    record = (await one.look("n", timeout_s=SHORT_S)).record
    with pytest.raises(TierUnavailable):
        await other.look("n", timeout_s=SHORT_S)
    with pytest.raises(TierUnavailable):
        await one.remove("n", timeout_s=SHORT_S)
    with pytest.raises(TierUnavailable):
        await one.names(ANN, "c", prefix="", after="", limit=9, timeout_s=SHORT_S)

    assert write.outcome is RecordOutcome.UNAVAILABLE
    assert record is not None
    assert (record.value, record.version, record.place) == (b"1", first.version, RecordPlace.SSD)
    assert not record.is_current
    redis.resume()
    await until_up(one)
    assert (await one.look("n")).record.is_current
    assert (await one.set("n", b"2", first.version)).is_stored


async def test_a_put_that_redis_took_late_is_found_by_its_token_and_made_once(
    pair: tuple[Store, Store], redis: RedisServer
) -> None:
    """Frozen at some point of a put: it is stored once or not at all, whatever was said of it."""
    one, other = pair
    token = b"t" * 16
    for delay_s in (0.0, 0.0005, 0.001, 0.002, 0.004):
        first = await one.set("n", b"before")
        put = asyncio.create_task(one.set("n", b"after", first.version, token=token, timeout_s=SHORT_S))
        await asyncio.sleep(delay_s)
        redis.pause()
        write = await put
        redis.resume()
        await until_up(other)
        again = await other.set("n", b"after", first.version, token=token)

        assert again.is_stored
        assert not write.is_stored or write.version == again.version
        assert await other.value("n") == b"after"
        assert (await other.set("n", b"x", first.version)).outcome is RecordOutcome.CONFLICT
        token = bytes([token[0] + 1]) * 16


@pytest.mark.parametrize("is_conditional", [True, False])
async def test_a_put_whose_answer_was_lost_and_that_others_replaced_is_in_doubt_and_made_once(
    pair: tuple[Store, Store], monkeypatch: pytest.MonkeyPatch, is_conditional: bool
) -> None:
    one, other = pair
    first = await one.set("n", b"before")
    remote = one.truth.remote
    ask = remote.store
    num_asked = 0

    async def lose_the_first_answer(
        tenant: TenantId, request: StoreRequest, *, deadline_s: float
    ) -> SharedEnd:
        nonlocal num_asked
        num_asked += 1
        end = await ask(tenant, request, deadline_s=deadline_s)
        if num_asked > 1:
            return end
        await other.set("n", b"on", end.version)
        return SharedEnd(SharedStatus.UNKNOWN, is_sent=True)

    monkeypatch.setattr(remote, "store", lose_the_first_answer)
    write = await one.set("n", b"mine", first.version if is_conditional else None)

    assert (write.outcome, write.is_doubtful) == (RecordOutcome.UNAVAILABLE, True)
    assert await other.value("n") == b"on"


async def test_after_a_restart_without_its_content_nobody_goes_on_unknowingly(
    pair: tuple[Store, Store], redis: RedisServer
) -> None:
    one, other = pair
    first = await one.set("n", b"1")
    second = await other.set("n", b"2", first.version)
    redis.kill()
    redis.start()
    await until_up(one)
    await until_up(other)

    found = [(await store.look("n")).record for store in pair]
    assert [(record.value, record.is_current) for record in found] == [(b"1", False), (b"2", False)]
    for store, version in ((one, first.version), (other, second.version)):
        write = await store.set("n", b"on", version)
        assert (write.outcome, write.version) == (RecordOutcome.CONFLICT, 0)
    anew = await one.set("n", b"anew", 0)
    assert anew.is_stored
    assert anew.version not in (first.version, second.version)
    assert await other.value("n") == b"anew"
    assert other.events["lost"] > 0


async def test_without_a_copy_a_lost_record_is_absent_for_that_reason(
    pair: tuple[Store, Store], redis: RedisServer
) -> None:
    one, other = pair
    await one.set("n", b"1")
    redis.ask(b"DEL", key_of("n"))

    assert (await other.look("n")).reason is RecordAbsence.LOST
    assert [info.name for info in await other.listed()] == []


async def test_a_copy_is_served_for_a_day_after_it_was_last_seen(kit: Kit, redis: RedisServer) -> None:
    async with kit.store() as store:
        await store.set("n", b"1")
        kit.clock.moved_s += COPY_LIFE_S - 60
        assert (await store.look("n")).record.is_current
        kit.clock.moved_s += COPY_LIFE_S - 60
        redis.kill()
        assert (await store.look("n", timeout_s=SHORT_S)).record.value == b"1"
        kit.clock.moved_s += 120

        with pytest.raises(TierUnavailable):
            await store.look("n", timeout_s=SHORT_S)


async def test_copies_outlive_a_restart_of_the_store_without_redis(kit: Kit, redis: RedisServer) -> None:
    async with kit.store() as store:
        first = await store.set("n", b"1")
    redis.kill()

    async with kit.store() as store:
        record = (await store.look("n", timeout_s=SHORT_S)).record
        assert record is not None
        assert (record.value, record.version, record.is_current) == (b"1", first.version, False)
        write = await store.set("n", b"2", first.version, timeout_s=SHORT_S)
        assert (write.outcome, write.is_doubtful) == (RecordOutcome.UNAVAILABLE, False)
    kit.wall.moved_s += COPY_LIFE_S
    async with kit.store() as store:
        with pytest.raises(TierUnavailable):
            await store.look("n", timeout_s=SHORT_S)


async def test_what_others_dropped_or_changed_leaves_the_copies(
    pair: tuple[Store, Store], kit: Kit, redis: RedisServer
) -> None:
    one, other = pair
    for name in ("dropped", "changed", "same"):
        await one.set(name, b"1")
    await other.remove("dropped")
    await other.set("changed", b"2")
    kit.clock.moved_s += 601
    while True:
        await one.truth.sweep()
        if one.truth.copies.local.find(tenant_of(ANN) + record_id(RecordKey("c", "changed", ANN))) is None:
            break
    redis.kill()

    assert (await one.look("same", timeout_s=SHORT_S)).record.value == b"1"
    for name in ("dropped", "changed"):
        with pytest.raises(TierUnavailable):
            await one.look(name, timeout_s=SHORT_S)


async def test_a_token_of_zeros_is_no_mark_of_a_dropped_record(pair: tuple[Store, Store]) -> None:
    one, other = pair
    await one.set("n", b"1")
    await other.remove("n")

    write = await one.set("n", b"2", 0, token=bytes(16))

    assert write.outcome is RecordOutcome.STORED
    assert write.version > 0
    assert await other.value("n") == b"2"


async def test_what_was_read_from_redis_is_copied_too(pair: tuple[Store, Store], redis: RedisServer) -> None:
    one, other = pair
    await one.set("n", b"1")
    assert await other.value("n") == b"1"
    while other.truth.copies._keeping:
        await asyncio.wait(set(other.truth.copies._keeping))
    redis.kill()

    assert (await other.look("n", timeout_s=SHORT_S)).record.value == b"1"


async def test_redis_may_be_absent_at_the_start_and_come_later(kit: Kit, redis: RedisServer) -> None:
    redis.kill()
    async with kit.store() as store:
        assert (await store.set("n", b"1", timeout_s=SHORT_S)).outcome is RecordOutcome.UNAVAILABLE
        redis.start()
        await until_up(store)

        assert (await store.set("n", b"1")).is_stored


# Content that nobody put


async def test_damaged_bytes_are_absent_and_removed(pair: tuple[Store, Store], redis: RedisServer) -> None:
    one, _ = pair
    async with Kit(None, redis.url, one.truth.codec.is_sealed, keys=_keys(one)).store() as reader:
        for number in range(40):
            await one.set("n", b"value" * 50)
            data = bytearray(redis.ask(b"GET", key_of("n")))
            at = random.Random(number).randrange(len(data))
            data[at] ^= 1 << number % 8
            redis.ask(b"SET", key_of("n"), bytes(data), b"KEEPTTL")

            found = await reader.look("n")

            assert (found.record, found.reason) == (None, RecordAbsence.CORRUPT)
            assert redis.ask(b"EXISTS", key_of("n")) == b":0\r\n"
        assert reader.events["corrupt"] == 40
        assert (await reader.set("n", b"anew", 0)).is_stored


async def test_a_damaged_record_is_served_from_a_copy_that_is_marked(
    pair: tuple[Store, Store], redis: RedisServer
) -> None:
    one, _ = pair
    first = await one.set("n", b"value")
    redis.ask(b"SETRANGE", key_of("n"), b"130", b"\xff\xff\xff\xff")

    record = (await one.look("n")).record

    assert record is not None
    assert (record.value, record.version, record.is_current) == (b"value", first.version, False)


@pytest.mark.parametrize("source", ["m", "n"])
async def test_another_record_in_its_place_is_not_served(
    pair: tuple[Store, Store], redis: RedisServer, source: str
) -> None:
    """Neither that of another name, nor an older state of another tenant's, nor the clear in a sealed one."""
    one, other = pair
    await one.set(source, b"foreign", salt=BOB if source == "n" else ANN)
    names = SharedNames("kvstore", tenant_of(BOB if source == "n" else ANN))
    salt = BOB if source == "n" else ANN
    foreign = redis.ask(b"GET", names.of(record_id(RecordKey("c", source, salt))))
    redis.ask(b"SET", key_of("n"), foreign)

    assert (await other.look("n")).record is None


async def test_a_record_in_the_clear_is_not_served_where_they_are_encrypted(
    tmp_path: Path, redis: RedisServer
) -> None:
    clear, sealed = Kit(tmp_path, redis.url), Kit(tmp_path, redis.url, is_sealed=True)
    async with clear.store("a") as plain, sealed.store("b") as closed:
        await plain.set("n", b"planted")

        assert (await closed.look("n")).reason is RecordAbsence.UNREADABLE
        in_the_way = await closed.set("n", b"ours", 0)
        assert in_the_way.outcome is RecordOutcome.CONFLICT
        assert (await closed.set("n", b"ours", in_the_way.version)).is_stored
        assert (await plain.look("n")).reason is RecordAbsence.UNREADABLE
        assert await closed.value("n") == b"ours"


async def test_a_node_reads_its_own_records_after_encryption_was_switched_on(
    tmp_path: Path, redis: RedisServer
) -> None:
    kit = Kit(tmp_path, redis.url)
    async with kit.store("a") as plain:
        first = await plain.set("n", b"ours")
    kit.is_sealed = True
    async with kit.store("a") as closed, kit.store("b") as other:
        record = (await closed.look("n")).record
        assert record is not None
        assert (record.value, record.version, record.is_current) == (b"ours", first.version, True)
        assert (await other.look("n")).reason is RecordAbsence.UNREADABLE
        assert other.events["unreadable"] == 1

        assert (await closed.set("n", b"ours again", first.version)).is_stored
        assert await other.value("n") == b"ours again"


async def test_a_key_of_another_type_is_an_outage_of_that_record_alone(
    pair: tuple[Store, Store], redis: RedisServer
) -> None:
    one, _ = pair
    redis.ask(b"LPUSH", key_of("n"), b"x")

    write = await one.set("n", b"1")

    assert (write.outcome, write.is_doubtful) == (RecordOutcome.UNAVAILABLE, False)
    assert "WRONGTYPE" in write.problem
    with pytest.raises(TierUnavailable, match="WRONGTYPE"):
        await one.look("n")
    assert (await one.set("m", b"1")).is_stored


# Quota and index


def used_bytes(redis: RedisServer) -> int:
    return int(redis.ask(b"HGET", NAMES.index, b"used"))


async def test_the_index_adds_up_whatever_is_done(pair: tuple[Store, Store], redis: RedisServer) -> None:
    dice = random.Random(9)
    for _ in range(40):
        works = []
        for store in pair:
            name = f"n{dice.randrange(6)}"
            works += [
                store.set(name, bytes(dice.randrange(20_000))),
                store.remove(name),
                store.set(f"s{dice.randrange(3)}", b"", ttl_s=0.01),
                store.truth._sweep_tenant(
                    tenant_of(ANN), deadline_s=store.truth.clock() + 10, is_thorough=True
                ),
            ]
        await asyncio.gather(*(work for work in works))
    for store in pair:
        await store.truth._sweep_tenant(tenant_of(ANN), deadline_s=store.truth.clock() + 10, is_thorough=True)

    found = await pair[0].truth.remote.entries(tenant_of(ANN), deadline_s=pair[0].truth.clock() + 10)
    heads = [head_or_none(data) for data, _ in found.entries.values()]
    assert used_bytes(redis) == sum(charge_bytes(head.stored_bytes) for head in heads)


async def test_the_quota_is_one_for_all_stores(kit: Kit) -> None:
    kit.quota_bytes = 4 * 4096
    async with kit.store("a") as one, kit.store("b") as other:
        for number in range(4):
            assert (await one.set(f"n{number}", b"x")).is_stored

        assert (await other.set("more", b"x")).outcome is RecordOutcome.QUOTA
        assert (await other.set("n0", b"y")).is_stored
        assert (await other.set("more", b"x", salt=BOB)).is_stored


async def test_what_redis_lost_does_not_fill_the_quota_for_ever(kit: Kit, redis: RedisServer) -> None:
    kit.quota_bytes = 2 * 4096
    async with kit.store() as store:
        for name in ("a", "b"):
            await store.set(name, b"x")
        redis.ask(b"DEL", key_of("a"))

        assert (await store.set("c", b"x")).is_stored


async def test_a_redis_without_memory_refuses_puts_and_serves_what_is_there(
    tmp_path: Path, redis: RedisServer
) -> None:
    redis.ask(b"CONFIG", b"SET", b"maxmemory", b"8mb")
    redis.ask(b"CONFIG", b"SET", b"maxmemory-policy", b"noeviction")
    async with Kit(tmp_path, redis.url).store() as store:
        writes = [await store.set(f"n{number}", bytes(MIB)) for number in range(12)]
        outcomes = [write.outcome for write in writes]

        assert outcomes[-1] is RecordOutcome.FULL
        assert set(outcomes) == {RecordOutcome.STORED, RecordOutcome.FULL}
        assert not any(write.is_doubtful for write in writes)
        assert await store.value("n0") == bytes(MIB)
        assert await store.remove("n0")
        assert (await store.set("small", b"x")).is_stored


# Servers


async def test_a_user_with_these_rights_alone_is_enough(tmp_path: Path, redis: RedisServer) -> None:
    rights = [right.encode() for right in RIGHTS.split() if right != "+asking"]
    redis.ask(b"ACL", b"SETUSER", b"kv", b"reset", b"on", b">pw", b"~kvstore:*", b"+ping", *rights)
    for words in ([b"EVAL", b"return 1", b"0"], [b"CONFIG", b"GET", b"*"], [b"KEYS", b"*"]):
        assert b"no permissions" in redis.ask(b"ACL", b"DRYRUN", b"kv", *words)
    kit = Kit(tmp_path, redis.url, user="kv", password="pw", quota_bytes=2 * 4096)
    async with kit.store() as store:
        first = await store.set("n", b"1", 0)
        assert (await store.set("n", b"2", first.version)).is_stored
        assert await store.value("n") == b"2"
        assert len(await store.listed()) == 1
        await store.set("m", b"1", ttl_s=0.01)
        await store.set("o", b"1")
        await store.truth.sweep()
        assert await store.remove("n")
        assert store.stats()["is_up"]


async def test_a_user_without_the_rights_is_told_which(
    tmp_path: Path, redis: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    rights = [b"+get", b"+set", b"+del", b"+exists", b"+ping"]
    redis.ask(b"ACL", b"SETUSER", b"kv", b"reset", b"on", b">pw", b"~kvstore:*", *rights)
    async with Kit(tmp_path, redis.url, user="kv", password="pw").store() as store:
        write = await store.set("n", b"1")

        assert (write.outcome, write.is_doubtful) == (RecordOutcome.UNAVAILABLE, False)
        assert "NOPERM" in write.problem
        assert f"ACL SETUSER kv ~kvstore:* {RIGHTS}" in caplog.text


async def test_what_a_servers_settings_mean_for_records_is_said_once(
    tmp_path: Path, redis: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    redis.ask(b"CONFIG", b"SET", b"maxmemory", b"64mb")
    redis.ask(b"CONFIG", b"SET", b"maxmemory-policy", b"allkeys-lru")
    async with Kit(tmp_path, redis.url).store() as store:
        for _ in range(3):
            await store.truth.sweep()

    assert caplog.text.count("records may be evicted with the blocks") == 1
    assert caplog.text.count("a restart of it loses records") == 1


async def test_a_cluster_keeps_each_tenants_records_on_one_node(tmp_path: Path) -> None:
    cluster = RedisCluster(tmp_path / "cluster").start()
    try:
        async with (
            Kit(tmp_path, cluster.url).store("a") as one,
            Kit(tmp_path, cluster.url).store("b") as other,
        ):
            salts = [f"salt {number}".encode() for number in range(12)]
            for salt in salts:
                first = await one.set("n", salt, 0, salt=salt)
                assert (await other.set("n", salt, first.version, salt=salt)).is_stored
                assert await one.value("n", salt=salt) == salt
                assert [info.name for info in await one.listed(salt=salt)] == ["n"]
            assert await one.remove("n", salt=salts[0])
            assert sum(node.ask(b"DBSIZE") != b":0\r\n" for node in cluster.masters) > 1
            cluster.masters[0].kill()
            ended = [await one.set("n", b"x", salt=salt, timeout_s=SHORT_S) for salt in salts]
            assert {write.outcome for write in ended} == {RecordOutcome.STORED, RecordOutcome.UNAVAILABLE}
    finally:
        cluster.stop()


async def test_a_failover_that_loses_puts_lets_no_version_stand_for_two_states(tmp_path: Path) -> None:
    sentinels = RedisSentinels(tmp_path / "sentinels").start()
    kit = Kit(tmp_path, sentinels.url, sentinel_master=MASTER)
    try:
        async with kit.store("a") as one, kit.store("b") as other:
            first = await one.set("n", b"1")
            async with asyncio.timeout(30):
                while True:
                    if sentinels.is_replicated():
                        break
                    await asyncio.sleep(0.01)
            sentinels.replica.pause()
            # What the master writes from here on waits in no buffer of the replica's.
            sentinels.master.ask(b"CLIENT", b"KILL", b"TYPE", b"replica")
            second = await one.set("n", b"2", first.version)
            assert second.is_stored
            sentinels.master.kill()
            sentinels.replica.resume()
            async with asyncio.timeout(60):
                while True:
                    write = await other.set("n", b"2 of another", first.version, timeout_s=1)
                    if write.is_stored:
                        break

            late = await one.set("n", b"3", second.version)

            assert write.version != second.version
            assert (late.outcome, late.version) == (RecordOutcome.CONFLICT, write.version)
            assert await one.value("n") == b"2 of another"
    finally:
        sentinels.stop()


# Erasing


async def test_erasing_a_tenant_removes_its_records_everywhere(tmp_path: Path, redis: RedisServer) -> None:
    kit = Kit(tmp_path, redis.url, is_sealed=True)
    async with kit.store("a") as one, kit.store("b") as other:
        for number in range(150):
            await one.set(f"n{number}", b"x")
        await one.set("n", b"bobs", salt=BOB)
        assert await other.value("n0") == b"x"
        told = kit.keys.erase(ANN)

        count, problems = await one.erase(*told)
        await other.erase(*told)

        assert (count, problems) == (150, [])
        assert redis.ask(b"HLEN", NAMES.index) == b":1\r\n"
        assert used_bytes(redis) == 0
        for store in (one, other):
            assert (await store.look("n0")).record is None
            assert await store.listed() == []
            assert len(store.truth.copies.local) <= 1
        assert await other.value("n", salt=BOB) == b"bobs"
        assert (await one.set("n0", b"new", 0)).is_stored
        assert await other.value("n0") == b"new"


async def test_another_node_that_hears_late_of_an_erasure_removes_nothing_newer(
    tmp_path: Path, redis: RedisServer
) -> None:
    kit = Kit(tmp_path, redis.url, is_sealed=True)
    async with kit.store("a") as one, kit.store("b") as other:
        await one.set("old", b"x")
        told = kit.keys.erase(ANN)
        await one.erase(*told)
        assert (await one.set("new", b"y", 0)).is_stored

        await other.erase(*told)
        await other.erase(told[0], ())

        assert await other.value("new") == b"y"
        assert [info.name for info in await one.listed()] == ["new"]


async def test_an_erasure_that_redis_does_not_take_is_made_up_for(tmp_path: Path, redis: RedisServer) -> None:
    kit = Kit(tmp_path, redis.url, is_sealed=True)
    async with kit.store() as store:
        await store.set("n", b"x")
        told = kit.keys.erase(ANN)
        redis.pause()
        _, problems = await store.erase(*told)
        redis.resume()

        assert problems
        async with asyncio.timeout(30):
            while True:
                if redis.ask(b"HLEN", NAMES.index) == b":1\r\n":
                    break
                await asyncio.sleep(0.01)


async def test_in_redis_nothing_of_an_encrypted_record_can_be_read(
    tmp_path: Path, redis: RedisServer
) -> None:
    async with Kit(tmp_path, redis.url, is_sealed=True).store() as store:
        await store.set("name-of-a-session", b"a secret" * 100)

    stored = redis.ask(b"GET", key_of("name-of-a-session")) + redis.ask(b"HGETALL", NAMES.index)
    assert len(stored) > 900
    assert b"a secret" not in stored
    assert b"name-of-a" not in stored


def _keys(store: Store):
    codec = store.truth.codec
    return codec._keys if codec.is_sealed else Kit().keys
