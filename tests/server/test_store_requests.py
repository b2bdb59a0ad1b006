"""`Store` and slots lent ahead, byte by byte: whose slots count, and what becomes of them."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from kvstore import AsyncKVStore, MissReason, PrefixChain, client_slots
from kvstore.messages import (
    ChainRef,
    Commit,
    Count,
    Done,
    Failed,
    FailureCode,
    FilledSlots,
    Hello,
    HelloReader,
    Lent,
    OpenNamespace,
    Ping,
    Request,
    Reserve,
    ReturnSlots,
    Store,
    Stored,
    Welcome,
    WrittenSlot,
    encode_message,
)
from kvstore.running import serving
from kvstore.server import StoreServer
from kvstore.tracing import TraceContext
from tests.server.test_server import NAMESPACE, PATIENT, RawClient, _config

_STOCK = 8


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[StoreServer]:
    async with serving(_config(), socket_path=tmp_path / "kv.sock") as running:
        yield running


@pytest.fixture
async def client(server: StoreServer, tmp_path: Path) -> AsyncIterator[AsyncKVStore]:
    async with await AsyncKVStore.connect(tmp_path / "kv.sock", timeouts=PATIENT) as connected:
        await connected.open_namespace(NAMESPACE)
        yield connected


@pytest.fixture
async def raw(server: StoreServer, tmp_path: Path) -> AsyncIterator[RawClient]:
    async with RawClient(tmp_path / "kv.sock") as connected:
        await connected.greet()
        yield connected


def _about(first: int, blocks: int) -> ChainRef:
    return ChainRef(_chain(first, blocks))


def _chain(first: int, blocks: int) -> PrefixChain:
    return NAMESPACE.chain(range(first, first + 4 * blocks))


async def _stock(raw: RawClient, count: int = _STOCK, first: int = 500_000) -> FilledSlots:
    """Slots lent ahead, as if they had been written."""
    lent = await raw.ask(Reserve(_about(first, 1), 1_000_000))
    assert isinstance(lent, Lent)
    (slot,) = lent.slots
    written = WrittenSlot(0, slot.offset, slot.generation, 0)
    answer = await raw.ask(Commit(_about(first, 1), (written,), count))
    assert isinstance(answer, Stored)
    assert (answer.stored, len(answer.slots), answer.lent_us) == (1, count, 30_000_000)
    return _filled(answer.slots)


def _filled(slots: Sequence[tuple[int, int]]) -> FilledSlots:
    """Lent slots, as if zeros had been written there of which nobody knows the sum."""
    offsets, generations = zip(*slots, strict=True)
    return FilledSlots(offsets, generations, (0,) * len(offsets))


def _answered(answer: object, *, stored: int, slots: int = 0) -> Stored:
    assert isinstance(answer, Stored)
    assert (answer.stored, len(answer.slots)) == (stored, slots)
    return answer


async def test_what_a_store_brings_is_stored_and_the_next_slots_are_lent(
    client: AsyncKVStore, raw: RawClient
) -> None:
    slots = await _stock(raw)
    answer = _answered(await raw.ask(Store(_about(0, _STOCK), slots, _STOCK)), stored=_STOCK, slots=_STOCK)

    assert answer.outcomes == b""
    assert {offset for offset, _ in answer.slots}.isdisjoint(slots.offsets)
    assert (await client.match(_chain(0, _STOCK))).blocks == _STOCK
    assert await client.check(0) == []


async def test_a_slot_is_stored_once_and_in_its_generation_only(client: AsyncKVStore, raw: RawClient) -> None:
    slots = await _stock(raw)
    stale = replace(slots, generations=(*slots.generations[:-1], slots.generations[-1] + 1))
    for wrong in (stale, replace(slots, offsets=(*slots.offsets[:-1], 4096))):
        answer = await raw.ask(Store(_about(0, _STOCK), wrong, _STOCK))
        assert isinstance(answer, Failed)
        assert answer.code is FailureCode.TIMED_OUT
    assert (await client.stats())["lent_ahead_bytes"] == _STOCK * 4096

    _answered(await raw.ask(Store(_about(0, _STOCK), slots)), stored=_STOCK)
    again = await raw.ask(Store(_about(50_000, _STOCK), slots))
    assert isinstance(again, Failed)
    assert (await client.match(_chain(50_000, _STOCK))).blocks == 0
    assert await client.check(0) == []


async def test_a_client_can_neither_store_nor_return_anothers_slots(
    client: AsyncKVStore, raw: RawClient, tmp_path: Path
) -> None:
    slots = await _stock(raw)
    async with RawClient(tmp_path / "kv.sock") as thief:
        await thief.greet()
        assert isinstance(await thief.ask(Store(_about(0, _STOCK), slots)), Failed)
        await thief.send(encode_message(ReturnSlots(_unused(slots)), 9))
        assert await thief.ask(Ping()) == Done()
    assert (await client.stats())["lent_ahead_bytes"] == _STOCK * 4096
    await raw.send(encode_message(ReturnSlots(_unused(slots)), 9))
    assert await raw.ask(Ping()) == Done()
    assert (await client.stats())["lent_ahead_bytes"] == 0


def _unused(slots: FilledSlots) -> tuple[tuple[int, int], ...]:
    return tuple(zip(slots.offsets, slots.generations, strict=True))


async def test_slots_of_what_is_not_stored_are_free_again(client: AsyncKVStore, raw: RawClient) -> None:
    _answered(await raw.ask(Store(_about(0, 4), (await _stock(raw, 4)))), stored=4)
    slots = await _stock(raw, 8, first=600_000)
    chain = _chain(0, 8)
    answer = _answered(await raw.ask(Store(ChainRef(chain), slots)), stored=4)

    assert answer.outcomes == bytes([1, 1, 1, 1, 0, 0, 0, 0])
    stats = await client.stats()
    assert stats["tiers"]["dram"]["used_bytes"] == 10 * 4096
    assert stats["lent_ahead_bytes"] == 0
    assert await client.check(0) == []


async def test_a_store_of_an_ended_epoch_is_dropped(client: AsyncKVStore, raw: RawClient) -> None:
    slots = await _stock(raw)
    await client.advance_epoch(NAMESPACE.model)
    answer = _answered(await raw.ask(Store(_about(0, _STOCK), slots)), stored=0)

    assert answer.reason is MissReason.OTHER_EPOCH
    assert answer.outcomes == bytes([2]) * _STOCK
    assert (await client.stats())["lent_ahead_bytes"] == 0


async def test_a_namespace_that_is_not_open_leaves_the_slots_with_the_client(
    client: AsyncKVStore, raw: RawClient
) -> None:
    slots = await _stock(raw)
    other = type(NAMESPACE)("other", NAMESPACE.layout)
    about = ChainRef(other.chain(range(4 * _STOCK)))
    refused = await raw.ask(Store(about, slots))
    assert isinstance(refused, Failed)
    assert refused.code is FailureCode.NAMESPACE_NOT_OPEN
    assert await raw.ask(OpenNamespace(other)) == Done()
    _answered(await raw.ask(Store(about, slots)), stored=_STOCK)


async def test_slots_for_blocks_of_another_length_are_not_published(
    client: AsyncKVStore, raw: RawClient
) -> None:
    slots = await _stock(raw)
    layout = type(NAMESPACE.layout).opaque(block_bytes=8192, block_tokens=4)
    longer = type(NAMESPACE)("longer", layout)
    assert await raw.ask(OpenNamespace(longer)) == Done()
    assert isinstance(await raw.ask(Store(ChainRef(longer.chain(range(4 * _STOCK))), slots)), Failed)
    assert await client.check(0) == []


async def test_slots_that_were_reserved_can_be_stored_too_and_many_of_them_in_turns(
    client: AsyncKVStore, raw: RawClient
) -> None:
    lent = await raw.ask(Reserve(_about(0, 600), 1_000_000))
    assert isinstance(lent, Lent)
    count = len(lent.slots)
    assert count > 256
    filled = _filled([slot[1:] for slot in lent.slots])
    await client.put(_chain(0, 2), bytes(2 * 4096))
    answer = _answered(await raw.ask(Store(_about(0, count), filled)), stored=count - 2)

    assert answer.outcomes == bytes([1, 1]) + bytes(count - 2)
    assert (await client.match(_chain(0, count))).blocks == count
    assert await client.check(0) == []


async def test_no_blocks_and_no_slots_are_a_store_too(raw: RawClient) -> None:
    _answered(await raw.ask(Store(_about(0, 0), FilledSlots(), 4)), stored=0, slots=4)


async def test_more_is_not_lent_ahead_than_can_be_spared(client: AsyncKVStore, raw: RawClient) -> None:
    await _stock(raw, 60)
    _answered(await raw.ask(Store(_about(0, 0), FilledSlots(), 5)), stored=0)
    _answered(await raw.ask(Store(_about(0, 0), FilledSlots(), 4)), stored=0, slots=4)
    assert (await client.stats())["lent_ahead_bytes"] == 4 * 2**20 // 16


async def _alike(raw: RawClient, puts: int, count: int = _STOCK) -> FilledSlots:
    """Put so many times in the same way; returns the slots that were lent with the last answer."""
    slots = await _stock(raw, count)
    for number in range(puts):
        store = Store(_about(number * 1000, count), slots, count)
        answer = _answered(await raw.ask(store), stored=count, slots=count)
        assert {offset for offset, _ in answer.slots}.isdisjoint(slots.offsets)
        slots = _filled(answer.slots)
    return slots


async def test_of_puts_that_are_alike_the_next_slots_are_at_hand_and_go_with_those_that_are_returned(
    client: AsyncKVStore, raw: RawClient
) -> None:
    slots = await _alike(raw, puts=4)
    assert (await client.stats())["lent_ahead_bytes"] == 2 * _STOCK * 4096

    await raw.send(encode_message(ReturnSlots(_unused(slots)), 9))
    assert await raw.ask(Ping()) == Done()
    assert (await client.stats())["lent_ahead_bytes"] == 0
    assert await client.check(0) == []


async def test_slots_at_hand_for_other_puts_than_the_one_that_comes_are_free_again(
    client: AsyncKVStore, raw: RawClient
) -> None:
    slots = await _alike(raw, puts=3)
    _answered(await raw.ask(Store(_about(50_000, _STOCK), slots, 3)), stored=_STOCK, slots=3)

    assert (await client.stats())["lent_ahead_bytes"] == 3 * 4096


async def test_slots_that_were_at_hand_for_long_are_lent_anew(
    client: AsyncKVStore, raw: RawClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    slots = await _alike(raw, puts=3)
    monkeypatch.setattr(client_slots, "_AGAIN_S", 0.0)
    store = Store(_about(50_000, _STOCK), slots, _STOCK)
    answer = _answered(await raw.ask(store), stored=_STOCK, slots=_STOCK)

    assert answer.lent_us == 30_000_000
    assert (await client.stats())["lent_ahead_bytes"] == 2 * _STOCK * 4096


async def test_slots_at_hand_are_free_when_the_client_goes(client: AsyncKVStore, raw: RawClient) -> None:
    await _alike(raw, puts=3)
    raw.sock.close()
    async with asyncio.timeout(30):
        while (await client.stats())["lent_ahead_bytes"]:
            await client.match(_chain(0, 1))

    assert await client.check(0) == []


async def test_a_store_that_stops_lends_nothing_that_is_at_hand(
    client: AsyncKVStore, raw: RawClient, server: StoreServer
) -> None:
    slots = await _alike(raw, puts=3)
    await server._manager.drain(timeout_s=1)
    answer = await raw.ask(Store(_about(50_000, _STOCK), slots, _STOCK))

    _answered(answer, stored=0)
    assert (await client.stats())["lent_ahead_bytes"] == 0


async def test_a_traced_store_is_stored(raw: RawClient) -> None:
    slots = await _stock(raw)
    trace = TraceContext(bytes(range(1, 17)), bytes(range(17, 25)))
    await raw.send(encode_message(Store(_about(0, _STOCK), slots, 2), 7, trace=trace))
    answered = await raw.answer()
    assert answered is not None
    _answered(answered[1], stored=_STOCK, slots=2)


@pytest.mark.parametrize(
    ("hello", "offered", "taken"),
    [
        (Hello(1), 0, 0),
        (Hello(1), 1, 1),
        (Hello(1), 4, 4),
        (Hello(1), 5, 5),
        (Hello(1), 1 << 40 | 5, 5),
        (HelloReader(1), 5, 1),
    ],
)
async def test_the_greeting_says_what_both_sides_know(
    server: StoreServer, tmp_path: Path, hello: Request, offered: int, taken: int
) -> None:
    async with RawClient(tmp_path / "kv.sock") as raw:
        await raw.send(encode_message(hello, offered))
        answered = await raw.answer()
        assert answered is not None
        assert isinstance(answered[1], Welcome)
        assert answered[0] == taken


async def test_an_idle_client_with_a_stock_makes_way_and_its_slots_are_nobodys_before_it_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstore.server._IDLE_S", 0.0)
    path = tmp_path / "kv.sock"
    async with serving(_config(max_connections=1), socket_path=path) as server:
        async with RawClient(path) as idle:
            await idle.greet()
            await _stock(idle)
            async with RawClient(path) as other:
                await other.greet()
                assert await idle.answer() is None
                assert server.num_connections == 1
                answer = await other.ask(Store(_about(0, 0), FilledSlots(), 64))
                _answered(answer, stored=0)
                await idle.send(b"what is sent now is thrown away")
        async with RawClient(path) as last:
            await last.greet()
            async with asyncio.timeout(30):
                while answer == Stored(0):
                    answer = await last.ask(Store(_about(0, 0), FilledSlots(), 64))
            _answered(answer, stored=0, slots=64)


async def test_of_clients_with_a_stock_only_so_many_make_way_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstore.server._MIN_MAKING_WAY", 1)
    monkeypatch.setattr("kvstore.server._IDLE_S", 0.0)
    path = tmp_path / "kv.sock"
    async with serving(_config(max_connections=1), socket_path=path) as server, RawClient(path) as idle:
        await idle.greet()
        await _stock(idle)
        async with RawClient(path) as other:
            await other.greet()
            await _stock(other, first=600_000)
            async with RawClient(path) as third:
                refused = await third.answer()

                assert refused is not None
                assert isinstance(refused[1], Failed)
                assert server.num_connections == 1


async def test_a_server_stops_while_a_client_that_made_way_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstore.server._IDLE_S", 0.0)
    path = tmp_path / "kv.sock"
    async with serving(_config(max_connections=1), socket_path=path) as server, RawClient(path) as idle:
        await idle.greet()
        await _stock(idle)
        async with RawClient(path) as other:
            await other.greet()
            await server.stop()
            assert server.num_connections == 0


async def test_older_clients_are_answered_as_before(raw: RawClient) -> None:
    lent = await raw.ask(Reserve(_about(0, 1), 1_000_000))
    assert isinstance(lent, Lent)
    (slot,) = lent.slots
    written = (WrittenSlot(0, slot.offset, slot.generation, 0),)
    assert await raw.ask(Commit(_about(0, 1), written)) == Count(1)
