"""PagedEngine: the bundled runtime. One request runs at a time; the others wait their turn in order."""

import asyncio
import contextlib
import logging
import math
import os
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from kvstore.errors import InvalidConfig, InvalidRequest, PromptTooLong
from kvstore.keys import Namespace
from kvstore.layout import KVLayout
from kvstore.manager import BlockManager
from kvstore.miss import MissReason
from kvstore.tier import Slot, Tier
from kvstore_engine_adapter.adapter import manager_over
from kvstore_engine_adapter.attention import TorchAttention
from kvstore_engine_adapter.generation import (
    EngineBusy,
    EngineClosed,
    Finished,
    GenerateRequest,
    Prefilled,
    RequestReport,
    Token,
)
from kvstore_engine_adapter.llama import LlamaModel
from kvstore_engine_adapter.load_policy import LoadPolicy
from kvstore_engine_adapter.model import LoadedModel
from kvstore_engine_adapter.page_pool import TORCH_DTYPES, PagePool
from kvstore_engine_adapter.request_blocks import BlockSupply, RequestBlocks, Waits
from kvstore_engine_adapter.sampling import Sampler, log_probabilities
from kvstore_engine_adapter.worker import ForwardWorker

logger = logging.getLogger(__name__)

DEFAULT_CONTEXT_TOKENS = 8192
"""Prompt and answer, if the model takes as much and nothing else is asked for."""

_FAULTS = frozenset(
    reason.value
    for reason in (MissReason.TIMED_OUT, MissReason.UNAVAILABLE, MissReason.BREAKER_OPEN, MissReason.CORRUPT)
)

Event = Prefilled | Token | Finished
"""What ``generate`` yields: one Prefilled, tokens, then one Finished."""


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """What an engine is told.

    ``max_model_tokens`` bounds prompt and answer (None: the model's context, at most 8192). ``num_blocks`` is
    the size of the ``vram`` tier (None: four sequences of full length). ``is_reusing`` False: no tier at all,
    every prompt is computed. ``max_waiting`` requests wait, further ones are refused.
    """

    block_tokens: int = 16
    max_model_tokens: int | None = None
    num_blocks: int | None = None
    is_reusing: bool = True
    max_waiting: int = 64
    tenant_salt: bytes = b""
    epoch: int = 0
    waits: Waits = field(default_factory=Waits)


class PagedEngine:
    """A model, its paged KV memory, and a manager that keeps and shares blocks. An EngineAdapter.

    Everything but the forward passes runs on one event loop. A request that is cancelled or whose consumer
    closes the generator leaves after the pass under way, and gives back all its slots.
    """

    def __init__(
        self,
        model: LoadedModel,
        settings: EngineSettings | None = None,
        *,
        lower: Sequence[Tier] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._model = model
        self._settings = settings or EngineSettings()
        self._lower = tuple(lower)
        self._clock = clock
        self._layout = layout_of(model, self._settings.block_tokens)
        self._namespace = Namespace(
            model=model.config.name,
            layout=self._layout,
            weights=model.digest,
            rope=model.config.rope.describe(),
            tenant_salt=self._settings.tenant_salt,
            epoch=self._settings.epoch,
        )
        self._context_tokens = _context_tokens(model, self._settings)
        self._spare_pages = math.ceil(self._context_tokens / self._settings.block_tokens)
        self._turn = asyncio.Lock()
        self._waiting = 0
        self._running: _Running | None = None

    @property
    def namespace(self) -> Namespace:
        """Everything that decides what its KV bytes mean."""
        return self._namespace

    @property
    def layout(self) -> KVLayout:
        """Shape of one block."""
        return self._layout

    @property
    def num_page_slots(self) -> int:
        """Slots of the ``vram`` tier."""
        if not self._settings.is_reusing:
            return 0
        return self._settings.num_blocks or 4 * self._spare_pages

    @property
    def pages(self) -> PagePool:
        """The page memory.

        Raises:
            EngineClosed: the engine is not open.
        """
        return self._require_running().pool

    @property
    def context_tokens(self) -> int:
        """Most tokens of prompt and answer together."""
        return self._context_tokens

    @property
    def manager(self) -> BlockManager | None:
        """The manager of its blocks; None if nothing is reused or the engine is not open."""
        return self._running.supply.manager if self._running else None

    async def open(self) -> None:
        """Get the page memory, find the exact row counts (see ``llama``), open the tiers.

        Raises:
            InvalidConfig: the page memory cannot be had.
            TierUnavailable: a lower tier cannot be opened.
        """
        assert self._running is None, "the engine is open"
        running = self._running = self._start()
        try:
            supply = running.supply
            supply.policy.prefill_s_per_token = await running.worker.prepare(supply.spare)
            ladder = ", ".join(map(str, running.forward_model.ladder))
            logger.info("engine: row counts with equal bits: %s", ladder)
            if self._settings.is_reusing:
                manager = manager_over(self, self._lower)
                await manager.open()
                running.supply.manager = manager
        except BaseException:
            self._running = None
            running.worker.close()
            raise

    async def close(self, *, drain_s: float = 5.0) -> None:
        """Cancel what runs and waits, let writes drain for ``drain_s``, close the tiers. Idempotent."""
        running, self._running = self._running, None
        if running is None:
            return
        others = running.tasks - {asyncio.current_task()}
        for task in others:
            task.cancel()
        if others:
            await asyncio.wait(others)
        if running.supply.manager is not None:
            await running.supply.manager.close(drain_s=drain_s)
        running.worker.close()

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Event, None]:
        """Yield Prefilled, the answer's tokens, then Finished.

        Close the generator (``contextlib.aclosing``) to end it early.

        Raises:
            InvalidRequest: an empty prompt, a token outside the vocabulary, or ``max_tokens`` below 1.
            PromptTooLong: the prompt, or prompt and ``max_tokens``, exceed the context.
            EngineBusy: the queue is full.
            EngineClosed: the engine is not open.
        """
        arrived_s = self._clock()
        max_tokens = self._checked_max_tokens(request)
        running = self._require_running()
        if self._waiting >= self._settings.max_waiting:
            raise EngineBusy(f"engine: {self._waiting} requests wait, the limit: try again later")
        async with self._its_turn(), running.tracking():
            if running is not self._running:
                raise EngineClosed("engine: it was closed while the request waited")
            report = RequestReport(prompt_tokens=len(request.prompt), queue_s=self._clock() - arrived_s)
            sequence = _Sequence(self, running, request, report, arrived_s)
            try:
                async for event in sequence.run(max_tokens):
                    yield event
            finally:
                sequence.blocks.end()

    def stats(self) -> dict[str, object]:
        """Return counters, ready for JSON: the manager's, and the engine's own.

        ``store_faults`` holds what went wrong with the store: calls of the engine's that failed or came late,
        ``write_dropped/<tier>/<reason>`` blocks not written and ``<call>_missed/<reason>`` blocks not found.
        """
        running = self._running
        manager_stats = running.supply.manager.stats() if running and running.supply.manager else None
        return {
            "waiting_requests": self._waiting,
            "is_running": self._turn.locked(),
            "store_faults": dict(running.supply.faults if running else {}) | _faults(manager_stats or {}),
            "manager": manager_stats,
        }

    def _start(self) -> "_Running":
        settings, num_slots = self._settings, self.num_page_slots
        device = self._model.weights.embedding.device
        num_pages = num_slots + self._spare_pages
        _refuse_more_than_memory((num_pages + 1) * self._layout.block_bytes, device)
        try:
            pool = PagePool(self._layout, num_pages, device)
        except (RuntimeError, MemoryError, OSError) as error:
            raise InvalidConfig(
                f"engine: {num_pages} KV pages of {self._layout.block_bytes} bytes cannot be had: "
                "lower the number of blocks or the model length"
            ) from error
        forward_model = LlamaModel(
            self._model.config,
            self._model.weights,
            TorchAttention(),
            block_tokens=settings.block_tokens,
            max_tokens=self._context_tokens,
        )
        policy = LoadPolicy(settings.block_tokens, self._layout.block_bytes)
        spare = [Slot(number) for number in range(num_slots, num_pages)]
        supply = BlockSupply(None, policy, spare, settings.waits, self._clock)
        return _Running(forward_model, pool, ForwardWorker(forward_model, pool), supply)

    def _require_running(self) -> "_Running":
        if self._running is None:
            raise EngineClosed("engine: it is not open, or is closing")
        return self._running

    def _checked_max_tokens(self, request: GenerateRequest) -> int:
        count, limit = len(request.prompt), self._context_tokens
        if not count:
            raise InvalidRequest("prompt: it has no tokens")
        if count >= limit:
            raise PromptTooLong(
                f"prompt: {count} tokens, the context is {limit} including at least one token of answer: "
                "shorten the prompt or raise the model length"
            )
        vocabulary = self._model.config.vocab_size
        if not all(0 <= token < vocabulary for token in request.prompt):
            raise InvalidRequest(f"prompt: a token is outside 0..{vocabulary - 1}")
        if request.max_tokens is None:
            return limit - count
        if request.max_tokens < 1:
            raise InvalidRequest(f"max_tokens: {request.max_tokens}, expected at least 1")
        if count + request.max_tokens > limit:
            raise PromptTooLong(
                f"prompt: {count} tokens and max_tokens {request.max_tokens} exceed the context of {limit}: "
                f"shorten the prompt or ask for at most {limit - count}"
            )
        return request.max_tokens

    @contextlib.asynccontextmanager
    async def _its_turn(self) -> AsyncIterator[None]:
        self._waiting += 1
        try:
            await self._turn.acquire()
        finally:
            self._waiting -= 1
        try:
            yield
        finally:
            self._turn.release()


@dataclass(slots=True)
class _Running:
    """What exists while the engine is open."""

    forward_model: LlamaModel
    pool: PagePool
    worker: ForwardWorker
    supply: BlockSupply
    tasks: "set[asyncio.Task[object]]" = field(default_factory=set)

    @contextlib.asynccontextmanager
    async def tracking(self) -> AsyncIterator[None]:
        """Note the current task as one that computes, for ``close``."""
        task = asyncio.current_task()
        assert task is not None
        self.tasks.add(task)
        try:
            yield
        finally:
            self.tasks.discard(task)


class _Sequence:
    """One request while it runs."""

    def __init__(
        self,
        engine: PagedEngine,
        running: _Running,
        request: GenerateRequest,
        report: RequestReport,
        arrived_s: float,
    ) -> None:
        self._running = running
        self._request = request
        self._report = report
        self._arrived_s = arrived_s
        self._namespace = engine.namespace
        self._block_tokens = engine.layout.block_tokens
        self._clock = running.supply.clock
        self._tokens = list(request.prompt)
        self._slots: list[Slot] = []
        self._published = 0
        self.blocks: RequestBlocks = running.supply.begin()

    async def run(self, max_tokens: int) -> AsyncGenerator[Event, None]:
        """Load, prefill, decode."""
        sampler = Sampler(self._request.sampling, self._request.prompt)
        logits = await self._prefill()
        if self._request.wants_first_logits:
            self._report.first_logits = logits.cpu().numpy()
        self._report.ttft_s = self._clock() - self._arrived_s
        self._publish()
        yield Prefilled(self._report)
        while True:
            token = sampler.choose(logits)
            if token in self._request.end_tokens:
                yield Finished("stop", self._report, self._event(token, logits))
                return
            self._report.output_tokens += 1
            yield self._event(token, logits)
            if self._report.output_tokens == max_tokens:
                yield Finished("length", self._report)
                return
            logits = await self._decode(token)

    def _event(self, token: int, logits: torch.Tensor) -> Token:
        if self._request.logprobs is None:
            return Token(token)
        return Token(token, *log_probabilities(logits, token, self._request.logprobs))

    async def _prefill(self) -> torch.Tensor:
        block_tokens, prompt = self._block_tokens, self._request.prompt
        # The last token is always computed: its logits choose the first token.
        chain = self._namespace.chain(prompt)[: (len(prompt) - 1) // block_tokens]
        prefix = await self.blocks.load(chain)
        self._report.note_prefix(prefix, block_tokens)
        self._slots = list(prefix.slots)
        self._published = len(prefix.slots)
        started_s = self._clock()
        await self._grow(math.ceil(len(prompt) / block_tokens) - len(prefix.slots))
        logits = None
        position = self._report.matched_tokens
        while position < len(prompt):
            end = min(len(prompt), self._running.forward_model.chunk_end(position))
            logits = await self._running.worker.forward(
                prompt[position:end], position, self._slots, wants_logits=end == len(prompt)
            )
            position = end
        assert logits is not None, "a prompt leaves at least one token to compute"
        self._report.prefill_s = self._clock() - started_s
        computed = len(prompt) - self._report.matched_tokens
        if computed >= self._running.forward_model.chunk_tokens:
            self._running.supply.policy.note_prefill(computed, self._report.prefill_s)
        return logits

    async def _decode(self, token: int) -> torch.Tensor:
        position = len(self._tokens)
        self._tokens.append(token)
        if position == len(self._slots) * self._block_tokens:
            await self._grow(1)
        logits = await self._running.worker.forward([token], position, self._slots, wants_logits=True)
        assert logits is not None
        self._publish()
        return logits

    async def _grow(self, blocks: int) -> None:
        taken = await self.blocks.take(blocks)
        self._slots += taken
        await self._running.worker.clear(taken)

    def _publish(self) -> None:
        """Share the blocks that have filled up since the last call."""
        filled = len(self._tokens) // self._block_tokens
        if filled > self._published and self.blocks.is_sharing:
            chain = self._namespace.chain(self._tokens)[self._published : filled]
            self.blocks.publish(chain, self._slots[self._published : filled])
        self._published = filled


def layout_of(model: LoadedModel, block_tokens: int) -> KVLayout:
    """Return the layout of a model's blocks.

    Raises:
        InvalidLayout: ``block_tokens`` makes no valid block.
    """
    dtype = next(name for name, value in TORCH_DTYPES.items() if value is model.weights.embedding.dtype)
    config = model.config
    return KVLayout(dtype, config.num_layers, block_tokens, config.num_kv_heads, config.head_dim)


def block_bytes_of(model: LoadedModel, block_tokens: int) -> int:
    """Return the bytes of one block, for sizing the pool from bytes."""
    return layout_of(model, block_tokens).block_bytes


def _refuse_more_than_memory(wanted_bytes: int, device: torch.device) -> None:
    # Pages get memory when they are touched: asking for too much would end in a kill much later.
    total_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if device.type == "cpu" and wanted_bytes > total_bytes:
        raise InvalidConfig(
            f"engine: the KV pages need {wanted_bytes} bytes, this machine has {total_bytes}: "
            "lower the number of blocks or the model length"
        )


def _faults(manager_stats: Mapping[str, object]) -> dict[str, object]:
    """Return the counters of a manager's that speak of a fault of a lower tier, by name."""
    faults = {f"write_dropped/{name}": n for name, n in _inside(manager_stats, "write_drops_blocks")}
    for call in ("match", "fetch"):
        misses = dict(_inside(dict(_inside(manager_stats, call)), "misses_blocks"))
        faults |= {f"{call}_missed/{name}": n for name, n in misses.items() if name in _FAULTS}
    return faults


def _inside(stats: Mapping[str, object], name: str) -> list[tuple[str, object]]:
    value = stats.get(name)
    return list(value.items()) if isinstance(value, dict) else []


def default_context_tokens(model: LoadedModel) -> int:
    """Return the tokens of prompt and answer that are offered if nothing else is asked for."""
    return min(model.config.context_tokens, DEFAULT_CONTEXT_TOKENS)


def _context_tokens(model: LoadedModel, settings: EngineSettings) -> int:
    limit, wanted = model.config.context_tokens, settings.max_model_tokens
    if wanted is None:
        return default_context_tokens(model)
    if not 2 <= wanted <= limit:
        raise InvalidConfig(f"engine: a model length of {wanted} tokens, the model allows 2..{limit}")
    return wanted


__all__ = [
    "DEFAULT_CONTEXT_TOKENS",
    "EngineSettings",
    "Event",
    "PagedEngine",
    "block_bytes_of",
    "default_context_tokens",
    "layout_of",
]
