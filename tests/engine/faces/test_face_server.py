"""The face's listener: too many connections, slow clients, clients that stop reading, what is no HTTP."""

import asyncio
import json
import socket

import aiohttp
import pytest

from kvstore.http.limits import Limits
from kvstore_engine_adapter.faces.answering import Answering
from kvstore_engine_adapter.faces.event_stream import SlowClient
from kvstore_engine_adapter.faces.sampling_fields import AnswerPlan
from kvstore_engine_adapter.sampling import SamplingParams
from tests.engine.faces.face_server import LONG_TEXT, face_server


def address(server):
    host, _, port = server.url.rpartition("//")[2].rpartition(":")
    return host, int(port)


def chat_bytes(**fields):
    messages = [{"role": "user", "content": LONG_TEXT}]
    body = json.dumps({"model": "tiny", "messages": messages, "max_tokens": 5} | fields).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


async def answer_to(server, data):
    """All that the server sends on one connection until it ends it."""
    reader, writer = await asyncio.open_connection(*address(server))
    writer.write(data)
    try:
        return await reader.read()
    finally:
        writer.close()


@pytest.mark.parametrize(
    "data",
    [
        b"rubbish\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\0" * 64 + b"\r\n\r\n",
        b"GET /" + b"a" * 10_000 + b" HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n" + b"X: y\r\n" * 1000 + b"\r\n",
        b"POST /generate HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: -5\r\n\r\n",
    ],
    ids=lambda data: repr(data[:16]),
)
async def test_what_is_no_http_is_answered_in_openais_shape_and_without_a_traceback(server, caplog, data):
    answer = await answer_to(server, data)

    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.")
    assert b" 400 " in head.splitlines()[0]
    assert json.loads(body)["error"]["type"] == "invalid_request_error"
    assert "Traceback" not in caplog.text
    assert server.counters.malformed_requests == 1


async def test_connections_beyond_the_cap_are_told_so(lively):
    async with face_server(lively, server_options={"limits": Limits(max_connections=2)}) as server:
        held = [await asyncio.open_connection(*address(server)) for _ in range(2)]
        for reader, writer in held:
            writer.write(b"GET /v1/models HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
            assert (await reader.readuntil(b"}]}")).startswith(b"HTTP/1.1 200 ")
        answer = await answer_to(server, b"")
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "overloaded"
        for _, writer in held:
            writer.close()
        while server.counters.open_connections:  # noqa: ASYNC110  # nothing tells
            await asyncio.sleep(0.01)
        async with server.async_openai() as client:
            assert (await client.models.list()).data[0].id == "tiny"


async def test_connections_that_say_nothing_make_way_for_others(lively):
    async with face_server(lively, server_options={"limits": Limits(max_connections=2)}) as server:
        silent = [await asyncio.open_connection(*address(server)) for _ in range(6)]
        async with server.async_openai() as client:
            assert (await client.models.list()).data[0].id == "tiny"
        for _, writer in silent:
            writer.close()
        assert server.counters.refused_connections == 0


async def test_a_head_that_does_not_come_to_its_end_ends_the_connection(lively):
    async with face_server(lively, server_options={"limits": Limits(header_s=0.2)}) as server:
        assert await answer_to(server, b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127") == b""
        assert server.counters.slow_clients == 1


async def test_an_idle_connection_ends_and_one_whose_request_takes_long_does_not(lively):
    limits = Limits(header_s=0.2, idle_s=0.2)
    async with face_server(lively, server_options={"limits": limits}) as server:
        answer = await answer_to(server, chat_bytes(max_tokens=600, ignore_eos=True))
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["usage"]["completion_tokens"] == 600


async def test_a_client_that_stops_reading_is_dropped_and_others_go_on(lively):
    async with face_server(lively, server_options={"limits": Limits(stall_s=0.5)}) as server:
        with socket.socket() as deaf:
            deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            deaf.connect(address(server))
            deaf.sendall(
                chat_bytes(stream=True, n=8, logprobs=True, top_logprobs=20, max_tokens=700, ignore_eos=True)
            )
            async with server.async_openai() as client:
                other = await client.chat.completions.create(
                    model="tiny", messages=[{"role": "user", "content": "hello"}], max_tokens=5
                )
            assert other.usage.completion_tokens <= 5
            await server.has_requests(True)
            await server.has_requests(False)
            while not server.counters.slow_clients:  # noqa: ASYNC110  # nothing tells
                await asyncio.sleep(0.01)
        assert server.counters.slow_clients == 1


async def test_stats_count_requests_and_errors_by_route_and_code(server):
    async with server.async_openai() as client, aiohttp.ClientSession(server.url) as session:
        await client.models.list()
        for path in ("/v1/models/x", "/v1/nothing", "/v1/sessions/x"):
            async with session.get(path) as response:
                assert response.status == 404
        async with session.head("/health") as response:
            assert response.status == 200
        async with session.get("/stats") as response:
            http = (await response.json())["http"]
    assert http["requests"] == {
        "/v1/models": 1,
        "/v1/models/{name}": 1,
        "unknown": 1,
        "/v1/sessions/{name}": 1,
        "/health": 1,
        "/stats": 1,
    }
    assert http["errors"] == {"model_not_found": 1, "404": 1, "session_not_found": 1}
    assert http["open_connections"] == 2


async def test_tokens_that_nobody_reads_are_bounded(lively):
    async with face_server(lively) as server:
        plan = AnswerPlan(sampling=SamplingParams(), max_tokens=700, ignores_end=True)
        prompt = lively.tokenizer.encode(LONG_TEXT)
        answering = Answering(server.engine, lively.tokenizer, [prompt], plan, max_unread_tokens=20)
        pieces = answering.pieces()
        await anext(pieces)
        await server.has_requests(False)
        with pytest.raises(SlowClient, match="20 tokens of its stream unread"):
            [piece async for piece in pieces]
        assert len(answering.choices[0].tokens) <= 60
