"""Puts that are one exchange: of every client, and when something happens between lending and storing."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from kvstore import KVStore, MissReason, Namespace, PrefixChain, PutResult
from kvstore.calls import FetchResult
from kvstore.checksum import checksum
from kvstore.drill.store_process import wait_until
from kvstore.link import Link
from kvstore.messages import Request, Store
from tests.client.conftest import BLOCK_BYTES, NAMESPACE, PATIENT, in_shared_memory
from tests.client.facade import Face
from tests.store_process import MIB, StoreProcess

Payloads = npt.NDArray[np.uint8]


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine's puts follow each other at longer distances."""
    monkeypatch.setattr("kvstore.stock._AGAIN_S", 60.0)
    monkeypatch.setattr("kvstore.stock._IDLE_S", 60.0)


def _chain(number: int, blocks: int = 8) -> PrefixChain:
    return NAMESPACE.chain(range(1000 * number, 1000 * number + 4 * blocks))


async def _requests(face: Face) -> dict[str, int]:
    requests: dict[str, int] = (await face.stats())["server"]["requests"]
    return requests


async def _stock_up(face: Face, payloads: Payloads, first: int = 100) -> None:
    """Put twice, so that the next put finds slots lent ahead."""
    for number in (first, first + 1):
        assert (await face.put(_chain(number), payloads)).stored == 8


@in_shared_memory
async def test_puts_that_follow_each_other_are_one_exchange_each(client: Face, payloads: Payloads) -> None:
    await _stock_up(client, payloads)
    before = await _requests(client)
    for number in range(5):
        assert await client.put(_chain(number), payloads) == PutResult(8, 0, 0)
    after = await _requests(client)

    assert after["store"] - before.get("store", 0) == 5
    assert (after["reserve"], after["commit"]) == (before["reserve"], before["commit"])
    for number in range(5):
        found: FetchResult = await client.fetch_into(_chain(number), buffers := np.zeros_like(payloads))
        assert found.blocks == 8
        assert np.array_equal(buffers, payloads)
    stats = await client.stats()
    assert stats["lent_ahead_bytes"] == 2 * 8 * BLOCK_BYTES  # those of the next answer are at hand
    assert stats["puts_blocks"]["stored"] == 7 * 8


@in_shared_memory
async def test_a_put_of_stored_blocks_copies_them_once_and_then_asks_first(
    client: Face, payloads: Payloads
) -> None:
    await _stock_up(client, payloads)
    half = PutResult(4, 4, 0)
    await client.put(_chain(1)[:4], payloads[:4])
    await client.put(_chain(9), payloads)
    assert await client.put(_chain(1), payloads) == half
    for _ in range(3):
        assert await client.put(_chain(1), payloads) == PutResult(0, 8, 0)
    requests = await _requests(client)
    assert requests["store"] == 2
    assert await client.put(_chain(2), payloads) == PutResult(8, 0, 0)
    await client.put(_chain(3), payloads)
    assert (await client.put(_chain(4), payloads)).stored == 8
    assert (await _requests(client))["store"] == 4
    buffers = np.zeros_like(payloads)
    assert (await client.fetch_into(_chain(1), buffers)).blocks == 8
    assert np.array_equal(buffers, payloads)


@in_shared_memory
async def test_a_larger_put_than_the_stock_is_two_exchanges_and_makes_it_larger(
    client: Face, payloads: Payloads
) -> None:
    for number in range(3):
        assert (await client.put(_chain(number, 2), payloads[:2])).stored == 2
    assert (await client.put(_chain(10), payloads)).stored == 8
    assert (await client.put(_chain(11), payloads)).stored == 8
    requests = await _requests(client)
    assert (requests["store"], requests["reserve"]) == (2, 3)


@in_shared_memory
async def test_wrong_checksums_are_not_stored(client: Face, payloads: Payloads) -> None:
    await _stock_up(client, payloads)
    right = [checksum(row) for row in payloads]
    wrong = [*right[:5], right[5] ^ 1, *right[6:]]
    assert await client.put(_chain(1), payloads, checksums=right) == PutResult(8, 0, 0)
    result = await client.put(_chain(2), payloads, checksums=wrong)
    assert (result.stored, result.dropped, result.doubtful) == (5, 3, (5, 6, 7))
    assert result.reason is MissReason.CORRUPT
    assert (await client.match(_chain(2))).blocks == 5
    assert (await client.stats())["lent_ahead_bytes"] <= 8 * BLOCK_BYTES


@in_shared_memory
async def test_blocks_dropped_and_epochs_ended_meanwhile(client: Face, payloads: Payloads) -> None:
    await _stock_up(client, payloads)
    assert await client.drop(_chain(100)) == 8
    assert await client.put(_chain(100), payloads) == PutResult(8, 0, 0)
    await client.advance_epoch(NAMESPACE.model)
    late = await client.put(_chain(1), payloads)
    assert (late.stored, late.dropped, late.doubtful) == (0, 8, tuple(range(8)))
    assert late.reason is MissReason.OTHER_EPOCH
    assert (await _requests(client))["store"] == 2


async def test_a_namespace_that_was_forgotten_is_opened_again(
    store: StoreProcess, sync_client: KVStore, payloads: Payloads
) -> None:
    other = Namespace("other", NAMESPACE.layout)
    for number in (1, 2):
        sync_client.put(_chain(number), payloads)
    sync_client.open_namespace(other)
    assert sync_client.put(other.chain(range(32)), payloads).stored == 8
    assert sync_client.stats()["server"]["requests"]["store"] == 1


@in_shared_memory
async def test_blocks_of_other_lengths_have_slots_of_their_own(client: Face, payloads: Payloads) -> None:
    small = Namespace("small", type(NAMESPACE.layout).opaque(block_bytes=5000, block_tokens=4))
    await client.open_namespace(small)
    for number in range(4):
        assert (await client.put(_chain(number), payloads)).stored == 8
        chain = small.chain(range(1000 * number, 1000 * number + 8))
        assert (await client.put(chain, [row[:5000] for row in payloads[:2]])).stored == 2
    assert (await _requests(client))["store"] == 5
    assert (await client.stats())["lent_ahead_bytes"] == 8 * BLOCK_BYTES + 2 * 8192


def test_two_clients_put_the_same_blocks(
    store: StoreProcess, sync_client: KVStore, payloads: Payloads
) -> None:
    with KVStore.connect(store.socket_path, timeouts=PATIENT) as other:
        other.open_namespace(NAMESPACE)
        for number in (1, 2):
            sync_client.put(_chain(number), payloads)
            other.put(_chain(10 + number), payloads)
        results: list[PutResult] = []
        for number in range(20, 24):
            both = [
                threading.Thread(
                    target=lambda face=face, at=number: results.append(face.put(_chain(at), payloads))
                )
                for face in (sync_client, other)
            ]
            for thread in both:
                thread.start()
            for thread in both:
                thread.join(60)
        assert sum(result.stored for result in results) == 4 * 8
        assert sum(result.present for result in results) == 4 * 8
        assert not any(result.dropped for result in results)
        assert sync_client.check() == []


def test_threads_of_one_client_have_a_stock_for_each_connection(
    store: StoreProcess, sync_client: KVStore, payloads: Payloads
) -> None:
    wrong: list[int] = []

    def work(first: int) -> None:
        for number in range(first, first + 12):
            rows = np.roll(payloads, number, axis=1)
            sync_client.put(_chain(number, 2), rows[:2])
            found = sync_client.get(_chain(number, 2))
            wrong.extend(at for at, block in enumerate(found) if not np.array_equal(block, rows[at]))

    threads = [threading.Thread(target=work, args=(100 * at,)) for at in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert wrong == []
    assert sync_client.stats()["server"]["requests"]["store"] > 0
    assert sync_client.check() == []


def test_a_forked_child_uses_nothing_of_its_parents_stock(
    store: StoreProcess, sync_client: KVStore, payloads: Payloads
) -> None:
    for number in (1, 2):
        sync_client.put(_chain(number), payloads)
    held = sync_client.stats()["lent_ahead_bytes"]
    assert held == 8 * BLOCK_BYTES
    child = os.fork()
    if not child:
        try:
            stored = sync_client.put(_chain(3), payloads[::-1].copy()).stored
            os._exit(0 if stored == 8 else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    requests = sync_client.stats()["server"]["requests"]
    assert (requests["reserve"], requests.get("store", 0)) == (3, 0)
    assert sync_client.put(_chain(4), payloads).stored == 8
    for number, expected in ((3, payloads[::-1]), (4, payloads)):
        assert np.array_equal(np.stack(sync_client.get(_chain(number))), expected)
    assert sync_client.stats()["server"]["requests"]["store"] == 1


def test_a_server_that_is_killed_and_started_in_between(
    store: StoreProcess, sync_client: KVStore, payloads: Payloads
) -> None:
    for number in (1, 2, 3):
        assert sync_client.put(_chain(number), payloads).stored == 8
    store.kill()
    dead = sync_client.put(_chain(4), payloads)
    assert (dead.stored, dead.dropped, dead.reason) == (0, 8, MissReason.UNAVAILABLE)
    store.start()
    sync_client.ping()
    assert sync_client.put(_chain(5), payloads).stored == 8
    assert np.array_equal(np.stack(sync_client.get(_chain(5))), payloads)
    assert sync_client.check() == []
    assert sync_client.client_stats().server_restarts == 1


def test_a_put_whose_time_is_over_stores_nothing_and_its_slots_go_back(
    store: StoreProcess, sync_client: KVStore, payloads: Payloads
) -> None:
    for number in (1, 2, 3):
        sync_client.put(_chain(number), payloads)
    late = sync_client.put(_chain(4), payloads, timeout_s=0)
    assert (late.stored, late.dropped, late.reason) == (0, 8, MissReason.TIMED_OUT)
    assert sync_client.put(_chain(5), payloads).stored == 8
    assert sync_client.stats()["tiers"]["dram"]["used_bytes"] <= 5 * 8 * BLOCK_BYTES
    assert sync_client.check() == []


def test_a_read_only_client_is_lent_nothing(store: StoreProcess) -> None:
    with KVStore.connect(store.socket_path, timeouts=PATIENT, is_read_only=True) as reader:
        reader.ping()
        link = reader._pool.take(time.monotonic() + 30, is_control=True)
        assert link.stock is None
        reader._pool.give_back(link)


async def test_an_idle_stock_goes_back_at_the_next_call(
    store: StoreProcess, sync_client: KVStore, payloads: Payloads, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstore.stock._IDLE_S", 0.0)
    for number in (1, 2):
        sync_client.put(_chain(number), payloads)
    sync_client.match(_chain(1))
    assert sync_client.stats()["lent_ahead_bytes"] == 0
    assert sync_client.put(_chain(3), payloads).stored == 8
    assert sync_client.stats()["server"]["requests"].get("store", 0) == 0


async def test_connections_that_nobody_uses_give_their_stock_back_too(
    store: StoreProcess, sync_client: KVStore, payloads: Payloads, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstore.stock._IDLE_S", 60.0)
    many = threading.Barrier(4)

    def put(first: int) -> None:
        for number in (first, first + 1):
            many.wait(60)
            sync_client.put(_chain(number), payloads)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(put, range(10, 50, 10)))
    idle = sync_client._pool._idle
    assert len(idle) > 1
    assert all(link.stock is not None for link in idle)
    for link in idle:
        link.stock.idle_from_s = 0.0
        for lot in link.stock._lots.values():
            lot.until_s = 0.0
    sync_client._pool._look_at_s = 0.0

    # Each connection tells of its own; the server may hear of the question on another before.
    assert wait_until(lambda: sync_client.stats()["lent_ahead_bytes"] == 0, 30)
    assert len(sync_client._pool._idle) == len(idle)


@in_shared_memory
async def test_a_put_of_nothing_asks_for_nothing(client: Face, payloads: Payloads) -> None:
    await _stock_up(client, payloads)
    before = await _requests(client)
    assert await client.put(_chain(1)[:0], payloads[:0]) == PutResult(0, 0, 0)
    assert (await _requests(client)).get("store", 0) == before.get("store", 0)


def test_nothing_is_written_over_a_connection_in_doubt(
    store: StoreProcess, sync_client: KVStore, payloads: Payloads, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in (1, 2):
        sync_client.put(_chain(number), payloads)
    (link,) = sync_client._pool._idle
    assert link.stock is not None
    # As where what lies idle could not be given back.
    monkeypatch.setattr(type(link), "give_back_idle", lambda it: setattr(it, "_is_clean", False))
    written: list[object] = []
    monkeypatch.setattr("kvstore.put_calls.fill_slots", lambda *args, **_: written.append(args))

    result = sync_client.put(_chain(3), payloads)

    assert (result.stored, result.dropped, result.reason) == (0, 8, MissReason.UNAVAILABLE)
    assert not written


async def test_a_cancelled_put_gives_its_slots_back(
    store: StoreProcess, async_client: Any, payloads: Payloads
) -> None:
    for number in (1, 2):
        await async_client.put(_chain(number), payloads)
    for number in range(3, 9):
        put = asyncio.create_task(async_client.put(_chain(number), payloads))
        await asyncio.sleep(0)
        put.cancel()
        with pytest.raises(asyncio.CancelledError):
            await put
        for _ in range(2):
            assert (await async_client.put(_chain(100 + number), payloads)).dropped == 0
    stats = await async_client.stats()
    assert stats["lent_ahead_bytes"] <= 8 * BLOCK_BYTES
    stored = sum(stats["puts_blocks"].get(kind, 0) for kind in ("stored",))
    assert stats["tiers"]["dram"]["used_bytes"] == stored * BLOCK_BYTES + stats["lent_ahead_bytes"]
    assert await async_client.check() == []


async def test_many_tasks_share_one_connections_stock(async_client: Any, payloads: Payloads) -> None:
    for _ in range(3):
        await asyncio.gather(*(async_client.put(_chain(number, 2), payloads[:2]) for number in range(8)))
        for number in range(8):
            found = await async_client.get(_chain(number, 2))
            assert np.array_equal(np.stack(found), payloads[:2])
            await async_client.drop(_chain(number, 2))
    assert await async_client.check() == []


@contextmanager
def _stocked(store: StoreProcess) -> Iterator["subprocess.Popen[str]"]:
    """A client process with slots lent ahead."""
    command = [sys.executable, "-m", "tests.client.stocked_client", str(store.socket_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert json.loads(process.stdout.readline())["stored"] == [8, 8, 8]
        yield process
        process.kill()


def test_a_client_that_is_killed_with_a_stock_leaves_nothing(
    store: StoreProcess, sync_client: KVStore
) -> None:
    with _stocked(store) as process:
        assert sync_client.stats()["lent_ahead_bytes"] == 8 * BLOCK_BYTES
        process.send_signal(signal.SIGKILL)
        process.wait(30)
        assert wait_until(lambda: sync_client.stats()["lent_ahead_bytes"] == 0, 30)
    assert sync_client.stats()["tiers"]["dram"]["used_bytes"] == 24 * BLOCK_BYTES
    assert sync_client.check() == []


def test_a_client_that_was_frozen_past_its_stocks_time_stores_all_the_same(tmp_path: Path) -> None:
    with (
        StoreProcess(tmp_path, lease_s=0.5) as store,
        KVStore.connect(store.socket_path, timeouts=PATIENT) as monitor,
        _stocked(store) as process,
    ):
        process.send_signal(signal.SIGSTOP)
        assert wait_until(lambda: monitor.stats()["overdue_slots"] == 8, 30)
        process.send_signal(signal.SIGCONT)
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write("\n")
        process.stdin.flush()
        assert json.loads(process.stdout.readline()) == {"stored": 8, "right": 8}
        assert monitor.stats()["overdue_slots"] == 0
        assert monitor.stats()["server"]["requests"]["store"] == 1
        assert monitor.check() == []


class _Slow:
    """Has a connection's `Store` wait until the slots that it names have had their time."""

    def __init__(self, monitor: KVStore) -> None:
        self._ask = Link.ask
        self._monitor = monitor

    def ask(self, link: Link, request: Request, *args: Any) -> Any:
        if isinstance(request, Store):
            assert wait_until(lambda: self._monitor.stats()["overdue_slots"] == 8, 30)
        return self._ask(link, request, *args)


def test_slots_whose_time_ended_while_they_were_written_are_not_published(
    tmp_path: Path, payloads: Payloads, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        StoreProcess(tmp_path, lease_s=3.0) as store,
        KVStore.connect(store.socket_path, timeouts=PATIENT) as monitor,
        KVStore.connect(store.socket_path, timeouts=PATIENT) as client,
    ):
        client.open_namespace(NAMESPACE)
        for number in (1, 2):
            client.put(_chain(number), payloads)
        slow = _Slow(monitor)
        monkeypatch.setattr(Link, "ask", lambda link, request, *args: slow.ask(link, request, *args))
        late = client.put(_chain(3), payloads)

        assert (late.stored, late.dropped, late.reason) == (0, 8, MissReason.TIMED_OUT)
        assert client.match(_chain(3)).blocks == 0
        assert wait_until(lambda: monitor.stats()["overdue_slots"] == 0, 30)
        assert monitor.stats()["tiers"]["dram"]["used_bytes"] == 16 * BLOCK_BYTES
        assert monitor.check() == []


async def test_a_full_store_lends_nothing_ahead_and_puts_go_on(tmp_path: Path, payloads: Payloads) -> None:
    with (
        StoreProcess(tmp_path, dram_bytes=2 * MIB) as store,
        KVStore.connect(store.socket_path, timeouts=PATIENT) as client,
    ):
        client.open_namespace(NAMESPACE)
        for number in range(20):
            result = client.put(_chain(number), payloads)
            assert result.stored + result.present + result.dropped == 8
        requests = client.stats()["server"]["requests"]
        assert requests.get("store", 0) == 0
        assert client.stats()["lent_ahead_bytes"] == 0
        assert client.check() == []
