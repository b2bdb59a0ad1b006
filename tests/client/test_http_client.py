"""Clients over HTTP: leases, refusals, tenants, faults of the server and of what lies between."""

import asyncio
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from kvstore import AsyncKVStore, ClientStats, KVStore, MissReason, PrefixChain, PutResult, Timeouts
from kvstore.auth import Scope
from kvstore.checksum import checksum
from kvstore.errors import (
    Forbidden,
    InvalidConfig,
    InvalidRequest,
    ServerUnavailable,
    Unauthorized,
)
from kvstore.keyring_file import add_key, create_keyring, remove_key
from kvstore.server_address import HttpAddress, parse_http_address
from tests.black_hole import black_hole
from tests.client.conftest import BLOCK_BYTES, NAMESPACE, PATIENT
from tests.client.scripted_http import answering, reply
from tests.redis_server import free_port
from tests.store_process import StoreProcess
from tests.tiers.certificates import Authority
from tests.tiers.reply_proxy import ReplyProxy

pytestmark = pytest.mark.usefixtures("namespace")


@pytest.fixture
def http_store(tmp_path: Path) -> Iterator[StoreProcess]:
    with StoreProcess(tmp_path, http_port=free_port()) as running:
        yield running


@pytest.fixture
def http_client(http_store: StoreProcess) -> Iterator[KVStore]:
    with KVStore.connect(http_store.url, timeouts=PATIENT) as client:
        client.open_namespace(NAMESPACE)
        yield client


def opened_reply() -> bytes:
    return json.dumps(
        {"namespace": NAMESPACE.digest.hex(), "tenant_salt": "", "block_bytes": BLOCK_BYTES}
    ).encode()


# Leases


def test_a_lease_over_http_keeps_blocks_and_is_released(
    http_client: KVStore, chain: PrefixChain, payloads: np.ndarray
) -> None:
    http_client.put(chain, payloads)
    with http_client.lease(chain) as lease:
        assert (lease.blocks, lease.tiers, lease.reason) == (8, ("dram",) * 8, None)
        assert lease.is_valid()
        assert http_client.drop(chain) == 0
        assert lease.renew()
    assert not lease.is_valid()
    assert http_client.drop(chain) == 8


def test_a_match_leases_in_the_same_round_trip(
    http_client: KVStore, chain: PrefixChain, payloads: np.ndarray
) -> None:
    http_client.put(chain[:3], payloads[:3])
    found = http_client.match(chain, lease=True)
    assert (found.blocks, found.lease.blocks, found.reason) == (3, 3, MissReason.NEVER_SEEN)
    assert http_client.drop(chain[:3]) == 0
    found.lease.release()
    found.lease.release()
    assert http_client.drop(chain[:3]) == 3


def test_a_lease_that_the_server_does_not_know_is_not_renewed(
    http_store: StoreProcess, http_client: KVStore, chain: PrefixChain, payloads: np.ndarray
) -> None:
    http_client.put(chain, payloads)
    lease = http_client.lease(chain)
    http_store.kill()
    http_store.start()
    assert not lease.renew()
    lease.release()


def test_what_needs_shared_memory_is_refused_with_the_remedy(
    http_client: KVStore, chain: PrefixChain, payloads: np.ndarray
) -> None:
    http_client.put(chain, payloads)
    with pytest.raises(InvalidRequest, match="use put"):
        http_client.reserve(chain)
    with http_client.lease(chain) as lease, pytest.raises(InvalidRequest, match="use get"):
        http_client.view(lease)
    with pytest.raises(InvalidRequest, match="no shared memory"):
        http_client.register_with_cuda()


# Who calls


def tenants(folder: Path, **scopes: set[Scope]) -> tuple[Path, dict[str, str]]:
    keyring = folder / "keys"
    create_keyring(keyring)
    made = {
        name: add_key(keyring, name, tenant=name.partition("_")[0], scopes=frozenset(allowed))
        for name, allowed in scopes.items()
    }
    return keyring, made


@contextmanager
def guarded_store(folder: Path, keyring: Path, **tls: Path) -> Iterator[StoreProcess]:
    port = free_port()
    more = "".join(f'{name} = "{path}"\n' for name, path in tls.items())
    with StoreProcess(folder, http_port=port, http_more=f'api_keys = "file:{keyring}"\n{more}') as store:
        yield store


ALL = {Scope.READ, Scope.WRITE, Scope.ADMIN}


def test_two_tenants_never_meet(tmp_path: Path, payloads: np.ndarray) -> None:
    keyring, keys = tenants(tmp_path, one=ALL, two=ALL)
    with (
        guarded_store(tmp_path, keyring) as store,
        KVStore.connect(store.url, api_key=keys["one"], timeouts=PATIENT) as first,
        KVStore.connect(store.url, api_key=keys["two"], timeouts=PATIENT) as second,
    ):
        ours, theirs = first.open_namespace(NAMESPACE), second.open_namespace(NAMESPACE)
        assert ours.tenant_salt
        assert ours.digest != theirs.digest
        assert first.put(ours.chain(range(32)), payloads).stored == 8
        assert second.match(theirs.chain(range(32))).blocks == 0
        second._state.open_namespace(ours)  # it learned the other's salt
        stolen = ours.chain(range(32))
        assert second.match(stolen).blocks == 0
        assert second.exists(stolen) == [False] * 8
        assert second.get(stolen) == []
        assert second.client_stats().refused == 3
        assert len(first.get(stolen)) == 8


def test_an_unknown_key_is_an_error_at_the_start_and_a_miss_on_the_data_path(
    tmp_path: Path, chain: PrefixChain, payloads: np.ndarray
) -> None:
    keyring, keys = tenants(tmp_path, one=ALL)
    with guarded_store(tmp_path, keyring) as store:
        with (
            KVStore.connect(store.url, api_key="wrong", timeouts=PATIENT) as stranger,
            pytest.raises(Unauthorized),
        ):
            stranger.open_namespace(NAMESPACE)
        with KVStore.connect(store.url, api_key=keys["one"], timeouts=PATIENT) as client:
            ours = client.open_namespace(NAMESPACE).chain(range(32))
            client.put(ours, payloads)
            remove_key(keyring, "one")
            give_up_s = time.monotonic() + 30
            while client.match(ours).blocks and time.monotonic() < give_up_s:
                time.sleep(0.05)
            found = client.match(ours)
            assert (found.blocks, found.reason) == (0, MissReason.UNAVAILABLE)
            assert client.put(ours, payloads) == PutResult(0, 0, 8, tuple(range(8)))
            assert client.client_stats().refused > 0
            with pytest.raises(Unauthorized):
                client.ping()


def test_a_scope_that_a_key_lacks_is_forbidden(tmp_path: Path, payloads: np.ndarray) -> None:
    keyring, keys = tenants(tmp_path, one_reader={Scope.READ})
    with (
        guarded_store(tmp_path, keyring) as store,
        KVStore.connect(store.url, api_key=keys["one_reader"], timeouts=PATIENT) as reader,
    ):
        chain = reader.open_namespace(NAMESPACE).chain(range(32))
        assert reader.put(chain, payloads).dropped == 8
        for call in (reader.stats, reader.check, reader.flush, reader.namespaces):
            with pytest.raises(Forbidden):
                call()
        with pytest.raises(Forbidden):
            reader.drop(chain)
        with pytest.raises(Forbidden):
            reader.open_namespace(NAMESPACE, is_public=True)


def test_https_with_an_authority_of_our_own(tmp_path: Path, payloads: np.ndarray) -> None:
    authority = Authority(tmp_path / "authority")
    folder = authority.folder("server", authority.sign("server", alternative="IP:127.0.0.1"))
    (folder / "ca.crt").unlink()  # with it, the server would ask for certificates
    keyring, keys = tenants(tmp_path, one=ALL)
    trusting = authority.folder("client")
    with guarded_store(tmp_path, keyring, tls_folder=folder) as store:
        url = store.url.replace("http:", "https:")
        with KVStore.connect(url, api_key=keys["one"], tls_folder=trusting, timeouts=PATIENT) as client:
            chain = client.open_namespace(NAMESPACE).chain(range(32))
            assert client.put(chain, payloads).stored == 8
            assert np.array_equal(np.array(client.get(chain)), payloads)
        with (
            KVStore.connect(url, api_key=keys["one"], timeouts=PATIENT) as doubting,
            pytest.raises(ServerUnavailable, match="certificate is not accepted"),
        ):
            doubting.open_namespace(NAMESPACE)


# Faults


def test_an_absent_server_is_a_miss(chain: PrefixChain, payloads: np.ndarray) -> None:
    with KVStore.connect(f"http://127.0.0.1:{free_port()}", timeouts=PATIENT) as client:
        client._state.open_namespace(NAMESPACE)
        assert client.match(chain).reason is MissReason.UNAVAILABLE
        assert client.get(chain) == []
        assert client.put(chain, payloads).dropped == 8
        with pytest.raises(ServerUnavailable):
            client.ping()


def test_a_restarted_server_is_reached_again(
    http_store: StoreProcess, http_client: KVStore, chain: PrefixChain, payloads: np.ndarray
) -> None:
    http_client.put(chain, payloads)
    http_store.kill()
    assert http_client.match(chain).blocks == 0
    http_store.start()
    http_client.ping()
    assert http_client.match(chain).reason is MissReason.NEVER_SEEN
    assert http_client.put(chain, payloads).stored == 8


def test_a_payload_that_was_damaged_on_the_way_is_not_served(
    http_store: StoreProcess, chain: PrefixChain, payloads: np.ndarray
) -> None:
    proxy = ReplyProxy(http_store.settings.http_port)
    with KVStore.connect(f"http://127.0.0.1:{proxy.port}", timeouts=PATIENT) as client:
        client.open_namespace(NAMESPACE)
        client.put(chain, payloads)
        wrong = payloads[4, :64].tobytes()
        proxy.mangle = lambda data: data.replace(wrong, bytes(64))
        out = np.zeros_like(payloads)
        result = client.fetch_into(chain, out)
        assert (result.blocks, result.reason) == (4, MissReason.CORRUPT)
        assert np.array_equal(out[:4], payloads[:4])
        assert client.client_stats().checksum_failures == 1
        proxy.mangle = lambda data: data
        assert client.fetch_into(chain, out).blocks == 8
    proxy.stop()


def test_a_put_that_was_damaged_on_the_way_is_not_stored(
    http_client: KVStore, chain: PrefixChain, payloads: np.ndarray
) -> None:
    sums = [checksum(row) for row in payloads]
    sums[5] ^= 1
    result = http_client.put(chain, payloads, checksums=sums)
    assert (result.stored, result.doubtful) == (5, (5, 6, 7))
    assert http_client.match(chain).blocks == 5


def test_a_cut_answer_keeps_the_whole_blocks_before_it(
    http_store: StoreProcess, chain: PrefixChain, payloads: np.ndarray
) -> None:
    proxy = ReplyProxy(http_store.settings.http_port)
    with KVStore.connect(f"http://127.0.0.1:{proxy.port}", timeouts=PATIENT) as client:
        client.open_namespace(NAMESPACE)
        client.put(chain, payloads)
        passed = 0

        def cut(data: bytes) -> bytes | None:
            nonlocal passed
            passed += len(data)
            return data if passed <= 3 * BLOCK_BYTES else None

        proxy.mangle = cut
        out = np.zeros_like(payloads)
        result = client.fetch_into(chain, out)
        assert result.blocks <= 3
        assert result.reason is MissReason.UNAVAILABLE
        assert np.array_equal(out[: result.blocks], payloads[: result.blocks])
    proxy.stop()


@pytest.mark.parametrize(
    "body",
    [
        b"not JSON",
        b"[]",
        b'{"blocks": 9, "tiers": [], "reason": null}',
        b'{"blocks": 9, "tiers": ["a","a","a","a","a","a","a","a","a"], "reason": null}',
        b'{"blocks": -1, "tiers": []}',
        b'{"blocks": true, "tiers": ["dram"]}',
        b'{"blocks": 0, "tiers": [], "reason": "made up"}',
        b"[" * 100_000,
    ],
)
def test_an_answer_of_another_form_is_a_counted_miss(body: bytes, chain: PrefixChain) -> None:
    with answering(reply(body)) as url, KVStore.connect(url, timeouts=PATIENT) as client:
        client._state.open_namespace(NAMESPACE)
        assert client.match(chain).blocks == 0
        assert client.client_stats().protocol_errors == 1


@pytest.mark.parametrize("body", [b"", b'{"blocks": 0, "tiers": [], "reason": null}'], ids=["none", "part"])
def test_a_server_that_dies_in_its_answer_is_called_unavailable_and_no_liar(
    body: bytes, chain: PrefixChain
) -> None:
    answer = reply(body, length=len(body) + 100)
    with answering(answer) as url, KVStore.connect(url, timeouts=PATIENT) as client:
        client._state.open_namespace(NAMESPACE)
        assert client.match(chain).reason is MissReason.UNAVAILABLE
        assert client.client_stats().protocol_errors == 0


def test_a_server_that_dies_in_the_head_of_a_fetch_is_no_liar(chain: PrefixChain) -> None:
    with answering(reply(b"\x10\0", length=100)) as url, KVStore.connect(url, timeouts=PATIENT) as client:
        client._state.open_namespace(NAMESPACE)
        assert client.get(chain) == []
        assert client.client_stats().protocol_errors == 0


@pytest.mark.parametrize("raw", [b"SSH-2.0-x\r\n", b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 1000, b"\0" * 100])
def test_a_server_that_speaks_something_else_is_a_miss(raw: bytes, chain: PrefixChain) -> None:
    def answer(stream: socket.socket) -> None:
        stream.recv(1 << 16)
        stream.sendall(raw)

    with answering(answer) as url, KVStore.connect(url, timeouts=PATIENT) as client:
        client._state.open_namespace(NAMESPACE)
        assert client.match(chain).blocks == 0


def test_an_address_that_swallows_everything_does_not_hide_the_next_one(chain: PrefixChain) -> None:
    with (
        black_hole() as silent,
        answering(reply(b'{"blocks": 0, "tiers": [], "reason": null}')) as url,
        KVStore.connect(url, timeouts=PATIENT) as client,
    ):
        client._state.open_namespace(NAMESPACE)
        address = parse_http_address(url)
        places = [(socket.AF_INET, silent), (socket.AF_INET, (address.host, address.port))]
        client._transport._lookup._found = found = Future()
        found.set_result(places)
        assert client.match(chain, timeout_s=6).reason is None


def test_a_redirect_is_not_followed(chain: PrefixChain) -> None:
    def answer(stream: socket.socket) -> None:
        stream.recv(1 << 16)
        stream.sendall(b"HTTP/1.1 302 X\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n")

    with answering(answer) as url, KVStore.connect(url, timeouts=PATIENT) as client:
        client._state.open_namespace(NAMESPACE)
        assert client.match(chain).reason is MissReason.UNAVAILABLE


def test_a_server_that_dribbles_costs_no_more_than_the_timeout(chain: PrefixChain) -> None:
    ended = threading.Event()

    def answer(stream: socket.socket) -> None:
        stream.recv(1 << 16)
        for byte in b"HTTP/1.1 200 OK\r\nContent-Length: 99999\r\n\r\n" + b" " * 10_000:
            if ended.wait(0.02):
                return
            try:
                stream.sendall(bytes([byte]))
            except OSError:
                return

    with answering(answer) as url, KVStore.connect(url, timeouts=PATIENT) as client:
        client._state.open_namespace(NAMESPACE)
        began_s = time.monotonic()
        found = client.match(chain, timeout_s=0.3)
        assert (found.blocks, found.reason) == (0, MissReason.TIMED_OUT)
        assert time.monotonic() - began_s < 5
        ended.set()


def test_another_namespace_than_was_asked_for_is_refused() -> None:
    body = opened_reply().replace(NAMESPACE.digest.hex().encode(), b"00" * 32)
    with (
        answering(reply(body)) as url,
        KVStore.connect(url, timeouts=PATIENT) as client,
        pytest.raises(Exception, match="another namespace"),
    ):
        client.open_namespace(NAMESPACE)


async def test_a_cancelled_call_ends_soon_and_leaves_the_buffers_alone(chain: PrefixChain) -> None:
    asked = threading.Event()
    ended = threading.Event()

    def answer(stream: socket.socket) -> None:
        stream.recv(1 << 16)
        asked.set()
        ended.wait(30)

    with answering(answer) as url:
        async with await AsyncKVStore.connect(url, timeouts=PATIENT) as client:
            client._state.open_namespace(NAMESPACE)
            call = asyncio.create_task(client.fetch_into(chain, bytearray(8 * BLOCK_BYTES)))
            await asyncio.to_thread(asked.wait, 30)
            began_s = time.monotonic()
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            assert time.monotonic() - began_s < 5
            ended.set()
            assert client.client_stats() == ClientStats()  # it is no call that was not served


async def test_closing_ends_calls_under_way_as_misses(chain: PrefixChain) -> None:
    asked = threading.Event()
    ended = threading.Event()

    def answer(stream: socket.socket) -> None:
        stream.recv(1 << 16)
        asked.set()
        ended.wait(30)

    with answering(answer) as url:
        client = await AsyncKVStore.connect(url, timeouts=PATIENT)
        client._state.open_namespace(NAMESPACE)
        call = asyncio.create_task(client.match(chain))
        await asyncio.to_thread(asked.wait, 30)
        await client.close()
        assert (await call).blocks == 0
        ended.set()


def test_a_forked_child_makes_its_own_connections(
    http_client: KVStore, chain: PrefixChain, payloads: np.ndarray
) -> None:
    http_client.put(chain, payloads)
    child = os.fork()
    if not child:
        is_right = np.array_equal(np.array(http_client.get(chain)), payloads)
        os._exit(0 if is_right else 1)
    assert http_client.match(chain).blocks == 8
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert np.array_equal(np.array(http_client.get(chain)), payloads)


def test_a_forked_child_has_threads_of_its_own_for_an_async_client(
    http_store: StoreProcess, chain: PrefixChain
) -> None:
    async def blocks() -> int:
        await client.open_namespace(NAMESPACE)
        return (await client.match(chain)).blocks

    client = asyncio.run(AsyncKVStore.connect(http_store.url, timeouts=PATIENT))
    assert asyncio.run(blocks()) == 0
    child = os.fork()
    if not child:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(30)
        os._exit(asyncio.run(blocks()))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    asyncio.run(client.close())


def test_threads_share_a_client(http_client: KVStore, chain: PrefixChain, payloads: np.ndarray) -> None:
    http_client.put(chain, payloads)
    wrong: list[int] = []

    def work() -> None:
        for _ in range(10):
            if not np.array_equal(np.array(http_client.get(chain)), payloads):
                wrong.append(1)

    threads = [threading.Thread(target=work) for _ in range(24)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


# Addresses


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("http://127.0.0.1:80", HttpAddress("127.0.0.1", 80, False)),
        ("https://store.example", HttpAddress("store.example", 443, True)),
        ("HTTP://[::1]:8470/", HttpAddress("::1", 8470, False)),
        ("unix:/run/kv.sock", None),
        ("/run/kv.sock", None),
    ],
)
def test_addresses(text: str, address: HttpAddress | None) -> None:
    assert parse_http_address(text) == address


@pytest.mark.parametrize(
    "text", ["http://", "http://a/b", "http://a?b", "http://user:secret@a", "http://a:b", "https://a:99999"]
)
def test_an_address_that_is_none_is_refused_and_not_echoed(text: str) -> None:
    with pytest.raises(InvalidConfig) as raised:
        parse_http_address(text)
    assert "secret" not in str(raised.value)


def test_options_of_http_are_refused_for_a_socket(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match="api_key"):
        KVStore.connect(tmp_path / "s", api_key="k")
    with pytest.raises(InvalidConfig, match="not https"):
        KVStore.connect("http://127.0.0.1:1", tls_folder=tmp_path)
    with pytest.raises(InvalidConfig, match="in the clear"):
        KVStore.connect("http://store.example:80", api_key="k")
    with pytest.raises(InvalidConfig, match=r"ca\.crt"):
        KVStore.connect("https://127.0.0.1:1", tls_folder=tmp_path)


@pytest.mark.parametrize("key", ["", "s3cret\n", "s3cret\r\nX: y", "s3 cret", "s3cret\0", "s3cr\u00e9t"])
def test_a_key_that_no_header_can_hold_is_refused_and_not_echoed(key: str) -> None:
    with pytest.raises(InvalidConfig, match="api_key") as raised:
        KVStore.connect("http://127.0.0.1:1", api_key=key)
    assert "s3" not in str(raised.value)


def test_the_key_is_shown_nowhere() -> None:
    with KVStore.connect("http://127.0.0.1:1", api_key="s3cret", timeouts=Timeouts()) as client:
        assert "s3cret" not in repr(client) + repr(vars(client))
