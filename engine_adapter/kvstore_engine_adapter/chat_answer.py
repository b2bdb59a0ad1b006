"""AnswerText and the JSON of answers: text up to a stop, and OpenAI's response objects."""

import base64
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvstore_engine_adapter.generation import RequestReport
from kvstore_engine_adapter.tokenizer import ModelTokenizer, TextStream


class AnswerText:
    """The text of an answer as it grows, cut before the first stop text.

    Text that may be the beginning of a stop is held until that is decided.
    """

    def __init__(self, tokenizer: ModelTokenizer, stops: Sequence[str]) -> None:
        self._stream = TextStream(tokenizer)
        self._stops = tuple(stops)
        self._held = ""
        self.is_stopped = False

    def push(self, token: int) -> str:
        """Return the text that may be sent now."""
        return self._release(self._stream.push(token), is_last=False)

    def finish(self) -> str:
        """Return what is left."""
        return self._release(self._stream.finish(), is_last=True)

    def _release(self, text: str, *, is_last: bool) -> str:
        if self.is_stopped:
            return ""
        self._held += text
        found = [at for at in (self._held.find(stop) for stop in self._stops) if at >= 0]
        if found:
            self.is_stopped = True
            return self._held[: min(found)]
        kept = 0 if is_last else max((_overlap(self._held, stop) for stop in self._stops), default=0)
        released, self._held = self._held[: len(self._held) - kept], self._held[len(self._held) - kept :]
        return released


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of ``text`` that begins ``stop``."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """What all chunks of one answer share. ``created`` is in Unix seconds."""

    id: str
    created: int
    model: str

    def completion(
        self, text: str, finish_reason: str, report: RequestReport, tokens: Sequence[int] | None
    ) -> dict[str, object]:
        """Return a whole answer."""
        message = {"role": "assistant", "content": text, "refusal": None}
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": finish_reason}
        return {
            **self._head("chat.completion"),
            "choices": [choice],
            "usage": usage(report),
            "kvstore": reuse(report, tokens),
        }

    def chunk(self, delta: dict[str, object], finish_reason: str | None = None) -> dict[str, object]:
        """Return one chunk of a streamed answer."""
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        return {**self._head("chat.completion.chunk"), "choices": [choice]}

    def usage_chunk(self, report: RequestReport) -> dict[str, object]:
        """Return the chunk that carries the usage."""
        return {**self._head("chat.completion.chunk"), "choices": [], "usage": usage(report)}

    def _head(self, kind: str) -> dict[str, object]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}


def usage(report: RequestReport) -> dict[str, object]:
    """Return OpenAI's usage object; reused tokens are its cached tokens."""
    return {
        "prompt_tokens": report.prompt_tokens,
        "completion_tokens": report.output_tokens,
        "total_tokens": report.prompt_tokens + report.output_tokens,
        "prompt_tokens_details": {"cached_tokens": report.matched_tokens},
    }


def reuse(report: RequestReport, tokens: Sequence[int] | None) -> dict[str, object]:
    """Return the ``kvstore`` object: where the prompt's KV came from and how long it took.

    The fields are those of RequestReport; ``first_logits`` is base64 of little-endian float32 ``[vocab]``.
    """
    result: dict[str, object] = {
        "prompt_tokens": report.prompt_tokens,
        "matched_tokens": report.matched_tokens,
        "found_tokens": report.found_tokens,
        "tiers": report.tokens_by_tier,
        "miss_reason": report.miss_reason,
        "queue_s": round(report.queue_s, 6),
        "load_s": round(report.load_s, 6),
        "prefill_s": round(report.prefill_s, 6),
        "ttft_s": round(report.ttft_s, 6),
    }
    if report.first_logits is not None:
        logits = report.first_logits.astype(np.dtype("<f4"), copy=False)
        result["first_logits"] = base64.b64encode(logits.tobytes()).decode("ascii")
    if tokens is not None:
        result["output_tokens"] = list(tokens)
    return result
