"""What one client does keeps no other out: silent greetings, idle connections, floods of requests."""

import asyncio
import errno
import socket
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from kvstore import AsyncKVStore
from kvstore import accepting as accepting_module
from kvstore import server as server_module
from kvstore import serving as serving_module
from kvstore.accepting import Accepting
from kvstore.errors import ServerUnavailable
from kvstore.messages import ChainRef, Check, Done, Match, Ping, Request, Stats, encode_message
from kvstore.running import serving
from kvstore.server_socket import BACKLOG
from tests.server.test_server import NAMESPACE, PATIENT, RawClient, _config, _until


async def test_silent_connections_keep_nobody_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "_GREETING_TIMEOUT_S", 3600.0)
    path = tmp_path / "kv.sock"
    silent: list[socket.socket] = []
    async with serving(_config(), socket_path=path) as server:
        for _ in range(3 * BACKLOG):
            sock = socket.socket(socket.AF_UNIX)
            sock.setblocking(False)
            await asyncio.get_running_loop().sock_connect(sock, str(path))
            silent.append(sock)
            await asyncio.sleep(0)
        async with await AsyncKVStore.connect(path, timeouts=PATIENT) as client:
            await client.ping()

        # The oldest were ended, the latest may still greet.
        await _until(lambda: len(server._greetings) <= BACKLOG)
        assert server.counters.silent_greetings >= 2 * BACKLOG - 1
        assert silent[0].recv(1) == b""
        with pytest.raises(BlockingIOError):
            silent[-1].recv(1)
    for sock in silent:
        sock.close()


async def test_a_slow_greeting_is_ended_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "_GREETING_TIMEOUT_S", 0.01)
    async with serving(_config(), socket_path=tmp_path / "kv.sock") as server:
        async with RawClient(tmp_path / "kv.sock") as slow:
            assert await slow.answer() is None
        assert server.counters.refused_connections == 1


async def test_an_idle_client_that_holds_nothing_makes_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "_IDLE_S", 0.0)
    path = tmp_path / "kv.sock"
    chain = NAMESPACE.chain(range(4))
    async with (
        serving(_config(max_connections=2), socket_path=path) as server,
        await AsyncKVStore.connect(path, timeouts=PATIENT) as idle,
        await AsyncKVStore.connect(path, timeouts=PATIENT) as holding,
        await AsyncKVStore.connect(path, timeouts=PATIENT) as third,
    ):
        await holding.open_namespace(NAMESPACE)
        await holding.put(chain, bytes(4096))
        async with await holding.lease(chain) as lease:
            await idle.ping()
            await third.ping()

            assert server.counters.idle_ended == 1
            assert server.num_connections == 2
            assert lease.is_valid()
            # Ended without a word: its next call finds a connection of its own again.
            await idle.ping()
            assert len(await holding.view(lease)) == 1


async def test_clients_that_hold_something_stay_and_the_next_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "_IDLE_S", 0.0)
    path = tmp_path / "kv.sock"
    async with (
        serving(_config(max_connections=1), socket_path=path),
        await AsyncKVStore.connect(path, timeouts=PATIENT) as holding,
        await AsyncKVStore.connect(path, timeouts=PATIENT) as second,
    ):
        await holding.open_namespace(NAMESPACE)
        async with await holding.reserve(NAMESPACE.chain(range(4))):
            with pytest.raises(ServerUnavailable, match="raise max_connections"):
                await second.ping()


async def test_a_flood_of_small_requests_lets_others_have_their_turn(tmp_path: Path) -> None:
    path = tmp_path / "kv.sock"
    flood = 6_000
    async with (
        serving(_config(), socket_path=path) as server,
        RawClient(path) as flooding,
        RawClient(path) as other,
    ):
        await flooding.greet()
        await other.greet()
        await flooding.send(b"".join(encode_message(Ping(), at) for at in range(flood)))
        await other.send(encode_message(Ping(), 7))
        answered = await other.answer()

        assert answered == (7, Done())
        assert server.counters.requests["ping"] < flood / 2
        for at in range(flood):
            assert await flooding.answer() == (at, Done())


async def _answered_until_another_is(
    path: Path, counted: Counter[str], kind: str, flood: Sequence[Request]
) -> int:
    """How many requests of a client that sends many at once are taken before another's first is answered."""
    async with RawClient(path) as flooding, RawClient(path) as other:
        await flooding.greet()
        await other.greet()
        sending = asyncio.create_task(
            flooding.send(b"".join(encode_message(request, at) for at, request in enumerate(flood)))
        )
        await other.send(encode_message(Ping(), 7))
        assert await other.answer() == (7, Done())
        taken = counted[kind]
        for _ in flood:
            assert await flooding.answer() is not None
        await sending
    return taken


async def test_a_turn_is_over_after_its_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving_module, "_TURN_S", 0.0)
    path = tmp_path / "kv.sock"
    async with serving(_config(), socket_path=path) as server:
        flood = [Stats()] * 400
        assert await _answered_until_another_is(path, server.counters.requests, "stats", flood) < 40


async def test_a_turn_is_over_after_some_requests_that_have_to_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving_module, "_TURN_S", 3600.0)
    path = tmp_path / "kv.sock"
    async with serving(_config(), socket_path=path) as server:
        flood = [Check(0, 1_000_000)] * 200
        assert await _answered_until_another_is(path, server.counters.requests, "check", flood) < 60


async def test_a_crowd_that_connects_is_let_in_one_by_one() -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listener:
        listener.setblocking(False)
        crowd = [socket.create_connection(listener.getsockname()) for _ in range(30)]
        let_in: list[socket.socket] = []
        accepting = Accepting(listener, let_in.append, "test")
        turns = 0
        while len(let_in) < 30:
            await asyncio.sleep(0)
            turns += 1
            assert len(let_in) <= turns
        accepting.stop()
        for sock in [*crowd, *let_in]:
            sock.close()


async def test_what_cannot_be_accepted_waits_and_is_let_in_later(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(accepting_module, "_PAUSE_S", 0.01)
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()),
    ):
        listener.setblocking(False)
        failures: list[BaseException] = [MemoryError(), OSError(errno.EMFILE, "Too many open files")]
        let_in: list[socket.socket] = []

        class Failing:
            def fileno(self) -> int:
                return listener.fileno()

            def accept(self) -> tuple[socket.socket, object]:
                if failures:
                    raise failures.pop()
                return listener.accept()

        accepting = Accepting(Failing(), let_in.append, "test")  # type: ignore[arg-type]  # a socket's part
        await _until(lambda: bool(let_in))
        accepting.stop()
        let_in[0].close()
    assert "Too many open files" in caplog.text


async def test_many_large_requests_of_one_client_let_others_have_their_turn(tmp_path: Path) -> None:
    path = tmp_path / "kv.sock"
    large = ChainRef(NAMESPACE.chain(np.arange(4 * 4_000)))
    async with (
        serving(_config(), socket_path=path) as server,
        RawClient(path) as flooding,
        RawClient(path) as other,
    ):
        await flooding.greet()
        await other.greet()
        sending = asyncio.create_task(
            flooding.send(b"".join(encode_message(Match(large, 1_000_000), at) for at in range(64)))
        )
        answered_when = []
        for at in range(5):
            await other.ask(Ping(), at)
            answered_when.append(server.counters.requests["match"])
        for _ in range(64):
            assert await flooding.answer() is not None
        await sending

        # A turn takes in one such request.
        assert max(answered_when) < 32
