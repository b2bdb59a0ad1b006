"""The HTTP face on a real socket: OpenAI's shapes, errors, streaming, hang-ups."""

import asyncio
import base64
import contextlib
import gzip
import io
import json
import time
import zlib

import aiohttp
import numpy as np
import pytest

from kvstore.errors import TierFull
from kvstore_engine_adapter.faces.http_face import MAX_BODY_BYTES
from kvstore_engine_adapter.generation import Prefilled, RequestReport, Token
from tests.engine.faces.face_server import LONG_TEXT, face_server


def body(text=LONG_TEXT, **fields):
    return {
        "model": "tiny",
        "messages": [{"role": "user", "content": text}],
        "temperature": 0,
        "max_tokens": 8,
    } | fields


class Client:
    def __init__(self, session, engine):
        self._session = session
        self.engine = engine

    async def post(self, data, **headers):
        options = {"data": io.BytesIO(data)} if isinstance(data, bytes) else {"json": data}
        options["headers"] = {name.replace("_", "-"): value for name, value in headers.items()}
        async with self._session.post("/v1/chat/completions", **options) as response:
            return response.status, await response.json(), response.headers

    async def get(self, path, headers=None):
        async with self._session.get(path, headers=headers) as response:
            return response.status, await response.json()

    async def events(self, data):
        async with self._session.post("/v1/chat/completions", json=data) as response:
            assert response.status == 200
            assert response.content_type == "text/event-stream"
            lines = (await response.text()).split("\n\n")
        assert lines[-2:] == ["data: [DONE]", ""]
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]

    def streaming(self, data):
        return self._session.post("/v1/chat/completions", json=data)


@contextlib.asynccontextmanager
async def serving(model, *, max_body_bytes=65536, **settings):
    async with (
        face_server(model, server_options={"max_body_bytes": max_body_bytes}, **settings) as server,
        aiohttp.ClientSession(server.url) as session,
    ):
        yield Client(session, server.engine)


@pytest.fixture
async def client(tiny_bf16):
    async with serving(tiny_bf16) as client:
        yield client


async def test_an_answer_has_openais_shape(client):
    status, answer, _ = await client.post(body())
    assert status == 200
    assert answer["object"] == "chat.completion"
    assert answer["id"].startswith("chatcmpl-")
    (choice,) = answer["choices"]
    assert choice["message"]["role"] == "assistant"
    assert choice["finish_reason"] in ("length", "stop")
    usage = answer["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 0}


async def test_reused_tokens_are_reported_as_cached(client):
    await client.post(body())
    _, answer, _ = await client.post(body())
    cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached == answer["kvstore"]["matched_tokens"] > 100
    assert answer["kvstore"]["tiers"] == {"vram": cached}
    assert answer["kvstore"]["miss_reason"] is None


async def test_a_streamed_answer_is_the_same_as_a_whole_one(client):
    _, whole, _ = await client.post(body(kvstore={"output_tokens": True}))
    events = await client.events(
        body(stream=True, stream_options={"include_usage": True}, kvstore={"output_tokens": True})
    )
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    text = "".join(e["choices"][0]["delta"].get("content", "") for e in events if e["choices"])
    assert text == whole["choices"][0]["message"]["content"]
    last, usage = events[-2:]
    assert last["choices"][0]["finish_reason"] == whole["choices"][0]["finish_reason"]
    assert last["kvstore"]["output_tokens"] == whole["kvstore"]["output_tokens"]
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]


async def test_first_logits_come_as_float32_and_choose_the_first_token(client, tiny_bf16):
    _, answer, _ = await client.post(body(kvstore={"first_logits": True}))
    logits = np.frombuffer(base64.b64decode(answer["kvstore"]["first_logits"]), dtype="<f4")
    assert logits.shape == (tiny_bf16.config.vocab_size,)
    assert int(logits.argmax()) == answer["kvstore"]["output_tokens"][0]


async def test_what_a_request_says_of_its_blocks_future_is_taken(client):
    said = {"ends_session": True, "is_one_off": True, "next_use_s": 60}
    status, _, _ = await client.post(body(kvstore=said))

    assert status == 200


async def test_a_stop_text_ends_the_answer(client):
    _, plain, _ = await client.post(body(max_tokens=30))
    text = plain["choices"][0]["message"]["content"]
    stop = text[5:8]
    _, stopped, _ = await client.post(body(max_tokens=30, stop=[stop]))
    assert stopped["choices"][0]["message"]["content"] == text[: text.index(stop)]
    assert stopped["choices"][0]["finish_reason"] == "stop"
    assert stopped["usage"]["completion_tokens"] < 30


async def test_content_may_come_in_text_parts(client):
    parts = [{"type": "text", "text": LONG_TEXT[:50]}, {"type": "text", "text": LONG_TEXT[50:]}]
    _, split, _ = await client.post(body(parts))
    _, whole, _ = await client.post(body())
    assert split["choices"] == whole["choices"]


async def test_parameters_that_mean_off_are_accepted(client):
    status, _, _ = await client.post(
        body(
            n=1, logprobs=False, presence_penalty=0.0, tools=None, response_format={"type": "text"}, user="me"
        )
    )
    assert status == 200


BAD = [
    (b"{", "invalid_json", None),
    (b'{"a": NaN}', "invalid_json", None),
    (b"[" * 20000, "invalid_json", None),
    (b"\xff\xfe", "invalid_json", None),
    (b"[]", "invalid_json", None),
    (b"", "invalid_json", None),
    (body(model=None), None, "model"),
    (body(model=7), None, "model"),
    (body(messages=[]), None, "messages"),
    (body(messages="hello"), None, "messages"),
    (body(messages=["hello"]), None, "messages[0]"),
    (body(messages=[{"role": "king", "content": "x"}]), None, "messages[0].role"),
    (body(messages=[{"role": "user", "content": 7}]), None, "messages[0].content"),
    (
        body([{"type": "image_url", "image_url": {"url": "http://127.0.0.1/x"}}]),
        None,
        "messages[0].content[0]",
    ),
    (body("\ud800"), None, "messages[0].content"),
    (body(temperature="hot"), None, "temperature"),
    (body(temperature=3), None, "temperature"),
    (body(temperature=True), None, "temperature"),
    (body(top_p=0), None, "top_p"),
    (body(top_k=1.5), None, "top_k"),
    (body(seed="x"), None, "seed"),
    (body(seed=10**30), None, "seed"),
    (body(max_tokens=0), None, "max_tokens"),
    (body(max_tokens=1.5), None, "max_tokens"),
    (body(stream="yes"), None, "stream"),
    (body(stream_options=[]), None, "stream_options"),
    (body(stream_options={"x": 1}), "unknown_parameter", "stream_options.x"),
    (body(stop=[""]), None, "stop"),
    (body(stop=["a"] * 5), None, "stop"),
    (body(n=0), None, "n"),
    (body(n=17), None, "n"),
    (body(n=True), None, "n"),
    (body(tools=[{"type": "function"}]), "unsupported_parameter", "tools"),
    (body(logprobs=1), None, "logprobs"),
    (body(top_logprobs=3), None, "top_logprobs"),
    (body(logprobs=True, top_logprobs=21), None, "top_logprobs"),
    (body(min_p=1.5), None, "min_p"),
    (body(presence_penalty=-3), None, "presence_penalty"),
    (body(frequency_penalty="x"), None, "frequency_penalty"),
    (body(repetition_penalty=0), None, "repetition_penalty"),
    (body(priority=1 << 40), None, "priority"),
    (body(stop_token_ids=[-1]), None, "stop_token_ids"),
    (body(ignore_eos="no"), None, "ignore_eos"),
    (body(logit_bias={"5": 1}), "unsupported_parameter", "logit_bias"),
    (
        body(messages=[{"role": "assistant", "content": "x", "tool_calls": [1]}]),
        "unsupported_parameter",
        "messages[0].tool_calls",
    ),
    (body(response_format={"type": "json_object"}), "unsupported_parameter", "response_format"),
    (body(frobnicate=1), "unknown_parameter", "frobnicate"),
    (body(kvstore={"x": 1}), "unknown_parameter", "kvstore.x"),
    (body(kvstore={"first_logits": 1}), None, "kvstore.first_logits"),
    (body(kvstore={"ends_session": "yes"}), None, "kvstore.ends_session"),
    (body(kvstore={"next_use_s": -1}), None, "kvstore.next_use_s"),
    (body("word " * 3000), "context_length_exceeded", "messages"),
    (body(max_tokens=5000), "context_length_exceeded", "messages"),
]


async def test_bad_requests_get_openai_shaped_errors_and_the_engine_goes_on(client):
    for data, code, param in BAD:
        status, answer, _ = await client.post(data)
        error = answer["error"]
        assert (status, error["code"], error["param"]) == (400, code, param), data
        assert error["type"] == "invalid_request_error"
        assert "\n" not in error["message"]
    status, _, _ = await client.post(body())
    assert status == 200


@pytest.mark.alone
async def test_a_body_of_megabytes_is_refused_while_others_are_served(tiny_bf16):
    async with serving(tiny_bf16, max_body_bytes=MAX_BODY_BYTES) as client:
        refused = asyncio.create_task(client.post(json.dumps(body(LONG_TEXT * 9_000)).encode()))
        longest_s = 0.0
        while not refused.done():
            started_s = time.monotonic()
            assert (await client.get("/healthz"))[0] == 200
            longest_s = max(longest_s, time.monotonic() - started_s)
        status, answer, _ = await refused
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
    # Tokenizing it takes seconds.
    assert longest_s < 0.5


async def test_an_error_of_a_streaming_request_has_its_own_status(client):
    status, answer, _ = await client.post(body("word " * 3000, stream=True))
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")


async def test_an_unknown_model_is_404(client):
    status, answer, _ = await client.post(body(model="gpt-9"))
    assert (status, answer["error"]["code"]) == (404, "model_not_found")
    status, answer = await client.get("/v1/models/gpt-9")
    assert (status, answer["error"]["code"]) == (404, "model_not_found")


async def test_an_unknown_route_and_a_wrong_method_are_openai_shaped(client):
    status, answer = await client.get("/v1/nothing")
    assert (status, answer["error"]["type"]) == (404, "invalid_request_error")
    status, answer = await client.get("/v1/chat/completions")
    assert (status, answer["error"]["type"]) == (405, "invalid_request_error")


async def test_a_body_beyond_the_limit_is_413(client):
    status, answer, _ = await client.post(body("x" * 70000))
    assert (status, answer["error"]["type"]) == (413, "invalid_request_error")


PACKED = gzip.compress(json.dumps(body()).encode())


@pytest.mark.parametrize(
    ("encoding", "data", "status"),
    [
        ("gzip", b"garbage", 400),
        ("deflate", b"\xff\xffgarbage", 400),
        ("gzip", PACKED[:-20], 400),
        ("gzip", PACKED + b"more", 400),
        ("gzip", b"", 400),
        ("gzip", gzip.compress(b" " * 10_000_000), 413),
        ("br", PACKED, 415),
        ("zzz", PACKED, 415),
    ],
)
async def test_a_body_that_cannot_be_decompressed_is_refused(client, caplog, encoding, data, status):
    found, answer, _ = await client.post(data, Content_Encoding=encoding)
    assert (found, answer["error"]["type"]) == (status, "invalid_request_error")
    assert caplog.records == []


@pytest.mark.parametrize(
    ("encoding", "data"), [("gzip", PACKED), ("deflate", zlib.compress(gzip.decompress(PACKED)))]
)
async def test_a_compressed_body_is_answered_as_a_plain_one(client, encoding, data):
    _, plain, _ = await client.post(body())
    _, packed, _ = await client.post(data, Content_Encoding=encoding)
    assert packed["choices"] == plain["choices"]


async def test_an_expectation_is_met_or_refused_in_openais_shape(client):
    status, _, _ = await client.post(body(), Expect="100-continue")
    assert status == 200
    status, answer, _ = await client.post(body(), Expect="zzz")
    assert (status, answer["error"]["type"]) == (417, "invalid_request_error")
    status, answer = await client.get("/healthz", headers={"Expect": "zzz"})
    assert (status, answer["error"]["type"]) == (417, "invalid_request_error")


async def test_a_full_queue_is_503_with_a_time_to_come_back(tiny_bf16):
    async with serving(tiny_bf16, max_num_seqs=1, max_waiting=1) as client:
        answers = await asyncio.gather(*(client.post(body(max_tokens=60)) for _ in range(4)))
    refused = [(answer, headers) for status, answer, headers in answers if status == 503]
    assert sorted(status for status, _, _ in answers) == [200, 200, 503, 503]
    for answer, headers in refused:
        assert answer["error"]["type"] == "overloaded_error"
        assert headers["Retry-After"] == "1"


async def test_models_and_health_are_reported(client):
    status, models = await client.get("/v1/models")
    assert (status, models["data"][0]["id"], models["object"]) == (200, "tiny", "list")
    status, model = await client.get("/v1/models/tiny")
    assert (status, model["max_model_len"]) == (200, 1024)
    assert await client.get("/healthz") == (200, {"status": "ok"})
    status, stats = await client.get("/stats")
    assert (status, stats["waiting_requests"]) == (200, 0)


async def raw_answer(client, data):
    """All bytes that the server sends on one connection, until it closes it."""
    url = client._session._base_url
    reader, writer = await asyncio.open_connection(url.host, url.port)
    content = json.dumps(data).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(content)}\r\n\r\n"
    writer.write(head.encode() + content)
    try:
        async with asyncio.timeout(30):
            return await reader.read()
    finally:
        writer.close()


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ValueError("secret"), "the server failed; its log says why"),
        (TimeoutError("secret"), "the server failed; its log says why"),
        (ConnectionError("secret"), "the server failed; its log says why"),
        (TierFull("vram: full"), "vram: full"),
        (FloatingPointError("not finite"), "not finite"),
    ],
    ids=lambda value: type(value).__name__,
)
@pytest.mark.parametrize("num_tokens", [0, 3])
async def test_whatever_fails_in_a_stream_is_its_last_event_and_never_a_second_response(
    client, monkeypatch, caplog, error, said, num_tokens
):
    async def generate(_request):
        yield Prefilled(RequestReport(10))
        for _ in range(num_tokens):
            yield Token(5)
        raise error

    monkeypatch.setattr(client.engine, "generate", generate)

    answer = await raw_answer(client, body(stream=True))

    head, _, stream = answer.partition(b"\r\n\r\n")
    events = [line for line in stream.split(b"\n\n") if b"data: " in line]
    assert head.startswith(b"HTTP/1.1 200 ")
    assert answer.count(b"HTTP/1.1") == 1
    assert stream.endswith(b"\r\n0\r\n\r\n")
    assert json.loads(events[-1].partition(b"data: ")[2])["error"]["message"] == said
    assert b"secret" not in answer
    assert b"[DONE]" not in answer
    assert type(error).__name__ in caplog.text
    assert "Traceback" in caplog.text


@pytest.mark.parametrize("error", [ValueError("secret"), TimeoutError("secret"), ConnectionError("secret")])
async def test_whatever_fails_before_an_answer_has_openais_shape(client, monkeypatch, error):
    async def generate(_request):
        raise error
        yield  # makes it a generator

    monkeypatch.setattr(client.engine, "generate", generate)

    for is_streaming in (False, True):
        status, answer, _ = await client.post(body(stream=is_streaming))
        assert status == 500
        assert answer["error"]["message"] == "the server failed; its log says why"


@pytest.mark.alone
async def test_a_client_that_hangs_up_ends_its_request(client):
    async with client.streaming(body(max_tokens=400, stream=True)) as response:
        assert response.status == 200
        await response.content.readline()
        response.close()
    status, answer, _ = await client.post(body())
    assert status == 200
    # Behind 400 tokens for nobody it would wait about a second.
    assert answer["kvstore"]["queue_s"] < 0.2
    assert client.engine.manager.stats()["owners"] == 0
    assert client.engine.stats()["is_running"] is False


@pytest.mark.alone
async def test_a_client_that_gives_up_on_a_whole_answer_ends_its_request(client):
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            await client.post(body(max_tokens=400))
    status, answer, _ = await client.post(body())
    assert status == 200
    assert answer["kvstore"]["queue_s"] < 0.2
    assert client.engine.manager.stats()["owners"] == 0


async def test_a_failure_inside_the_engine_is_500_and_the_engine_goes_on(client, monkeypatch):
    def broken(*_args, **_kwargs):
        raise ZeroDivisionError

    with monkeypatch.context() as patch:
        patch.setattr(client.engine._running.forward_model, "run", broken)
        status, answer, _ = await client.post(body())
        assert (status, answer["error"]["type"]) == (500, "server_error")
    status, _, _ = await client.post(body())
    assert status == 200
