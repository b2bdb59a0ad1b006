"""Clients of a server that lies: nothing it says becomes a hit, and it is left at once."""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from kvstore import AsyncKVStore, KVStore, MissReason, PrefixChain
from kvstore.errors import ProtocolMismatch, ServerUnavailable
from kvstore.messages import (
    Answer,
    Count,
    Done,
    Failed,
    Hello,
    Leased,
    Lent,
    LentSlot,
    Matched,
    Presence,
    Ready,
    ReadySlot,
    Report,
    Request,
    Seen,
    TierNames,
    Welcome,
    decode_request,
    encode_message,
)
from kvstore.wire import FrameDecoder, encode_frame
from tests.client.conftest import NAMESPACE, PATIENT
from tests.client.facade import Face, SyncFace

WELCOME = Welcome(bytes(16), 0, 32)
Lie = Callable[[Request, int], bytes]


@asynccontextmanager
async def _liar(path: Path, lie: Lie, *, is_greeting: bool = True) -> AsyncIterator[None]:
    """A server that greets properly and then answers every request with a lie."""

    speaking: set[asyncio.Task[None]] = set()

    async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        speaking.add(task)
        decoder = FrameDecoder()
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65536):
                decoder.feed(data)
                while (frame := decoder.next_frame()) is not None:
                    request = decode_request(frame)
                    is_hello = isinstance(request, Hello) and is_greeting
                    writer.write(encode_message(WELCOME, 0) if is_hello else lie(request, frame.request_id))
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()

    server = await asyncio.start_unix_server(speak, path)
    try:
        yield
    finally:
        server.close()
        await server.wait_closed()
        await asyncio.gather(*speaking)


@asynccontextmanager
async def _client(kind: str, path: Path) -> AsyncIterator[Face]:
    if kind == "sync":
        with KVStore.connect(path, timeouts=PATIENT) as client:
            client.open_namespace(NAMESPACE)
            yield SyncFace(client)
    else:
        async with await AsyncKVStore.connect(path, timeouts=PATIENT) as client:
            await client.open_namespace(NAMESPACE)
            yield client


def _saying(answer: Answer) -> Lie:
    def lie(request: Request, request_id: int) -> bytes:
        is_opening = type(request).__name__ == "OpenNamespace"
        return encode_message(Done() if is_opening else answer, request_id)

    return lie


LIES: dict[str, Lie] = {
    "garbage": lambda _, __: os.urandom(100),
    "another id": lambda _, request_id: encode_message(Done(), request_id + 1000),
    "another answer": _saying(Count(1)),
    "a request": lambda _, request_id: encode_message(Hello(1), request_id),
    "too many blocks": _saying(Matched(TierNames.of(["dram"] * 9), None)),
    "blocks of another size": _saying(Ready(1, 5, (ReadySlot(0, 0, 0),), TierNames.of(["dram"]), None)),
    "slots without an arena": _saying(
        Ready(1, 64 << 10, (ReadySlot(1 << 40, 0, 0),), TierNames.of(["dram"]), None)
    ),
    "seen without an arena": _saying(Seen(64 << 10, (ReadySlot(4096, 1, 0),) * 8, "dram")),
    "fewer seen than asked": _saying(Seen(64 << 10, (ReadySlot(4096, 1, 0),), "dram")),
    "seen of another size": _saying(Seen(5, (ReadySlot(4096, 1, 0),) * 8, "dram")),
    "too many slots": _saying(Lent(tuple(LentSlot(at, 0, 0) for at in range(9)), 0)),
    "more present than asked": _saying(Lent((), 9)),
}


@pytest.mark.parametrize("kind", ["sync", "async"])
@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
async def test_a_lie_is_a_miss(tmp_path: Path, chain: PrefixChain, kind: str, lie: Lie) -> None:
    path = tmp_path / "kv.sock"
    async with _liar(path, lie), _client(kind, path) as client:
        buffers = np.zeros((8, 64 << 10), np.uint8)
        found = await client.match(chain)
        fetched = await client.fetch_into(chain, buffers)
        put = await client.put(chain, buffers)

    assert (found.blocks, found.reason) == (0, MissReason.UNAVAILABLE)
    assert (fetched.blocks, fetched.reason) == (0, MissReason.UNAVAILABLE)
    assert (put.stored, put.present, put.dropped) == (0, 0, 8)
    assert client.client_stats().protocol_errors >= 1


HELD_LIES: dict[str, Lie] = {
    "garbage": LIES["garbage"],
    "another id": LIES["another id"],
    "another answer": LIES["another answer"],
    "more tiers than blocks": _saying(Leased(None, 0, 0, (), TierNames.of(["dram"] * 9), None)),
    "blocks of another size": _saying(Leased(1, 9, 5, (ReadySlot(0, 0, 0),), TierNames.of(["dram"]), None)),
    "slots without an arena": _saying(
        Leased(1, 9, 64 << 10, (ReadySlot(1 << 40, 0, 0),), TierNames.of(["dram"]), None)
    ),
    "too few bits": _saying(Presence(b"")),
    "too many bits": _saying(Presence(b"\xff\xff")),
    "too many slots": LIES["too many slots"],
}


@pytest.mark.parametrize("kind", ["sync", "async"])
@pytest.mark.parametrize("lie", HELD_LIES.values(), ids=HELD_LIES)
async def test_a_lie_about_what_is_held_holds_nothing(
    tmp_path: Path, chain: PrefixChain, kind: str, lie: Lie
) -> None:
    path = tmp_path / "kv.sock"
    async with _liar(path, lie), _client(kind, path) as client:
        lease = await client.lease(chain)
        found = await client.match(chain, lease=True)
        async with await client.reserve(chain) as blocks:
            assert len(blocks) == 0

        assert (lease.blocks, found.blocks, found.lease.blocks) == (0, 0, 0)
        assert await client.exists(chain) == [False] * 8
        assert blocks.result.dropped == 8
    assert client.client_stats().protocol_errors >= 1


@pytest.mark.parametrize("kind", ["sync", "async"])
@pytest.mark.parametrize("report", [b"", b"[1]", b'{"a"', b"\xff", b"[" * 9999, b"3"])
async def test_a_report_that_is_none_is_an_error_of_the_control_call(
    tmp_path: Path, kind: str, report: bytes
) -> None:
    path = tmp_path / "kv.sock"
    async with _liar(path, _saying(Report(report))), _client(kind, path) as client:
        with pytest.raises(ProtocolMismatch):
            await client.stats()
        with pytest.raises(ProtocolMismatch):
            await client.check()


GREETINGS: Sequence[tuple[str, bytes]] = [
    ("garbage", b"SSH-2.0-OpenSSH_9.2\r\n" + bytes(40)),
    ("another version", b"KVSF\x07\x00" + encode_message(WELCOME, 0)[6:]),
    ("another answer", encode_message(Done(), 0)),
    ("another id", encode_message(WELCOME, 5)),
    ("more than a greeting", encode_message(WELCOME, 0) * 2),
    ("an arena that does not come", encode_message(Welcome(bytes(16), 4096, 32), 0)),
]


@pytest.mark.parametrize("kind", ["sync", "async"])
@pytest.mark.parametrize(
    "greeting", [greeting for _, greeting in GREETINGS], ids=[name for name, _ in GREETINGS]
)
async def test_a_greeting_that_is_none_is_a_miss_and_a_clear_control_error(
    tmp_path: Path, chain: PrefixChain, kind: str, greeting: bytes
) -> None:
    path = tmp_path / "kv.sock"
    async with _liar(path, lambda _, __: greeting, is_greeting=False), _client(kind, path) as client:
        found = await client.match(chain)
        with pytest.raises((ProtocolMismatch, ServerUnavailable)):
            await client.ping()

    assert (found.blocks, found.reason) == (0, MissReason.UNAVAILABLE)


@pytest.mark.parametrize("kind", ["sync", "async"])
async def test_an_older_server_is_a_counted_miss_that_says_which_versions_met(
    tmp_path: Path, chain: PrefixChain, payloads: npt.NDArray[np.uint8], kind: str
) -> None:
    path = tmp_path / "kv.sock"
    refusal = Failed.of(ServerUnavailable("frame: protocol version 2, this side speaks 1"))
    older = encode_frame(Failed.KIND, 0, refusal.to_wire(), version=1)
    async with _liar(path, lambda _, __: older, is_greeting=False), _client(kind, path) as client:
        with pytest.raises(
            (ProtocolMismatch, ServerUnavailable), match="protocol version 1, this side speaks"
        ):
            await client.ping()
        found = await client.match(chain)
        put = await client.put(chain, payloads)

    assert (found.blocks, found.reason, put.stored) == (0, MissReason.UNAVAILABLE, 0)
    assert client.client_stats().protocol_errors >= 1


@pytest.mark.parametrize("kind", ["sync", "async"])
async def test_a_server_that_closes_at_the_greeting_is_a_miss(
    tmp_path: Path, chain: PrefixChain, kind: str
) -> None:
    left = asyncio.Event()

    async def leave(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
        left.set()

    path = tmp_path / "kv.sock"
    server = await asyncio.start_unix_server(leave, path)
    async with server, _client(kind, path) as client:
        assert (await client.match(chain)).reason is MissReason.UNAVAILABLE
        await left.wait()
