"""Speed of the bundled engine, and that reuse changes no bit: one model, one request at a time.

Prints prefill and decode tokens per second, and for several numbers of reused blocks the time to the first
token, the largest difference of the first logits from a cold run, and whether the greedy answers are equal.
``--json`` ends with one JSON object on stdout; its ``results`` hold one entry per number of reused blocks.
"""

import argparse
import asyncio
import json
import random
import statistics
import sys
from pathlib import Path

import numpy as np
import torch

from kvstore_engine_adapter.generation import Finished, GenerateRequest, RequestReport, Token
from kvstore_engine_adapter.kv_dtype import TORCH_DTYPES
from kvstore_engine_adapter.model import LoadedModel, load_model
from kvstore_engine_adapter.paged_engine import EngineSettings, PagedEngine

ANSWER_TOKENS = 24


async def ask(engine: PagedEngine, prompt: list[int], max_tokens: int) -> tuple[list[int], RequestReport]:
    """Return the greedy answer and its report."""
    tokens: list[int] = []
    async for event in engine.generate(GenerateRequest(prompt, max_tokens, wants_first_logits=True)):
        if isinstance(event, Token):
            tokens.append(event.token)
        elif isinstance(event, Finished):
            return tokens, event.report
    raise AssertionError("an answer ends with Finished")


async def measure(model: LoadedModel, prompt: list[int], repeats: int) -> dict[str, object]:
    """Run the whole benchmark: cold first, then with a few, half, and all but the last blocks reused."""
    loop = asyncio.get_running_loop()
    length = len(prompt) + ANSWER_TOKENS
    cold_engine = PagedEngine(model, EngineSettings(max_model_tokens=length, is_reusing=False))
    await cold_engine.open()
    prefill, decode = [], []
    for _ in range(repeats):
        started_s = loop.time()
        cold_tokens, cold = await ask(cold_engine, prompt, ANSWER_TOKENS)
        prefill.append(len(prompt) / cold.prefill_s)
        decode.append((ANSWER_TOKENS - 1) / (loop.time() - started_s - cold.ttft_s))
    await cold_engine.close()
    blocks = (len(prompt) - 1) // 16
    results = []
    for count in sorted({1, 2, 3, 5, blocks // 4, blocks // 2, blocks - 2, blocks - 1, blocks}):
        engine = PagedEngine(model, EngineSettings(max_model_tokens=length))
        await engine.open()
        await ask(engine, prompt[: count * 16 + 1], 1)
        tokens, warm = await ask(engine, prompt, ANSWER_TOKENS)
        await engine.close()
        assert cold.first_logits is not None
        assert warm.first_logits is not None
        results.append(
            {
                "reused_tokens": warm.matched_tokens,
                "max_logit_diff": float(np.abs(warm.first_logits - cold.first_logits).max()),
                "outputs_equal": tokens == cold_tokens,
                "ttft_s": warm.ttft_s,
            }
        )
    return {
        "prompt_tokens": len(prompt),
        "prefill_tokens_per_s": statistics.median(prefill),
        "prefill_spread": [min(prefill), max(prefill)],
        "decode_tokens_per_s": statistics.median(decode),
        "ttft_cold_s": cold.ttft_s,
        "results": results,
    }


def main() -> int:
    """Parse arguments, measure, print. Exit status 1 if reuse changed anything."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", type=Path, required=True, help="GGUF file or Hugging Face folder")
    parser.add_argument("--prompt-tokens", type=int, default=870)
    parser.add_argument("--dtype", choices=sorted(TORCH_DTYPES), default="bfloat16")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model = load_model(args.model, dtype=TORCH_DTYPES[args.dtype], device=torch.device("cpu"))
    numbers = random.Random(5)
    prompt = [numbers.randrange(model.config.vocab_size) for _ in range(args.prompt_tokens)]
    report = asyncio.run(measure(model, prompt, args.repeats))
    results = report["results"]
    assert isinstance(results, list)
    for entry in results:
        print(
            f"{entry['reused_tokens']:5} tokens reused: first token after {entry['ttft_s']:.3f} s, "
            f"largest logit difference {entry['max_logit_diff']:.1e}, same answer: {entry['outputs_equal']}",
            file=sys.stderr,
        )
    print(
        f"prefill {report['prefill_tokens_per_s']:.0f} tokens/s, decode {report['decode_tokens_per_s']:.1f}, "
        f"cold first token after {report['ttft_cold_s']:.3f} s",
        file=sys.stderr,
    )
    if args.json:
        print(json.dumps(report))
    return 0 if all(e["outputs_equal"] and e["max_logit_diff"] == 0.0 for e in results) else 1


if __name__ == "__main__":
    sys.exit(main())
