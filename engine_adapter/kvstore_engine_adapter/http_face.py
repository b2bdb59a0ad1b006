"""HttpFace: the engine's OpenAI-compatible HTTP interface."""

import asyncio
import contextlib
import json
import logging
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from aiohttp import web

from kvstore.errors import InvalidRequest, KVStoreError, PromptTooLong, TierFull
from kvstore_engine_adapter.chat_answer import AnswerHead, AnswerText, reuse
from kvstore_engine_adapter.chat_request import ApiError, ChatRequest, parse_chat_request
from kvstore_engine_adapter.closing_time import ClosingTime
from kvstore_engine_adapter.generation import (
    EngineBusy,
    EngineClosed,
    Finished,
    GenerateRequest,
    Prefilled,
    RequestReport,
    Token,
)
from kvstore_engine_adapter.paged_engine import PagedEngine
from kvstore_engine_adapter.request_body import read_body
from kvstore_engine_adapter.tokenizer import ModelTokenizer

logger = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

MAX_BODY_BYTES = 4 << 20
_WRITE_PATIENCE_S = 10.0
_RETRY_AFTER_S = 1


class ClientGone(ConnectionError):
    """A client that hung up, or that does not read its stream."""


@dataclass(slots=True)
class _Answer:
    """What has come of one request so far."""

    text: AnswerText
    report: RequestReport
    tokens: list[int] = field(default_factory=list)
    finish_reason: str = "stop"


class HttpFace:
    """Routes of one engine, served by its ``runner``. A client that hangs up ends its request.

    A client that does not read its stream for 10 seconds is dropped: the engine runs one request at a time.
    ``close`` before the runner's clean-up gives the requests under way their time.
    """

    def __init__(
        self,
        engine: PagedEngine,
        tokenizer: ModelTokenizer,
        *,
        model_name: str,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._model_name = model_name
        self._wall_clock = wall_clock
        self._created = int(wall_clock())
        self._closing_time = ClosingTime()

    def runner(self, *, max_body_bytes: int = MAX_BODY_BYTES, shutdown_s: float = 1.0) -> web.AppRunner:
        """Return what serves the routes, not set up. ``shutdown_s``: half the time its clean-up may take."""
        app = web.Application(client_max_size=max_body_bytes, middlewares=[_errors_in_openai_shape])
        app.router.add_post("/v1/chat/completions", self._chat, expect_handler=_answer_expectation)
        for path, answer in (
            ("/v1/models", self._models),
            ("/v1/models/{name:.+}", self._model),
            ("/healthz", self._health),
            ("/stats", self._stats),
        ):
            app.router.add_get(path, answer, expect_handler=_answer_expectation)
        # Cancellation on: a client that hangs up ends its request.
        return web.AppRunner(
            app,
            handler_cancellation=True,
            access_log=None,
            auto_decompress=False,
            shutdown_timeout=shutdown_s,
        )

    async def close(self, *, grace_s: float) -> None:
        """Refuse new chats, give those under way ``grace_s`` seconds, then end them with an error."""
        await self._closing_time.close(grace_s=grace_s)

    async def _health(self, _request: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def _stats(self, _request: web.Request) -> web.Response:
        return web.json_response(self._engine.stats())

    async def _models(self, _request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [self._model_object()]})

    async def _model(self, request: web.Request) -> web.Response:
        self._require_model(request.match_info["name"])
        return web.json_response(self._model_object())

    def _model_object(self) -> dict[str, object]:
        return {
            "id": self._model_name,
            "object": "model",
            "created": self._created,
            "owned_by": "kvstore",
            "max_model_len": self._engine.context_tokens,
        }

    def _require_model(self, name: str) -> None:
        if name != self._model_name:
            raise ApiError(
                404,
                f"the model {name[:200]!r} does not exist here: this server serves {self._model_name!r}",
                param="model",
                code="model_not_found",
            )

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        with self._closing_time.request():
            async with self._closing_time.step():
                chat = parse_chat_request(await _read_body(request))
                self._require_model(chat.model)
                # In a thread: a prompt of hundreds of kilobytes takes the tokenizer a second.
                prompt = await asyncio.to_thread(
                    self._tokenizer.encode_chat, chat.messages, context_tokens=self._engine.context_tokens
                )
            return await self._answer(request, chat, prompt)

    async def _answer(
        self, request: web.Request, chat: ChatRequest, prompt: Sequence[int]
    ) -> web.StreamResponse:
        generate = GenerateRequest(
            prompt=prompt,
            max_tokens=chat.max_tokens,
            sampling=chat.sampling,
            end_tokens=self._tokenizer.end_tokens,
            wants_first_logits=chat.wants_first_logits,
        )
        answer = _Answer(AnswerText(self._tokenizer, chat.stops), RequestReport(len(prompt)))
        head = AnswerHead(f"chatcmpl-{secrets.token_hex(12)}", int(self._wall_clock()), self._model_name)
        async with contextlib.aclosing(self._pieces(generate, answer)) as pieces:
            in_time = self._until_closed(pieces)
            if chat.is_streaming:
                return await _stream(request, chat, head, answer, in_time)
            text = "".join([piece async for piece in in_time])
        tokens = answer.tokens if chat.wants_tokens else None
        return web.json_response(head.completion(text, answer.finish_reason, answer.report, tokens))

    async def _until_closed(self, pieces: AsyncIterator[str]) -> AsyncIterator[str]:
        """Yield the pieces; EngineClosed if the next one is not there at the end of closing time."""
        while True:
            async with self._closing_time.step():
                piece = await anext(pieces, None)
            if piece is None:
                return
            yield piece

    async def _pieces(self, generate: GenerateRequest, answer: _Answer) -> AsyncGenerator[str, None]:
        """Yield the answer's text piece by piece, the first (empty) one once the prompt is computed."""
        async with contextlib.aclosing(self._engine.generate(generate)) as events:
            async for event in events:
                match event:
                    case Prefilled(report):
                        answer.report = report
                        yield ""
                    case Token(token):
                        answer.tokens.append(token)
                        yield answer.text.push(token)
                        if answer.text.is_stopped:
                            return
                    case Finished(reason, _):
                        answer.finish_reason = reason
                        yield answer.text.finish()
        if answer.text.is_stopped:
            answer.finish_reason = "stop"


async def _stream(
    request: web.Request, chat: ChatRequest, head: AnswerHead, answer: _Answer, pieces: AsyncIterator[str]
) -> web.StreamResponse:
    """Send the answer as server-sent events.

    An error before the first piece still gets its own status; any later one is the stream's last event.
    """
    await anext(pieces)
    response = web.StreamResponse(
        headers={"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
    )
    await response.prepare(request)
    try:
        await _send_answer(response, chat, head, answer, pieces)
    except ClientGone:
        raise
    except Exception as error:
        logger.exception("an answer failed half-way")
        await _send(response, _api_error(error).body)
        await _end(response)
    return response


async def _send_answer(
    response: web.StreamResponse,
    chat: ChatRequest,
    head: AnswerHead,
    answer: _Answer,
    pieces: AsyncIterator[str],
) -> None:
    await _send(response, head.chunk({"role": "assistant", "content": ""}))
    async for piece in pieces:
        if piece:
            await _send(response, head.chunk({"content": piece}))
    last = head.chunk({}, answer.finish_reason)
    last["kvstore"] = reuse(answer.report, answer.tokens if chat.wants_tokens else None)
    await _send(response, last)
    if chat.includes_usage:
        await _send(response, head.usage_chunk(answer.report))
    await _write(response, b"data: [DONE]\n\n")


async def _send(response: web.StreamResponse, event: dict[str, object]) -> None:
    await _write(response, b"data: " + json.dumps(event, ensure_ascii=False).encode() + b"\n\n")


async def _write(response: web.StreamResponse, data: bytes) -> None:
    try:
        async with asyncio.timeout(_WRITE_PATIENCE_S):
            await response.write(data)
    except (ConnectionError, TimeoutError) as error:
        raise ClientGone("a client went away or stopped reading its stream") from error


async def _end(response: web.StreamResponse) -> None:
    """End a stream. Nothing may follow it, so its connection is not used again."""
    response.force_close()
    try:
        async with asyncio.timeout(_WRITE_PATIENCE_S):
            await response.write_eof()
    except (ConnectionError, TimeoutError) as error:
        raise ClientGone("a client went away or stopped reading its stream") from error


async def _answer_expectation(request: web.Request) -> web.Response | None:
    """Send 100 Continue to a client that asks for it; refuse any other expectation."""
    expectation = request.headers.get("Expect", "")
    if expectation.lower() != "100-continue":
        return _error_response(ApiError(417, f"Expect: {expectation[:40]!r} is not supported"))
    await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    request.writer.output_size = 0  # what came before the status line does not count as sent
    return None


async def _read_body(request: web.Request) -> bytes:
    try:
        return await read_body(request)
    except ConnectionError as error:
        raise ClientGone("a client went away while it sent its request") from error


@web.middleware
async def _errors_in_openai_shape(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except web.HTTPException as error:
        if error.status < 400:
            raise
        return _error_response(ApiError(error.status, error.text or error.reason))
    except (ApiError, KVStoreError, ArithmeticError) as error:
        return _error_response(_api_error(error))
    except ClientGone as error:
        logger.info("%s", error)
        raise
    except Exception as error:
        logger.exception("%s %s failed", request.method, request.path)
        return _error_response(_api_error(error))


def _api_error(error: Exception) -> ApiError:
    match error:
        case ApiError():
            return error
        case PromptTooLong():
            return ApiError(400, str(error), param="messages", code="context_length_exceeded")
        case InvalidRequest():
            return ApiError(400, str(error))
        case EngineBusy() | EngineClosed() | TierFull():
            return ApiError(503, str(error), kind="overloaded_error", code="overloaded")
        case KVStoreError() | ArithmeticError():
            return ApiError(500, str(error), kind="server_error")
        case _:
            return ApiError(500, "the server failed; its log says why", kind="server_error")


def _error_response(error: ApiError) -> web.Response:
    headers = {"Retry-After": str(_RETRY_AFTER_S)} if error.status == 503 else None
    return web.json_response(error.body, status=error.status, headers=headers)
