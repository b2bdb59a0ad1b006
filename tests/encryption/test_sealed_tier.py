"""SealedTier: what is planted, moved, damaged or erased in the medium below is never served."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from kvstore.keys import NamespaceDigest
from kvstore.miss import MissReason
from kvstore.testing import MemoryTier
from kvstore.tier import (
    SEALED_HEADER_BYTES,
    BlockHeader,
    Medium,
    ReadStatus,
    Tier,
    WriteRequest,
    WriteStatus,
)
from kvstore_tiers.remote import RemoteTier
from kvstore_tiers.remote_session import KeyNames
from kvstore_tiers.sealed import SealedTier
from kvstore_tiers.sealing import DataKey, seal_payload
from kvstore_tiers.ssd import SsdTier
from tests.encryption.keys import TENANT, OneKey
from tests.redis_server import RedisServer
from tests.tiers.blocks import block_id, header, payload, to_read, to_write

LENGTH = 40_000
CAPACITY = 4 << 20
NAMES = KeyNames("kvstore")


def soon() -> float:
    return time.monotonic() + 30


async def put(tier: Tier, *numbers: int) -> list[WriteStatus]:
    return await tier.write([to_write(number, LENGTH) for number in numbers], deadline_s=soon())


async def statuses(tier: Tier, *numbers: int) -> list[ReadStatus]:
    requests = [to_read(number, LENGTH) for number in numbers]
    outcomes = await tier.read(requests, deadline_s=soon())
    for number, request, outcome in zip(numbers, requests, outcomes, strict=True):
        if outcome.status is ReadStatus.OK:
            assert bytes(request.buffer[:LENGTH]) == payload(number, LENGTH)
        else:
            # Nothing of what was refused stays in the buffer in the clear.
            assert payload(number, LENGTH)[:64] not in bytes(request.buffer)
    return [outcome.status for outcome in outcomes]


def sealed_request(number: int, key: DataKey, *, data: bytes | None = None) -> WriteRequest:
    """A write of a block that somebody sealed under a key of theirs."""
    data = data or payload(number, LENGTH)
    buffer = memoryview(bytearray(LENGTH))
    found = seal_payload(key, header(number, data), memoryview(data), buffer)
    assert found is not None
    return WriteRequest(found, buffer)


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path_factory.mktemp("redis")).start()
    yield server
    server.stop()


@asynccontextmanager
async def on_redis(redis: RedisServer, keys: OneKey | None = None) -> AsyncIterator[SealedTier]:
    redis.ask(b"FLUSHALL")
    tier = SealedTier(RemoteTier(redis.url, timeout_s=5), keys or OneKey())
    await tier.open()
    yield tier
    await tier.close()


@asynccontextmanager
async def on_ssd(folder: Path, keys: OneKey | None = None) -> AsyncIterator[SealedTier]:
    tier = SealedTier(SsdTier(folder, capacity_bytes=CAPACITY, is_sealed=True), keys or OneKey())
    await tier.open()
    yield tier
    assert tier.check() == []
    await tier.close()


# Planted and moved


@pytest.mark.parametrize("what", ["in the clear", "under another key", "under a key of that name"])
async def test_none_of_a_thousand_planted_blocks_is_served(redis: RedisServer, what: str) -> None:
    async with on_redis(redis) as tier:
        keys = tier._keys
        assert isinstance(keys, OneKey)
        planter = DataKey.make(TENANT)
        if what == "under a key of that name":
            planter.id = keys.key.id
        for start in range(0, 1000, 100):
            numbers = range(start, start + 100)
            planted = (
                [to_write(number, LENGTH) for number in numbers]
                if what == "in the clear"
                else [sealed_request(number, planter) for number in numbers]
            )
            written = await tier.inner.write(planted, deadline_s=soon())
            assert written == [WriteStatus.OK] * 100
        expected = ReadStatus.CORRUPT if what == "under a key of that name" else ReadStatus.MISMATCH
        for start in range(0, 1000, 100):
            assert await statuses(tier, *range(start, start + 100)) == [expected] * 100
        left = int(redis.ask(b"DBSIZE")[1:-2])
        assert left == (0 if expected is ReadStatus.CORRUPT else 1000)
        assert tier.counters["opened"] == 0


async def test_a_block_of_another_tenants_namespace_is_not_served_under_ones_own(redis: RedisServer) -> None:
    async with on_redis(redis) as tier:
        await put(tier, 1)
        value = redis.ask(b"GET", NAMES.of(block_id(1)))
        at = BlockHeader.unpack(value[:SEALED_HEADER_BYTES])
        foreign = at._replace(block=at.block._replace(namespace=NamespaceDigest(b"x" * 32)))
        redis.ask(b"SET", NAMES.of(block_id(1)), foreign.pack() + value[SEALED_HEADER_BYTES:])
        assert await statuses(tier, 1) == [ReadStatus.MISMATCH]


@pytest.mark.parametrize("moved", ["payload", "seal", "value"])
async def test_parts_of_two_blocks_do_not_make_a_third(redis: RedisServer, moved: str) -> None:
    async with on_redis(redis) as tier:
        await put(tier, 1, 2)
        one, other = (redis.ask(b"GET", NAMES.of(block_id(number))) for number in (1, 2))
        ours = BlockHeader.unpack(one[:SEALED_HEADER_BYTES])
        theirs = BlockHeader.unpack(other[:SEALED_HEADER_BYTES])
        made = {
            "payload": ours._replace(checksum=theirs.checksum).pack() + other[SEALED_HEADER_BYTES:],
            "seal": ours._replace(seal=theirs.seal).pack() + one[SEALED_HEADER_BYTES:],
            "value": theirs._replace(block=ours.block, depth=ours.depth).pack() + other[SEALED_HEADER_BYTES:],
        }
        redis.ask(b"SET", NAMES.of(block_id(1)), made[moved])
        assert await statuses(tier, 1, 2) == [ReadStatus.CORRUPT, ReadStatus.OK]
        assert await statuses(tier, 1) == [ReadStatus.ABSENT]


async def test_a_sealed_block_is_no_hit_where_encryption_is_off(redis: RedisServer) -> None:
    async with on_redis(redis) as tier:
        await put(tier, 1)
        assert await statuses(tier.inner, 1) == [ReadStatus.MISMATCH]
        assert await statuses(tier, 1) == [ReadStatus.OK]


async def test_a_tampered_copy_on_ssd_is_dropped_and_can_be_stored_again(tmp_path: Path) -> None:
    async with on_ssd(tmp_path / "ssd") as tier:
        await put(tier, 1)
        keys = tier._keys
        assert isinstance(keys, OneKey)
        planter = DataKey.make(TENANT)
        planter.id = keys.key.id
        await tier.inner.write([sealed_request(1, planter)], deadline_s=soon())

        assert await statuses(tier, 1) == [ReadStatus.CORRUPT]
        assert (await statuses(tier, 1), tier.used_bytes) == ([ReadStatus.ABSENT], 0)
        assert await put(tier, 1) == [WriteStatus.OK]
        assert await statuses(tier, 1) == [ReadStatus.OK]


# Keys that are gone, or not here


async def test_copies_under_keys_that_are_gone_are_dropped_at_the_start(tmp_path: Path) -> None:
    keys = OneKey()
    async with on_ssd(tmp_path / "ssd", keys) as tier:
        await put(tier, 1, 2)
        keys.key = DataKey.make(TENANT)
        await put(tier, 3)
    async with on_ssd(tmp_path / "ssd", keys) as tier:
        assert [at.block for at in await tier.scan()] == [block_id(3)]
        assert await statuses(tier, 1, 2, 3) == [ReadStatus.ABSENT] * 2 + [ReadStatus.OK]


async def test_without_keys_the_tier_is_down_and_loses_nothing(tmp_path: Path) -> None:
    keys = OneKey()
    async with on_ssd(tmp_path / "ssd", keys) as tier:
        await put(tier, 1, 2)
        keys.down = "made so"

        assert tier.health().reason == "made so"
        assert await tier.scan() == []
        assert await statuses(tier, 1) == [ReadStatus.UNAVAILABLE]
        assert await put(tier, 3) == [WriteStatus.UNAVAILABLE]
        assert tier.has_room(CAPACITY, 100)
        probe = await tier.probe([block_id(1)], deadline_s=soon())
        assert (probe.tiers, probe.reason) == ([None], MissReason.UNAVAILABLE)

        keys.down = ""
        assert [at.block for at in await tier.scan()] == [block_id(1), block_id(2)]
        assert await statuses(tier, 1, 2) == [ReadStatus.OK] * 2


async def test_a_copy_of_an_erased_tenant_is_absent_because_of_that_and_goes(redis: RedisServer) -> None:
    async with on_redis(redis) as tier:
        await put(tier, 1, 2)
        keys = tier._keys
        assert isinstance(keys, OneKey)
        keys.erase()
        (outcome,) = await tier.read([to_read(1, LENGTH)], deadline_s=soon())
        assert (outcome.status, outcome.reason) == (ReadStatus.ABSENT, MissReason.ERASED)
        assert redis.ask(b"DBSIZE") == b":1\r\n"


async def test_a_key_that_is_forgotten_while_a_copy_is_read_serves_it_no_more() -> None:
    class Slow(MemoryTier):
        async def read(self, requests, *, deadline_s):  # type: ignore[no-untyped-def]
            outcomes = await super().read(requests, deadline_s=deadline_s)
            keys.erase()
            return outcomes

    keys = OneKey()
    key = keys.key
    keys.opening_key = lambda *_args, **_kwargs: asyncio.sleep(0, key)  # type: ignore[method-assign,assignment]
    tier = SealedTier(Slow(capacity_bytes=CAPACITY), keys)
    await tier.open()
    await put(tier, 1)
    request = to_read(1, LENGTH)
    (outcome,) = await tier.read([request], deadline_s=soon())
    assert (outcome.status, outcome.reason) == (ReadStatus.ABSENT, MissReason.ERASED)
    await tier.close()


# Enabling and disabling


async def test_a_slab_that_was_written_in_the_clear_is_made_anew_when_encryption_comes(
    tmp_path: Path,
) -> None:
    plain = SsdTier(tmp_path / "ssd", capacity_bytes=CAPACITY)
    await plain.open()
    await put(plain, 1)
    await plain.close()
    window = payload(1, LENGTH)[:64]
    assert window in (tmp_path / "ssd" / "slab").read_bytes()
    for _ in range(2):
        async with on_ssd(tmp_path / "ssd") as tier:
            assert await tier.scan() == []
            assert window not in (tmp_path / "ssd" / "slab").read_bytes()
            await put(tier, 1)


async def test_a_slab_is_made_anew_also_when_encryption_was_off_for_a_while(tmp_path: Path) -> None:
    keys = OneKey()
    async with on_ssd(tmp_path / "ssd", keys) as tier:
        await put(tier, 1)
    plain = SsdTier(tmp_path / "ssd", capacity_bytes=CAPACITY)
    await plain.open()
    assert await statuses(plain, 1) == [ReadStatus.ABSENT]
    await put(plain, 2)
    await plain.close()
    async with on_ssd(tmp_path / "ssd", keys) as tier:
        assert payload(2, LENGTH)[:64] not in (tmp_path / "ssd" / "slab").read_bytes()
        assert await tier.scan() == []


# Bounds


async def test_staging_is_bounded_and_many_blocks_go_through_it() -> None:
    tier = SealedTier(MemoryTier(capacity_bytes=CAPACITY), OneKey(), staging_bytes=100_000)
    await tier.open()
    assert await put(tier, *range(20)) == [WriteStatus.OK] * 20
    assert tier._staging is not None
    assert len(tier._staging) <= 100_000
    assert await statuses(tier, *range(20)) == [ReadStatus.OK] * 20
    await tier.close()


async def test_a_block_larger_than_the_staging_goes_through_alone() -> None:
    tier = SealedTier(MemoryTier(capacity_bytes=CAPACITY), OneKey(), staging_bytes=4096)
    await tier.open()
    assert await put(tier, 1, 2) == [WriteStatus.OK] * 2
    assert await statuses(tier, 1, 2) == [ReadStatus.OK] * 2
    await tier.close()


async def test_records_that_are_no_blocks_pass_in_the_clear() -> None:
    inner = MemoryTier(capacity_bytes=CAPACITY, medium=Medium.REMOTE, is_shared=True)
    tier = SealedTier(inner, OneKey(), plain=frozenset({block_id(1).namespace}))
    await tier.open()
    assert await put(tier, 1) == [WriteStatus.OK]
    assert inner.stored[block_id(1).storage_key][1] == payload(1, LENGTH)
    assert await statuses(tier, 1) == [ReadStatus.OK]
    await tier.close()


async def test_a_block_that_changed_in_memory_is_refused_and_the_others_are_written() -> None:
    tier = SealedTier(MemoryTier(capacity_bytes=CAPACITY), OneKey())
    await tier.open()
    requests = [to_write(number, LENGTH) for number in (1, 2, 3)]
    requests[1].buffer[7] ^= 1
    written = await tier.write(requests, deadline_s=soon())
    assert written == [WriteStatus.OK, WriteStatus.REFUSED, WriteStatus.OK]
    await tier.close()
