"""What the connector costs vLLM: requests that reuse nothing, and a store that is frozen or dead.

One engine on the CPU answers new prompts by turns with and without its connector: two processes of the same
engine differ by some percent on their own. ``ratio`` is of the medians, ``added_ms`` the median of the pairs'
differences; ``low`` and ``high`` bound each with 95 % (bootstrap over pairs). Beside them is what the engine
measures of itself, which other processes disturb less: ``calls_ms``, in the connector's methods in one
request, and ``wait_ms``, from a request's first lookup to its answer. Deadlines are the defaults. Needs the
engines' environment: run ``scripts/test-engines contract`` once. With ``--model smollm2`` the model is the
demo's (run ``scripts/demo`` once), else a small random one.
"""

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.engines.real_model import find_model, write_folder
from tests.engines.replica_process import Answer, ReplicaProcess, transfer_config
from tests.engines.scenario import Workshop, tokens
from tests.engines.stored import address

_WARM_UP = 3
_PAUSE_S = 0.1
_RESAMPLES = 2000
STEPS = ("nothing_to_reuse", "frozen", "dead")


class Turns:
    """An engine that answers with and without its connector, and the times of its answers."""

    def __init__(self, replica: ReplicaProcess, *, prompt_tokens: int, answer_tokens: int) -> None:
        self._replica = replica
        self._prompt_tokens, self._answer_tokens = prompt_tokens, answer_tokens
        self._seed = 0
        self.are_equal = True

    def measure(self, turns: int) -> dict[str, float]:
        """Answer new prompts by turns; returns milliseconds, ratios and their bounds."""
        found: dict[bool, list[Answer]] = {True: [], False: []}
        for turn in range(turns + _WARM_UP):
            self._seed += 1
            prompt = [tokens(90_000 + self._seed, self._prompt_tokens)]
            for is_without in (False, True) if turn % 2 else (True, False):
                # What the last one saves is saved by then.
                time.sleep(_PAUSE_S)
                found[is_without].append(
                    self._replica.ask(prompt, max_tokens=self._answer_tokens, without=is_without, reset=True)
                )
            self.are_equal &= found[True][-1].tokens == found[False][-1].tokens
        return _summed_up(found[False][_WARM_UP:], found[True][_WARM_UP:])


def _summed_up(on: Sequence[Answer], off: Sequence[Answer]) -> dict[str, float]:
    pairs = [(1000 * one.seconds, 1000 * other.seconds) for one, other in zip(on, off, strict=True)]
    low, high = _bounds(pairs, _ratio)
    added_low, added_high = _bounds(pairs, _added)
    calls_ms = [1000 * sum(answer.calls_s.values()) for answer in on]
    waits_ms = [1000 * wait_s for answer in on for wait_s in answer.waits_s]
    found = {
        "turns": len(pairs),
        "on_ms": statistics.median(one for one, _ in pairs),
        "off_ms": statistics.median(other for _, other in pairs),
        "ratio": _ratio(pairs),
        "ratio_low": low,
        "ratio_high": high,
        "added_ms": _added(pairs),
        "added_low_ms": added_low,
        "added_high_ms": added_high,
        "worst_ms": max(one - other for one, other in pairs),
        "worst_by_chance_ms": max(other - one for one, other in pairs),
        "cpu_ratio": statistics.median(one.cpu_s for one in on) / statistics.median(one.cpu_s for one in off),
        "calls_ms": statistics.median(calls_ms),
        "worst_calls_ms": max(calls_ms),
        "wait_ms": statistics.median(waits_ms),
        "worst_wait_ms": max(waits_ms),
    }
    return {name: round(value, 4) for name, value in found.items()} | _by_call(on)


def _by_call(on: Sequence[Answer]) -> dict[str, float]:
    """Return the milliseconds of one request in each of the connector's methods, where there are any."""
    names = {name for answer in on for name in answer.calls_s}
    medians = {name: statistics.median(1000 * one.calls_s.get(name, 0.0) for one in on) for name in names}
    return {f"in {name}": round(ms, 3) for name, ms in sorted(medians.items()) if ms >= 0.0005}


def _ratio(pairs: Sequence[tuple[float, float]]) -> float:
    return statistics.median(one for one, _ in pairs) / statistics.median(other for _, other in pairs)


def _added(pairs: Sequence[tuple[float, float]]) -> float:
    return statistics.median(one - other for one, other in pairs)


def _bounds(
    pairs: Sequence[tuple[float, float]], figure: Callable[[Sequence[tuple[float, float]]], float]
) -> tuple[float, float]:
    """Return what a figure lies between with 95 %: it is taken of pairs drawn anew, many times."""
    draw = random.Random(1)
    found = sorted(figure(draw.choices(pairs, k=len(pairs))) for _ in range(_RESAMPLES))
    return found[_RESAMPLES // 40], found[-_RESAMPLES // 40]


def main() -> int:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", choices=["small", "smollm2"], default="small")
    parser.add_argument("--turns", type=int, default=30, help="pairs of requests for each line")
    parser.add_argument("--prompt-tokens", type=int, default=300)
    parser.add_argument("--answer-tokens", type=int, default=16)
    parser.add_argument("--steps", nargs="+", choices=STEPS, default=STEPS, help="all by default")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kvstore-vllm-") as made, ExitStack() as stack:
        shop = Workshop(Path(made))
        more = _model(shop, given.model)
        store = stack.enter_context(shop.store("cost", dram_bytes=512 << 20))
        replica = stack.enter_context(
            shop.replica(
                "on", transfer=transfer_config(address(store), loads="cheaper"), watched=True, **more
            )
        )
        turns = Turns(replica, prompt_tokens=given.prompt_tokens, answer_tokens=given.answer_tokens)
        found: dict[str, Any] = {"model": given.model}
        happen: dict[str, Callable[[], object]] = {"frozen": store.pause, "dead": store.kill}
        for name in STEPS:
            if name not in given.steps:
                continue
            happen.get(name, lambda: None)()
            found[name] = turns.measure(given.turns)
            if not given.json:
                print(f"{name}: {found[name]}", flush=True)
        found["outputs_equal"] = turns.are_equal
    if given.json:
        print(json.dumps(found))
    return 0 if turns.are_equal else 1


def _model(shop: Workshop, name: str) -> dict[str, Any]:
    if name == "small":
        return {}
    source = find_model()
    if source is None:
        raise SystemExit("the demo's model is not there: run scripts/demo once")
    folder = shop.folder / "smollm2"
    write_folder(source, folder)
    return {
        "model": folder,
        "dtype": "bfloat16",
        "skip_tokenizer_init": True,
        "kv_cache_memory_bytes": 256 << 20,
    }


if __name__ == "__main__":
    sys.exit(main())
