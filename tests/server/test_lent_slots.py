"""Slots in the hands of clients that freeze, or are disconnected while they may go on writing."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from kvstore import AsyncKVStore, PrefixChain
from kvstore.messages import ChainRef, Lent, Reserve, ReturnSlots, UnusedSlot, encode_message
from kvstore.running import serving
from kvstore.server import StoreServer
from tests.server.test_server import NAMESPACE, PATIENT, RawClient, _config, _until

NUM_SLOTS = 1024


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[StoreServer]:
    async with serving(_config(), socket_path=tmp_path / "kv.sock") as running:
        yield running


@pytest.fixture
async def client(server: StoreServer, tmp_path: Path) -> AsyncIterator[AsyncKVStore]:
    async with await AsyncKVStore.connect(tmp_path / "kv.sock", timeouts=PATIENT) as connected:
        await connected.open_namespace(NAMESPACE)
        yield connected


def _chain(first: int, blocks: int) -> PrefixChain:
    return NAMESPACE.chain(range(first, first + 4 * blocks))


async def _reserved(raw: RawClient, first: int, blocks: int) -> Lent:
    answer = await raw.ask(Reserve(ChainRef(_chain(first, blocks)), 1_000_000), 2)
    assert isinstance(answer, Lent)
    return answer


async def test_each_client_that_freezes_with_all_it_gets_leaves_half_of_the_rest_to_others(
    server: StoreServer, client: AsyncKVStore, tmp_path: Path
) -> None:
    held = []
    async with AsyncExitStack() as stack:
        for number in range(5):
            raw = await stack.enter_async_context(RawClient(tmp_path / "kv.sock"))
            await raw.greet()
            lent = await _reserved(raw, 100_000 * number, NUM_SLOTS)
            again = await _reserved(raw, 100_000 * number + 50_000, NUM_SLOTS)
            assert not again.slots
            held.append(len(lent.slots))
        put = await client.put(_chain(10_000_000, 8), np.full(8 * 4096, 7, np.uint8))
        stats = await client.stats()

    assert all(later <= (earlier + 1) // 2 + 1 for earlier, later in pairwise(held))
    assert sum(held) <= NUM_SLOTS * 31 // 32
    assert put.stored == 8
    assert stats["puts_blocks"]["over_share"] > 0
    await _until(lambda: server.num_connections == 1)


async def test_slots_that_were_given_back_count_no_more(server: StoreServer, tmp_path: Path) -> None:
    async with RawClient(tmp_path / "kv.sock") as raw:
        await raw.greet()
        for _ in range(3):
            lent = await _reserved(raw, 0, NUM_SLOTS)
            assert len(lent.slots) >= NUM_SLOTS // 4
            unused = tuple(UnusedSlot(slot.offset, slot.generation) for slot in lent.slots)
            await raw.send(encode_message(ReturnSlots(unused), 3))


async def test_slots_of_a_client_that_was_cut_off_stay_its_own_until_it_is_gone(
    server: StoreServer, client: AsyncKVStore, tmp_path: Path
) -> None:
    async with RawClient(tmp_path / "kv.sock") as raw:
        await raw.greet()
        lent = await _reserved(raw, 0, 8)
        await raw.send(b"no frame at all, but the process lives and writes")
        assert await raw.answer() is None

        stats = await client.stats()
        assert stats["tiers"]["dram"]["used_bytes"] == len(lent.slots) * 4096
        async with RawClient(tmp_path / "kv.sock") as other:
            await other.greet()
            others = await _reserved(other, 1_000_000, NUM_SLOTS)
        assert not {at.offset for at in lent.slots} & {at.offset for at in others.slots}
    await _until(lambda: server.num_connections == 1)
    assert (await client.stats())["server"]["lingering"] == 1
    assert await client.check() == []


async def test_a_server_stops_while_a_client_that_was_cut_off_lives(tmp_path: Path) -> None:
    path = tmp_path / "kv.sock"
    async with serving(_config(), socket_path=path) as server, RawClient(path) as raw:
        await raw.greet()
        await _reserved(raw, 0, 8)
        await raw.send(bytes(64))
        assert await raw.answer() is None
        assert server.num_connections == 1
        async with asyncio.timeout(30):
            await server.stop()
        assert server.num_connections == 0
