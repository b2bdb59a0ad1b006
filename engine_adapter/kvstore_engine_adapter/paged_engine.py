"""PagedEngine: the bundled runtime: a model, its paged KV memory, and requests that run in batches."""

import asyncio
import logging
import math
import os
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from kvstore.errors import InvalidConfig, InvalidRequest, PromptTooLong
from kvstore.hints import Hints
from kvstore.keys import Namespace
from kvstore.layout import KVLayout
from kvstore.manager import BlockManager
from kvstore.miss import MissReason
from kvstore.outlasting import outlast
from kvstore.tier import Slot, Tier
from kvstore_engine_adapter.adapter import engine_manager_settings, manager_over
from kvstore_engine_adapter.attention import PageOps
from kvstore_engine_adapter.device_pages import AttentionBackend, kernels_for, ops_on
from kvstore_engine_adapter.engine_loop import EngineLoop
from kvstore_engine_adapter.generation import EngineBusy, EngineClosed, Finished, GenerateRequest
from kvstore_engine_adapter.kv_dtype import KVCacheDtype
from kvstore_engine_adapter.live_request import Event
from kvstore_engine_adapter.llama import LlamaModel
from kvstore_engine_adapter.load_policy import LoadPolicy
from kvstore_engine_adapter.model import LoadedModel
from kvstore_engine_adapter.page_pool import PagePool
from kvstore_engine_adapter.request_blocks import BlockSupply, Waits
from kvstore_engine_adapter.scheduler import Phase, SchedulerLimits
from kvstore_engine_adapter.tensor_parallel.group_tier import GroupTier, GroupVramTier, LentSlots
from kvstore_engine_adapter.tensor_parallel.leading_worker import LeadingWorker, RankSums
from kvstore_engine_adapter.tensor_parallel.rank_group import RankGroup
from kvstore_engine_adapter.worker import ForwardWorker
from kvstore_kernels import PagedKernels

logger = logging.getLogger(__name__)

DEFAULT_CONTEXT_TOKENS = 8192
"""Prompt and answer, if the model takes as much and nothing else is asked for."""

_FAULTS = frozenset(
    reason.value
    for reason in (MissReason.TIMED_OUT, MissReason.UNAVAILABLE, MissReason.BREAKER_OPEN, MissReason.CORRUPT)
)

_STEP_TOKENS = {"cpu": 128}
OTHER_STEP_TOKENS = 2048
"""Tokens of one pass by device, if nothing else is asked for: enough to keep it busy, and no more."""


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """What an engine is told.

    ``max_model_tokens`` bounds prompt and answer (None: the model's context, at most 8192). ``num_blocks`` is
    the size of the ``vram`` tier (None: four sequences of full length). ``is_reusing`` False: no tier at all,
    every prompt is computed. ``max_num_seqs`` requests run at a time, ``max_waiting`` more wait, further ones
    are refused. A pass computes at most ``step_tokens`` tokens (None: 128 on a CPU, else 2048). ``ageing_s``:
    see ``scheduler``. ``compiled_folder`` keeps what is compiled for this machine (None: on a CPU torch's
    attention is used). ``attention_backend`` is for a GPU. ``kv_cache_dtype``: what keys and values
    are kept as. ``served_name``: what clients call the model, for traces (None: its own name).
    """

    block_tokens: int = 16
    max_model_tokens: int | None = None
    num_blocks: int | None = None
    is_reusing: bool = True
    max_num_seqs: int = 32
    max_waiting: int = 64
    step_tokens: int | None = None
    ageing_s: float = 30.0
    compiled_folder: Path | None = None
    attention_backend: AttentionBackend = AttentionBackend.EXACT
    kv_cache_dtype: KVCacheDtype = KVCacheDtype.AUTO
    tenant_salt: bytes = b""
    epoch: int = 0
    served_name: str | None = None
    waits: Waits = field(default_factory=Waits)


class PagedEngine:
    """A model, its paged KV memory, and a manager that keeps and shares blocks. An EngineAdapter.

    Everything but the passes runs on one event loop. A request that is cancelled or whose consumer closes
    the generator leaves after the pass under way, and gives back all its slots. ``kernels`` do the work on
    the pages (None: those of the device, see ``device_pages``).

    ``model`` may be rank 0's share, with the ``group`` of ranks that have the others: started, and loaded
    with the same model. ``lower`` is then a tier over the store that the group's followers use. When the
    group is lost, the engine answers nothing any more: every request ends with RankLost.
    """

    def __init__(
        self,
        model: LoadedModel,
        settings: EngineSettings | None = None,
        *,
        lower: Sequence[Tier] = (),
        group: RankGroup | None = None,
        clock: Callable[[], float] = time.monotonic,
        kernels: PagedKernels | None = None,
    ) -> None:
        assert model.shard.size == (1 if group is None else group.size), "a share of another number of ranks"
        self._model = model
        self._settings = settings or EngineSettings()
        self._group = group
        self._lent = LentSlots()
        self._lower: tuple[Tier, ...] = tuple(lower)
        if group is not None:
            self._lower = tuple(GroupTier(tier, group, self._lent) for tier in lower)
        self._clock = clock
        self._kernels = kernels
        kept_as, computes_in = self._settings.kv_cache_dtype, model.weights.embedding.dtype
        self._layout = layout_of(model, self._settings.block_tokens, kept_as)
        self._namespace = Namespace(
            model=model.config.name,
            layout=self._layout,
            weights=kept_as.weights_name(model.shard.weights_name(model.digest), computes_in),
            rope=model.config.rope.describe(),
            tenant_salt=self._settings.tenant_salt,
            epoch=self._settings.epoch,
        )
        self._context_tokens = _context_tokens(model, self._settings)
        self._spare_pages = math.ceil(self._context_tokens / self._settings.block_tokens)
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
        return self._num_blocks

    @property
    def _num_blocks(self) -> int:
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

    @property
    def max_requests(self) -> int:
        """Most requests that run and wait at a time."""
        return self._settings.max_num_seqs + self._settings.max_waiting

    async def open(self) -> None:
        """Get the page memory, find the exact row counts (see ``llama``), open the tiers, start the loop.

        Raises:
            InvalidConfig: the page memory cannot be had.
            TierUnavailable: a lower tier cannot be opened.
            RankLost: another rank has ended, or cannot do the same.
        """
        assert self._running is None, "the engine is open"
        running = self._running = await asyncio.to_thread(self._start)
        try:
            loop = running.loop = await self._prepare(running)
            if self._settings.is_reusing:
                top, pace = self._top(running.pool), running.supply.pace
                manager = manager_over(self, self._lower, top=top, settings=engine_manager_settings(pace))
                await manager.open()
                running.supply.manager = manager
        except BaseException:
            self._running = None
            running.worker.close()
            raise
        running.task = asyncio.create_task(loop.run(), name="engine-loop")

    def _top(self, pool: PagePool) -> GroupVramTier | None:
        return None if self._group is None else GroupVramTier(pool, self.num_page_slots, lent=self._lent)

    async def _prepare(self, running: "_Running") -> EngineLoop:
        settings, model = self._settings, running.forward_model
        if isinstance(running.worker, LeadingWorker):
            await running.worker.meet(
                block_tokens=settings.block_tokens,
                compiled_folder=settings.compiled_folder,
                attention_backend=settings.attention_backend,
                kv_cache_dtype=settings.kv_cache_dtype,
            )
        step_tokens = max(settings.max_num_seqs, _step_tokens(settings, running.pool.device))
        running.supply.policy.prefill = await running.worker.prepare(
            running.supply.spare, max_rows=step_tokens, max_head_rows=settings.max_num_seqs
        )
        limits = SchedulerLimits(
            max_seated=min(settings.max_num_seqs, model.max_rows),
            step_tokens=min(step_tokens, model.max_rows),
            block_tokens=settings.block_tokens,
            ageing_s=settings.ageing_s,
        )
        rows = ", ".join(map(str, model.row_ladder))
        logger.info("engine: attention: %s; row counts with equal bits: %s", running.ops.describe(), rows)
        name = settings.served_name or model.config.name
        return EngineLoop(running.worker, running.supply, self._namespace, limits, served_name=name)

    async def close(self, *, drain_s: float = 5.0) -> None:
        """End what runs and waits with EngineClosed, let writes drain for ``drain_s``, close the tiers.

        Idempotent.
        """
        running, self._running = self._running, None
        if running is None:
            return
        if running.task is not None:
            running.task.cancel()
            await asyncio.wait([running.task])
        if running.supply.manager is not None:
            await running.supply.manager.close(drain_s=drain_s)
        running.worker.close()

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Event, None]:
        """Yield Prefilled, the answer's tokens, then Finished.

        Close the generator (``contextlib.aclosing``) to end it early: when that returns, all it had is given
        back.

        Raises:
            InvalidRequest: an empty prompt, a token outside the vocabulary, or ``max_tokens`` below 1.
            PromptTooLong: the prompt, or prompt and ``max_tokens``, exceed the context.
            EngineBusy: the queue is full.
            EngineClosed: the engine is not open, or was closed meanwhile.
            ArithmeticError: the model's logits are not finite.
        """
        max_tokens = self._checked_max_tokens(request)
        loop = self._require_running().loop
        if loop is None:
            raise EngineClosed("engine: it is not open yet")
        limit = self.max_requests
        if loop.num_live >= limit:
            raise EngineBusy(f"engine: {limit} requests run and wait, the limit: try again later")
        live = loop.submit(request, max_tokens)
        try:
            while True:
                event = await live.events.get()
                if isinstance(event, Exception):
                    raise event
                yield event
                if isinstance(event, Finished):
                    return
        finally:
            loop.abandon(live)
            await outlast(asyncio.ensure_future(live.has_ended.wait()))

    def note_hints(
        self, tokens: Sequence[int], hints: Hints, *, behind_tokens: int = 0, tenant_salt: bytes = b""
    ) -> None:
        """Say what became known of the future of a sequence's full blocks, without a use of them.

        Only of those that begin at or after ``behind_tokens``. Does nothing where no blocks are kept.
        """
        running = self._running
        if running is not None and running.loop is not None:
            running.loop.note_hints(tokens, hints, behind_tokens=behind_tokens, tenant_salt=tenant_salt)

    def stats(self) -> dict[str, object]:
        """Return counters, ready for JSON: the manager's, and the engine's own.

        ``store_faults`` holds what went wrong with the store: calls of the engine's that failed or came late,
        ``write_dropped/<tier>/<reason>`` blocks not written and ``<call>_missed/<reason>`` blocks not found.
        """
        running = self._running
        manager_stats = running.supply.manager.stats() if running and running.supply.manager else None
        loop = running.loop if running else None
        return {
            **{f"{phase.value}_requests": loop.num_in(phase) if loop else 0 for phase in Phase},
            "is_running": loop is not None and loop.num_live > 0,
            "counters": dict(loop.counters) if loop else {},
            "store_faults": dict(running.supply.faults if running else {}) | _faults(manager_stats or {}),
            "manager": manager_stats,
        }

    def _start(self) -> "_Running":
        settings, num_slots = self._settings, self.num_page_slots
        device = self._model.weights.embedding.device
        num_private = self._spare_pages if settings.is_reusing else self._num_blocks + self._spare_pages
        num_pages = num_slots + num_private
        _refuse_more_than_memory((num_pages + 1) * self._layout.block_bytes, device)
        backend, folder = settings.attention_backend, settings.compiled_folder
        pages = self._model.shard.pages_of(self._layout)
        computes_in = self._model.weights.embedding.dtype
        kernels = self._kernels or kernels_for(pages, device, backend, folder, computes_in=computes_in)
        try:
            pool = PagePool(pages, num_pages, device, kernels=kernels, computes_in=computes_in)
        except (RuntimeError, MemoryError, OSError) as error:
            raise InvalidConfig(
                f"engine: {num_pages} KV pages of {self._layout.block_bytes} bytes cannot be had: "
                "lower the number of blocks or the model length"
            ) from error
        config = self._model.shard.config_of(self._model.config)
        sums = None if self._group is None else RankSums()
        forward_model = LlamaModel(
            config, self._model.weights, max_tokens=self._context_tokens, rank_sum=sums
        )
        ops = ops_on(pool, num_heads=config.num_heads, folder=folder, backend=backend)
        policy = LoadPolicy(settings.block_tokens, pool.page_bytes)
        spare = [Slot(number) for number in range(num_slots, num_pages)]
        supply = BlockSupply(None, num_slots, policy, spare, settings.waits, self._clock)
        worker = ForwardWorker(forward_model, pool, ops)
        if self._group is not None and sums is not None:
            supply.part = self._model.shard.part_of(self._layout)
            worker = LeadingWorker(forward_model, pool, ops, self._group, sums)
        return _Running(forward_model, ops, pool, worker, supply)

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


@dataclass(slots=True)
class _Running:
    """What exists while the engine is open."""

    forward_model: LlamaModel
    ops: PageOps
    pool: PagePool
    worker: ForwardWorker
    supply: BlockSupply
    loop: EngineLoop | None = None
    task: "asyncio.Task[None] | None" = None


def layout_of(model: LoadedModel, block_tokens: int, kept_as: KVCacheDtype = KVCacheDtype.AUTO) -> KVLayout:
    """Return the layout of a model's blocks.

    Raises:
        InvalidLayout: ``block_tokens`` makes no valid block.
    """
    dtype, config = kept_as.layout_dtype(model.weights.embedding.dtype), model.config
    return KVLayout(dtype, config.num_layers, block_tokens, config.num_kv_heads, config.head_dim)


def block_bytes_of(model: LoadedModel, block_tokens: int, kept_as: KVCacheDtype = KVCacheDtype.AUTO) -> int:
    """Return the bytes of one block, for sizing the pool from bytes."""
    return layout_of(model, block_tokens, kept_as).block_bytes


def _step_tokens(settings: EngineSettings, device: torch.device) -> int:
    return settings.step_tokens or _STEP_TOKENS.get(device.type, OTHER_STEP_TOKENS)


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
    "OTHER_STEP_TOKENS",
    "EngineSettings",
    "Event",
    "PagedEngine",
    "block_bytes_of",
    "default_context_tokens",
    "layout_of",
]
