"""Control operations on a hung disk: their callers are answered in time, and nothing piles up."""

import asyncio
import contextlib
import json
import time

import pytest

from kvstore import AsyncKVStore
from kvstore.errors import ServerUnavailable, TimedOut
from kvstore.late_work import LateWork
from kvstore.messages import ChainRef, Check, Drop, Failed, FailureCode
from kvstore.server import StoreServer
from kvstore.serving import MAX_IN_FLIGHT
from tests.core.gated_tier import GatedTier
from tests.core.manager_harness import SPACE, running

CHAIN = SPACE.chain(range(4))


class HungTier(GatedTier):
    """A disk that hangs in every call while its gate is closed."""

    async def drop(self, blocks):
        await self.gate.wait()
        return await super().drop(blocks)


@contextlib.asynccontextmanager
async def hung_store(tmp_path):
    """A client of a store whose disk hangs, holding one block; the disk recovers at the end."""
    tier = HungTier("ssd")
    async with running(tier) as store:
        await store.put(CHAIN)
        assert await store.manager.flush(timeout_s=5)
        server = StoreServer(store.manager, socket_path=tmp_path / "s")
        await server.listen()
        server.start(store.dram.arena.fd)
        async with await AsyncKVStore.connect(tmp_path / "s") as client:
            await client.open_namespace(SPACE)
            await client.ping(timeout_s=10)
            tier.gate.clear()
            try:
                yield client, server, tier
            finally:
                tier.gate.set()
                await server.stop()


async def ask(client, request):
    """The server's answer, however late: a client gives up a moment after the server should have."""
    return await client._link.ask(request, time.monotonic() + 30)


async def test_a_drop_on_a_hung_disk_is_answered_by_the_server_in_time_and_goes_on(tmp_path):
    async with hung_store(tmp_path) as (client, server, tier):
        await client.match(CHAIN, timeout_s=10)
        answer = await ask(client, Drop(ChainRef(CHAIN), 100_000))
        assert answer == Failed(FailureCode.TIMED_OUT, "server: drop did not end within 0.1 s, it goes on")
        assert server._late_work.num_late == 1

        tier.gate.set()
        async with asyncio.timeout(5):
            while server._late_work.num_late:  # noqa: ASYNC110
                await asyncio.sleep(0)
        assert not tier.stored


async def test_more_operations_than_places_do_not_hold_the_connection(tmp_path):
    async with hung_store(tmp_path) as (client, _, _):
        drops = [client.drop(CHAIN, timeout_s=0.5) for _ in range(MAX_IN_FLIGHT)]
        ended = await asyncio.gather(*drops, return_exceptions=True)
        assert all(isinstance(end, TimedOut) for end in ended if not isinstance(end, int))

        await client.ping(timeout_s=10)


async def test_a_check_of_a_hung_disk_says_that_it_was_cut(tmp_path):
    async with hung_store(tmp_path) as (client, _, _):
        answer = await ask(client, Check(64, 100_000))
        assert json.loads(answer.json) == ["server: check did not end within 0.1 s, it goes on"]


async def test_a_server_stops_in_time_while_its_disk_hangs(tmp_path):
    async with hung_store(tmp_path) as (client, server, tier):
        with pytest.raises(ServerUnavailable):
            await client.drop(CHAIN, timeout_s=0.1)
        started_s = time.monotonic()
        await server.stop(drain_s=0.1)
        assert time.monotonic() - started_s < 10
        assert not tier.gate.is_set()


async def test_operations_that_nobody_waits_for_are_bounded():
    late, gate = LateWork(max_late=2), asyncio.Event()
    for _ in range(2):
        with pytest.raises(TimedOut, match="goes on"):
            await late.within(gate.wait(), 0, "flush")

    with pytest.raises(TimedOut, match="2 operations have not ended in time, flush has to wait"):
        await late.within(gate.wait(), 10, "flush")

    gate.set()
    await late.close(patience_s=5)
    assert await late.within(gate.wait(), 10, "flush") is True
    assert late.num_late == 0


async def test_an_operation_goes_on_when_its_caller_is_cancelled():
    late, gate = LateWork(), asyncio.Event()
    caller = asyncio.create_task(late.within(gate.wait(), 10, "flush"))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert late.num_late == 1

    await late.close(patience_s=0)
    assert late.num_late == 0


async def test_what_fails_when_nobody_waits_is_in_the_log(caplog):
    late, gate = LateWork(), asyncio.Event()

    async def fail():
        await gate.wait()
        raise ZeroDivisionError

    with pytest.raises(TimedOut):
        await late.within(fail(), 0, "flush")
    gate.set()
    await late.close(patience_s=5)
    assert "ZeroDivisionError" in caplog.text
