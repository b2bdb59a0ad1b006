"""Service: what the routes of one engine share."""

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from typing import Protocol

from aiohttp import web

from kvstore.errors import KVStoreError
from kvstore.hints import Hints
from kvstore.http.counters import HttpCounters
from kvstore_engine_adapter.faces.answering import MAX_UNREAD_TOKENS, Answering
from kvstore_engine_adapter.faces.api_error import ApiError, api_error
from kvstore_engine_adapter.faces.callers import owner_of
from kvstore_engine_adapter.faces.choice import Piece
from kvstore_engine_adapter.faces.closing_time import ClosingTime
from kvstore_engine_adapter.faces.event_stream import ClientGone, EventStream
from kvstore_engine_adapter.faces.record_access import Owner
from kvstore_engine_adapter.faces.request_body import read_body
from kvstore_engine_adapter.faces.sampling_fields import AnswerPlan
from kvstore_engine_adapter.paged_engine import PagedEngine
from kvstore_engine_adapter.tokenizer import ChatMessage, ModelTokenizer

logger = logging.getLogger(__name__)

MAX_LOGPROBS_OF_ANSWER = 1 << 20
"""Log-probabilities of all choices of a request, alternatives included; each takes about 250 bytes."""


class Service:
    """One engine as the routes see it: model, tokenizer, time, and the end of it all."""

    def __init__(
        self,
        engine: PagedEngine,
        tokenizer: ModelTokenizer,
        *,
        model_name: str,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self.model_name = model_name
        self.closing_time = ClosingTime()
        self.counters = HttpCounters()
        self.num_unstored_responses = 0
        self._wall_clock = wall_clock
        self.created_s = self.now_s()

    def now_s(self) -> int:
        """Return the time of day in Unix seconds, as answers show it."""
        return int(self._wall_clock())

    def new_id(self, prefix: str) -> str:
        """Return a name that nobody has and nobody guesses."""
        return f"{prefix}{secrets.token_hex(16)}"

    def require_model(self, name: str) -> None:
        """Refuse a model that is not the one served.

        Raises:
            ApiError: 404.
        """
        if name != self.model_name:
            raise ApiError(
                404,
                f"the model {name[:200]!r} does not exist here: this server serves {self.model_name!r}",
                param="model",
                code="model_not_found",
            )

    async def encode_chat(self, messages: Sequence[ChatMessage]) -> list[int]:
        """Return the tokens of a conversation.

        In a thread: a prompt of hundreds of kilobytes takes the tokenizer a second.

        Raises:
            InvalidRequest, PromptTooLong: as ``ModelTokenizer.encode_chat``.
        """
        limit = self.engine.context_tokens
        return await asyncio.to_thread(self.tokenizer.encode_chat, messages, context_tokens=limit)

    async def encode_text(self, text: str) -> list[int]:
        """Return the tokens of a text. Raises PromptTooLong as ``ModelTokenizer.encode_prompt``."""
        limit = self.engine.context_tokens
        return await asyncio.to_thread(self.tokenizer.encode_prompt, text, context_tokens=limit)

    async def note_end(self, owner: Owner, messages: Sequence[ChatMessage], *, num_shared: int) -> None:
        """Say that nobody goes on from a history, but for its first messages. Never raises."""
        if not messages:
            return
        try:
            tokens = await self.encode_chat(messages)
            shared = await self.encode_chat(messages[:num_shared]) if num_shared else []
        except KVStoreError as error:  # they are too many, say
            logger.debug("sessions: the end of one is not told: %s", error)
            return
        same = next((i for i, (a, b) in enumerate(zip(tokens, shared, strict=False)) if a != b), len(shared))
        hints = Hints(ends_session=True)
        self.engine.note_hints(tokens, hints, behind_tokens=same, tenant_salt=owner.block_salt)

    def answering(
        self,
        prompts: Sequence[Sequence[int]],
        plan: AnswerPlan,
        *,
        request: web.Request,
        is_streaming: bool,
        keeps_stop: bool = False,
    ) -> Answering:
        """Return the answers to the prompts of a request, not begun.

        Raises:
            ApiError: 400: they might have more log-probabilities than fit in memory.
        """
        self._refuse_too_many_logprobs(len(prompts), plan)
        return Answering(
            self.engine,
            self.tokenizer,
            prompts,
            plan,
            tenant_salt=owner_of(request).block_salt,
            keeps_stop=keeps_stop,
            max_unread_tokens=MAX_UNREAD_TOKENS if is_streaming else None,
        )

    def _refuse_too_many_logprobs(self, num_prompts: int, plan: AnswerPlan) -> None:
        if plan.logprobs is None:
            return
        tokens = num_prompts * plan.num_choices * (plan.max_tokens or self.engine.context_tokens)
        if tokens * (plan.logprobs + 1) > MAX_LOGPROBS_OF_ANSWER:
            raise ApiError(
                400,
                f"up to {tokens} tokens with {plan.logprobs + 1} log-probabilities each: a request may ask"
                f" for {MAX_LOGPROBS_OF_ANSWER} in all: lower the tokens, choices or alternatives",
                param="logprobs",
            )

    @contextlib.asynccontextmanager
    async def pieces(self, answering: Answering) -> AsyncIterator[AsyncIterator[Piece]]:
        """Have answers generated inside the block; EngineClosed for what is not there at the end of time."""
        async with contextlib.aclosing(answering.pieces()) as pieces:
            yield self._until_closed(pieces)

    async def _until_closed(self, pieces: AsyncIterator[Piece]) -> AsyncGenerator[Piece, None]:
        while True:
            async with self.closing_time.step():
                piece = await anext(pieces, None)
            if piece is None:
                return
            yield piece


class StreamScript(Protocol):
    """What a face sends as events: ``begin``, the pieces, ``finish``; an error may end it anywhere."""

    async def begin(self, stream: EventStream) -> None:
        """Send what comes before the first piece."""

    async def send_piece(self, stream: EventStream, piece: Piece) -> None:
        """Send what has come of a choice."""

    async def finish(self, stream: EventStream) -> None:
        """Send what comes after the last piece."""

    async def fail(self, stream: EventStream, error: ApiError) -> None:
        """Send that the answer failed half-way."""


async def stream_answer(
    request: web.Request, pieces: AsyncIterator[Piece], script: StreamScript
) -> web.StreamResponse:
    """Send an answer as server-sent events.

    An error before the first piece still gets its own status; any later one is the stream's last event.
    """
    first = await anext(pieces)
    stream = EventStream()
    await stream.start(request)
    try:
        await script.begin(stream)
        await script.send_piece(stream, first)
        async for piece in pieces:
            await script.send_piece(stream, piece)
        await script.finish(stream)
    except ClientGone:
        raise
    except ApiError as error:
        await _end_with(stream, script, error)
    except Exception as error:
        logger.exception("an answer failed half-way")
        await _end_with(stream, script, api_error(error))
    return stream.response


async def _end_with(stream: EventStream, script: StreamScript, error: ApiError) -> None:
    await script.fail(stream, error)
    await stream.end()


async def read_request_body(request: web.Request) -> bytes:
    """Return a request's body.

    Raises:
        ApiError: as ``read_body``.
        ClientGone: the client went away meanwhile.
    """
    try:
        return await read_body(request)
    except ConnectionError as error:
        raise ClientGone("a client went away while it sent its request") from error
