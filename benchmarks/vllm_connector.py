"""What the connector costs vLLM: requests that reuse nothing, and a store that is frozen or dead.

Two engines on the CPU, one with the connector and one without, answer the same new prompts by turns, so that
what else the machine does falls on both. Ratios and differences are of medians; ``worst_ms`` is the largest
difference of one pair. Needs the engines' environment: run ``scripts/test-engines contract`` once. With
``--model smollm2`` the model is the demo's (run ``scripts/demo`` once), else a small random one.
"""

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.engines.real_model import find_model, write_folder
from tests.engines.replica_process import ReplicaProcess, transfer_config
from tests.engines.scenario import Workshop, tokens
from tests.engines.stored import address

_WARM_UP = 3


class Pair:
    """An engine with the connector and one without, and their answers' times."""

    def __init__(
        self, on: ReplicaProcess, off: ReplicaProcess, *, prompt_tokens: int, answer_tokens: int
    ) -> None:
        self._on, self._off = on, off
        self._prompt_tokens, self._answer_tokens = prompt_tokens, answer_tokens
        self._seed = 0
        self.are_equal = True

    def measure(self, turns: int) -> dict[str, float]:
        """Answer new prompts by turns; returns medians in milliseconds, their ratio and differences."""
        times: dict[str, list[float]] = {"on": [], "off": []}
        for turn in range(turns + _WARM_UP):
            self._seed += 1
            prompt = [tokens(90_000 + self._seed, self._prompt_tokens)]
            order = [("on", self._on), ("off", self._off)]
            answers = {
                name: replica.ask(prompt, max_tokens=self._answer_tokens)
                for name, replica in (order if turn % 2 else reversed(order))
            }
            self.are_equal &= answers["on"].tokens == answers["off"].tokens
            if turn >= _WARM_UP:
                for name, answer in answers.items():
                    times[name].append(answer.seconds * 1000)
        on, off = statistics.median(times["on"]), statistics.median(times["off"])
        pairs = [one - other for one, other in zip(times["on"], times["off"], strict=True)]
        return {
            "turns": turns,
            "on_ms": round(on, 2),
            "off_ms": round(off, 2),
            "ratio": round(on / off, 4),
            "added_ms": round(on - off, 2),
            "median_pair_ms": round(statistics.median(pairs), 2),
            "worst_ms": round(max(pairs), 2),
            "worst_by_chance_ms": round(max(-one for one in pairs), 2),
        }


def main() -> int:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", choices=["small", "smollm2"], default="small")
    parser.add_argument("--turns", type=int, default=30, help="pairs of requests for each line")
    parser.add_argument("--prompt-tokens", type=int, default=300)
    parser.add_argument("--answer-tokens", type=int, default=16)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kvstore-vllm-") as made, ExitStack() as stack:
        shop = Workshop(Path(made))
        more = _model(shop, given.model)
        store = stack.enter_context(shop.store("cost", dram_bytes=512 << 20))
        replicas = [
            shop.replica("on", transfer=transfer_config(address(store)), **more),
            shop.replica("off", **more),
        ]
        for replica in replicas:
            replica.launch()
            stack.push(replica.__exit__)
        for replica in replicas:
            replica.wait_ready()
        pair = Pair(*replicas, prompt_tokens=given.prompt_tokens, answer_tokens=given.answer_tokens)
        found: dict[str, Any] = {"model": given.model}
        steps: tuple[tuple[str, Callable[[], object]], ...] = (
            ("nothing_to_reuse", lambda: None),
            ("frozen", store.pause),
            ("dead", store.kill),
        )
        for name, happen in steps:
            happen()
            found[name] = pair.measure(given.turns)
            if not given.json:
                print(f"{name}: {found[name]}", flush=True)
        found["outputs_equal"] = pair.are_equal
    if given.json:
        print(json.dumps(found))
    return 0 if pair.are_equal else 1


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
