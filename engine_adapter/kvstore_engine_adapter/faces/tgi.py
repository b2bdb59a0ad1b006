"""TGI's routes: ``/generate``, ``/generate_stream``, ``/`` and ``/info``, in its shapes."""

import importlib.metadata
from collections.abc import Sequence

from aiohttp import web

from kvstore_engine_adapter.faces.answering import Answering
from kvstore_engine_adapter.faces.api_error import ApiError
from kvstore_engine_adapter.faces.choice import AnswerToken, Choice, Piece
from kvstore_engine_adapter.faces.event_stream import EventStream
from kvstore_engine_adapter.faces.openai_json import json_logprob
from kvstore_engine_adapter.faces.sampling_fields import MAX_STOPS
from kvstore_engine_adapter.faces.service import Service, read_request_body, stream_answer
from kvstore_engine_adapter.faces.tgi_request import TgiRequest, parse_tgi_request
from kvstore_engine_adapter.tokenizer import ModelTokenizer

TGI_PATHS = frozenset({"/", "/generate", "/generate_stream", "/info", "/health"})
"""Paths whose errors have TGI's shape."""


class TgiRoutes:
    """Answers as text-generation-inference does."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def generate(self, request: web.Request) -> web.StreamResponse:
        """Answer ``/generate``: one JSON object."""
        with self._service.closing_time.request():
            wanted, prompt = await self._read(request)
            return web.json_response(await self._whole(request, wanted, prompt))

    async def generate_stream(self, request: web.Request) -> web.StreamResponse:
        """Answer ``/generate_stream``: an event for each token."""
        with self._service.closing_time.request():
            wanted, prompt = await self._read(request)
            return await self._streamed(request, wanted, prompt)

    async def compatible(self, request: web.Request) -> web.StreamResponse:
        """Answer ``/``: as one of the others, by ``stream``; a whole answer is the only entry of a list."""
        with self._service.closing_time.request():
            wanted, prompt = await self._read(request)
            if wanted.is_streaming:
                return await self._streamed(request, wanted, prompt)
            return web.json_response([await self._whole(request, wanted, prompt)])

    async def info(self, _request: web.Request) -> web.Response:
        """Answer with the model and the limits."""
        engine = self._service.engine
        return web.json_response(
            {
                "model_id": self._service.model_name,
                "model_sha": None,
                "model_pipeline_tag": "text-generation",
                "model_dtype": engine.layout.dtype,
                "max_concurrent_requests": engine.max_requests,
                "max_best_of": 1,
                "max_stop_sequences": MAX_STOPS,
                "max_input_tokens": engine.context_tokens - 1,
                "max_total_tokens": engine.context_tokens,
                "validation_workers": 1,
                "max_client_batch_size": 1,
                "router": "kvstore",
                "version": importlib.metadata.version("tiered-kvstore"),
                "sha": None,
                "docker_label": None,
            }
        )

    async def _read(self, request: web.Request) -> tuple[TgiRequest, Sequence[int]]:
        async with self._service.closing_time.step():
            wanted = parse_tgi_request(await read_request_body(request))
            prompt = await self._service.encode_text(wanted.inputs)
            return wanted, prompt if wanted.truncate_tokens is None else prompt[-wanted.truncate_tokens :]

    async def _whole(
        self, request: web.Request, wanted: TgiRequest, prompt: Sequence[int]
    ) -> dict[str, object]:
        answering = self._service.answering(
            [prompt], wanted.plan, request=request, is_streaming=False, keeps_stop=True
        )
        async with self._service.pieces(answering) as pieces:
            async for _ in pieces:
                pass
        return _TgiAnswer(self._service.tokenizer, wanted, answering).whole()

    async def _streamed(
        self, request: web.Request, wanted: TgiRequest, prompt: Sequence[int]
    ) -> web.StreamResponse:
        answering = self._service.answering(
            [prompt], wanted.plan, request=request, is_streaming=True, keeps_stop=True
        )
        async with self._service.pieces(answering) as pieces:
            answer = _TgiAnswer(self._service.tokenizer, wanted, answering)
            return await stream_answer(request, pieces, answer)


class _TgiAnswer:
    """One answer as TGI writes it. A StreamScript.

    The last token's event says how it all ended: the model's end token, or the last one there was room for.
    """

    def __init__(self, tokenizer: ModelTokenizer, wanted: TgiRequest, answering: Answering) -> None:
        self._tokenizer = tokenizer
        self._wanted = wanted
        self._choice: Choice = answering.choices[0]
        self._waiting: AnswerToken | None = None
        self._num_sent = 0

    def whole(self) -> dict[str, object]:
        """Return a whole answer."""
        answer: dict[str, object] = {"generated_text": self._text()}
        if self._wanted.wants_details:
            tokens = [*self._choice.tokens, *self._end()]
            details = self._details()
            details["prefill"] = []
            details["tokens"] = [self._token(token) for token in tokens]
            if self._wanted.plan.logprobs:
                details["top_tokens"] = [self._top(token) for token in tokens]
            answer["details"] = details
        return answer

    async def begin(self, stream: EventStream) -> None:
        """Nothing comes before the first token."""

    async def send_piece(self, stream: EventStream, piece: Piece) -> None:
        """Send tokens, but for the last."""
        for token in piece.tokens:
            if self._waiting is not None:
                await self._send(stream, self._waiting, is_last=False)
            self._waiting = token
        num_tokens = self._num_sent + (self._waiting is not None)
        is_open = piece.finish_reason is None and num_tokens != self._wanted.plan.max_tokens
        if is_open and self._waiting is not None:
            await self._send(stream, self._waiting, is_last=False)
            self._waiting = None

    async def finish(self, stream: EventStream) -> None:
        """Send the last token with the whole text and how it ended."""
        for token in self._end():
            if self._waiting is not None:
                await self._send(stream, self._waiting, is_last=False)
            self._waiting = token
        assert self._waiting is not None, "an answer ends with a token"
        await self._send(stream, self._waiting, is_last=True)

    async def fail(self, stream: EventStream, error: ApiError) -> None:
        """Send the error."""
        await stream.send(error.tgi_body)

    async def _send(self, stream: EventStream, token: AnswerToken, *, is_last: bool) -> None:
        self._num_sent += 1
        event: dict[str, object] = {
            "index": self._num_sent,
            "token": self._token(token),
            "generated_text": self._text() if is_last else None,
            "details": self._details() if is_last else None,
        }
        if self._wanted.plan.logprobs:
            event["top_tokens"] = self._top(token)
        await stream.send(event)

    def _end(self) -> list[AnswerToken]:
        """Return the end token as TGI shows it: the answer's last; without it, nothing."""
        end = self._choice.end
        if end is None:
            return []
        text = self._tokenizer.token_bytes(end.token).decode("utf-8", errors="replace")
        return [AnswerToken(end.token, text, len(self._choice.text), end.logprob, end.top_logprobs)]

    def _text(self) -> str:
        return (self._wanted.inputs if self._wanted.returns_full_text else "") + self._choice.text

    def _details(self) -> dict[str, object]:
        choice = self._choice
        reasons = {"length": "length", "stop": "stop_sequence" if choice.has_stop_text else "eos_token"}
        return {
            "finish_reason": reasons[choice.finish_reason or "stop"],
            "generated_tokens": choice.report.output_tokens + (choice.end is not None),
            "input_length": choice.report.prompt_tokens,
            "seed": self._wanted.plan.sampling.seed,
        }

    def _token(self, token: AnswerToken) -> dict[str, object]:
        return self._entry(token.token, token.logprob, token.text)

    def _top(self, token: AnswerToken) -> list[dict[str, object]]:
        return [self._entry(other, logprob) for other, logprob in token.top_logprobs]

    def _entry(self, token: int, logprob: float | None, text: str | None = None) -> dict[str, object]:
        if text is None:
            text = self._tokenizer.token_bytes(token).decode("utf-8", errors="replace")
        return {
            "id": token,
            "text": text,
            "logprob": 0.0 if logprob is None else json_logprob(logprob),
            "special": token in self._tokenizer.special_tokens,
        }
