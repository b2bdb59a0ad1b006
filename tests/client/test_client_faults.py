"""Clients when their server is absent, dies, restarts, freezes or lies, and servers whose clients die."""

import asyncio
import os
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import pytest

from kvstore import AsyncKVStore, KVStore, MissReason, Namespace, PrefixChain, PutResult, Timeouts, transfer
from kvstore.arena_link import ArenaCache
from kvstore.errors import InvalidRequest, ServerUnavailable
from kvstore.link import Link, unix_dial
from kvstore.messages import ChainRef, Fetch, OpenNamespace, Ready, Release
from tests.client.conftest import NAMESPACE, PATIENT
from tests.client.facade import Face, SyncFace
from tests.store_process import StoreProcess

Payloads = npt.NDArray[np.uint8]
T = TypeVar("T")

BUSY_S = 1.0
"""Slack for a busy test machine on top of a call's timeout."""


@pytest.fixture(params=["sync", "async"])
async def face(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Face]:
    """A client of ``tmp_path``'s socket, whether or not a server is there."""
    path = tmp_path / "kv.sock"
    if request.param == "sync":
        with KVStore.connect(path, timeouts=PATIENT) as client:
            client.open_namespace(NAMESPACE)
            yield SyncFace(client)
    else:
        async with await AsyncKVStore.connect(path, timeouts=PATIENT) as client:
            await client.open_namespace(NAMESPACE)
            yield client


def _until(condition: Callable[[], object]) -> None:
    deadline_s = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline_s


async def test_without_a_server_the_data_path_misses_and_control_calls_say_so(
    face: Face, chain: PrefixChain, payloads: Payloads
) -> None:
    found = await face.match(chain)
    fetched = await face.fetch_into(chain, np.zeros_like(payloads))

    assert (found.blocks, found.reason) == (0, MissReason.UNAVAILABLE)
    assert (fetched.blocks, fetched.reason) == (0, MissReason.UNAVAILABLE)
    assert await face.put(chain, payloads) == PutResult(0, 0, 8, doubtful=tuple(range(8)))
    assert await face.prefetch(chain) == 0
    assert await face.get(chain) == []
    with pytest.raises(ServerUnavailable, match="is it running"):
        await face.ping()


async def test_a_server_that_comes_later_is_found(
    face: Face, chain: PrefixChain, payloads: Payloads, tmp_path: Path
) -> None:
    await face.match(chain)

    with StoreProcess(tmp_path):
        await face.ping()
        put = await face.put(chain, payloads)

    assert put.stored == 8


async def test_a_killed_server_is_a_miss_and_its_successor_serves_again(
    face: Face, store: StoreProcess, chain: PrefixChain, payloads: Payloads
) -> None:
    await face.put(chain, payloads)
    store.kill()
    dead = await face.match(chain)
    store.start()
    await face.ping()
    empty = await face.match(chain)
    put = await face.put(chain, payloads)
    buffers = np.zeros_like(payloads)
    fetched = await face.fetch_into(chain, buffers)

    assert (dead.blocks, dead.reason) == (0, MissReason.UNAVAILABLE)
    assert (empty.blocks, empty.reason) == (0, MissReason.NEVER_SEEN)
    assert (put.stored, fetched.blocks) == (8, 8)
    assert np.array_equal(buffers, payloads)
    assert face.client_stats().server_restarts == 1


async def test_a_stopped_server_holds_no_caller_longer_than_the_timeout(
    face: Face, store: StoreProcess, chain: PrefixChain, payloads: Payloads
) -> None:
    await face.put(chain, payloads)
    store.pause()
    started_s = time.monotonic()
    found = await face.match(chain, timeout_s=0.05)
    fetched = await face.fetch_into(chain, np.zeros_like(payloads), timeout_s=0.05)
    put = await face.put(chain, payloads, timeout_s=0.05)
    took_s = time.monotonic() - started_s
    store.resume()
    await face.ping()
    again = await face.match(chain)

    assert found.reason is MissReason.TIMED_OUT
    assert fetched.reason in (MissReason.TIMED_OUT, MissReason.UNAVAILABLE)
    assert put.dropped == 8
    assert took_s < 3 * 0.05 + BUSY_S
    assert again.blocks == 8


async def test_a_late_lease_is_given_back(
    face: Face, store: StoreProcess, chain: PrefixChain, payloads: Payloads
) -> None:
    await face.put(chain, payloads)
    store.pause()
    await face.fetch_into(chain, np.zeros_like(payloads), timeout_s=0.05)
    store.resume()

    # A leased block is not dropped; the late lease comes and goes on the connection of the call that gave up.
    dropped = 0
    while dropped < 8:
        dropped += await face.drop(chain)
    assert (await face.stats())["live_leases"] == 0


@pytest.mark.parametrize("verb", ["put", "fetch_into"])
async def test_a_copy_under_way_stops_when_the_connection_is_lost(
    face: Face,
    store: StoreProcess,
    chain: PrefixChain,
    payloads: Payloads,
    verb: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if verb == "fetch_into":
        await face.put(chain, payloads)
    copied: list[int] = []
    began, may_go_on = threading.Event(), threading.Event()

    def after_one(copy: Callable[..., T]) -> Callable[..., T]:
        def copy_and_wait(*words: Any) -> T:  # Any: those of any of the functions
            digest = copy(*words)
            copied.append(64 << 10)
            began.set()
            assert may_go_on.wait(30)
            return digest

        return copy_and_wait

    with monkeypatch.context() as patch:
        patch.setattr("kvstore.transfer.GROUP_BYTES", 64 << 10)
        for name in ("_write_slot", "copy_arrays_in", "copy_array_with_checksum"):
            patch.setattr(transfer, name, after_one(getattr(transfer, name)))
        call = asyncio.ensure_future(getattr(face, verb)(chain, payloads))
        await asyncio.to_thread(began.wait, 30)
        store.kill()
        if isinstance(face, AsyncKVStore):
            while face._link is not None and not face._link.is_lost:  # noqa: ASYNC110
                await asyncio.sleep(0)
        may_go_on.set()
        result = await call

    assert copied == [64 << 10]
    if verb == "put":
        assert result == PutResult(0, 0, 8, doubtful=tuple(range(8)))
    else:
        assert (result.blocks, result.reason) == (1, MissReason.UNAVAILABLE)


@pytest.mark.parametrize("what", ["lease", "slots"])
def test_what_a_killed_client_held_is_free_again(
    sync_client: KVStore, store: StoreProcess, chain: PrefixChain, payloads: Payloads, what: str
) -> None:
    if what == "lease":
        sync_client.put(chain, payloads)
    before = sync_client.stats()["tiers"]["dram"]["used_bytes"]
    command = [sys.executable, "-m", "tests.client.holding_client", str(store.socket_path), what]
    holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert holder.stdout is not None
    assert holder.stdin is not None
    said = holder.stdout.readline().strip()
    held = sync_client.stats()
    holder.kill()
    holder.wait()
    holder.stdout.close()
    holder.stdin.close()

    _until(lambda: sync_client.stats()["owners"] == 1)
    after = sync_client.stats()

    assert said == {"lease": b"Ready", "slots": b"Lent"}[what]
    assert held["owners"] == 2
    assert after["tiers"]["dram"]["used_bytes"] == before
    assert sync_client.drop(chain) == (8 if what == "lease" else 0)


def _first_slot(store: StoreProcess, chain: PrefixChain) -> tuple[Link, Ready]:
    deadline_s = time.monotonic() + 30
    link = Link.open(unix_dial(store.socket_path), ArenaCache(), deadline_s)
    link.ask(OpenNamespace(NAMESPACE), deadline_s)
    answer = link.ask(Fetch(ChainRef(chain), 1_000_000), deadline_s)
    assert isinstance(answer, Ready)
    assert answer.lease is not None
    return link, answer


async def test_a_flipped_byte_is_never_served_and_the_block_is_dropped(
    face: Face, store: StoreProcess, chain: PrefixChain, payloads: Payloads
) -> None:
    await face.put(chain, payloads)
    link, ready = _first_slot(store, chain)
    assert link.arena is not None
    assert link.arena.writing is not None
    assert ready.lease is not None
    link.arena.writing.slot(ready.slots[3].offset, 64 << 10)[100] ^= 1
    link.tell(Release(ready.lease))
    link.close()

    buffers = np.zeros_like(payloads)
    fetched = await face.fetch_into(chain, buffers)
    # The store looks at the reported block itself, and then drops it.
    while (await face.match(chain)).blocks != 3:
        pass
    put = await face.put(chain, payloads)
    repaired = await face.get(chain)

    assert (fetched.blocks, fetched.reason) == (3, MissReason.CORRUPT)
    assert np.array_equal(buffers[:3], payloads[:3])
    assert face.client_stats().checksum_failures == 1
    assert put.stored == 1
    assert np.array_equal(np.stack(repaired), payloads)


def test_a_forked_child_opens_its_own_connection(
    sync_client: KVStore, chain: PrefixChain, payloads: Payloads
) -> None:
    sync_client.put(chain, payloads)
    pid = os.fork()
    if pid == 0:
        is_right = np.array_equal(np.stack(sync_client.get(chain)), payloads)
        os._exit(0 if is_right and sync_client.client_stats().connects == 2 else 1)
    _, status = os.waitpid(pid, 0)

    assert status == 0
    assert sync_client.match(chain).blocks == 8
    assert sync_client.client_stats().connects == 1


def test_importing_the_product_loads_no_heavy_package() -> None:
    program = (
        "import sys, kvstore, kvstore.client, kvstore.async_client;"
        "print([name for name in ('torch', 'cupy', 'lmdb', 'redis', 'aiohttp') if name in sys.modules])"
    )

    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)

    assert done.stdout.strip() == "[]"


def test_default_timeouts_are_those_documented() -> None:
    assert Timeouts() == Timeouts(match_s=0.05, fetch_s=1.0, put_s=1.0, control_s=5.0)


def test_one_timeout_sets_the_whole_data_path(tmp_path: Path, namespace: Namespace) -> None:
    with KVStore.connect(tmp_path / "none.sock", timeout_s=0.25) as client:
        assert client.timeouts == Timeouts(match_s=0.25, fetch_s=0.25, put_s=0.25, control_s=5.0)


def _num_arena_mappings() -> int:
    lines = Path("/proc/self/maps").read_text().splitlines()
    return sum("kvstore-arena" in line for line in lines)


async def test_the_arena_of_a_dead_server_is_let_go(
    face: Face, store: StoreProcess, chain: PrefixChain, payloads: Payloads
) -> None:
    await face.put(chain, payloads)
    before = _num_arena_mappings()

    for _ in range(3):
        store.kill()
        store.start()
        await face.ping()
        await face.put(chain, payloads)

    assert _num_arena_mappings() == before


@pytest.mark.parametrize("timeout_s", [-1.0, float("nan")])
async def test_an_impossible_timeout_is_refused(face: Face, chain: PrefixChain, timeout_s: float) -> None:
    with pytest.raises(InvalidRequest, match="timeout_s"):
        await face.match(chain, timeout_s=timeout_s)


async def test_an_endless_timeout_is_bounded_by_the_answer(
    face: Face, store: StoreProcess, chain: PrefixChain
) -> None:
    assert (await face.match(chain, timeout_s=float("inf"))).reason is MissReason.NEVER_SEEN
