"""ForwardWorker: the one thread that computes, so that the event loop stays responsive."""

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch

from kvstore.outlasting import outlast
from kvstore.tier import Slot
from kvstore_engine_adapter.attention import PageOps, Segment
from kvstore_engine_adapter.llama import LlamaModel
from kvstore_engine_adapter.load_policy import PrefillSpeed
from kvstore_engine_adapter.page_pool import PagePool
from kvstore_engine_adapter.sampling import Sampler, choose_all, log_probabilities

Result = TypeVar("Result")

_TIMED_TOKENS = 64
_TIMED_CONTEXT = 1024


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is wanted of the last row of a segment: the next token, and what else the request asked for."""

    sampler: Sampler
    logprobs: int | None = None
    wants_logits: bool = False


@dataclass(frozen=True, slots=True)
class PassWork:
    """One pass: pages copied (from, to) and pages cleared first; then segments, each with what is wanted."""

    copies: Sequence[tuple[Slot, Slot]]
    cleared: Sequence[Slot]
    segments: Sequence[tuple[Segment, Wanted | None]]


@dataclass(frozen=True, slots=True)
class Sampled:
    """The next token, or why there is none; ``logits`` are ``[vocab]``, float32."""

    token: int | ArithmeticError
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()
    logits: npt.NDArray[np.float32] | None = None


@dataclass(frozen=True, slots=True)
class PassResult:
    """What came of each segment, None where nothing was wanted, and how long the pass took."""

    sampled: Sequence[Sampled | None]
    seconds: float


class ForwardWorker:
    """Runs passes one after the other. None is abandoned: its pages are in use until it ends."""

    def __init__(self, model: LlamaModel, pool: PagePool, ops: PageOps) -> None:
        self._model = model
        self._pool = pool
        self._ops = ops
        # OpenMP's number of threads is each thread's own: what was set for this one holds for no new one.
        threads = torch.get_num_threads()
        self._executor = ThreadPoolExecutor(
            max_workers=1,
            thread_name_prefix="forward",
            initializer=lambda: _begin_thread(threads, pool.device),
        )

    async def compute(self, work: PassWork) -> PassResult:
        """Run a pass. If cancelled, wait for its end, then raise."""
        return await self.run(lambda: self._compute(work))

    async def run(self, work: Callable[[], Result]) -> Result:
        """Run ``work`` in the thread. If cancelled, wait for the end of the work, then raise."""
        return await outlast(asyncio.get_running_loop().run_in_executor(self._executor, work))

    async def prepare(self, spare: Sequence[Slot], *, max_rows: int, max_head_rows: int) -> PrefillSpeed:
        """Find the exact row counts; measure prefill, using spare pages."""
        await self.run(self._ops.prepare)
        await self.run(lambda: self._model.prepare(max_rows=max_rows, max_head_rows=max_head_rows))
        return await self.run(lambda: self._prefill_speed(spare))

    def close(self) -> None:
        """End the thread once its work is done. Blocking for at most one pass. Idempotent."""
        self._executor.shutdown()
        self._ops.close()

    def _compute(self, work: PassWork) -> PassResult:
        started_s = time.monotonic()
        hidden = self.forward(work.copies, work.cleared, [segment for segment, _ in work.segments])
        last = np.cumsum([len(segment.tokens) for segment, _ in work.segments]) - 1
        wanted = [(int(row), want) for row, (_, want) in zip(last, work.segments, strict=True) if want]
        sampled: list[Sampled] = []
        if wanted:
            logits = self._model.logits(hidden[[row for row, _ in wanted]])
            sampled = _sample(logits, [want for _, want in wanted])
        found = iter(sampled)
        results = [next(found) if want else None for _, want in work.segments]
        self._pool.finish()  # what the caller does next with the pages, and the time, count on it
        return PassResult(results, time.monotonic() - started_s)

    def forward(
        self,
        copies: Sequence[tuple[Slot, Slot]],
        cleared: Sequence[Slot],
        segments: Sequence[Segment],
    ) -> torch.Tensor:
        """Copy and clear pages, then compute the rows of the segments: ``[rows, hidden]``, float32.

        In the thread that computes.
        """
        for source, target in copies:
            self._pool.copy(source, target)
        self._pool.clear(cleared)
        return self._model.run(self._model.batch(segments, self._ops.begin(segments)))

    def _prefill_speed(self, spare: Sequence[Slot]) -> PrefillSpeed:
        """Time a pass at the start of a sequence and one behind as many tokens as the spare pages hold."""
        limit = min(len(spare) * self._pool.layout.block_tokens, self._model.max_tokens)
        count = min(_TIMED_TOKENS, self._model.max_rows, limit)
        late = min(_TIMED_CONTEXT, limit - count)
        first_s = self._timed(Segment([0] * count, 0, spare))
        if not late:
            return PrefillSpeed(first_s / count)
        context_s = max(0.0, self._timed(Segment([0] * count, late, spare)) - first_s) / (count * late)
        return PrefillSpeed(max(first_s / count - context_s * count / 2, 0.0), context_s)

    def _timed(self, segment: Segment) -> float:
        times: list[float] = []
        for _ in range(3):  # the first one pays for set-up
            started_s = time.monotonic()
            self.forward((), (), [segment])
            self._pool.finish()
            times.append(time.monotonic() - started_s)
        return min(times)


def _begin_thread(threads: int, device: torch.device) -> None:
    torch.set_num_threads(threads)
    if device.index is not None:  # which device is the current one is each thread's own, too
        torch.cuda.set_device(device)


def _sample(logits: torch.Tensor, wanted: Sequence[Wanted]) -> list[Sampled]:
    sampled: list[Sampled] = []
    for row, token, want in zip(
        logits, choose_all(logits, [want.sampler for want in wanted]), wanted, strict=True
    ):
        logprob: float | None = None
        top: tuple[tuple[int, float], ...] = ()
        if want.logprobs is not None and isinstance(token, int):
            logprob, top = log_probabilities(row, token, want.logprobs)
        sampled.append(Sampled(token, logprob, top, row.cpu().numpy() if want.wants_logits else None))
    return sampled
