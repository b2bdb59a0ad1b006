"""Answering: the choices of one request, generated side by side, as pieces in the order that they come."""

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass

from kvstore_engine_adapter.faces.choice import Choice, Piece, StopCut
from kvstore_engine_adapter.faces.event_stream import SlowClient
from kvstore_engine_adapter.faces.sampling_fields import AnswerPlan
from kvstore_engine_adapter.generation import (
    EngineClosed,
    Finished,
    GenerateRequest,
    Prefilled,
    RequestReport,
    Token,
)
from kvstore_engine_adapter.paged_engine import PagedEngine
from kvstore_engine_adapter.sampling import MAX_SEED
from kvstore_engine_adapter.tokenizer import ModelTokenizer, TextStream

MAX_UNREAD_TOKENS = 4096
"""Tokens that may wait for a client that reads its stream too slowly, before it is dropped."""

_MAX_AT_ONCE = 8
"""Choices of one request that are with the engine at a time: the rest of its queue is for others."""


@dataclass(frozen=True, slots=True)
class _Group:
    """The choices of one prompt: all but the first wait until that has computed it."""

    request: GenerateRequest
    choices: tuple[Choice, ...]
    is_computed: asyncio.Event


class Answering:
    """The answers to some prompts, ``num_choices`` to each, as an AnswerPlan says.

    ``choices`` are in the order of the prompts. A choice goes on while nobody takes its pieces: what waits
    is joined, and bounded by ``max_unread_tokens``.
    """

    def __init__(
        self,
        engine: PagedEngine,
        tokenizer: ModelTokenizer,
        prompts: Sequence[Sequence[int]],
        plan: AnswerPlan,
        *,
        tenant_salt: bytes = b"",
        keeps_stop: bool = False,
        max_unread_tokens: int | None = None,
    ) -> None:
        self._engine = engine
        self._plan = plan
        self._tenant_salt = tenant_salt
        self._groups: list[_Group] = []
        self._waiting: dict[int, Piece] = {}
        self._failure: Exception | None = None
        self._news = asyncio.Event()
        self._at_once = asyncio.Semaphore(_MAX_AT_ONCE)
        self._max_unread_tokens = max_unread_tokens
        self._end_tokens = plan.stop_tokens | (frozenset() if plan.ignores_end else tokenizer.end_tokens)
        for prompt in prompts:
            first = len(self._groups) * plan.num_choices
            choices = tuple(
                Choice(
                    first + number,
                    RequestReport(len(prompt)),
                    TextStream(tokenizer),
                    StopCut(plan.stops, keeps_stop=keeps_stop),
                    keeps_tokens=plan.wants_tokens or plan.logprobs is not None,
                )
                for number in range(plan.num_choices)
            )
            self._groups.append(_Group(self._request(prompt), choices, asyncio.Event()))

    @property
    def choices(self) -> list[Choice]:
        """All choices, in order."""
        return [choice for group in self._groups for choice in group.choices]

    @property
    def usage(self) -> tuple[int, int, int]:
        """Tokens of the prompts, of these reused, and of the answers. A prompt counts once."""
        firsts = [group.choices[0].report for group in self._groups]
        return (
            sum(report.prompt_tokens for report in firsts),
            sum(report.matched_tokens for report in firsts),
            sum(choice.report.output_tokens for choice in self.choices),
        )

    async def pieces(self) -> AsyncGenerator[Piece, None]:
        """Yield what comes, a first empty piece once a prompt is computed; raises what the engine raises.

        Close the generator to end what is left.

        Raises:
            SlowClient: too much waits to be taken.
        """
        tasks = [
            asyncio.create_task(self._pump(group, choice))
            for group in self._groups
            for choice in group.choices
        ]
        try:
            num_left = len(tasks)
            while num_left:
                await self._news.wait()
                self._news.clear()
                waiting, self._waiting = self._waiting, {}
                for piece in waiting.values():
                    num_left -= piece.finish_reason is not None
                    yield piece
                if self._failure is not None:
                    raise self._failure
        finally:
            await _end(tasks)

    def _request(self, prompt: Sequence[int]) -> GenerateRequest:
        plan = self._plan
        return GenerateRequest(
            prompt=prompt,
            max_tokens=plan.max_tokens,
            sampling=plan.sampling,
            end_tokens=self._end_tokens,
            wants_first_logits=plan.wants_first_logits,
            priority=plan.priority,
            logprobs=plan.logprobs,
            tenant_salt=self._tenant_salt,
            hints=plan.hints,
        )

    async def _pump(self, group: _Group, choice: Choice) -> None:
        """Have one choice generated. What fails goes to whoever takes the pieces."""
        is_first = choice is group.choices[0]
        try:
            if not is_first:
                await group.is_computed.wait()
            async with self._at_once:
                await self._generate(group, choice)
        except asyncio.CancelledError:
            # By the engine, if anybody still takes pieces: it is closing.
            self._fail(EngineClosed("engine: it was closed before the answer was finished"))
            raise
        except Exception as error:
            self._fail(error)
        finally:
            if is_first:
                group.is_computed.set()

    async def _generate(self, group: _Group, choice: Choice) -> None:
        request = _with_own_seed(group.request, choice.index - group.choices[0].index)
        async with contextlib.aclosing(self._engine.generate(request)) as events:
            async for event in events:
                match event:
                    case Prefilled(report):
                        choice.report = report
                        group.is_computed.set()
                        self._add(Piece(choice.index))
                    case Token():
                        self._add(choice.push(event))
                    case Finished():
                        self._add(choice.finish(event))
                if choice.finish_reason is not None:
                    return

    def _fail(self, error: Exception) -> None:
        self._failure = self._failure or error
        self._news.set()

    def _add(self, piece: Piece) -> None:
        before = self._waiting.get(piece.index)
        self._waiting[piece.index] = piece if before is None else before.joined(piece)
        self._news.set()
        limit = self._max_unread_tokens
        if limit is not None and sum(len(at.tokens) for at in self._waiting.values()) > limit:
            raise SlowClient(f"a client has {limit} tokens of its stream unread: it reads too slowly")


def _with_own_seed(request: GenerateRequest, number: int) -> GenerateRequest:
    """Return the request of the choice of that number: with one seed all would be the same."""
    seed = request.sampling.seed
    if seed is None or not number:
        return request
    own = seed + number if seed <= MAX_SEED - number else seed + number - 2 * MAX_SEED
    return dataclasses.replace(request, sampling=dataclasses.replace(request.sampling, seed=own))


async def _end(tasks: Sequence["asyncio.Task[None]"]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
