"""ForwardWorker: the one thread that computes, so that the event loop stays responsive."""

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from kvstore.outlasting import outlast
from kvstore.tier import Slot
from kvstore_engine_adapter.llama import LlamaModel
from kvstore_engine_adapter.page_pool import PagePool

Result = TypeVar("Result")


class ForwardWorker:
    """Runs forward passes one after the other. None is abandoned: its pages are in use until it ends."""

    def __init__(self, model: LlamaModel, pool: PagePool) -> None:
        self._model = model
        self._pool = pool
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="forward")

    async def clear(self, slots: Sequence[Slot]) -> None:
        """Zero pages before they are computed into."""
        await self.run(lambda: self._pool.clear(slots))

    async def forward(
        self, tokens: Sequence[int], start: int, slots: Sequence[Slot], *, wants_logits: bool
    ) -> torch.Tensor | None:
        """Compute tokens of one chunk into their pages; return the last one's logits ``[vocab]`` if asked."""
        return await self.run(lambda: self._forward(tokens, start, slots, wants_logits))

    async def run(self, work: Callable[[], Result]) -> Result:
        """Run ``work`` in the thread. If cancelled, wait for the end of the work, then raise."""
        return await outlast(asyncio.get_running_loop().run_in_executor(self._executor, work))

    async def prepare(self, spare: Sequence[Slot]) -> float:
        """Find the exact row counts; return the seconds that prefill takes per token, using spare pages."""
        await self.run(self._model.probe_ladder)
        return await self.run(lambda: self._timed_prefill(spare))

    def close(self) -> None:
        """End the thread once its work is done. Blocking for at most one pass. Idempotent."""
        self._executor.shutdown()

    def _forward(
        self, tokens: Sequence[int], start: int, slots: Sequence[Slot], wants_logits: bool
    ) -> torch.Tensor | None:
        step = self._model.step(tokens, start, slots, self._pool)
        hidden = self._model.run(step, self._pool)
        return self._model.logits(hidden[-1]) if wants_logits else None

    def _timed_prefill(self, spare: Sequence[Slot]) -> float:
        count = min(self._model.chunk_tokens, len(spare) * self._pool.layout.block_tokens)
        step = self._model.step([0] * count, 0, spare, self._pool)
        seconds = 0.0
        for _ in range(2):  # the first run pays for set-up
            started_s = time.monotonic()
            hidden = self._model.run(step, self._pool)
            self._model.logits(hidden[-1])
            seconds = time.monotonic() - started_s
        return seconds / count
