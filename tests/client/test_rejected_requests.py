"""Requests that the server calls invalid though their client found them right: misses that are counted.

Over a network a request may be damaged on the way. What a caller does wrong is found before it is sent.
"""

import json
import random
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from kvstore import AsyncKVStore, KVStore, MissReason, PrefixChain
from kvstore.drill.reply_proxy import ReplyProxy
from kvstore.errors import InvalidRequest, KVStoreError, RejectedRequest
from kvstore.keys import BlockKey
from kvstore.messages import Answer, Failed, FailureCode, Release, Request, ReturnSlots
from tests.client.conftest import BLOCK_BYTES, NAMESPACE, PATIENT
from tests.client.facade import Face, SyncFace
from tests.client.lying_arena import lying_server
from tests.client.scripted_http import answering, reply, requested
from tests.redis_server import free_port
from tests.store_process import StoreProcess

CODES = ["bad_request", "too_large", "not_found", "method_not_allowed", "unsupported_media_type", "made_up"]


def refusal(code: str) -> bytes:
    return json.dumps({"error": {"code": code, "message": "no"}}).encode()


async def _faces(address: str | Path) -> list[Face]:
    return [
        SyncFace(KVStore.connect(address, timeouts=PATIENT)),
        await AsyncKVStore.connect(address, timeouts=PATIENT),
    ]


async def _every_call_of_the_data_path(client: Face, chain: PrefixChain, payloads: np.ndarray) -> int:
    """Make each once; each is a miss. Returns how many there are."""
    found = await client.match(chain)
    assert (found.blocks, found.reason) == (0, MissReason.UNAVAILABLE)
    leased = await client.match(chain, lease=True)
    assert (leased.blocks, leased.reason, leased.lease.blocks) == (0, MissReason.UNAVAILABLE, 0)
    assert (await client.lease(chain)).reason is MissReason.UNAVAILABLE
    assert await client.exists(chain) == [False] * 8
    assert await client.get(chain) == []
    fetched = await client.fetch_into(chain, np.zeros_like(payloads))
    assert (fetched.blocks, fetched.reason) == (0, MissReason.UNAVAILABLE)
    put = await client.put(chain, payloads)
    assert (put.stored, put.dropped, put.doubtful) == (0, 8, tuple(range(8)))
    assert await client.prefetch(chain) == 0
    return 8


@pytest.mark.parametrize("code", CODES)
async def test_what_the_server_calls_invalid_over_http_is_a_counted_miss(
    code: str, chain: PrefixChain, payloads: np.ndarray
) -> None:
    with answering(reply(refusal(code), status=400)) as url:
        for client in await _faces(url):
            client_state(client).open_namespace(NAMESPACE)
            calls = await _every_call_of_the_data_path(client, chain, payloads)
            stats = client.client_stats()
            is_rejected = code in ("bad_request", "too_large")
            assert (stats.unavailable, stats.rejected) == (calls, calls if is_rejected else 0)
            assert stats.protocol_errors == (0 if is_rejected else calls)
            await client.close()


def client_state(client: Face):  # type: ignore[no-untyped-def]  # of either kind
    return (client.client if isinstance(client, SyncFace) else client)._state


@pytest.mark.parametrize("code", [FailureCode.INVALID_REQUEST, FailureCode.INVALID_LAYOUT])
async def test_what_the_server_calls_invalid_over_a_socket_is_a_counted_miss(
    tmp_path: Path, code: FailureCode, chain: PrefixChain, payloads: np.ndarray
) -> None:
    def answer(request: Request) -> Answer | None:
        return None if isinstance(request, Release | ReturnSlots) else Failed(code, "no")

    path = tmp_path / "kv.sock"
    with lying_server(path, answer):
        for client in await _faces(path):
            await client.open_namespace(NAMESPACE)
            calls = await _every_call_of_the_data_path(client, chain, payloads)
            assert client.client_stats().rejected == calls
            await client.close()


def test_a_connection_whose_request_was_damaged_is_given_up(chain: PrefixChain) -> None:
    num_connections = 0

    def answer(stream: socket.socket) -> None:
        nonlocal num_connections
        num_connections += 1
        body = refusal("bad_request")
        stream.sendall(
            b"HTTP/1.1 400 X\r\nContent-Length: %d\r\n" % len(body) + requested(stream) + b"\r\n" + body
        )
        stream.recv(1)  # whether the client goes on here

    with answering(answer) as url, KVStore.connect(url, timeouts=PATIENT) as client:
        client._state.open_namespace(NAMESPACE)
        assert client.match(chain).blocks == client.match(chain).blocks == 0
        assert num_connections == 2


def test_a_control_call_raises_what_the_server_says() -> None:
    body = refusal("bad_request")
    with answering(reply(body, status=400)) as url, KVStore.connect(url, timeouts=PATIENT) as client:
        with pytest.raises(RejectedRequest, match="no"):
            client.advance_epoch("m")
        assert issubclass(RejectedRequest, InvalidRequest)


def test_a_lease_that_is_renewed_and_released_by_damaged_requests_is_no_error(chain: PrefixChain) -> None:
    granted = {"blocks": 1, "tiers": ["dram"], "reason": None, "lease": "0" * 32, "leased": 1, "lease_s": 30}
    answers = [(200, json.dumps(granted).encode()), *[(400, refusal("bad_request"))] * 2]

    def answer(stream: socket.socket) -> None:
        status, body = answers.pop(0)
        reply(body, status=status)(stream)

    with answering(answer) as url, KVStore.connect(url, timeouts=PATIENT) as client:
        client._state.open_namespace(NAMESPACE)
        lease = client.match(chain[:1], lease=True).lease
        assert lease.blocks == 1
        assert not lease.renew()
        lease.release()
        assert client.client_stats().rejected == 2


class DamagingProxy(ReplyProxy):
    """Relays to a server and damages what it is told to of the requests."""

    damage: Callable[[bytes], bytes] = staticmethod(lambda data: data)

    def _relay(self, source: socket.socket, target: socket.socket, is_reply: bool) -> None:
        if is_reply:
            super()._relay(source, target, is_reply)
            return
        try:
            while data := source.recv(1 << 20):
                target.sendall(self.damage(data))
        except OSError:
            return
        finally:
            self._cut(source)
            self._cut(target)


@pytest.fixture
def damaging(tmp_path: Path) -> Iterator[DamagingProxy]:
    with StoreProcess(tmp_path, http_port=free_port()) as running:
        proxy = DamagingProxy(running.settings.http_port)
        yield proxy
        proxy.stop()


@pytest.mark.timeout(300)
def test_requests_that_are_damaged_on_the_way_never_raise_and_never_give_wrong_bytes(
    damaging: DamagingProxy, chain: PrefixChain, payloads: np.ndarray
) -> None:
    choose = random.Random(4)
    url = f"http://127.0.0.1:{damaging.port}"
    with KVStore.connect(url, timeout_s=5) as client:
        client.open_namespace(NAMESPACE)
        client.put(chain, payloads)

        def damage(data: bytes) -> bytes:
            spoilt = bytearray(data)
            if choose.random() < 0.7:
                spoilt[choose.randrange(min(len(spoilt), 1200))] = choose.randrange(256)
            return bytes(spoilt)

        damaging.damage = damage
        fresh = NAMESPACE.chain(range(1000, 1032))

        def fetched(count: int) -> bool:
            rows = np.zeros_like(payloads[:count])
            blocks = client.fetch_into(chain[:count], rows, timeout_s=0.5).blocks
            return np.array_equal(rows[:blocks], payloads[:blocks])

        def put(count: int) -> bool:
            result = client.put(fresh[:count], payloads[:count], timeout_s=0.5)
            return result.stored + result.present + result.dropped == count

        def leased(count: int) -> bool:
            with client.lease(chain[:count], timeout_s=0.5) as lease:
                return lease.blocks <= count

        calls = (
            fetched,
            put,
            leased,
            lambda count: client.match(chain[:count], timeout_s=0.5).blocks <= count,
            lambda count: len(client.exists(chain[:count], timeout_s=0.5)) == count,
            lambda count: client.prefetch(chain[:count], timeout_s=0.5) <= count,
        )
        assert all(choose.choice(calls)(1 + number % 8) for number in range(150))
        stats = client.client_stats()
        assert stats.rejected > 0

        damaging.damage = lambda data: data
        for _ in range(100):
            out = np.zeros_like(payloads)
            if client.fetch_into(chain, out).blocks == 8:
                break
        assert np.array_equal(out, payloads)
        stored = client.get(fresh)
        assert all(np.array_equal(block, payloads[at]) for at, block in enumerate(stored))
        assert client.check(1000) == []


def test_the_callers_own_bad_input_is_found_before_anything_is_sent(chain: PrefixChain) -> None:
    asked: list[bytes] = []

    def answer(stream: socket.socket) -> None:
        asked.append(stream.recv(1))

    with answering(answer) as url, KVStore.connect(url, timeouts=PATIENT) as client:
        client._state.open_namespace(NAMESPACE)
        for call in (
            lambda: client.match(chain, timeout_s=-1),
            lambda: client.fetch_into(chain, bytearray(3)),
            lambda: client.put(chain, bytes(8 * BLOCK_BYTES), checksums=[1]),
            lambda: client.get_block(chain),
        ):
            with pytest.raises(KVStoreError) as raised:
                call()
            assert type(raised.value) is InvalidRequest
    assert asked == []


@pytest.mark.parametrize("count", [1, 65])
def test_a_key_of_another_length_is_no_miss_where_there_is_no_server(tmp_path: Path, count: int) -> None:
    keys = tuple(BlockKey(bytes([at]) * 16) for at in range(count))
    wrong = PrefixChain(NAMESPACE.digest, keys, NAMESPACE.block_tokens)

    with KVStore.connect(tmp_path / "none.sock") as client:
        client.open_namespace(NAMESPACE)
        with pytest.raises(InvalidRequest, match=f"key 0 of {count} has 16 bytes"):
            client.match(wrong)
