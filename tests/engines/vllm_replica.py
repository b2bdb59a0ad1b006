"""One vLLM engine in a process, told by JSON lines what to do; run with the engines' own Python.

The first line on stdin has ``LLM``'s arguments. Then each line has prompts; each answer is a line on the
original stdout, everything else goes to stderr. ``told`` are ``kv_transfer_params``, ``lora`` the name,
number and folder of an adapter. With ``watched`` among the arguments each answer says how long the engine was
in calls of its connector. A line with ``instead`` is answered with another one, see
instead_connector.py.
"""

import json
import os
import sys
import time
from contextlib import nullcontext


def main() -> None:
    """Serve until stdin ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    arguments = json.loads(sys.stdin.readline())
    is_watched = arguments.pop("watched", False)
    from vllm import LLM, SamplingParams

    watch = _watch() if is_watched else None
    started_s = time.monotonic()
    engine = LLM(**arguments)
    _say(answers, {"ready_s": time.monotonic() - started_s})
    for line in sys.stdin:
        asked = json.loads(line)
        if asked.get("reset"):
            engine.reset_prefix_cache()
        told = asked.get("told")
        sampling = SamplingParams(
            temperature=0.0,
            max_tokens=asked["max_tokens"],
            ignore_eos=True,
            logprobs=asked.get("logprobs"),
            extra_args=None if told is None else {"kv_transfer_params": told},
        )
        prompts = [{"prompt_token_ids": tokens} | asked.get("more", {}) for tokens in asked["prompts"]]
        with _with(engine, asked.get("instead")):
            started_s, started_cpu_s = time.monotonic(), time.process_time()
            outputs = engine.generate(
                prompts, sampling, use_tqdm=False, lora_request=_adapter(asked.get("lora"))
            )
            seconds, cpu_s = time.monotonic() - started_s, time.process_time() - started_cpu_s
        _say(
            answers,
            {
                "seconds": seconds,
                "tokens": [list(output.outputs[0].token_ids) for output in outputs],
                "logprobs": [_logprobs(output.outputs[0]) for output in outputs],
                "cached": [output.num_cached_tokens for output in outputs],
                "finish": [output.outputs[0].finish_reason for output in outputs],
                "preemptions": _counter(engine, "vllm:num_preemptions"),
                "left": _left(engine),
                "external": _counter(engine, "vllm:external_prefix_cache_hits"),
                "cpu_s": cpu_s,
                **({} if watch is None else watch.take()),
            },
        )
    del engine


def _with(engine: object, instead: str | None) -> object:
    if instead is None:
        return nullcontext()
    from tests.engines.instead_connector import connector_instead

    return connector_instead(engine, instead)


def _watch() -> object:
    from kvstore_engine_adapter.vllm.connector import KVStoreConnector
    from tests.engines.call_watch import CallWatch

    return CallWatch(KVStoreConnector)


def _adapter(named: list | None) -> object:
    if named is None:
        return None
    from vllm.lora.request import LoRARequest

    return LoRARequest(*named)


def _logprobs(output: object) -> list[float]:
    found = getattr(output, "logprobs", None) or []
    return [at[token].logprob for at, token in zip(found, output.token_ids, strict=True)]


def _left(engine: object) -> dict[str, int] | None:
    """Return what vLLM's scheduler still holds when nothing is asked; None: it is in another process."""
    try:
        scheduler = engine.llm_engine.engine_core.engine_core.scheduler
    except AttributeError:
        return None
    pool = scheduler.kv_cache_manager.block_pool
    return {
        "requests": len(scheduler.requests),
        "waiting": len(scheduler.waiting),
        "running": len(scheduler.running),
        "loading": len(scheduler.finished_recving_kv_req_ids),
        "blocks": pool.num_gpu_blocks - 1 - pool.free_block_queue.num_free_blocks,
        "referenced": sum(block.ref_cnt for block in pool.blocks if not block.is_null),
    }


def _counter(engine: object, name: str) -> float | None:
    try:
        return sum(metric.value for metric in engine.get_metrics() if metric.name == name)
    except (AssertionError, AttributeError):
        return None


def _say(answers: object, value: object) -> None:
    answers.write(json.dumps(value) + "\n")
    answers.flush()


if __name__ == "__main__":
    main()
