"""RemoteTier on a network that truncates, repeats, delays, swaps and cuts; and under many callers at once."""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.tier import ReadStatus, WriteStatus
from kvstore_tiers.remote import RemoteTier
from tests.redis_server import RedisServer
from tests.tiers.blocks import block_id, payload, to_read, to_write
from tests.tiers.remote_calls import opened, put, statuses, until, until_healed, within
from tests.tiers.reply_proxy import ReplyProxy, pass_on
from tests.tiers.unruly_stream import FAULTS, UnrulyStream

LENGTH = 3000
BATCH = 10
DEADLINE_S = 0.1
SLACK_S = 1.0
"""How late a call may end on a busy machine; the threads it waits for are given the deadline itself."""


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path / "redis").start()
    yield server
    server.stop()


class Walk:
    """One caller that reads, writes, probes and drops at random, and checks all it gets."""

    def __init__(self, tier: RemoteTier, seed: int) -> None:
        self.tier = tier
        self.seen: Counter[str] = Counter()
        self.latest_s = 0.0
        self._dice = random.Random(seed)

    async def step(self) -> None:
        # While the breaker is open there is nothing to be wrong.
        await until(lambda: self.tier.health().is_up)
        numbers = self._dice.sample(range(100), BATCH)
        began_s = time.monotonic()
        deadline_s = began_s + DEADLINE_S
        await self._dice.choice([self._read, self._read, self._write, self._probe, self._drop])(
            numbers, deadline_s
        )
        self.latest_s = max(self.latest_s, time.monotonic() - deadline_s)

    async def _read(self, numbers: list[int], deadline_s: float) -> None:
        requests = [to_read(number, LENGTH) for number in numbers]
        outcomes = await self.tier.read(requests, deadline_s=deadline_s)
        for number, request, outcome in zip(numbers, requests, outcomes, strict=True):
            self.seen[f"read {outcome.status.value}"] += 1
            if outcome.status is ReadStatus.OK:
                assert bytes(request.buffer[:LENGTH]) == payload(number, LENGTH)
                assert outcome.header is not None
                assert outcome.header.block == block_id(number)

    async def _write(self, numbers: list[int], deadline_s: float) -> None:
        requests = [to_write(number, LENGTH) for number in numbers]
        for status in await self.tier.write(requests, deadline_s=deadline_s):
            self.seen[f"write {status.value}"] += 1

    async def _probe(self, numbers: list[int], deadline_s: float) -> None:
        blocks = [block_id(number) for number in numbers]
        for name in (await self.tier.probe(blocks, deadline_s=deadline_s)).tiers:
            self.seen[f"probe {name}"] += 1

    async def _drop(self, numbers: list[int], _deadline_s: float) -> None:
        await self.tier.drop([block_id(number) for number in numbers[:2]])
        self.seen["drop"] += BATCH


@pytest.mark.parametrize("seed", [1, 2])
async def test_an_unruly_network_never_makes_a_wrong_byte_or_a_late_call(
    redis: RedisServer, seed: int
) -> None:
    proxy = ReplyProxy(redis.port)
    stream = UnrulyStream(seed, odds=0.03, delay_s=0.15)
    options = {"timeout_s": DEADLINE_S, "breaker_backoff_s": 0.001, "breaker_backoff_max_s": 0.01}
    async with opened(redis.url, timeout_s=10) as tier:
        await put(tier, *range(100), length=LENGTH)
    async with opened(proxy.url, **options) as tier:
        proxy.mangle = stream
        walks = [Walk(tier, seed=100 * seed + number) for number in range(4)]
        for _ in range(125):
            await asyncio.gather(*(walk.step() for walk in walks))
        seen = sum((walk.seen for walk in walks), Counter[str]())
        assert sum(seen.values()) == 4 * 125 * BATCH
        assert max(walk.latest_s for walk in walks) < SLACK_S
        assert seen["read ok"] > 500
        assert seen["write ok"] > 100
        assert set(stream.done) == {"nothing", *FAULTS}
        proxy.mangle = pass_on
        assert await until_all_are_ok(tier, *range(100))
    proxy.stop()


async def until_all_are_ok(tier: RemoteTier, *numbers: int) -> bool:
    """Whether writes and reads all succeed again, once what was on its way has come or timed out."""
    give_up_s = within(60)
    while time.monotonic() < give_up_s:
        await until(lambda: tier.health().is_up)
        written, read = await put(tier, *numbers), await statuses(tier, *numbers)
        if set(written) == {WriteStatus.OK} and set(read) == {ReadStatus.OK}:
            return True
    return False


async def test_five_hundred_reads_at_once_share_four_connections_without_an_error(redis: RedisServer) -> None:
    proxy = ReplyProxy(redis.port)
    async with opened(proxy.url, num_connections=4, timeout_s=10) as tier:
        assert await put(tier, *range(100)) == [WriteStatus.OK] * 100
        found = await asyncio.gather(*(statuses(tier, number % 100, seconds=60) for number in range(500)))
        assert found == [[ReadStatus.OK]] * 500
        assert tier.counters == {}
        assert proxy.num_connections <= 4 + 2 + 1
    proxy.stop()


async def test_a_reply_too_many_is_noticed_before_the_next_call(redis: RedisServer) -> None:
    proxy = ReplyProxy(redis.port)
    async with opened(proxy.url, num_connections=1) as tier:
        await put(tier, 1)
        proxy.mangle = lambda data: data + b":1\r\n"
        assert (await tier.probe([block_id(1)], deadline_s=within(5))).tiers == ["remote"]
        proxy.mangle = pass_on
        assert (await tier.probe([block_id(9)], deadline_s=within(5))).tiers == [None]
        assert await statuses(tier, 1) == [ReadStatus.OK]
    proxy.stop()


async def test_answers_that_are_one_behind_are_not_believed(redis: RedisServer) -> None:
    proxy = ReplyProxy(redis.port)
    async with opened(proxy.url, num_connections=1) as tier:
        await put(tier, 1)
        proxy.mangle = lambda data: b":1\r\n" + data
        assert (await tier.probe([block_id(9)], deadline_s=within(5))).tiers == [None]
        proxy.mangle = lambda data: b"+OK\r\n" + data
        assert await put(tier, 2) == [WriteStatus.UNAVAILABLE]
        proxy.mangle = pass_on
        assert await until_healed(tier, 1) == [ReadStatus.OK]
        assert tier.counters["faults"] == 2
    proxy.stop()
