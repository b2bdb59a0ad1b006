"""Leases and reservations when their server dies, their client is frozen or forked, or a block is damaged."""

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from kvstore import AsyncKVStore, KVStore, MissReason, PrefixChain, PutResult
from kvstore.arena_link import ArenaCache
from kvstore.errors import InvalidRequest
from kvstore.link import Link, unix_dial
from kvstore.messages import ChainRef, Fetch, OpenNamespace, Ready
from tests.client.conftest import BLOCK_BYTES, NAMESPACE, PATIENT
from tests.client.facade import Face
from tests.client.test_client_faults import face as face
from tests.store_process import StoreProcess

Payloads = npt.NDArray[np.uint8]


def _until(condition: Callable[[], object]) -> None:
    deadline_s = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline_s


class Frozen:
    """A client process that is stopped, with what it holds, until ``thaw``."""

    def __init__(self, store: StoreProcess, role: str) -> None:
        command = [sys.executable, "-m", "tests.client.frozen_client", str(store.socket_path), role]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._input, self._output = self._process.stdin, self._process.stdout
        self.held = json.loads(self._output.readline())["blocks"]
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> dict[str, int]:
        self._process.send_signal(signal.SIGCONT)
        self._input.write(b"go on\n")
        self._input.flush()
        said: dict[str, int] = json.loads(self._output.readline())
        assert self._process.wait(60) == 0
        return said

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        self._input.close()
        self._output.close()


@pytest.fixture
def brief_store(tmp_path: Path) -> Iterator[StoreProcess]:
    """A store whose leases last for half a second."""
    with StoreProcess(tmp_path, lease_s=0.5) as running:
        yield running


@pytest.fixture
def brief_client(brief_store: StoreProcess) -> Iterator[KVStore]:
    with KVStore.connect(brief_store.socket_path, timeouts=PATIENT) as client:
        client.open_namespace(NAMESPACE)
        yield client


def _fill(client: KVStore) -> None:
    """Put so many blocks that every slot of the arena is used anew."""
    other = NAMESPACE.chain(range(10_000, 10_000 + 4 * 512))
    for start in range(0, 512, 64):
        client.put(other[start : start + 64], np.full(64 * BLOCK_BYTES, 7, np.uint8))


async def test_a_lease_ends_with_its_server_and_its_successor_grants_new_ones(
    face: Face, store: StoreProcess, chain: PrefixChain, payloads: Payloads
) -> None:
    await face.put(chain, payloads)
    lease = await face.lease(chain)
    views = await face.view(lease)
    store.kill()
    if isinstance(face, AsyncKVStore):
        while face._link is not None and not face._link.is_lost:
            await face.match(chain)

    assert not lease.is_valid()
    assert await face.view(lease) == []
    assert not await lease.renew()
    assert b"".join(views) == payloads.tobytes()

    store.start()
    await face.ping()
    empty = await face.lease(chain)
    await face.put(chain, payloads)
    async with await face.lease(chain) as again:
        assert (empty.blocks, empty.reason) == (0, MissReason.NEVER_SEEN)
        assert len(await face.view(again)) == 8
        assert not lease.is_valid()
    await lease.release()
    assert face.client_stats().server_restarts == 1
    assert (await face.stats())["lease_events"].get("stale_releases", 0) == 0


async def test_without_a_server_leases_and_reservations_are_empty(
    face: Face, chain: PrefixChain, tmp_path: Path
) -> None:
    lease = await face.lease(chain)
    found = await face.match(chain, lease=True)
    async with await face.reserve(chain) as blocks:
        assert len(blocks) == 0

    assert (lease.blocks, lease.reason) == (0, MissReason.UNAVAILABLE)
    assert (found.blocks, found.reason, found.lease.blocks) == (0, MissReason.UNAVAILABLE, 0)
    assert blocks.result == PutResult(0, 0, 8, doubtful=tuple(range(8)))
    assert await face.exists(chain) == [False] * 8


async def test_a_reservation_whose_server_dies_stores_nothing(
    face: Face, store: StoreProcess, chain: PrefixChain, payloads: Payloads
) -> None:
    async with await face.reserve(chain) as blocks:
        store.kill()
        store.start()
        for block in blocks:
            block.array[:] = payloads[block.position]

    assert blocks.result == PutResult(0, 0, 8, doubtful=tuple(range(8)))
    await face.ping()
    assert (await face.match(chain)).blocks == 0


async def test_a_lease_outlives_other_calls_that_time_out(
    face: Face, store: StoreProcess, chain: PrefixChain, payloads: Payloads
) -> None:
    await face.put(chain, payloads)
    async with await face.lease(chain) as lease:
        store.pause()
        late = await face.match(chain, timeout_s=0.02)
        store.resume()
        await face.ping()

        assert late.reason is MissReason.TIMED_OUT
        assert lease.is_valid()
        assert len(await face.view(lease)) == 8


async def test_what_comes_too_late_is_given_back(
    face: Face, store: StoreProcess, chain: PrefixChain, payloads: Payloads
) -> None:
    await face.put(chain[:4], payloads[:4])
    await (await face.lease(chain)).release()
    used = (await face.stats())["tiers"]["dram"]["used_bytes"]
    store.pause()
    late = await face.lease(chain, timeout_s=0.05)
    late_blocks = await face.reserve(chain, timeout_s=0.05)
    store.resume()

    assert (late.blocks, len(late_blocks)) == (0, 0)
    while (await face.stats())["live_leases"] or (await face.stats())["tiers"]["dram"]["used_bytes"] != used:
        # The late answers are found by whoever uses the connection next.
        await (await face.lease(chain[:1])).release()


def test_a_reader_frozen_past_its_lease_gets_misses(
    brief_store: StoreProcess, brief_client: KVStore, chain: PrefixChain, payloads: Payloads
) -> None:
    brief_client.put(chain, payloads)
    with contextlib.closing(_Ended(Frozen(brief_store, "read"))) as closing:
        frozen = closing.frozen
        _until(lambda: brief_client.stats()["live_leases"] == 0)
        brief_client.drop(chain)
        _fill(brief_client)
        said = frozen.thaw()

    assert frozen.held == 8
    assert said == {
        "is_changed": True,
        "is_valid": False,
        "views": 0,
        "is_renewed": False,
        "ended_leases": 1,
        "fetched": 0,
    }


def test_a_writer_frozen_past_its_time_changes_nobodys_block(
    brief_store: StoreProcess, brief_client: KVStore, payloads: Payloads
) -> None:
    with contextlib.closing(_Ended(Frozen(brief_store, "write"))) as closing:
        frozen = closing.frozen
        _until(lambda: brief_client.stats()["overdue_slots"] == 8)
        _fill(brief_client)
        filled = NAMESPACE.chain(range(10_000, 10_000 + 4 * 512))
        stored = [filled[at : at + 1] for at, is_here in enumerate(brief_client.exists(filled)) if is_here]
        said = frozen.thaw()

    assert frozen.held == 8
    assert said == {"stored": 0, "present": 0, "dropped": 8}
    assert len(stored) > 100
    assert all((brief_client.get_block(one) == 7).all() for one in stored)
    assert brief_client.stats()["overdue_slots"] == 0
    assert brief_client.check(1000) == []


class _Ended:
    def __init__(self, frozen: Frozen) -> None:
        self.frozen = frozen

    def close(self) -> None:
        self.frozen.end()


def _slot_of(store: StoreProcess, chain: PrefixChain, at: int) -> tuple[Link, memoryview]:
    deadline_s = time.monotonic() + 30
    link = Link.open(unix_dial(store.socket_path), ArenaCache(), deadline_s)
    link.ask(OpenNamespace(NAMESPACE), deadline_s)
    answer = link.ask(Fetch(ChainRef(chain), 1_000_000), deadline_s)
    assert isinstance(answer, Ready)
    assert link.arena is not None
    assert link.arena.writing is not None
    return link, link.arena.writing.slot(answer.slots[at].offset, BLOCK_BYTES)


async def test_views_end_at_a_damaged_block_which_the_store_then_drops(
    face: Face, store: StoreProcess, chain: PrefixChain, payloads: Payloads
) -> None:
    await face.put(chain, payloads)
    async with await face.lease(chain) as lease:
        link, slot = _slot_of(store, chain, 3)
        slot[100] ^= 1
        link.close()

        views = await face.view(lease)

        assert b"".join(views) == payloads[:3].tobytes()
        assert face.client_stats().checksum_failures == 1
        while (await face.match(chain)).blocks != 3:
            pass
        assert lease.is_valid()
        assert len(await face.view(lease)) == 3


def test_a_forked_child_neither_has_nor_ends_its_parents_leases(
    sync_client: KVStore, chain: PrefixChain, payloads: Payloads
) -> None:
    sync_client.put(chain, payloads)
    lease = sync_client.lease(chain)
    pid = os.fork()
    if pid == 0:
        has_none = not lease.is_valid() and not lease.renew() and sync_client.view(lease) == []
        lease.release()
        with sync_client.lease(chain) as own:
            is_right = len(sync_client.view(own)) == 8
        os._exit(0 if has_none and is_right else 1)
    _, status = os.waitpid(pid, 0)

    assert status == 0
    assert lease.is_valid()
    assert lease.renew()
    assert len(sync_client.view(lease)) == 8
    lease.release()
    _until(lambda: sync_client.stats()["live_leases"] == 0)


def test_a_lease_of_another_client_is_none(
    sync_client: KVStore, store: StoreProcess, chain: PrefixChain, payloads: Payloads
) -> None:
    sync_client.put(chain, payloads)
    with KVStore.connect(store.socket_path, timeouts=PATIENT) as other:
        other.open_namespace(NAMESPACE)
        with other.lease(chain) as lease, sync_client.lease(chain):
            assert sync_client.view(lease) == []
            assert len(other.view(lease)) == 8


def test_a_read_only_client_reads_and_cannot_write(
    sync_client: KVStore, store: StoreProcess, chain: PrefixChain, payloads: Payloads
) -> None:
    sync_client.put(chain, payloads)
    program = f"""
import sys
from kvstore import KVStore
from tests.client.conftest import NAMESPACE, PATIENT
with KVStore.connect({str(store.socket_path)!r}, timeouts=PATIENT, is_read_only=True) as client:
    client.open_namespace(NAMESPACE)
    chain = NAMESPACE.chain(range(32))
    with client.lease(chain) as lease:
        print(len(client.get(chain)), len(client.view(lease)), client.prefetch(chain))
    print(*{{line.split()[1] for line in open("/proc/self/maps") if "kvstore-arena" in line}})
"""

    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)

    assert done.stdout == "8 8 8\nr--s\n"


@pytest.mark.parametrize("kind", ["sync", "async"])
async def test_a_read_only_client_refuses_to_change_the_store(
    kind: str, store: StoreProcess, chain: PrefixChain, payloads: Payloads
) -> None:
    calls: dict[str, tuple[object, ...]] = {
        "put": (chain, payloads),
        "put_block": (chain[:1], payloads[0]),
        "reserve": (chain,),
        "drop": (chain,),
        "demote": (chain,),
        "advance_epoch": ("tiny",),
    }
    for name, given in calls.items():
        if kind == "sync":
            with KVStore.connect(store.socket_path, is_read_only=True) as client:
                client.open_namespace(NAMESPACE)
                with pytest.raises(InvalidRequest, match="read-only"):
                    getattr(client, name)(*given)
        else:
            async with await AsyncKVStore.connect(store.socket_path, is_read_only=True) as reader:
                await reader.open_namespace(NAMESPACE)
                with pytest.raises(InvalidRequest, match="read-only"):
                    await getattr(reader, name)(*given)


def test_readers_are_sent_a_descriptor_that_cannot_be_written(store: StoreProcess) -> None:
    kept: list[int] = []

    class Keeping(ArenaCache):
        def adopt(self, instance, fds, size_bytes, *, table_fd):  # type: ignore[no-untyped-def]
            kept.extend(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE for fd in (*fds, table_fd))
            return super().adopt(instance, fds, size_bytes, table_fd=table_fd)

    deadline_s = time.monotonic() + 30
    Link.open(unix_dial(store.socket_path), Keeping(), deadline_s, is_read_only=True).close()
    Link.open(unix_dial(store.socket_path), Keeping(), deadline_s).close()

    assert kept == [os.O_RDONLY, os.O_RDONLY, os.O_RDONLY, os.O_RDWR, os.O_RDONLY]


def test_sixteen_threads_hold_leases_on_one_client(
    sync_client: KVStore, chain: PrefixChain, payloads: Payloads
) -> None:
    sync_client.put(chain, payloads)
    wrong: list[int] = []
    served = threading.Semaphore(0)

    def work(seed: int) -> None:
        choose = np.random.default_rng(seed)
        for _ in range(30):
            count = int(choose.integers(1, 9))
            with sync_client.lease(chain[:count]) as lease:
                views = sync_client.view(lease)
                if choose.random() < 0.3:
                    assert lease.renew()
                if choose.random() < 0.3:
                    sync_client.match(chain)
                if b"".join(views) != payloads[:count].tobytes() or not lease.is_valid():
                    wrong.append(count)
                served.release()

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(work, range(16)))

    assert wrong == []
    assert served.acquire(blocking=False)
    _until(lambda: sync_client.stats()["live_leases"] == 0)
    assert sync_client.check() == []
