"""``POST /v1/chat/completions``: OpenAI's chat, whole and streamed."""

from collections.abc import Sequence
from dataclasses import dataclass

from aiohttp import web

from kvstore_engine_adapter.faces.answering import Answering
from kvstore_engine_adapter.faces.api_error import ApiError
from kvstore_engine_adapter.faces.callers import owner_of
from kvstore_engine_adapter.faces.chat_request import (
    SESSION_HEADER,
    ChatRequest,
    parse_chat_request,
    with_session_header,
)
from kvstore_engine_adapter.faces.choice import AnswerToken, Choice, Piece
from kvstore_engine_adapter.faces.event_stream import EventStream
from kvstore_engine_adapter.faces.openai_json import AnswerHead, chat_logprobs, reuse, usage
from kvstore_engine_adapter.faces.record_access import Owner
from kvstore_engine_adapter.faces.service import Service, read_request_body, stream_answer
from kvstore_engine_adapter.faces.session_routes import session_json
from kvstore_engine_adapter.faces.sessions import SessionHead, Sessions
from kvstore_engine_adapter.tokenizer import ChatMessage


class ChatRoute:
    """Answers chats."""

    def __init__(self, service: Service, sessions: Sessions) -> None:
        self._service = service
        self._sessions = sessions

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """Answer one request."""
        service = self._service
        with service.closing_time.request():
            async with service.closing_time.step():
                chat = parse_chat_request(await read_request_body(request))
                service.require_model(chat.model)
                chat = with_session_header(chat, request.headers.getall(SESSION_HEADER, []))
            if chat.session is None:
                return await self._answer(request, chat, chat.messages, None)
            owner = owner_of(request)
            with self._sessions.in_hand(owner, chat.session.name):
                async with service.closing_time.step():
                    head, history = await self._sessions.begin_turn(owner, chat.session)
                turn = _Turn(self._sessions, owner, head, chat.messages)
                return await self._answer(request, chat, [*history, *chat.messages], turn)

    async def _answer(
        self, request: web.Request, chat: ChatRequest, messages: Sequence[ChatMessage], turn: "_Turn | None"
    ) -> web.StreamResponse:
        service = self._service
        async with service.closing_time.step():
            prompt = await service.encode_chat(messages)
        answering = service.answering([prompt], chat.plan, request=request, is_streaming=chat.is_streaming)
        answer = _ChatAnswer(service, chat, answering, turn)
        async with service.pieces(answering) as pieces:
            if chat.is_streaming:
                return await stream_answer(request, pieces, answer)
            async for _ in pieces:
                pass
        return web.json_response(await answer.whole())


@dataclass(slots=True)
class _Turn:
    """The turn of a session that an answer ends."""

    sessions: Sessions
    owner: Owner
    head: SessionHead
    messages: Sequence[ChatMessage]

    async def end(self, text: str) -> None:
        """Store it. Raises ApiError as ``Sessions.end_turn``."""
        messages = [*self.messages, ChatMessage("assistant", text)]
        self.head = await self.sessions.end_turn(self.owner, self.head, messages)


class _ChatAnswer:
    """One answer as OpenAI writes it. A StreamScript."""

    def __init__(self, service: Service, chat: ChatRequest, answering: Answering, turn: _Turn | None) -> None:
        self._tokenizer = service.tokenizer
        self._chat = chat
        self._head = AnswerHead(service.new_id("chatcmpl-"), service.now_s(), service.model_name)
        self._answering = answering
        self._turn = turn

    async def whole(self) -> dict[str, object]:
        """Return a whole answer, once its session has it."""
        await self._end_turn()
        choices = [
            {
                "index": choice.index,
                "message": {"role": "assistant", "content": choice.text, "refusal": None},
                "logprobs": self._logprobs(choice.tokens),
                "finish_reason": choice.finish_reason,
            }
            for choice in self._answering.choices
        ]
        return {
            **self._head.of_kind("chat.completion"),
            "choices": choices,
            "usage": usage(self._answering),
            "kvstore": self._reuse(self._answering.choices[0]),
        }

    async def begin(self, stream: EventStream) -> None:
        """Send each choice's role."""
        for choice in self._answering.choices:
            await stream.send(self._chunk(choice.index, {"role": "assistant", "content": ""}))

    async def send_piece(self, stream: EventStream, piece: Piece) -> None:
        """Send text, and at a choice's end its reason."""
        if piece.text or (piece.tokens and self._chat.plan.logprobs is not None):
            await stream.send(self._chunk(piece.index, {"content": piece.text}, tokens=piece.tokens))
        if piece.finish_reason is not None:
            # The session first: an answer that it does not have must not look finished.
            await self._end_turn()
            last = self._chunk(piece.index, {}, finish_reason=piece.finish_reason)
            last["kvstore"] = self._reuse(self._answering.choices[piece.index])
            await stream.send(last)

    async def finish(self, stream: EventStream) -> None:
        """Send the usage if it is wanted, and the end."""
        if self._chat.includes_usage:
            chunk = self._head.of_kind("chat.completion.chunk")
            await stream.send({**chunk, "choices": [], "usage": usage(self._answering)})
        await stream.send_done()

    async def fail(self, stream: EventStream, error: ApiError) -> None:
        """Send the error."""
        await stream.send(error.body)

    def _chunk(
        self,
        index: int,
        delta: dict[str, object],
        *,
        tokens: Sequence[AnswerToken] = (),
        finish_reason: str | None = None,
    ) -> dict[str, object]:
        choice = {
            "index": index,
            "delta": delta,
            "logprobs": self._logprobs(tokens) if tokens else None,
            "finish_reason": finish_reason,
        }
        chunk: dict[str, object] = {**self._head.of_kind("chat.completion.chunk"), "choices": [choice]}
        if self._chat.includes_usage:
            chunk["usage"] = None
        return chunk

    def _logprobs(self, tokens: Sequence[AnswerToken]) -> dict[str, object] | None:
        return None if self._chat.plan.logprobs is None else chat_logprobs(self._tokenizer, tokens)

    def _reuse(self, choice: Choice) -> dict[str, object]:
        shown = reuse(choice, shows_tokens=self._chat.plan.wants_tokens)
        return shown if self._turn is None else shown | {"session": session_json(self._turn.head)}

    async def _end_turn(self) -> None:
        if self._turn is not None:
            await self._turn.end(self._answering.choices[0].text)
