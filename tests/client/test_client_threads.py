"""Many threads, or many tasks, on one client: every byte that is served is the right one."""

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt

from kvstore import AsyncKVStore, KVStore, PrefixChain
from kvstore.link_pool import MAX_LINKS
from tests.client.conftest import BLOCK_BYTES, NAMESPACE

THREADS = 16
ROUNDS = 20


def _chain(sequence: int) -> PrefixChain:
    return NAMESPACE.chain(np.arange(16) + 1000 * sequence)


def _payload(sequence: int) -> npt.NDArray[np.uint8]:
    return np.random.default_rng(sequence).integers(0, 256, (4, BLOCK_BYTES), np.uint8)


def test_sixteen_threads_on_one_client_never_see_anothers_bytes(sync_client: KVStore) -> None:
    wrong: list[int] = []
    served = threading.Semaphore(0)

    def work(seed: int) -> None:
        choose = np.random.default_rng(seed)
        for _ in range(ROUNDS):
            sequence = int(choose.integers(0, 24))
            operation = int(choose.integers(0, 4))
            if operation == 0:
                sync_client.put(_chain(sequence), _payload(sequence))
            elif operation == 1:
                sync_client.match(_chain(sequence))
            elif operation == 2 and sequence % 5 == 0:
                sync_client.drop(_chain(sequence))
            else:
                blocks = sync_client.get(_chain(sequence))
                expected = _payload(sequence)
                wrong.extend(
                    sequence for at, block in enumerate(blocks) if not np.array_equal(block, expected[at])
                )
                served.release(len(blocks)) if blocks else None

    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(work, range(THREADS)))

    assert wrong == []
    assert served.acquire(blocking=False)
    assert sync_client.check() == []


async def test_many_tasks_on_one_connection_never_see_anothers_bytes(async_client: AsyncKVStore) -> None:
    async def work(sequence: int) -> bool:
        await async_client.put(_chain(sequence), _payload(sequence))
        blocks = await async_client.get(_chain(sequence))
        return all(np.array_equal(block, row) for block, row in zip(blocks, _payload(sequence), strict=False))

    results = await asyncio.gather(*(work(sequence % 24) for sequence in range(96)))

    assert all(results)
    assert async_client.client_stats().connects == 1
    assert await async_client.check() == []


async def test_a_cancelled_call_gives_back_its_lease_and_touches_no_buffer_afterwards(
    async_client: AsyncKVStore,
) -> None:
    await async_client.put(_chain(1), _payload(1))
    buffers = np.zeros((4, BLOCK_BYTES), np.uint8)
    calls = [asyncio.create_task(async_client.fetch_into(_chain(1), buffers)) for _ in range(8)]
    await asyncio.sleep(0)
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)
    buffers[:] = 7
    await async_client.ping()
    await async_client.ping()

    assert (buffers == 7).all()
    assert await async_client.drop(_chain(1)) == 4  # a leased block is not dropped


def test_connections_of_calls_that_ended_between_two_steps_are_not_counted_for_ever(
    sync_client: KVStore,
) -> None:
    """An exception that a signal brings may fall where nothing gives the connection back."""
    pool = sync_client._pool
    for _ in range(MAX_LINKS + 2):
        link = pool.take(time.monotonic() + 30, is_control=True)
        link.close()  # as its end does; without a warning in the tests' output
        del link
    assert pool.num_links == 0
    sync_client.ping()
    assert pool.num_links == 1


def test_who_waits_for_a_connection_gets_the_place_of_a_lost_one(sync_client: KVStore) -> None:
    pool = sync_client._pool
    taken = [pool.take(time.monotonic() + 30, is_control=True) for _ in range(MAX_LINKS)]
    assert pool.num_links == MAX_LINKS
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(sync_client.ping, timeout_s=30)
        while not pool._num_waiting:
            time.sleep(0.001)
        taken.pop().close()
        waiting.result(30)
    for link in taken:
        pool.give_back(link)
