"""What keys and values kept as fp8 cost in accuracy: a model reads texts, its cache kept as it is and as fp8.

For each text all tokens go through the model, in passes of 128 with the pages of those before, once for each
dtype. Printed are the perplexity of both, the share of positions whose likeliest token is the same, and the
median and the largest divergence (Kullback-Leibler, in nats) of the predicted distributions from those of the
unquantised cache. ``--json`` ends with one JSON object on stdout.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from kvstore.config import cache_folder
from kvstore_engine_adapter.attention import Segment
from kvstore_engine_adapter.cpu_page_ops import page_ops_for
from kvstore_engine_adapter.demo.texts import load_texts
from kvstore_engine_adapter.kv_dtype import TORCH_DTYPES, KVCacheDtype
from kvstore_engine_adapter.llama import LlamaModel
from kvstore_engine_adapter.model import LoadedModel, load_model
from kvstore_engine_adapter.model_fetch import fetch_model
from kvstore_engine_adapter.page_pool import PagePool
from kvstore_engine_adapter.paged_engine import layout_of

_BLOCK_TOKENS = 16
_PASS_TOKENS = 128


def log_probabilities(model: LoadedModel, tokens: Sequence[int], kept_as: KVCacheDtype) -> torch.Tensor:
    """Return what the model predicts behind each token: ``[tokens, vocab]`` float32, logarithms."""
    device, computes_in = torch.device("cpu"), model.weights.embedding.dtype
    slots = list(range(-(-len(tokens) // _BLOCK_TOKENS)))
    layout = layout_of(model, _BLOCK_TOKENS, kept_as)
    pool = PagePool(layout, len(slots), device, computes_in=computes_in)
    ops = page_ops_for(pool, num_heads=model.config.num_heads, folder=cache_folder() / "compiled")
    forward = LlamaModel(model.config, model.weights, max_tokens=len(tokens))
    ops.prepare()
    forward.prepare(max_rows=_PASS_TOKENS, max_head_rows=_PASS_TOKENS)
    rows = []
    for start in range(0, len(tokens), _PASS_TOKENS):
        segment = Segment(tokens[start : start + _PASS_TOKENS], start, slots)
        hidden = forward.run(forward.batch([segment], ops.begin([segment])))[: len(segment.tokens)]
        rows.append(forward.logits(hidden).log_softmax(-1))
    ops.close()
    return torch.cat(rows)


def compared(plain: torch.Tensor, fp8: torch.Tensor, tokens: Sequence[int]) -> dict[str, object]:
    """Return how the predictions of two caches differ, and how well each predicts the text."""
    said = torch.tensor(tokens[1:])
    divergence = (plain.exp() * (plain - fp8)).sum(-1).clamp(min=0.0)

    def perplexity(found: torch.Tensor) -> float:
        return float(torch.exp(-found[:-1].gather(1, said[:, None]).mean()))

    return {
        "tokens": len(tokens),
        "perplexity": round(perplexity(plain), 3),
        "perplexity_fp8": round(perplexity(fp8), 3),
        "same_likeliest_ratio": round(float((plain.argmax(-1) == fp8.argmax(-1)).float().mean()), 4),
        "divergence_median": round(float(divergence.median()), 5),
        "divergence_max": round(float(divergence.max()), 4),
    }


def main() -> int:
    """Parse arguments, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", type=Path, help="GGUF or model folder (default: the demo's model)")
    parser.add_argument("--text", type=Path, nargs="*", help="texts to read (default: the demo's)")
    parser.add_argument("--most-tokens", type=int, default=1500, help="of each text, from its beginning")
    parser.add_argument("--dtype", choices=sorted(TORCH_DTYPES), default="bfloat16")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    path = args.model or fetch_model(cache_folder() / "models", say=lambda text: print(text, file=sys.stderr))
    model = load_model(path, dtype=TORCH_DTYPES[args.dtype], device=torch.device("cpu"))
    found = {}
    with torch.inference_mode():
        for name, text in texts(args.text).items():
            tokens = model.tokenizer.encode(text)[: args.most_tokens]
            plain, fp8 = (log_probabilities(model, tokens, kept_as) for kept_as in KVCacheDtype)
            found[name] = compared(plain, fp8, tokens)
            print(f"kv_dtype: {name}: {found[name]}", file=sys.stderr, flush=True)
    report = {"model": model.config.name, "dtype": args.dtype, "texts": found}
    print(json.dumps(report) if args.json else json.dumps(report, indent=2))
    return 0


def texts(paths: Sequence[Path] | None) -> dict[str, str]:
    """Return texts by name."""
    if paths:
        return {path.name: path.read_text(encoding="utf-8") for path in paths}
    bundled = load_texts()
    return {"harbour": bundled.document, "orchard": bundled.other_document}


if __name__ == "__main__":
    sys.exit(main())
