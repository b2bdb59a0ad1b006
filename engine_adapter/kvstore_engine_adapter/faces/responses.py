"""``/v1/responses``: OpenAI's responses, which a server keeps and goes on from; whole and streamed."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from aiohttp import web

from kvstore.log_limit import LimitedWarning
from kvstore_engine_adapter.faces.answering import Answering
from kvstore_engine_adapter.faces.api_error import ApiError
from kvstore_engine_adapter.faces.callers import owner_of
from kvstore_engine_adapter.faces.choice import AnswerToken, Piece
from kvstore_engine_adapter.faces.event_stream import EventStream
from kvstore_engine_adapter.faces.openai_json import reuse, token_logprob
from kvstore_engine_adapter.faces.record_access import Owner
from kvstore_engine_adapter.faces.response_request import ResponseRequest, parse_response_request
from kvstore_engine_adapter.faces.service import Service, read_request_body, stream_answer
from kvstore_engine_adapter.faces.stored_responses import StoredResponse, StoredResponses
from kvstore_engine_adapter.tokenizer import ChatMessage

logger = logging.getLogger(__name__)


class ResponseRoutes:
    """Answers and keeps responses."""

    def __init__(self, service: Service, stored: StoredResponses) -> None:
        self._service = service
        self._stored = stored
        self._warning = LimitedWarning(logger)

    async def create(self, request: web.Request) -> web.StreamResponse:
        """Answer one request."""
        service, owner = self._service, owner_of(request)
        with service.closing_time.request():
            async with service.closing_time.step():
                wanted = parse_response_request(await read_request_body(request))
                service.require_model(wanted.model)
                history, ancestors = await self._history(owner, wanted)
                prompt = await service.encode_chat([*history, *wanted.messages])
            answering = service.answering(
                [prompt], wanted.plan, request=request, is_streaming=wanted.is_streaming
            )
            context = _Context(owner, wanted, ancestors, self._stored, self._warning)
            answer = _ResponseAnswer(service, context, answering)
            async with service.pieces(answering) as pieces:
                if wanted.is_streaming:
                    return await stream_answer(request, pieces, answer)
                async for _ in pieces:
                    pass
            return web.json_response(await answer.kept())

    async def show(self, request: web.Request) -> web.Response:
        """Answer with a stored response."""
        found = await self._stored.get(owner_of(request), request.match_info["id"])
        return web.json_response(found.response)

    async def delete(self, request: web.Request) -> web.Response:
        """Drop a stored response; the blocks of its turn may leave first from then on."""
        name, owner = request.match_info["id"], owner_of(request)
        ended = await self._stored.delete(owner, name)
        await self._service.note_end(owner, ended.messages, num_shared=ended.num_shared)
        return web.json_response({"id": name, "object": "response", "deleted": True})

    async def items(self, request: web.Request) -> web.Response:
        """Answer with the input of a stored response."""
        found = await self._stored.get(owner_of(request), request.match_info["id"])
        items = found.items if request.query.get("order") == "asc" else found.items[::-1]
        ids = [item.get("id") if isinstance(item, dict) else None for item in items]
        return web.json_response(
            {
                "object": "list",
                "data": items,
                "first_id": ids[0] if ids else None,
                "last_id": ids[-1] if ids else None,
                "has_more": False,
            }
        )

    async def _history(
        self, owner: Owner, wanted: ResponseRequest
    ) -> tuple[list[ChatMessage], Sequence[str]]:
        history: list[ChatMessage] = []
        ancestors: Sequence[str] = ()
        if wanted.previous_response_id is not None:
            history, ancestors = await self._stored.history(owner, wanted.previous_response_id)
        if wanted.instructions is not None:
            history = [ChatMessage("system", wanted.instructions), *history]
        return history, ancestors


@dataclass(frozen=True, slots=True)
class _Context:
    """What a response is made from, and where it is kept."""

    owner: Owner
    wanted: ResponseRequest
    ancestors: Sequence[str]
    stored: StoredResponses
    warning: LimitedWarning


class _ResponseAnswer:
    """One answer as OpenAI writes it, kept before its last event. A StreamScript."""

    def __init__(self, service: Service, context: _Context, answering: Answering) -> None:
        self._tokenizer = service.tokenizer
        self._service = service
        self._context = context
        self._choice = answering.choices[0]
        self._answering = answering
        self._created_s = service.now_s()
        self._id = service.new_id("resp_")
        self._message_id = service.new_id("msg_")
        self._num_events = 0

    async def kept(self) -> dict[str, object]:
        """Return the whole response, stored if that was wanted and could be done."""
        response = self._response(self._status(), [self._message(self._status())])
        if not self._context.wanted.is_stored:
            return response
        try:
            await self._context.stored.store(self._context.owner, self._id, self._to_store(response))
        except ApiError as error:
            # The answer is whole; only what goes on from it will be told that it is not known.
            self._context.warning.warn("responses: one was not stored: %s", error)
            self._service.num_unstored_responses += 1
            response["store"] = False
            response["kvstore"] = {**self._reuse(), "not_stored": error.message}
        return response

    async def begin(self, stream: EventStream) -> None:
        """Send that the response, its message and the message's text begin."""
        for kind in ("response.created", "response.in_progress"):
            await self._send(stream, kind, response=self._response("in_progress", []))
        item = {**self._message("in_progress"), "content": []}
        await self._send(stream, "response.output_item.added", output_index=0, item=item)
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        await self._send(stream, "response.content_part.added", **self._place(), part=part)

    async def send_piece(self, stream: EventStream, piece: Piece) -> None:
        """Send text."""
        logprobs = self._logprobs(piece.tokens)
        if piece.text or logprobs:
            delta = {"delta": piece.text, "logprobs": logprobs}
            await self._send(stream, "response.output_text.delta", **self._place(), **delta)

    async def finish(self, stream: EventStream) -> None:
        """Send that all is done, once it is stored."""
        status = self._status()
        message = self._message(status)
        part = self._part()
        await self._send(
            stream,
            "response.output_text.done",
            **self._place(),
            text=self._choice.text,
            logprobs=part["logprobs"],
        )
        await self._send(stream, "response.content_part.done", **self._place(), part=part)
        await self._send(stream, "response.output_item.done", output_index=0, item=message)
        await self._send(stream, f"response.{status}", response=await self.kept())

    async def fail(self, stream: EventStream, error: ApiError) -> None:
        """Send the error."""
        detail = {"code": error.code, "message": error.message, "param": error.param}
        await self._send(stream, "error", **detail)
        response = self._response("failed", [])
        response["error"] = {"code": "server_error", "message": error.message}
        await self._send(stream, "response.failed", response=response)

    async def _send(self, stream: EventStream, kind: str, **data: object) -> None:
        await stream.send({"type": kind, "sequence_number": self._num_events, **data}, event=kind)
        self._num_events += 1

    def _place(self) -> dict[str, object]:
        return {"item_id": self._message_id, "output_index": 0, "content_index": 0}

    def _status(self) -> str:
        return "incomplete" if self._choice.finish_reason == "length" else "completed"

    def _response(self, status: str, output: list[dict[str, object]]) -> dict[str, object]:
        wanted, is_done = self._context.wanted, status in ("completed", "incomplete")
        sampling = wanted.plan.sampling
        response: dict[str, object] = {
            "id": self._id,
            "object": "response",
            "created_at": self._created_s,
            "completed_at": self._service.now_s() if status == "completed" else None,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": wanted.instructions,
            "max_output_tokens": wanted.plan.max_tokens,
            "metadata": wanted.metadata,
            "model": self._service.model_name,
            "output": output,
            "parallel_tool_calls": True,
            "previous_response_id": wanted.previous_response_id,
            "reasoning": {"effort": None, "summary": None},
            "store": wanted.is_stored,
            "temperature": sampling.temperature,
            "text": {"format": {"type": "text"}},
            "tool_choice": "auto",
            "tools": [],
            "top_logprobs": wanted.plan.logprobs or 0,
            "top_p": sampling.top_p,
            "truncation": "disabled",
            "usage": self._usage() if is_done else None,
            "user": None,
        }
        return response | {"kvstore": self._reuse()} if is_done else response

    def _reuse(self) -> dict[str, object]:
        return reuse(self._choice, shows_tokens=False)

    def _usage(self) -> dict[str, object]:
        input_tokens, cached_tokens, output_tokens = self._answering.usage
        return {
            "input_tokens": input_tokens,
            "input_tokens_details": {"cached_tokens": cached_tokens, "cache_write_tokens": 0},
            "output_tokens": output_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": input_tokens + output_tokens,
        }

    def _message(self, status: str) -> dict[str, object]:
        return {
            "id": self._message_id,
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": [self._part()],
        }

    def _part(self) -> dict[str, object]:
        return {
            "type": "output_text",
            "text": self._choice.text,
            "annotations": [],
            "logprobs": self._logprobs(self._choice.tokens),
        }

    def _logprobs(self, tokens: Sequence[AnswerToken]) -> list[dict[str, object]]:
        if self._context.wanted.plan.logprobs is None:
            return []
        return [
            {
                **token_logprob(self._tokenizer, token.token, token.logprob),
                "top_logprobs": [
                    token_logprob(self._tokenizer, other, value) for other, value in token.top_logprobs
                ],
            }
            for token in tokens
        ]

    def _to_store(self, response: dict[str, object]) -> StoredResponse:
        messages = self._context.wanted.messages
        items: list[object] = [
            {
                "id": self._service.new_id("msg_"),
                "type": "message",
                "role": message.role,
                "status": "completed",
                "content": [_input_part(message)],
            }
            for message in messages
        ]
        answer = ChatMessage("assistant", self._choice.text)
        return StoredResponse(response, items, (*messages, answer), tuple(self._context.ancestors))


def _input_part(message: ChatMessage) -> dict[str, object]:
    if message.role == "assistant":
        return {"type": "output_text", "text": message.content, "annotations": []}
    return {"type": "input_text", "text": message.content}
