"""An SGLang engine as a process: one JSON line with its arguments, then lines with prompts. SGLang's Python.

The first line is ``Engine``'s arguments. Then each line has prompts; each answer is a line on the
original stdout, everything else goes to stderr.
"""

import json
import os
import sys
import time

import sglang_on_cpu

sglang_on_cpu.install()


def main() -> None:
    """Serve until stdin ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    arguments = json.loads(sys.stdin.readline())
    import sglang

    started_s = time.monotonic()
    engine = sglang.Engine(**arguments)
    _say(answers, {"ready_s": time.monotonic() - started_s})
    for line in sys.stdin:
        asked = json.loads(line)
        if asked.get("reset"):
            engine.flush_cache()
        sampling = {"temperature": 0.0, "max_new_tokens": asked["max_tokens"], "ignore_eos": True}
        started_s = time.monotonic()
        outputs = engine.generate(input_ids=asked["prompts"], sampling_params=sampling, return_logprob=True)
        seconds = time.monotonic() - started_s
        found = [output["meta_info"] for output in outputs]
        _say(
            answers,
            {
                "seconds": seconds,
                "tokens": [list(output["output_ids"]) for output in outputs],
                "logprobs": [[one[0] for one in meta["output_token_logprobs"]] for meta in found],
                "cached": [meta["cached_tokens"] for meta in found],
                "finish": [meta["finish_reason"]["type"] for meta in found],
                "preemptions": None,
                "external": sum(_from_storage(meta) for meta in found),
            },
        )
    engine.shutdown()


def _from_storage(meta: dict) -> int:
    return int((meta.get("cached_tokens_details") or {}).get("storage") or 0)


def _say(answers: object, value: object) -> None:
    answers.write(json.dumps(value) + "\n")
    answers.flush()


if __name__ == "__main__":
    main()
