"""``POST /v1/completions``: OpenAI's plain completions of one or several prompts, whole and streamed."""

from collections.abc import Sequence

from aiohttp import web

from kvstore_engine_adapter.faces.answering import Answering
from kvstore_engine_adapter.faces.api_error import ApiError
from kvstore_engine_adapter.faces.choice import AnswerToken, Choice, Piece
from kvstore_engine_adapter.faces.completion_request import CompletionRequest, parse_completion_request
from kvstore_engine_adapter.faces.event_stream import EventStream
from kvstore_engine_adapter.faces.openai_json import AnswerHead, json_logprob, reuse, usage
from kvstore_engine_adapter.faces.service import Service, read_request_body, stream_answer
from kvstore_engine_adapter.tokenizer import ModelTokenizer


class CompletionRoute:
    """Answers completions."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """Answer one request."""
        service = self._service
        with service.closing_time.request():
            async with service.closing_time.step():
                wanted = parse_completion_request(await read_request_body(request))
                service.require_model(wanted.model)
                prompts = [await self._encoded(prompt) for prompt in wanted.prompts]
            answering = service.answering(
                prompts, wanted.plan, request=request, is_streaming=wanted.is_streaming
            )
            head = AnswerHead(service.new_id("cmpl-"), service.now_s(), service.model_name)
            answer = _Completion(service.tokenizer, wanted, head, answering)
            async with service.pieces(answering) as pieces:
                if wanted.is_streaming:
                    return await stream_answer(request, pieces, answer)
                async for _ in pieces:
                    pass
            return web.json_response(answer.whole())

    async def _encoded(self, prompt: str | tuple[int, ...]) -> Sequence[int]:
        return await self._service.encode_text(prompt) if isinstance(prompt, str) else prompt


class _Completion:
    """One answer as OpenAI writes it. A StreamScript."""

    def __init__(
        self, tokenizer: ModelTokenizer, wanted: CompletionRequest, head: AnswerHead, answering: Answering
    ) -> None:
        self._tokenizer = tokenizer
        self._wanted = wanted
        self._head = head
        self._answering = answering

    def whole(self) -> dict[str, object]:
        """Return a whole answer."""
        choices = [
            {
                "index": choice.index,
                "text": self._echo(choice.index) + choice.text,
                "logprobs": self._logprobs(choice.tokens),
                "finish_reason": choice.finish_reason,
            }
            for choice in self._answering.choices
        ]
        return {
            **self._head.of_kind("text_completion"),
            "choices": choices,
            "usage": usage(self._answering),
            "kvstore": self._reuse(self._answering.choices[0]),
        }

    async def begin(self, stream: EventStream) -> None:
        """Send the prompts if they are wanted."""
        if self._wanted.echoes:
            for choice in self._answering.choices:
                await stream.send(self._chunk(choice.index, self._echo(choice.index)))

    async def send_piece(self, stream: EventStream, piece: Piece) -> None:
        """Send text; the last of a choice has its reason."""
        is_last = piece.finish_reason is not None
        if piece.text or is_last or (piece.tokens and self._wanted.plan.logprobs is not None):
            chunk = self._chunk(piece.index, piece.text, piece.tokens, piece.finish_reason)
            if is_last:
                chunk["kvstore"] = self._reuse(self._answering.choices[piece.index])
            await stream.send(chunk)

    async def finish(self, stream: EventStream) -> None:
        """Send the usage if it is wanted, and the end."""
        if self._wanted.includes_usage:
            chunk = self._head.of_kind("text_completion")
            await stream.send({**chunk, "choices": [], "usage": usage(self._answering)})
        await stream.send_done()

    async def fail(self, stream: EventStream, error: ApiError) -> None:
        """Send the error."""
        await stream.send(error.body)

    def _chunk(
        self,
        index: int,
        text: str,
        tokens: Sequence[AnswerToken] = (),
        finish_reason: str | None = None,
    ) -> dict[str, object]:
        choice = {
            "index": index,
            "text": text,
            "logprobs": self._logprobs(tokens) if tokens else None,
            "finish_reason": finish_reason,
        }
        chunk: dict[str, object] = {**self._head.of_kind("text_completion"), "choices": [choice]}
        if self._wanted.includes_usage:
            chunk["usage"] = None
        return chunk

    def _echo(self, index: int) -> str:
        if not self._wanted.echoes:
            return ""
        prompt = self._wanted.prompts[index // self._wanted.plan.num_choices]
        return prompt if isinstance(prompt, str) else self._tokenizer.decode(prompt)

    def _logprobs(self, tokens: Sequence[AnswerToken]) -> dict[str, object] | None:
        if self._wanted.plan.logprobs is None:
            return None
        return {
            "tokens": [self._text(token.token) for token in tokens],
            "token_logprobs": [json_logprob(token.logprob) for token in tokens],
            "top_logprobs": [self._alternatives(token) for token in tokens],
            "text_offset": [token.start_chars for token in tokens],
        }

    def _alternatives(self, token: AnswerToken) -> dict[str, float]:
        """Return the likeliest tokens and the chosen one; of those with one text the likelier counts."""
        found: dict[str, float] = {}
        for other, logprob in (*token.top_logprobs, (token.token, token.logprob)):
            found.setdefault(self._text(other), json_logprob(logprob))
        return found

    def _text(self, token: int) -> str:
        # As OpenAI writes tokens that are no whole characters.
        data = self._tokenizer.token_bytes(token)
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def _reuse(self, choice: Choice) -> dict[str, object]:
        return reuse(choice, shows_tokens=self._wanted.plan.wants_tokens)
