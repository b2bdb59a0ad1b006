"""What the connector costs vLLM: requests that reuse nothing, and a store that is frozen or dead.

One engine on the CPU answers new prompts by turns with its connector, with none, and with an empty one,
which shows what vLLM does for any: two processes of the same engine differ by some percent on their own.
``ratio`` is of the medians with the connector and with none, ``empty_ratio`` with the empty one and with
none; ``added_ms`` is the median of the pairs' differences; ``low`` and ``high`` bound each with 95 %
(bootstrap over pairs). Beside them is what the engine measures of itself, which other processes disturb
less: ``cpu_ratio``, of its CPU time; ``calls_ms``, in the connector's methods in one request; ``wait_ms``,
from a request's first lookup to its answer. Deadlines are the defaults. Needs the engines' environment: run
``scripts/test-engines contract`` once. With ``--model smollm2`` the model is the demo's (run
``scripts/demo`` once), else a small random one.
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
from typing import Any, TypeAlias

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.engines.real_model import find_model, write_folder
from tests.engines.replica_process import Answer, ReplicaProcess, transfer_config
from tests.engines.scenario import Workshop, tokens
from tests.engines.stored import address

_WARM_UP = 3
_PAUSE_S = 0.1
_KINDS = (None, "none", "empty")
"""Connectors in place of the engine's own."""
Pairs: TypeAlias = Sequence[tuple[float, float]]
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
        found: dict[str | None, list[Answer]] = {instead: [] for instead in _KINDS}
        for turn in range(turns + _WARM_UP):
            self._seed += 1
            prompt = [tokens(90_000 + self._seed, self._prompt_tokens)]
            for at in range(len(_KINDS)):
                instead = _KINDS[(turn + at) % len(_KINDS)]
                found[instead].append(self._ask(prompt, instead))
            self.are_equal &= all(one[-1].tokens == found[None][-1].tokens for one in found.values())
        on, off, empty = (found[instead][_WARM_UP:] for instead in _KINDS)
        return _summed_up(on, off, empty)

    def _ask(self, prompt: list[list[int]], instead: str | None) -> Answer:
        # What the last one saves is saved by then.
        time.sleep(_PAUSE_S)
        return self._replica.ask(prompt, max_tokens=self._answer_tokens, instead=instead, reset=True)


def _summed_up(on: Sequence[Answer], off: Sequence[Answer], empty: Sequence[Answer]) -> dict[str, float]:
    pairs = _paired(on, off)
    calls_ms = [1000 * sum(answer.calls_s.values()) for answer in on]
    waits_ms = [1000 * wait_s for answer in on for wait_s in answer.waits_s]
    found = {
        "turns": len(pairs),
        "on_ms": statistics.median(one for one, _ in pairs),
        "off_ms": statistics.median(other for _, other in pairs),
        **_bounded("ratio", pairs, _ratio),
        **_bounded("added_ms", pairs, _added),
        "worst_ms": max(one - other for one, other in pairs),
        "worst_by_chance_ms": max(other - one for one, other in pairs),
        **_bounded("empty_ratio", _paired(empty, off), _ratio),
        **_bounded("cpu_ratio", _paired(on, off, "cpu_s"), _ratio),
        **_bounded("empty_cpu_ratio", _paired(empty, off, "cpu_s"), _ratio),
        "calls_ms": statistics.median(calls_ms),
        "worst_calls_ms": max(calls_ms),
        "wait_ms": statistics.median(waits_ms),
        "worst_wait_ms": max(waits_ms),
    }
    return {name: round(value, 4) for name, value in found.items()} | _by_call(on)


def _paired(
    one: Sequence[Answer], other: Sequence[Answer], name: str = "seconds"
) -> list[tuple[float, float]]:
    """Return milliseconds of the answers to the same prompts."""
    return [(1000 * getattr(a, name), 1000 * getattr(b, name)) for a, b in zip(one, other, strict=True)]


def _bounded(name: str, pairs: Pairs, figure: Callable[[Pairs], float]) -> dict[str, float]:
    """Return a figure and what it lies between with 95 %: it is taken of pairs drawn anew, many times."""
    draw = random.Random(1)
    found = sorted(figure(draw.choices(pairs, k=len(pairs))) for _ in range(_RESAMPLES))
    low, high = found[_RESAMPLES // 40], found[-_RESAMPLES // 40]
    return {name: figure(pairs), f"{name}_low": low, f"{name}_high": high}


def _by_call(on: Sequence[Answer]) -> dict[str, float]:
    """Return the milliseconds of one request in each of the connector's methods, where there are any."""
    names = {name for answer in on for name in answer.calls_s}
    medians = {name: statistics.median(1000 * one.calls_s.get(name, 0.0) for one in on) for name in names}
    return {f"in {name}": round(ms, 3) for name, ms in sorted(medians.items()) if ms >= 0.0005}


def _ratio(pairs: Pairs) -> float:
    return statistics.median(one for one, _ in pairs) / statistics.median(other for _, other in pairs)


def _added(pairs: Pairs) -> float:
    return statistics.median(one - other for one, other in pairs)


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
