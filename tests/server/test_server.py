"""The server: its socket, whom it lets in, and what it does about clients that misbehave."""

import asyncio
import contextlib
import random
import socket
import stat
import struct
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import numpy as np
import pytest

from kvstore import AsyncKVStore, KVLayout, Namespace, PrefixChain, Timeouts
from kvstore import serving as serving_module
from kvstore.assembly import assemble
from kvstore.config import Config
from kvstore.errors import InvalidConfig, InvalidRequest, ServerUnavailable, TierUnavailable
from kvstore.messages import (
    ChainRef,
    Check,
    Commit,
    Count,
    Done,
    Failed,
    FailureCode,
    Fetch,
    GetRecord,
    Hello,
    Lent,
    Match,
    OpenNamespace,
    Ping,
    Prefetch,
    Release,
    Request,
    Reserve,
    ReturnSlots,
    Stats,
    UnusedSlot,
    Welcome,
    WrittenSlot,
    decode_answer,
    encode_message,
)
from kvstore.running import serving
from kvstore.server import StoreServer
from kvstore.server_address import parse_address
from kvstore.tracing import TraceContext
from kvstore.wire import MAX_BODY_BYTES, VERSION, FrameDecoder, encode_frame
from tests.store_process import MIB, StoreProcess

PATIENT = Timeouts(match_s=10, fetch_s=10, put_s=10, control_s=10)
NAMESPACE = Namespace("tiny", KVLayout.opaque(block_bytes=4096, block_tokens=4))


def _config(**server: object) -> Config:
    tiers = {"dram": {"capacity_bytes": 4 * MIB, "staging_bytes": MIB}}
    return Config.from_dict({"server": server, "tiers": tiers})


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[StoreServer]:
    async with serving(_config(), socket_path=tmp_path / "kv.sock") as running:
        yield running


@pytest.fixture
async def client(server: StoreServer, tmp_path: Path) -> AsyncIterator[AsyncKVStore]:
    async with await AsyncKVStore.connect(tmp_path / "kv.sock", timeouts=PATIENT) as connected:
        await connected.open_namespace(NAMESPACE)
        yield connected


class RawClient:
    """A client that says what it is told to, byte by byte."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.decoder = FrameDecoder()
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.setblocking(False)

    async def __aenter__(self) -> "RawClient":
        await asyncio.get_running_loop().sock_connect(self.sock, str(self.path))
        return self

    async def __aexit__(self, *_: object) -> None:
        self.sock.close()

    async def send(self, data: bytes) -> None:
        await asyncio.get_running_loop().sock_sendall(self.sock, data)

    async def answer(self) -> tuple[int, object] | None:
        """The next answer with its request's id, or None at the end of the stream."""
        async with asyncio.timeout(30):
            while (frame := self.decoder.next_frame()) is None:
                try:
                    data = await asyncio.get_running_loop().sock_recv(self.sock, 65536)
                except ConnectionResetError:
                    return None
                if not data:
                    return None
                self.decoder.feed(data)
        return frame.request_id, decode_answer(frame)

    async def ask(self, request: Request, request_id: int = 1) -> object:
        await self.send(encode_message(request, request_id))
        answered = await self.answer()
        assert answered is not None
        assert answered[0] == request_id
        return answered[1]

    async def greet(self) -> None:
        assert isinstance(await self.ask(Hello(1), 0), Welcome)
        assert isinstance(await self.ask(OpenNamespace(NAMESPACE)), Done)


async def _until(condition: Callable[[], object]) -> None:
    """Let the loop run until something holds that no call announces."""
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0)


def _num_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@contextlib.asynccontextmanager
async def _greeted(tmp_path: Path) -> AsyncIterator[RawClient]:
    async with RawClient(tmp_path / "kv.sock") as raw:
        await raw.greet()
        yield raw


@pytest.mark.usefixtures("server")
@pytest.mark.parametrize(
    ("offered", "taken"),
    [(0, 0), (1, 1), (2, 0), (8, 0), (16, 16), (17, 17), (4, 4), (31, 21), (1 << 40 | 1, 1), (1 << 40, 0)],
)
async def test_a_greeting_is_answered_with_what_both_sides_understand(
    tmp_path: Path, offered: int, taken: int
) -> None:
    async with RawClient(tmp_path / "kv.sock") as raw:
        await raw.send(encode_message(Hello(1), offered))

        answered = await raw.answer()

        assert answered is not None
        assert answered[0] == taken
        assert isinstance(answered[1], Welcome)


@pytest.mark.usefixtures("server")
@pytest.mark.parametrize("is_sampled", [True, False])
async def test_a_traced_request_is_answered_as_one_that_is_not(tmp_path: Path, is_sampled: bool) -> None:
    trace = TraceContext(b"t" * 16, b"s" * 8, is_sampled)
    async with _greeted(tmp_path) as raw:
        for request in (Ping(), Match(ChainRef(NAMESPACE.chain(range(64))), 1_000_000)):
            plain = await raw.ask(request)
            await raw.send(encode_message(request, 7, trace=trace))

            assert await raw.answer() == (7, plain)


async def test_the_socket_is_private_and_goes_when_the_server_stops(tmp_path: Path) -> None:
    path = tmp_path / "kv.sock"
    async with serving(_config(), socket_path=path):
        mode = path.stat().st_mode

    assert stat.S_IMODE(mode) == 0o600
    assert not path.exists()


async def test_a_stale_socket_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "kv.sock"
    with socket.socket(socket.AF_UNIX) as left_behind:
        left_behind.bind(str(path))

    async with serving(_config(), socket_path=path), await AsyncKVStore.connect(path) as client:
        await client.ping()


async def test_a_live_socket_is_refused_and_left_alone(server: StoreServer, tmp_path: Path) -> None:
    path = tmp_path / "kv.sock"

    with pytest.raises(InvalidConfig, match="another server answers"):
        async with serving(_config(), socket_path=path):
            pass

    async with await AsyncKVStore.connect(path) as client:
        await client.ping()


async def test_a_file_in_the_way_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "kv.sock"
    path.write_text("precious")

    with pytest.raises(InvalidConfig, match="something else"):
        async with serving(_config(), socket_path=path):
            pass

    assert path.read_text() == "precious"


async def test_a_missing_folder_is_made_for_the_servers_user_alone(tmp_path: Path) -> None:
    path = tmp_path / "kvstore" / "kv.sock"

    async with serving(_config(), socket_path=path), await AsyncKVStore.connect(path) as client:
        await client.ping()

    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


@pytest.mark.parametrize("folder", ["absent/kvstore", "file", "file/kvstore"])
async def test_a_folder_that_cannot_be_made_is_one_clear_error(tmp_path: Path, folder: str) -> None:
    (tmp_path / "file").touch()

    with pytest.raises(InvalidConfig, match=r"kv\.sock: .+: .+folder|folder .+: .+: make "):
        async with serving(_config(), socket_path=tmp_path / folder / "kv.sock"):
            pass

    assert not (tmp_path / "absent").exists()


def _config_with_ssd(folder: Path) -> Config:
    return Config.from_dict(
        {
            "tiers": {
                "dram": {"capacity_bytes": 4 * MIB, "staging_bytes": MIB},
                "ssd": {"path": str(folder), "capacity_bytes": 4 * MIB},
            }
        }
    )


async def test_a_server_whose_socket_is_taken_makes_nothing(server: StoreServer, tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match="another server answers"):
        async with serving(_config_with_ssd(tmp_path / "ssd"), socket_path=tmp_path / "kv.sock"):
            pass

    assert not (tmp_path / "ssd").exists()


async def test_a_tier_that_cannot_be_opened_leaves_no_socket(tmp_path: Path) -> None:
    (tmp_path / "ssd").write_text("in the way")

    with pytest.raises(TierUnavailable):
        async with serving(_config_with_ssd(tmp_path / "ssd"), socket_path=tmp_path / "kv.sock"):
            pass

    assert not (tmp_path / "kv.sock").exists()


async def test_whoever_connects_before_the_tiers_are_open_is_told_so_at_once(tmp_path: Path) -> None:
    path = tmp_path / "kv.sock"
    store = assemble(_config())
    server = StoreServer(store.manager, socket_path=path)
    await server.listen()
    await store.manager.open()

    async with await AsyncKVStore.connect(path, timeouts=PATIENT) as client:
        with pytest.raises(ServerUnavailable, match="starting"):
            await client.ping()
        with pytest.raises(InvalidConfig, match="another server answers"):
            await StoreServer(store.manager, socket_path=path).listen()
        server.start(store.dram.arena.fd)
        await client.ping(timeout_s=10)

    await server.stop()
    await store.manager.close()


@pytest.mark.parametrize("address", ["", "unix:", "http://host/x", "a\0b", "x" * 108, "é" * 54])
def test_an_address_that_cannot_be_a_socket_is_refused(address: str) -> None:
    with pytest.raises(InvalidConfig):
        parse_address(address)


def test_a_path_that_is_too_long_is_refused_with_its_length_and_the_limit() -> None:
    with pytest.raises(InvalidConfig, match=r"108 bytes, limit 107: use a shorter folder"):
        parse_address("/" + "x" * 107)


@pytest.mark.parametrize("address", ["unix:/run/kv.sock", "unix:///run/kv.sock", "/run/kv.sock"])
def test_every_form_of_an_address_names_the_path(address: str) -> None:
    assert parse_address(address) == Path("/run/kv.sock")


async def test_two_servers_may_start_in_one_folder_at_once(tmp_path: Path) -> None:
    async with serving(_config(), socket_path=tmp_path / "a"), serving(_config(), socket_path=tmp_path / "b"):
        assert (tmp_path / "a").is_socket()
        assert (tmp_path / "b").is_socket()


async def test_a_malformed_frame_ends_its_connection_and_no_other(
    server: StoreServer, client: AsyncKVStore, tmp_path: Path
) -> None:
    await client.ping()
    async with _greeted(tmp_path) as raw:
        await raw.send(b"GET / HTTP/1.1\r\n\r\n" + bytes(100))
        ended = await raw.answer()

    await client.ping()
    assert ended is None
    assert server.counters.protocol_errors == 1
    assert client.client_stats().connects == 1


@pytest.mark.parametrize(
    "data",
    [
        encode_message(Hello(1), 7),
        struct.pack("<4sHHQI", b"KVSF", VERSION, 999, 7, 1) + b"\x90",
        struct.pack("<4sHHQI", b"KVSF", VERSION, Match.KIND, 7, 3) + b"\x93\x01\x02",
        struct.pack("<4sHHQI", b"KVSF", VERSION, Match.KIND, 7, MAX_BODY_BYTES + 1),
        encode_message(Count(1), 7),
    ],
    ids=["second greeting", "unknown kind", "malformed body", "oversized", "an answer"],
)
async def test_a_frame_that_breaks_the_protocol_ends_the_connection(
    server: StoreServer, tmp_path: Path, data: bytes
) -> None:
    async with _greeted(tmp_path) as raw:
        await raw.send(data)

        assert await raw.answer() is None
    assert server.counters.protocol_errors == 1


@pytest.mark.parametrize("version", [1, 9])
async def test_a_client_of_another_version_is_told_so_in_its_own(
    server: StoreServer, tmp_path: Path, version: int
) -> None:
    async with RawClient(tmp_path / "kv.sock") as raw:
        hello = encode_message(Hello(1), 0)
        await raw.send(hello[:4] + version.to_bytes(2, "little") + hello[6:])
        data = await asyncio.get_running_loop().sock_recv(raw.sock, 65536)
        assert data[4:6] == version.to_bytes(2, "little")
        raw.decoder.feed(data[:4] + VERSION.to_bytes(2, "little") + data[6:])
        answered = await raw.answer()

        assert answered is not None
        assert isinstance(answered[1], Failed)
        assert f"version {version}, this side speaks {VERSION}" in answered[1].message
        assert await raw.answer() is None
    assert server.counters.protocol_errors == 1


async def test_a_frame_of_another_version_after_the_greeting_ends_the_connection(
    server: StoreServer, tmp_path: Path
) -> None:
    async with _greeted(tmp_path) as raw:
        ping = encode_message(Ping(), 7)
        await raw.send(ping[:4] + b"\x01\x00" + ping[6:])

        assert await raw.answer() is None
    assert server.counters.protocol_errors == 1


async def test_a_request_before_the_greeting_is_refused(server: StoreServer, tmp_path: Path) -> None:
    async with RawClient(tmp_path / "kv.sock") as raw:
        assert isinstance(await raw.ask(Ping(), 0), Failed)


@pytest.mark.parametrize("name", ["", "../up"])
async def test_a_malformed_request_before_the_greeting_is_refused_and_leaves_nothing(
    server: StoreServer, tmp_path: Path, name: str
) -> None:
    frame = encode_frame(GetRecord.KIND, 0, (b"", "sessions", name, 1))
    async with RawClient(tmp_path / "kv.sock") as raw:
        await raw.send(frame)

        assert await raw.answer() is not None
        assert await raw.answer() is None
    assert server.counters.protocol_errors == 1


async def test_more_clients_than_allowed_are_refused_with_the_limit(tmp_path: Path) -> None:
    path = tmp_path / "kv.sock"
    async with (
        serving(_config(max_connections=1), socket_path=path) as server,
        await AsyncKVStore.connect(path) as first,
        await AsyncKVStore.connect(path) as second,
    ):
        await first.ping()

        with pytest.raises(ServerUnavailable, match=r"1 clients are connected.*max_connections"):
            await second.ping()
        assert server.counters.refused_connections == 1
        await first.ping()


async def test_several_requests_of_a_connection_are_each_answered_by_id(
    server: StoreServer, tmp_path: Path
) -> None:
    about = ChainRef(NAMESPACE.chain(range(8)))
    async with _greeted(tmp_path) as raw:
        sent = {at: Match(about, 1000) if at % 2 else Ping() for at in range(10, 110)}
        await raw.send(b"".join(encode_message(request, at) for at, request in sent.items()))
        answered = [await raw.answer() for _ in sent]

    assert {answer[0] for answer in answered if answer is not None} == set(sent)


async def test_an_id_that_is_under_way_may_not_be_used_again(server: StoreServer, tmp_path: Path) -> None:
    about = ChainRef(NAMESPACE.chain(range(8)))
    async with _greeted(tmp_path) as raw:
        await raw.send(encode_message(Prefetch(about, 1000), 5) * 2)

        assert await raw.answer() is None
    assert server.counters.protocol_errors == 1


async def test_a_client_can_neither_end_anothers_lease_nor_return_anothers_slots(
    server: StoreServer, client: AsyncKVStore, tmp_path: Path
) -> None:
    chain = NAMESPACE.chain(range(8))
    async with _greeted(tmp_path) as holder, _greeted(tmp_path) as other:
        lent = await holder.ask(Reserve(ChainRef(chain), 1_000_000))
        assert isinstance(lent, Lent)
        await other.send(
            encode_message(ReturnSlots(tuple(UnusedSlot(at.offset, at.generation) for at in lent.slots)), 2)
        )
        await other.ask(Ping())
        stolen = await other.ask(
            Commit(
                ChainRef(chain),
                tuple(WrittenSlot(at.position, at.offset, at.generation, 0) for at in lent.slots),
            )
        )
        assert stolen == Count(0)
        assert (await client.stats())["tiers"]["dram"]["used_bytes"] == 8192
        await client.ping()

    await client.put(chain, np.zeros(8192, np.uint8))
    async with _greeted(tmp_path) as holder, _greeted(tmp_path) as other:
        await holder.ask(Fetch(ChainRef(chain), 1_000_000))
        for lease in range(20):
            await other.send(encode_message(Release(lease), 3))
        await other.ask(Ping())

        assert await client.drop(chain) == 0


async def test_a_slot_cannot_be_committed_twice_or_in_another_generation(
    server: StoreServer, client: AsyncKVStore, tmp_path: Path
) -> None:
    about = ChainRef(NAMESPACE.chain(range(4)))
    async with _greeted(tmp_path) as raw:
        lent = await raw.ask(Reserve(about, 1_000_000))
        assert isinstance(lent, Lent)
        (slot,) = lent.slots
        stale = WrittenSlot(0, slot.offset, slot.generation + 1, 0)
        right = WrittenSlot(0, slot.offset, slot.generation, 0)

        assert await raw.ask(Commit(about, (stale,))) == Count(0)
        assert await raw.ask(Commit(about, (right,))) == Count(1)
        assert await raw.ask(Commit(about, (right,))) == Count(0)


async def test_a_chain_of_an_unknown_namespace_is_refused_and_the_connection_goes_on(
    server: StoreServer, tmp_path: Path
) -> None:
    about = ChainRef(NAMESPACE.at_epoch(3).chain(range(8)))
    async with _greeted(tmp_path) as raw:
        answer = await raw.ask(Match(about, 1000))

        assert isinstance(answer, Failed)
        assert answer.code is FailureCode.NAMESPACE_NOT_OPEN
        assert await raw.ask(Ping()) == Done()


async def test_a_chain_that_names_a_block_twice_is_refused_and_the_connection_goes_on(
    server: StoreServer, client: AsyncKVStore
) -> None:
    chain = NAMESPACE.chain(range(4))
    twice = PrefixChain(chain.namespace, chain.keys * 2, 4)

    for call in (client.match(twice), client.put(twice, np.zeros(8192, np.uint8)), client.drop(twice)):
        with pytest.raises(InvalidRequest, match="names a block twice"):
            await call
    assert (await client.match(chain)).blocks == 0
    assert client.client_stats().connects == 1


async def test_a_client_that_does_not_read_is_bounded_and_then_closed(
    server: StoreServer, client: AsyncKVStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving_module, "_SLOW_READER_S", 0.05)
    async with _greeted(tmp_path) as raw:
        stats = encode_message(Stats(), 1)
        with contextlib.suppress(ConnectionError, TimeoutError):
            async with asyncio.timeout(20):
                while not server.counters.slow_readers:
                    await raw.send(stats * 100)

    await client.ping()
    assert server.counters.slow_readers == 1


async def test_requests_under_way_are_answered_when_the_server_stops(tmp_path: Path) -> None:
    path = tmp_path / "kv.sock"
    async with serving(_config(), socket_path=path) as server, _greeted(tmp_path) as raw:
        await raw.send(encode_message(Check(64, 10_000_000), 9))
        await _until(lambda: server.counters.requests["check"])
        stopping = asyncio.create_task(server.stop())
        answered = await raw.answer()
        await stopping

        assert answered is not None
        assert answered[0] == 9
        assert await raw.answer() is None


async def test_a_connection_that_ends_gives_back_everything(
    server: StoreServer, client: AsyncKVStore, tmp_path: Path
) -> None:
    chain = NAMESPACE.chain(range(40))
    for _ in range(50):
        async with _greeted(tmp_path) as raw:
            await raw.send(encode_message(Reserve(ChainRef(chain), 1_000_000), 2))
    await client.ping()
    await _until(lambda: server.num_connections == 1)

    stats = await client.stats()
    assert (stats["owners"], stats["tiers"]["dram"]["used_bytes"]) == (1, 0)
    assert await client.check() == []


def test_sigterm_ends_a_serving_process_with_status_zero_and_no_socket(tmp_path: Path) -> None:
    with StoreProcess(tmp_path) as store:
        status = store.terminate()

        assert status == 0
        assert not store.socket_path.exists()


def test_a_killed_server_leaves_a_socket_that_its_successor_replaces(tmp_path: Path) -> None:
    with StoreProcess(tmp_path) as store:
        store.kill()
        assert store.socket_path.exists()
        store.start()

        assert store.is_running


async def test_no_descriptor_is_left_after_many_connections(server: StoreServer, tmp_path: Path) -> None:
    async def visit() -> None:
        async with await AsyncKVStore.connect(tmp_path / "kv.sock", timeouts=PATIENT) as visitor:
            await visitor.ping()

    await visit()
    before = _num_descriptors()
    for _ in range(100):
        await visit()
    await _until(lambda: not server.num_connections)

    assert _num_descriptors() <= before


@pytest.mark.parametrize("seed", range(10))
async def test_mutated_frames_harm_nobody_else(
    server: StoreServer, client: AsyncKVStore, tmp_path: Path, seed: int
) -> None:
    choose = random.Random(seed)
    about = ChainRef(NAMESPACE.chain(range(16)))
    originals = [
        encode_message(request, 3)
        for request in (Match(about, 9), Fetch(about, 9), Reserve(about, 9), Release(1), Stats(), Ping())
    ]
    for _ in range(40):
        async with _greeted(tmp_path) as raw:
            data = bytearray(b"".join(choose.choices(originals, k=5)))
            for _ in range(choose.randint(1, 5)):
                data[choose.randrange(len(data))] = choose.randrange(256)
            with contextlib.suppress(ConnectionError):
                await raw.send(bytes(data))
    await _until(lambda: server.num_connections <= 1)
    await client.ping()

    stats = await client.stats()
    assert (stats["owners"], stats["tiers"]["dram"]["used_bytes"]) == (1, 0)
    assert await client.check() == []
