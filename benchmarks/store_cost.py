"""What a store costs a request that reuses nothing, and saves one that does: one engine, store on and off.

- nothing reused: one engine answers prompts nobody has seen, of each length, three each time in random order:
  with the store, without it, and without it once more. Without: its manager has no tier below its own pages.
  (Two engines would not do: where their memory happens to lie makes 4 % between two that are the same.)
  Printed are the medians of the ratios of time to the first token, of the whole answer, and of this process's
  processor time, until the answer is whole (cpu) and until its blocks are in the store too (cpu_and_writes),
  with an interval that holds the median in 95 of 100 such runs (bootstrap); as ``control`` the same of
  without by without, which is 1 but for the method.
- reused: another engine has stored a prompt's first blocks; the engine over the store has none of them in its
  own pages. It and one without a store answer the prompt in turn.

An engine's blocks are written to the store before the next request: each pays for its own writes. ``--json``
ends with one JSON object on stdout.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from kvstore.config import cache_folder
from kvstore_engine_adapter.generation import Finished, GenerateRequest, RequestReport
from kvstore_engine_adapter.kv_dtype import TORCH_DTYPES
from kvstore_engine_adapter.model import LoadedModel, load_model
from kvstore_engine_adapter.model_fetch import fetch_model
from kvstore_engine_adapter.paged_engine import EngineSettings, PagedEngine
from kvstore_tiers.store import StoreTier
from served_store import ServedStore

_BLOCK_TOKENS = 16
_REUSED_BLOCKS = (1, 2, 4, 8, 24)
_DRAM_BYTES = 2 << 30


@dataclass(frozen=True, slots=True)
class Times:
    """Of one request, in seconds: to its first token, in all, and of this process's processors.

    ``cpu_and_writes_s`` goes on until its blocks are written.
    """

    ttft_s: float
    total_s: float
    cpu_s: float
    cpu_and_writes_s: float
    report: RequestReport


@dataclass(frozen=True, slots=True)
class Bench:
    """What all parts share."""

    model: LoadedModel
    address: str
    lengths: Sequence[int]
    answer_tokens: int
    reused_blocks: Sequence[int]
    numbers: random.Random

    @contextlib.asynccontextmanager
    async def engine(self, *, has_store: bool) -> AsyncIterator[PagedEngine]:
        """Open an engine; its pages hold some prompts, not all."""
        settings = EngineSettings(
            block_tokens=_BLOCK_TOKENS,
            max_model_tokens=max(self.lengths) + self.answer_tokens,
            compiled_folder=cache_folder() / "compiled",
        )
        engine = PagedEngine(self.model, settings, lower=[StoreTier(self.address)] if has_store else [])
        await engine.open()
        try:
            yield engine
        finally:
            await engine.close()

    def prompt(self, tokens: int) -> list[int]:
        """Return tokens that nobody has seen."""
        return [self.numbers.randrange(self.model.config.vocab_size) for _ in range(tokens)]

    async def ask(self, engine: PagedEngine, prompt: Sequence[int], max_tokens: int) -> Times:
        """Have a prompt answered, and the blocks written to the store afterwards."""
        started_s, cpu_started_s = time.monotonic(), time.process_time()
        async for event in engine.generate(GenerateRequest(prompt, max_tokens)):
            if isinstance(event, Finished):
                report = event.report
        total_s, cpu_s = time.monotonic() - started_s, time.process_time() - cpu_started_s
        assert engine.manager is not None
        await engine.manager.flush(timeout_s=60)
        return Times(report.ttft_s, total_s, cpu_s, time.process_time() - cpu_started_s, report)

    async def three(self, engine: PagedEngine, tokens: int) -> tuple[Times, Times, Times]:
        """Ask one engine about three unseen prompts, in random order: (with the store, without, without)."""
        order = [0, 1, 2]
        self.numbers.shuffle(order)
        times: dict[int, Times] = {}
        for which in order:
            with without_store(engine) if which else contextlib.nullcontext():
                prompt = self.prompt(tokens)
                times[which] = await self.ask(engine, prompt, self.answer_tokens)
            # What was not stored would be when its room is wanted, at the expense of a later request.
            assert engine.manager is not None
            await engine.manager.drop(engine.namespace.chain(prompt))
        return times[0], times[1], times[2]

    async def pair(
        self, over_store: PagedEngine, without: PagedEngine, prompt: Sequence[int]
    ) -> tuple[Times, Times]:
        """Ask both, in random order; returns (over the store, without)."""
        order = [over_store, without]
        self.numbers.shuffle(order)
        times = {engine: await self.ask(engine, prompt, self.answer_tokens) for engine in order}
        return times[over_store], times[without]


@contextlib.contextmanager
def without_store(engine: PagedEngine) -> Iterator[None]:
    """Take the tiers below an engine's own away from its idle manager, and give them back."""
    assert engine.manager is not None
    state, fetcher = engine.manager._state, engine.manager._fetcher
    lower, may_ask = state.lower, fetcher._may_ask
    state.lower, fetcher._may_ask = (), False
    try:
        yield
    finally:
        state.lower, fetcher._may_ask = lower, may_ask


def interval(values: Sequence[float], numbers: random.Random) -> list[float]:
    """Return where the median lies in 95 of 100 samples drawn from the values."""
    drawn = sorted(statistics.median(numbers.choices(values, k=len(values))) for _ in range(2000))
    return [round(drawn[50], 4), round(drawn[-51], 4)]


def ratios(pairs: Sequence[tuple[Times, Sequence[Times]]]) -> dict[str, object]:
    """Return medians of the ratios of one's times by the mean of others', with their intervals."""
    found: dict[str, object] = {"pairs": len(pairs)}
    for name in ("ttft_s", "total_s", "cpu_s", "cpu_and_writes_s"):
        values = [
            getattr(on, name) / statistics.mean(getattr(off, name) for off in offs) for on, offs in pairs
        ]
        found[f"{name[:-2]}_ratio"] = round(statistics.median(values), 4)
        found[f"{name[:-2]}_ratio_interval"] = interval(values, random.Random(1))
    found["match_s"] = round(statistics.median(on.report.match_s for on, _ in pairs), 5)
    found["load_s"] = round(statistics.median(on.report.load_s - on.report.match_s for on, _ in pairs), 5)
    found["ttft_s"] = round(statistics.median(on.ttft_s for on, _ in pairs), 4)
    found["ttft_without_s"] = round(statistics.median(offs[0].ttft_s for _, offs in pairs), 4)
    return found


async def measure(bench: Bench, repeats: int) -> dict[str, object]:
    """Run both parts."""
    async with contextlib.AsyncExitStack() as stack:
        over_store = await stack.enter_async_context(bench.engine(has_store=True))
        nothing_reused: list[dict[str, object]] = []
        for length in bench.lengths:
            for _ in range(3):  # first requests pay for set-up
                await bench.three(over_store, length)
            threes = [await bench.three(over_store, length) for _ in range(repeats)]
            assert not any(times.report.matched_tokens for three in threes for times in three)
            found = ratios([(on, offs) for on, *offs in threes])
            found["control"] = ratios([(other, [off]) for _, off, other in threes])
            nothing_reused.append({"prompt_tokens": length} | found)
            say(f"nothing reused: {nothing_reused[-1]}")
        without = await stack.enter_async_context(bench.engine(has_store=False))
        writer = await stack.enter_async_context(bench.engine(has_store=True))
        reused = []
        for length, blocks in itertools.product(bench.lengths, bench.reused_blocks):
            if blocks >= length // _BLOCK_TOKENS:
                continue
            pairs = []
            for _ in range(max(3, repeats // 4)):
                prompt = bench.prompt(length)
                await bench.ask(writer, prompt[: blocks * _BLOCK_TOKENS + 1], 1)
                on, off = await bench.pair(over_store, without, prompt)
                pairs.append((on, [off]))
            loaded = statistics.mean(on.report.matched_tokens for on, _ in pairs)
            stored = {"prompt_tokens": length, "stored_tokens": blocks * _BLOCK_TOKENS}
            reused.append(stored | {"matched_tokens": loaded} | ratios(pairs))
            say(f"reused: {reused[-1]}")
    return {"answer_tokens": bench.answer_tokens, "nothing_reused": nothing_reused, "reused": reused}


def say(text: str) -> None:
    """Print progress on standard error."""
    print(f"store_cost: {text}", file=sys.stderr, flush=True)


def main() -> int:
    """Parse arguments, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", type=Path, help="GGUF or model folder (default: the demo's model)")
    parser.add_argument("--prompt-tokens", type=int, nargs="+", default=[400])
    parser.add_argument("--answer-tokens", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument(
        "--reused-blocks", type=int, nargs="*", default=_REUSED_BLOCKS, help="blocks stored before"
    )
    parser.add_argument("--dtype", choices=sorted(TORCH_DTYPES), default="bfloat16")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    path = args.model or fetch_model(cache_folder() / "models", say=say)
    model = load_model(path, dtype=TORCH_DTYPES[args.dtype], device=torch.device("cpu"))
    with tempfile.TemporaryDirectory(prefix="store-cost-") as name:
        store = ServedStore(Path(name), _DRAM_BYTES)
        try:
            bench = Bench(
                model=model,
                address=str(store.socket_path),
                lengths=args.prompt_tokens,
                answer_tokens=args.answer_tokens,
                reused_blocks=args.reused_blocks,
                numbers=random.Random(5),
            )
            report = asyncio.run(measure(bench, args.repeats))
        finally:
            store.close()
    print(json.dumps(report) if args.json else json.dumps(report, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
