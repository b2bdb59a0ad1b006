"""Blocks that clients read without asking: found only while they may be served, and told of afterwards."""

import array
import asyncio
import fcntl
import gc
import os
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from kvstore import AsyncKVStore, Hints, KVStore, MissReason, Part, PrefixChain
from kvstore.arena_link import ArenaCache
from kvstore.arena_view import SEALS
from kvstore.calls import FetchResult
from kvstore.client_state import ClientState
from kvstore.config import Config
from kvstore.direct_reads import read_directly
from kvstore.errors import InvalidRequest
from kvstore.link import Link, unix_dial
from kvstore.messages import ChainRef, Hello, OpenNamespace, Welcome, decode_answer, encode_message
from kvstore.ready_table import ReadyTable
from kvstore.running import serving
from kvstore.server import StoreServer
from kvstore.wire import READS_DIRECTLY, TAKES_TRACES, FrameDecoder
from tests.client.conftest import BLOCK_BYTES, NAMESPACE, PATIENT, in_shared_memory
from tests.client.facade import Face
from tests.store_process import MIB, StoreProcess

Payloads = npt.NDArray[np.uint8]
Buffers = Callable[[int, int], Sequence[Payloads]]
CONFIG = Config.from_dict({"tiers": {"dram": {"capacity_bytes": 16 * MIB, "staging_bytes": MIB}}})


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[StoreServer]:
    async with serving(CONFIG, socket_path=tmp_path / "kv.sock") as running:
        yield running


@pytest.fixture
def state() -> ClientState:
    made = ClientState(PATIENT)
    made.open_namespace(NAMESPACE)
    return made


@pytest.fixture
def link(store: StoreProcess) -> Iterator[Link]:
    """A connection that knows the namespace."""
    opened = Link.open(unix_dial(store.socket_path), ArenaCache(), time.monotonic() + 10)
    opened.ask(OpenNamespace(NAMESPACE), time.monotonic() + 10)
    opened.opened.add(NAMESPACE.digest)
    yield opened
    opened.close()


def _read(link: Link, state: ClientState, chain: PrefixChain, buffers: Buffers) -> FetchResult | None:
    return read_directly(
        link,
        state,
        ChainRef(chain),
        buffers,
        length_bytes=BLOCK_BYTES,
        deadline_s=time.monotonic() + 10,
        hints=None,
    )


def _read_in_time(link: Link, state: ClientState, chain: PrefixChain) -> None:
    """Read blocks as soon as they are listed: behind the answer to their put."""
    deadline_s = time.monotonic() + 60
    while _read(link, state, chain, Targets()) is None:
        assert time.monotonic() < deadline_s, "the blocks never came into the table"


class Targets:
    """Buffers of eight blocks; something happens when they are asked for."""

    def __init__(self, happens: Callable[[], object] = lambda: None) -> None:
        self.bytes = np.zeros((8, BLOCK_BYTES), np.uint8)
        self._happens = happens

    def __call__(self, start: int, stop: int) -> Sequence[Payloads]:
        self._happens()
        return list(self.bytes[start:stop])


LISTED_S = 60.0
"""How long at most blocks take to come into the table."""


async def _listed(face: Face, chain: PrefixChain, part: Part | None = None) -> list[Payloads]:
    """Fetch a chain until that takes no request; returns what was read so."""
    deadline_s = time.monotonic() + LISTED_S
    while time.monotonic() < deadline_s:
        before = face.client_stats().direct_blocks
        blocks = list(await face.get(chain, part=part))
        assert len(blocks) == len(chain)
        if face.client_stats().direct_blocks > before:
            return blocks
    raise AssertionError("the blocks never came into the table")


def _is_read_directly(client: KVStore, chain: PrefixChain, payloads: Payloads) -> bool:
    """Fetch a chain until that takes no request; False if it never does, or other blocks are found."""
    before, deadline_s = client.client_stats().direct_blocks, time.monotonic() + LISTED_S
    while client.client_stats().direct_blocks == before:
        if time.monotonic() >= deadline_s or not np.array_equal(client.get(chain), payloads):
            return False
    return True


@in_shared_memory
async def test_what_was_put_is_read_without_asking_and_counted_as_a_hit(
    client: Face, chain: PrefixChain, payloads: Payloads
) -> None:
    few = chain[:3]
    await client.put(few, payloads[:3])
    await _listed(client, few)
    # The server counts what it is told of, and does that when it reads it.
    before = (await client.stats())["fetch"]
    told, direct = (await client.stats())["direct_blocks"], client.client_stats().direct_blocks
    buffers = np.zeros_like(payloads[:3])
    found = await client.fetch_into(few, buffers)
    after = (await client.stats())["fetch"]

    assert (found.blocks, found.origins, found.reason) == (3, ("dram",) * 3, None)
    assert np.array_equal(buffers, payloads[:3])
    assert client.client_stats().direct_blocks == direct + 3
    assert (await client.stats())["direct_blocks"] == told + 3
    assert after["requests"] == before["requests"] + 1
    assert after["hits_blocks"]["dram"] == before["hits_blocks"]["dram"] + 3
    assert after["lookups_blocks"] == sum(after["hits_blocks"].values()) + sum(
        after["misses_blocks"].values()
    )


@in_shared_memory
async def test_a_part_of_a_block_is_read_without_asking(client: Face) -> None:
    namespace = NAMESPACE
    part = Part(0, 1, 0, 1)
    length = namespace.layout.part_bytes(part)
    chain = namespace.chain(range(4))
    await client.put(chain, np.full(length, 7, np.uint8), part=part)

    (block,) = await _listed(client, chain, part)

    assert block.tolist() == [7] * length


@in_shared_memory
async def test_a_block_that_was_dropped_is_not_read_by_whoever_dropped_it(
    client: Face, chain: PrefixChain, payloads: Payloads
) -> None:
    for _ in range(20):
        await client.put(chain[:1], payloads[:1])
        assert await client.get_block(chain[:1]) is not None
        assert await client.drop(chain[:1]) == 1
        assert await client.get_block(chain[:1]) is None


async def test_a_task_that_reads_without_asking_keeps_the_loop_from_nobody(
    store: StoreProcess, chain: PrefixChain, payloads: Payloads, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstore.async_client._TURN_S", 0.0)
    async with await AsyncKVStore.connect(store.socket_path, timeout_s=60) as client:
        await client.open_namespace(NAMESPACE)
        await client.put(chain[:2], payloads[:2])
        await _listed(client, chain[:2])
        others = asyncio.create_task(client.exists(chain))
        num_reads, before = 0, client.client_stats()
        while not others.done() and num_reads < 100_000:
            num_reads += 1
            assert len(await client.get(chain[:2])) == 2

        assert others.done()
        assert client.client_stats().direct_blocks - before.direct_blocks == 2 * num_reads
        assert client.client_stats().untold_blocks == 0


@in_shared_memory
async def test_blocks_of_an_ended_epoch_are_not_read(
    client: Face, chain: PrefixChain, payloads: Payloads
) -> None:
    await client.put(chain[:2], payloads[:2])
    await _listed(client, chain[:2])
    await client.advance_epoch(NAMESPACE.model)

    found = await client.fetch_into(chain[:2], np.zeros_like(payloads[:2]))

    assert (found.blocks, found.reason) == (0, MissReason.OTHER_EPOCH)


@in_shared_memory
async def test_a_call_without_time_reads_nothing(
    client: Face, chain: PrefixChain, payloads: Payloads
) -> None:
    await client.put(chain[:2], payloads[:2])
    await _listed(client, chain[:2])

    assert await client.get(chain[:2], timeout_s=0.0) == []


@in_shared_memory
async def test_a_chain_that_names_a_block_twice_is_refused(
    client: Face, chain: PrefixChain, payloads: Payloads
) -> None:
    await client.put(chain[:1], payloads[:1])
    await _listed(client, chain[:1])
    twice = PrefixChain(chain.namespace, chain.keys[:1] * 2, chain.block_tokens)

    with pytest.raises(InvalidRequest, match="twice"):
        await client.get(twice)
    assert await client.get_block(chain[:1]) is not None


@in_shared_memory
async def test_hints_of_what_is_read_are_heard(client: Face, chain: PrefixChain, payloads: Payloads) -> None:
    await client.put(chain[:2], payloads[:2])
    await _listed(client, chain[:2])
    before = (await client.stats())["hinted_requests"]

    await client.fetch_into(chain[:2], np.zeros_like(payloads[:2]), hints=Hints(ends_session=True))

    assert (await client.stats())["hinted_requests"] == before + 1


def test_a_reader_reads_without_asking_too(
    store: StoreProcess, sync_client: KVStore, chain: PrefixChain, payloads: Payloads
) -> None:
    sync_client.put(chain, payloads)
    with KVStore.connect(store.socket_path, timeouts=PATIENT, is_read_only=True) as reader:
        reader.open_namespace(NAMESPACE)
        assert _is_read_directly(reader, chain, payloads)


def test_blocks_that_leave_during_the_copy_are_not_taken(
    link: Link, state: ClientState, sync_client: KVStore, chain: PrefixChain, payloads: Payloads
) -> None:
    other = NAMESPACE.chain(range(100, 132))
    sync_client.put(chain, payloads)

    def change() -> None:
        sync_client.drop(chain)
        sync_client.put(other, payloads[::-1].copy())

    _read_in_time(link, state, chain)
    assert _read(link, state, chain, Targets(change)) is None
    assert state.stats.direct_blocks == 8


def test_blocks_that_come_back_in_other_slots_during_the_copy_are_asked_for(
    link: Link, state: ClientState, sync_client: KVStore, chain: PrefixChain, payloads: Payloads
) -> None:
    sync_client.put(chain, payloads)

    def change() -> None:
        sync_client.drop(chain)
        sync_client.put(chain, payloads)

    _read_in_time(link, state, chain)
    assert _read(link, state, chain, Targets(change)) is None
    _read_in_time(link, state, chain)


def test_an_epoch_that_ends_during_the_copy_ends_it(
    link: Link, state: ClientState, sync_client: KVStore, chain: PrefixChain, payloads: Payloads
) -> None:
    sync_client.put(chain, payloads)
    _read_in_time(link, state, chain)

    assert _read(link, state, chain, Targets(lambda: sync_client.advance_epoch(NAMESPACE.model))) is None


def test_a_damaged_block_is_asked_for_and_found_out(
    link: Link, state: ClientState, sync_client: KVStore, chain: PrefixChain, payloads: Payloads
) -> None:
    sync_client.put(chain, payloads)
    arena = link.arena
    assert arena is not None
    assert arena.ready is not None
    assert arena.writing is not None
    _read_in_time(link, state, chain)
    listed = arena.ready.find(
        chain.keys, state.name_end(chain, None), BLOCK_BYTES, arena.ready.era(time.monotonic())
    )
    assert listed is not None
    arena.writing.slot(listed[2][0], BLOCK_BYTES)[9] ^= 1

    assert _read(link, state, chain, Targets()) is None
    assert np.array_equal(np.stack(sync_client.get(chain)), payloads[:2])
    assert sync_client.client_stats().checksum_failures == 1


def test_a_traced_call_asks(
    link: Link,
    state: ClientState,
    sync_client: KVStore,
    chain: PrefixChain,
    payloads: Payloads,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sync_client.put(chain, payloads)
    _read_in_time(link, state, chain)
    monkeypatch.setattr("kvstore.link.current", lambda: object())

    assert _read(link, state, chain, Targets()) is None


def test_a_server_that_hangs_is_not_relied_on_for_long(
    store: StoreProcess, sync_client: KVStore, chain: PrefixChain, payloads: Payloads
) -> None:
    sync_client.put(chain[:1], payloads[:1])
    store.pause()
    try:
        deadline_s = time.monotonic() + 60
        while sync_client.get(chain[:1], timeout_s=0.05) and time.monotonic() < deadline_s:
            pass
        assert sync_client.get(chain[:1], timeout_s=0.05) == []
    finally:
        store.resume()


def test_after_a_restart_nothing_of_the_server_before_is_read(
    store: StoreProcess, sync_client: KVStore, chain: PrefixChain, payloads: Payloads
) -> None:
    sync_client.put(chain, payloads)
    assert len(sync_client.get(chain)) == 8
    store.kill()
    while_away = sync_client.get(chain)
    store.start()
    sync_client.ping(timeout_s=60)

    assert while_away == []
    assert sync_client.get(chain) == []
    sync_client.put(chain, payloads[::-1].copy())
    assert _is_read_directly(sync_client, chain, payloads[::-1])


def test_a_forked_child_reads_without_asking(
    sync_client: KVStore, chain: PrefixChain, payloads: Payloads
) -> None:
    sync_client.put(chain, payloads)
    sync_client.get(chain)
    pid = os.fork()
    if pid == 0:
        is_right = _is_read_directly(sync_client, chain, payloads)
        os._exit(0 if is_right and sync_client.client_stats().connects == 2 else 1)
    _, status = os.waitpid(pid, 0)

    assert status == 0


@pytest.mark.parametrize("kind", ["sync", "local"])
def test_a_closed_client_maps_nothing(
    store: StoreProcess, chain: PrefixChain, payloads: Payloads, kind: str
) -> None:
    before = _num_mapped_tables()
    client = KVStore.local(CONFIG) if kind == "local" else KVStore.connect(store.socket_path)
    with client:
        client.open_namespace(NAMESPACE)
        client.put(chain, payloads)
        client.get(chain)
        mapped = _num_mapped_tables()

    assert mapped > before
    assert _num_mapped_tables() == before


def _num_mapped_tables() -> int:
    gc.collect()  # of other tests some may not be gone yet
    return Path("/proc/self/maps").read_text().count("kvstore-ready")


def _greet(path: Path, offered: int) -> tuple[int, int]:
    """Greet as a client that offers these flags; returns those of the answer, and how many files came."""
    with socket.socket(socket.AF_UNIX) as stream:
        stream.connect(str(path))
        stream.sendall(encode_message(Hello(os.getpid()), offered))
        fds, decoder = array.array("i"), FrameDecoder()
        data, ancillary, _, _ = stream.recvmsg(4096, socket.CMSG_SPACE(8 * fds.itemsize))
        for _, _, payload in ancillary:
            fds.frombytes(payload)
        decoder.feed(data)
        frame = decoder.next_frame()
        for fd in fds:
            os.close(fd)
    assert frame is not None
    assert isinstance(decode_answer(frame), Welcome)
    return frame.request_id, len(fds)


def test_older_clients_are_sent_no_table(store: StoreProcess) -> None:
    newer, of_earlier_tables = 1 << 20, (2, 8)
    assert _greet(store.socket_path, 0) == (0, 2)
    assert _greet(store.socket_path, TAKES_TRACES) == (TAKES_TRACES, 2)
    assert [_greet(store.socket_path, flag) for flag in of_earlier_tables] == [(0, 2)] * 2
    assert _greet(store.socket_path, READS_DIRECTLY) == (READS_DIRECTLY, 3)
    assert _greet(store.socket_path, newer | TAKES_TRACES | READS_DIRECTLY) == (
        TAKES_TRACES | READS_DIRECTLY,
        3,
    )


async def test_a_server_without_a_table_is_asked(
    server: StoreServer, tmp_path: Path, chain: PrefixChain, payloads: Payloads
) -> None:
    server._table_fd, kept = None, server._table_fd
    async with await AsyncKVStore.connect(tmp_path / "kv.sock", timeouts=PATIENT) as client:
        await client.open_namespace(NAMESPACE)
        await client.put(chain[:2], payloads[:2])
        for _ in range(3):
            assert len(await client.get(chain[:2])) == 2
        assert client.client_stats().direct_blocks == 0
    server._table_fd = kept


def _garbage() -> int:
    fd = os.memfd_create("garbage", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.write(fd, os.urandom(1 << 17))
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
    return fd


async def test_what_is_no_table_is_done_without(
    server: StoreServer,
    tmp_path: Path,
    chain: PrefixChain,
    payloads: Payloads,
    caplog: pytest.LogCaptureFixture,
) -> None:
    server._table_fd, kept = _garbage(), server._table_fd
    async with await AsyncKVStore.connect(tmp_path / "kv.sock", timeouts=PATIENT) as client:
        await client.open_namespace(NAMESPACE)
        await client.put(chain[:2], payloads[:2])
        for _ in range(3):
            assert np.array_equal(np.stack(await client.get(chain[:2])), payloads[:2])
        stats = client.client_stats()
    os.close(server._table_fd)
    server._table_fd = kept

    assert (stats.direct_blocks, stats.protocol_errors, stats.connects) == (0, 0, 1)
    assert "the server is asked for every block" in caplog.text


async def test_a_table_of_another_server_is_done_without(
    server: StoreServer, tmp_path: Path, chain: PrefixChain, payloads: Payloads
) -> None:
    async with serving(CONFIG, socket_path=tmp_path / "other" / "kv.sock") as other:
        server._table_fd, kept = other._table_fd, server._table_fd
        async with await AsyncKVStore.connect(tmp_path / "kv.sock", timeouts=PATIENT) as client:
            await client.open_namespace(NAMESPACE)
            await client.put(chain[:2], payloads[:2])
            assert np.array_equal(np.stack(await client.get(chain[:2])), payloads[:2])
            assert client.client_stats().direct_blocks == 0
        server._table_fd = kept


async def test_a_server_that_stops_lists_nothing_any_more(
    server: StoreServer, chain: PrefixChain, payloads: Payloads
) -> None:
    listing = server._listing
    assert listing is not None
    table = ReadyTable.map(listing.fd, server._manager._state.top.arena.instance)  # type: ignore[attr-defined]
    before = table.era(time.monotonic())
    await server.stop()

    assert before > 0
    assert table.era(time.monotonic()) == 0


def test_what_a_busy_server_does_not_hear_at_once_it_is_told_before_the_next_request(
    store: StoreProcess,
    link: Link,
    state: ClientState,
    sync_client: KVStore,
    chain: PrefixChain,
    payloads: Payloads,
) -> None:
    one = chain[:1]
    sync_client.put(one, payloads[:1])
    _read_in_time(link, state, one)
    num_read = 1
    store.pause()
    try:
        while not link._unsent and _read(link, state, one, Targets()) is not None:
            num_read += 1
    finally:
        store.resume()
    link.ask(OpenNamespace(NAMESPACE), time.monotonic() + 60)

    assert state.stats.untold_blocks == 0
    assert sync_client.stats()["direct_blocks"] == num_read


def test_what_cannot_be_told_is_counted(
    store: StoreProcess,
    link: Link,
    state: ClientState,
    sync_client: KVStore,
    chain: PrefixChain,
    payloads: Payloads,
) -> None:
    one = chain[:1]
    sync_client.put(one, payloads[:1])
    _read_in_time(link, state, one)
    store.pause()
    link._unsent = encode_message(OpenNamespace(NAMESPACE), 7) * 10_000  # more than a socket takes

    _read_in_time(link, state, one)
    store.resume()
    assert (state.stats.direct_blocks, state.stats.untold_blocks) == (2, 1)
