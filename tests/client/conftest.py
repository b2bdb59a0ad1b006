"""A store in another process, and clients of every kind."""

import contextlib
import random
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from kvstore import AsyncKVStore, KVLayout, KVStore, Namespace, PrefixChain, Timeouts
from kvstore.config import Config
from kvstore.errors import InvalidRequest
from tests.client.facade import Face, SyncFace
from tests.redis_server import free_port
from tests.store_process import MIB, StoreProcess

PATIENT = Timeouts(match_s=10, fetch_s=10, put_s=10, control_s=10)
BLOCK_BYTES = 64 << 10
Start = Callable[[int], StoreProcess]
"""Returns a running store, given the port of its HTTP face (0: none)."""

NAMESPACE = Namespace("tiny", KVLayout.opaque(block_bytes=BLOCK_BYTES, block_tokens=4))


@pytest.fixture
def namespace() -> Namespace:
    return NAMESPACE


@pytest.fixture
def chain() -> PrefixChain:
    """Eight blocks."""
    return NAMESPACE.chain(range(32))


@pytest.fixture
def new_chain(request: pytest.FixtureRequest) -> PrefixChain:
    """Eight blocks that no other test has."""
    source = random.Random(request.node.nodeid)
    return NAMESPACE.chain([source.randrange(1 << 31) for _ in range(32)])


@pytest.fixture
def payloads() -> npt.NDArray[np.uint8]:
    """Bytes of eight blocks, one per row."""
    return np.random.default_rng(7).integers(0, 256, (8, BLOCK_BYTES), np.uint8)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[StoreProcess]:
    with StoreProcess(tmp_path) as running:
        yield running


@pytest.fixture
def sync_client(store: StoreProcess) -> Iterator[KVStore]:
    with KVStore.connect(f"unix:{store.socket_path}", timeouts=PATIENT) as client:
        client.open_namespace(NAMESPACE)
        yield client


@pytest.fixture
async def async_client(store: StoreProcess) -> AsyncIterator[AsyncKVStore]:
    async with await AsyncKVStore.connect(store.socket_path, timeouts=PATIENT) as client:
        await client.open_namespace(NAMESPACE)
        yield client


in_shared_memory = pytest.mark.parametrize("client", ["sync", "async", "local"], indirect=True)
"""For tests of what a client over HTTP refuses."""


KINDS = ["sync", "async", "local", "http", "async_http"]


@pytest.fixture(params=KINDS)
async def client(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Face]:
    """A client of each kind, of a store of its own; what it used must be sound afterwards."""
    with contextlib.ExitStack() as stores:

        def start(port: int) -> StoreProcess:
            return stores.enter_context(StoreProcess(tmp_path, http_port=port))

        async with _connected(request.param, start) as face:
            yield face


@pytest.fixture(scope="module")
def start_shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """Starts a store when the first of a module's tests asks for one."""
    with contextlib.ExitStack() as stores:
        started: dict[bool, StoreProcess] = {}

        def start(port: int) -> StoreProcess:
            if bool(port) not in started:
                folder = tmp_path_factory.mktemp("shared")
                process = StoreProcess(folder, http_port=port, dram_bytes=128 * MIB)
                started[bool(port)] = stores.enter_context(process)
            return started[bool(port)]

        yield start


@pytest.fixture(params=KINDS)
async def guest(request: pytest.FixtureRequest, start_shared: Start) -> AsyncIterator[Face]:
    """A client of each kind, of a store that other tests of the module use too."""
    async with _connected(request.param, start_shared) as face:
        yield face


@contextlib.asynccontextmanager
async def _connected(kind: str, start: Start) -> AsyncIterator[Face]:
    async with contextlib.AsyncExitStack() as opened:
        face: Face
        if kind == "local":
            tiers = {"dram": {"capacity_bytes": 16 * MIB, "staging_bytes": MIB}}
            local = KVStore.local(Config.from_dict({"tiers": tiers}), timeouts=PATIENT)
            face = SyncFace(opened.enter_context(local))
        else:
            is_http = "http" in kind
            store = start(free_port() if is_http else 0)
            address = store.url if is_http else store.socket_path
            if kind.startswith("async"):
                face = await AsyncKVStore.connect(address, timeouts=PATIENT)
                await opened.enter_async_context(face)
            else:
                remote = KVStore.connect(address, timeouts=PATIENT)
                face = SyncFace(opened.enter_context(remote))
        await face.open_namespace(NAMESPACE)
        yield face
        with contextlib.suppress(InvalidRequest):  # the test closed the client
            assert await face.check() == []
