"""One law over every Tier: a new implementation adds one entry to MAKERS."""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore.keys import NamespaceDigest
from kvstore.layout import Part
from kvstore.testing import FaultyTier, MemoryTier
from kvstore.tier import ReadRequest, ReadStatus, Tier, WriteRequest, WriteStatus
from kvstore_tiers.remote import RemoteTier
from kvstore_tiers.sealed import SealedTier
from kvstore_tiers.ssd import SsdTier
from kvstore_tiers.ssd_array import SsdArray
from tests.encryption.keys import OneKey
from tests.redis_cluster import RedisCluster
from tests.redis_server import RedisServer
from tests.tiers.blocks import LAYOUT, aligned, block_id, header, payload, to_read, to_write

LENGTH = 40_000
CAPACITY = 1 << 20
OURS, THEIRS, NOBODYS = (NamespaceDigest(bytes([number]) * 32) for number in (1, 2, 3))


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path_factory.mktemp("redis")).start()
    yield server
    server.stop()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisCluster]:
    servers = RedisCluster(tmp_path_factory.mktemp("cluster")).start()
    yield servers
    servers.stop()


Fixture = Callable[[str], Any]
Maker = Callable[[Path, Fixture], Tier]
MAKERS: dict[str, Maker] = {
    "memory": lambda _path, _get: MemoryTier(capacity_bytes=CAPACITY),
    "faulty without faults": lambda _path, _get: FaultyTier(MemoryTier(capacity_bytes=CAPACITY)),
    "ssd": lambda path, _get: SsdTier(path / "ssd", capacity_bytes=CAPACITY),
    "ssd of two folders": lambda path, _get: SsdArray(
        [SsdTier(path / name, capacity_bytes=CAPACITY // 2) for name in ("a", "b")]
    ),
    "sealed ssd": lambda path, _get: SealedTier(
        SsdTier(path / "ssd", capacity_bytes=CAPACITY, is_sealed=True), OneKey()
    ),
    "sealed ssd of two folders": lambda path, _get: SealedTier(
        SsdArray([SsdTier(path / name, capacity_bytes=CAPACITY // 2, is_sealed=True) for name in ("a", "b")]),
        OneKey(),
    ),
    "sealed remote": lambda path, get: SealedTier(
        RemoteTier(get("redis").url, key_prefix=str(path), timeout_s=5), OneKey()
    ),
    "sealed remote cluster": lambda path, get: SealedTier(
        RemoteTier(get("cluster").url, key_prefix=str(path), timeout_s=5), OneKey()
    ),
    "remote": lambda path, get: RemoteTier(get("redis").url, key_prefix=str(path), timeout_s=5),
    "remote cluster": lambda path, get: RemoteTier(get("cluster").url, key_prefix=str(path), timeout_s=5),
}


@pytest.fixture(params=MAKERS)
async def tier(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Tier]:
    made = MAKERS[request.param](tmp_path, request.getfixturevalue)
    await made.open()
    yield made
    assert getattr(made, "check", list)() == []
    await made.close()


def soon() -> float:
    return time.monotonic() + 30


async def put(tier: Tier, *numbers: int, length: int = LENGTH, version: int = 0) -> list[WriteStatus]:
    requests = [to_write(number, length, version=version) for number in numbers]
    return await tier.write(requests, deadline_s=soon())


async def statuses(tier: Tier, *numbers: int, length: int = LENGTH) -> list[ReadStatus]:
    requests = [to_read(number, length) for number in numbers]
    outcomes = await tier.read(requests, deadline_s=soon())
    for number, request, outcome in zip(numbers, requests, outcomes, strict=True):
        if outcome.status is ReadStatus.OK:
            assert bytes(request.buffer[:length]) == payload(number, length)
            assert outcome.header == header(number, payload(number, length))
            assert outcome.origin == tier.name
        else:
            assert outcome.header is None
    return [outcome.status for outcome in outcomes]


@pytest.mark.parametrize("length", [1, 4095, 4096, 4097, LENGTH, 200_000])
async def test_what_was_written_is_read_back(tier: Tier, length: int) -> None:
    assert await put(tier, 1, 2, length=length) == [WriteStatus.OK] * 2
    assert await statuses(tier, 1, 2, length=length) == [ReadStatus.OK] * 2


async def test_a_batch_of_many_blocks_is_read_back_in_order(tier: Tier) -> None:
    assert await put(tier, *range(20), length=5000) == [WriteStatus.OK] * 20
    assert await statuses(tier, *range(25), length=5000) == [ReadStatus.OK] * 20 + [ReadStatus.ABSENT] * 5


async def test_buffers_may_be_unaligned_and_exactly_as_long_as_the_payload(tier: Tier) -> None:
    data = payload(1, LENGTH)
    source = memoryview(bytearray(b"x" + data))[1:]
    assert await tier.write([WriteRequest(header(1, data), source)], deadline_s=soon()) == [WriteStatus.OK]
    target = memoryview(bytearray(LENGTH + 1))[1:]
    request = ReadRequest(block_id(1), LAYOUT, LENGTH, target)
    (outcome,) = await tier.read([request], deadline_s=soon())
    assert outcome.status is ReadStatus.OK
    assert bytes(target) == data


async def test_what_was_never_written_is_absent(tier: Tier) -> None:
    assert await statuses(tier, 7) == [ReadStatus.ABSENT]


async def test_a_second_write_replaces_the_first(tier: Tier) -> None:
    await put(tier, 1, version=1)
    await put(tier, 1)
    assert await statuses(tier, 1) == [ReadStatus.OK]


async def test_the_same_block_twice_in_one_write_leaves_one_whole_copy(tier: Tier) -> None:
    assert await put(tier, 1, 1) == [WriteStatus.OK] * 2
    assert await statuses(tier, 1) == [ReadStatus.OK]


async def test_a_dropped_block_is_absent_and_its_space_is_free(tier: Tier) -> None:
    await put(tier, 1, 2)
    assert await tier.drop([block_id(1), block_id(9)]) == 1
    assert await statuses(tier, 1, 2) == [ReadStatus.ABSENT, ReadStatus.OK]
    assert await tier.drop([block_id(2)]) == 1
    assert tier.used_bytes == 0


@pytest.mark.parametrize("what", ["layout", "length"])
async def test_a_copy_that_is_not_exactly_what_is_asked_for_is_no_hit(tier: Tier, what: str) -> None:
    await put(tier, 1)
    asked = {
        "layout": ReadRequest(block_id(1), b"o" * 32, LENGTH, aligned(LENGTH)),
        "length": ReadRequest(block_id(1), LAYOUT, LENGTH - 1, aligned(LENGTH)),
    }
    (outcome,) = await tier.read([asked[what]], deadline_s=soon())
    assert outcome.status is ReadStatus.MISMATCH
    assert outcome.header is None
    assert await statuses(tier, 1) == [ReadStatus.OK]


async def test_parts_of_a_block_are_copies_of_their_own(tier: Tier) -> None:
    await put(tier, 1)
    other = block_id(1, part=Part(0, 1, 0, 1))
    request = ReadRequest(other, LAYOUT, LENGTH, aligned(LENGTH))
    (outcome,) = await tier.read([request], deadline_s=soon())
    assert outcome.status is ReadStatus.ABSENT


def in_namespace(number: int, namespace: NamespaceDigest, *, version: int = 0) -> WriteRequest:
    """A write of a block of that raw key in some namespace; its bytes are another namespace's at no time."""
    data = payload(number + 100 * version + 10_000 * namespace[0], LENGTH)
    buffer = aligned(LENGTH)
    buffer[:LENGTH] = data
    return WriteRequest(header(number, data, block=block_id(number, namespace=namespace)), buffer)


async def bytes_of(tier: Tier, number: int, namespace: NamespaceDigest) -> bytes | None:
    """The bytes of a block; None if it is absent, which is the only other answer."""
    request = ReadRequest(block_id(number, namespace=namespace), LAYOUT, LENGTH, aligned(LENGTH))
    (outcome,) = await tier.read([request], deadline_s=soon())
    assert outcome.status in (ReadStatus.OK, ReadStatus.ABSENT)
    return bytes(request.buffer[:LENGTH]) if outcome.status is ReadStatus.OK else None


async def test_equal_keys_of_two_namespaces_are_copies_of_their_own(tier: Tier) -> None:
    await tier.write([in_namespace(1, OURS)], deadline_s=soon())
    await tier.drop([block_id(1, namespace=THEIRS)])
    await tier.touch([block_id(1, namespace=THEIRS)])
    found = await tier.probe([block_id(1, namespace=THEIRS)], deadline_s=soon())

    assert found.tiers == [None]
    assert await bytes_of(tier, 1, THEIRS) is None
    assert await bytes_of(tier, 1, OURS) == in_namespace(1, OURS).buffer[:LENGTH]


async def test_of_a_key_in_two_namespaces_each_is_replaced_and_dropped_alone(tier: Tier) -> None:
    first = [in_namespace(1, OURS), in_namespace(1, THEIRS)]
    assert await tier.write(first, deadline_s=soon()) == [WriteStatus.OK] * 2
    again = in_namespace(1, THEIRS, version=1)
    assert await tier.write([again], deadline_s=soon()) == [WriteStatus.OK]

    assert await bytes_of(tier, 1, OURS) == first[0].buffer[:LENGTH]
    assert await bytes_of(tier, 1, THEIRS) == again.buffer[:LENGTH]
    await tier.drop([block_id(1, namespace=THEIRS)])
    assert await bytes_of(tier, 1, THEIRS) is None
    assert await bytes_of(tier, 1, OURS) == first[0].buffer[:LENGTH]
    await tier.drop([block_id(1, namespace=OURS)])
    assert tier.used_bytes == 0


@pytest.mark.parametrize("seed", range(3))
async def test_a_tier_is_a_dictionary_by_namespace_and_key(tier: Tier, seed: int) -> None:
    """Writes, replacements and drops of four keys in three namespaces, against a dictionary."""
    dice, model = random.Random(seed), dict[tuple[int, NamespaceDigest], bytes]()
    names = [(number, namespace) for number in range(4) for namespace in (OURS, THEIRS, NOBODYS)]
    for version in range(60):
        number, namespace = dice.choice(names)
        if dice.random() < 0.6:
            request = in_namespace(number, namespace, version=version)
            assert await tier.write([request], deadline_s=soon()) == [WriteStatus.OK]
            model[number, namespace] = bytes(request.buffer[:LENGTH])
        else:
            await tier.drop([block_id(number, namespace=namespace)])
            model.pop((number, namespace), None)
        number, namespace = dice.choice(names)
        assert await bytes_of(tier, number, namespace) == model.get((number, namespace))
    assert {name: found for name in names if (found := await bytes_of(tier, *name)) is not None} == model
    await tier.drop([block_id(number, namespace=namespace) for number, namespace in names])
    assert tier.used_bytes == 0


async def test_a_probe_names_the_tier_of_leading_blocks(tier: Tier) -> None:
    await put(tier, 0, 1, 2)
    found = await tier.probe([block_id(number) for number in (0, 1, 9)], deadline_s=soon())
    assert found.tiers == [tier.name, tier.name, None]


async def test_scan_names_the_least_recently_used_first(tier: Tier) -> None:
    await put(tier, 0, 1, 2)
    await tier.touch([block_id(0)])
    expected = [] if tier.is_shared else [block_id(1), block_id(2), block_id(0)]
    assert [header.block for header in await tier.scan()] == expected


async def test_a_full_tier_says_so_block_by_block_and_takes_what_fits(tier: Tier) -> None:
    length = CAPACITY // 4
    expected = [WriteStatus.OK] * 4 + [WriteStatus.OK if tier.is_shared else WriteStatus.FULL]
    assert await put(tier, *range(5), length=length) == expected
    assert tier.has_room(1) == tier.is_shared
    await tier.drop([block_id(0)])
    assert tier.has_room(length)
    assert await put(tier, 7, length=length) == [WriteStatus.OK]


async def test_nothing_is_read_or_written_after_the_deadline(tier: Tier) -> None:
    if isinstance(tier, MemoryTier | FaultyTier):
        pytest.skip("a tier in memory takes no time")
    await put(tier, 1)
    past = time.monotonic() - 1
    (outcome,) = await tier.read([to_read(1, LENGTH)], deadline_s=past)
    assert outcome.status is ReadStatus.TIMED_OUT
    assert await tier.write([to_write(2, LENGTH)], deadline_s=past) == [WriteStatus.TIMED_OUT]
    assert await statuses(tier, 1, 2) == [ReadStatus.OK, ReadStatus.ABSENT]


async def test_many_tasks_at_once_see_whole_blocks_or_none(tier: Tier) -> None:
    async def write(number: int) -> None:
        await put(tier, number % 5, length=30_000)

    async def read(number: int) -> None:
        found = await statuses(tier, number % 5, length=30_000)
        assert found[0] in (ReadStatus.OK, ReadStatus.ABSENT)

    async def drop(number: int) -> None:
        await tier.drop([block_id(number % 5)])

    async with asyncio.TaskGroup() as group:
        for number in range(120):
            group.create_task((write, read, drop, read)[number % 4](number // 4))
    await tier.drop([block_id(number) for number in range(5)])
    assert tier.used_bytes == 0


async def test_a_cancelled_call_leaves_the_tier_whole(tier: Tier) -> None:
    await put(tier, 1)
    for number in range(20):
        task = asyncio.create_task(put(tier, number % 3 + 2))
        reading = asyncio.create_task(statuses(tier, 1))
        for _ in range(number % 4):
            await asyncio.sleep(0)
        task.cancel()
        reading.cancel()
        await asyncio.gather(task, reading, return_exceptions=True)
    assert await statuses(tier, 1) == [ReadStatus.OK]
    await tier.drop([block_id(number) for number in range(1, 6)])
    assert tier.used_bytes == 0


async def test_a_closed_tier_answers_unavailable(tier: Tier) -> None:
    await put(tier, 1)
    await tier.close()
    await tier.close()
    assert not tier.health().is_up
    assert tier.health().reason
    assert await statuses(tier, 1) == [ReadStatus.UNAVAILABLE]
    assert await put(tier, 1) == [WriteStatus.UNAVAILABLE]
    await tier.drop([block_id(1)])
