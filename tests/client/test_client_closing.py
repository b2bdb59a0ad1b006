"""Clients that are closed, or distrust their connection, while calls are under way."""

import asyncio
import os
import socket
import threading
from pathlib import Path

import numpy as np
import pytest

from kvstore import AsyncKVStore, KVStore, MissReason, PrefixChain
from kvstore.errors import ProtocolMismatch, ServerUnavailable
from kvstore.messages import Welcome, decode_request, encode_message
from kvstore.shared_link import SharedLink
from kvstore.wire import FrameDecoder
from tests.client.conftest import NAMESPACE, PATIENT
from tests.client.test_client_distrust import LIES

WELCOME = encode_message(Welcome(bytes(16), 0, 32), 0)


@pytest.fixture
def listener(tmp_path: Path):
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(os.fspath(tmp_path / "kv.sock"))
        listening.listen()
        listening.settimeout(30)
        yield listening


def _has_ended(accepted: socket.socket) -> bool:
    try:
        return accepted.recv(1000) == b""
    except ConnectionResetError:  # it ended without having read all we sent
        return True


@pytest.mark.parametrize("is_greeted", [False, True])
async def test_closing_a_client_that_connects_leaves_no_connection(
    listener: socket.socket, tmp_path: Path, chain: PrefixChain, is_greeted: bool
) -> None:
    client = await AsyncKVStore.connect(tmp_path / "kv.sock", timeouts=PATIENT)
    await client.open_namespace(NAMESPACE)
    call, waiting = (asyncio.create_task(client.match(chain)) for _ in range(2))
    accepted, _ = await asyncio.to_thread(listener.accept)
    accepted.settimeout(30)
    with accepted:
        await asyncio.to_thread(accepted.recv, 1000)
        if is_greeted:
            accepted.send(WELCOME)
        await client.close()

        assert await asyncio.to_thread(_has_ended, accepted)
        assert (await call).reason is MissReason.UNAVAILABLE
        assert (await waiting).reason is MissReason.UNAVAILABLE


async def test_a_call_cancelled_while_it_connects_leaves_no_connection(
    listener: socket.socket, tmp_path: Path
) -> None:
    async with await AsyncKVStore.connect(tmp_path / "kv.sock", timeouts=PATIENT) as client:
        call = asyncio.create_task(client.ping())
        accepted, _ = await asyncio.to_thread(listener.accept)
        accepted.settimeout(30)
        with accepted:
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            await asyncio.to_thread(accepted.recv, 1000)

            assert await asyncio.to_thread(_has_ended, accepted)


def test_closing_a_blocking_client_that_connects_leaves_no_connection_and_no_arena(
    listener: socket.socket, tmp_path: Path
) -> None:
    client = KVStore.connect(tmp_path / "kv.sock", timeouts=PATIENT)
    errors: list[BaseException] = []

    def ping() -> None:
        try:
            client.ping()
        except ServerUnavailable as error:
            errors.append(error)

    thread = threading.Thread(target=ping)
    thread.start()
    accepted, _ = listener.accept()
    accepted.settimeout(30)
    with accepted:
        accepted.recv(1000)
        client.close()
        accepted.send(WELCOME)
        thread.join(30)

        assert _has_ended(accepted)
    assert "closed" in str(errors[0])
    assert client._pool.num_links == 0
    assert client._pool.arenas._latest is None


async def test_a_call_that_distrusts_its_connection_leaves_the_successor_alone(
    listener: socket.socket, tmp_path: Path
) -> None:
    async with await AsyncKVStore.connect(tmp_path / "kv.sock", timeouts=PATIENT) as client:
        call = asyncio.create_task(client.stats())
        accepted, _ = await asyncio.to_thread(listener.accept)
        with accepted, socket.socket(socket.AF_UNIX) as theirs:
            await asyncio.to_thread(accepted.recv, 20)
            accepted.send(WELCOME)
            while client._link is None:  # noqa: ASYNC110
                await asyncio.sleep(0)
            first = client._link
            successor = type(first)(theirs, first.welcome, None)
            client._link = successor
            accepted.send(os.urandom(64))
            with pytest.raises(ProtocolMismatch):
                await call

        assert client._link is successor
        assert first.is_lost
        client._link = None


def test_a_blocking_client_closes_a_connection_whose_answer_does_not_fit(
    listener: socket.socket, tmp_path: Path, chain: PrefixChain
) -> None:
    lie = LIES["blocks of another size"]
    closed = threading.Event()

    def serve() -> None:
        accepted, _ = listener.accept()
        accepted.settimeout(30)
        decoder, is_greeted = FrameDecoder(), False
        with accepted:
            while data := accepted.recv(65536):
                decoder.feed(data)
                while (frame := decoder.next_frame()) is not None:
                    request = decode_request(frame)
                    accepted.send(lie(request, frame.request_id) if is_greeted else WELCOME)
                    is_greeted = True
        closed.set()

    thread = threading.Thread(target=serve)
    thread.start()
    with KVStore.connect(tmp_path / "kv.sock", timeouts=PATIENT) as client:
        client.open_namespace(NAMESPACE)
        assert client.fetch_into(chain, np.zeros((8, 64 << 10), np.uint8)).blocks == 0
        assert closed.wait(30)
    thread.join(30)


def test_a_client_that_is_closed_while_it_looks_at_a_lost_connection_misses(
    tmp_path: Path, chain: PrefixChain, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = KVStore.connect(tmp_path / "nobody.sock", timeouts=PATIENT)
    client.open_namespace(NAMESPACE)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with theirs:
        client._pool._shared = SharedLink(ours, Welcome(bytes(16), 0, 32), None)

        def is_lost(_: SharedLink) -> bool:
            client.close()
            return False

        monkeypatch.setattr(SharedLink, "is_lost", property(is_lost))
        assert client.lease(chain).reason is MissReason.UNAVAILABLE
