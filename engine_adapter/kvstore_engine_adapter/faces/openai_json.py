"""OpenAI's JSON that several of its routes share: usage, log-probabilities, and what this server adds."""

import base64
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvstore_engine_adapter.faces.answering import Answering
from kvstore_engine_adapter.faces.choice import AnswerToken, Choice
from kvstore_engine_adapter.generation import RequestReport
from kvstore_engine_adapter.tokenizer import ModelTokenizer

_LEAST_LOGPROB = -9999.0
"""What OpenAI's API shows for a token whose probability is so small that its logarithm is no number."""


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """What all objects of one answer share. ``created`` is in Unix seconds."""

    id: str
    created: int
    model: str

    def of_kind(self, kind: str) -> dict[str, object]:
        """Return the fields that begin an object."""
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}


def usage(answering: Answering) -> dict[str, object]:
    """Return the usage object; reused tokens are its cached tokens."""
    prompt_tokens, cached_tokens, output_tokens = answering.usage
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": output_tokens,
        "total_tokens": prompt_tokens + output_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


def chat_logprobs(tokenizer: ModelTokenizer, tokens: Sequence[AnswerToken]) -> dict[str, object]:
    """Return the log-probabilities of a chat's tokens."""
    content = [
        {
            **token_logprob(tokenizer, token.token, token.logprob),
            "top_logprobs": [token_logprob(tokenizer, other, value) for other, value in token.top_logprobs],
        }
        for token in tokens
    ]
    return {"content": content, "refusal": None}


def token_logprob(tokenizer: ModelTokenizer, token: int, logprob: float | None) -> dict[str, object]:
    """Return one token with its log-probability; its bytes tell what is no whole character."""
    data = tokenizer.token_bytes(token)
    return {
        "token": data.decode("utf-8", errors="replace"),
        "logprob": json_logprob(logprob),
        "bytes": list(data),
    }


def json_logprob(logprob: float | None) -> float:
    """Return a log-probability as JSON can say it."""
    return _LEAST_LOGPROB if logprob is None else max(logprob, _LEAST_LOGPROB)


def reuse(choice: Choice, *, shows_tokens: bool) -> dict[str, object]:
    """Return the ``kvstore`` object: where the prompt's KV came from and how long it took.

    The fields are those of RequestReport; ``first_logits`` is base64 of little-endian float32 ``[vocab]``.
    """
    report = choice.report
    result: dict[str, object] = {
        "prompt_tokens": report.prompt_tokens,
        "matched_tokens": report.matched_tokens,
        "found_tokens": report.found_tokens,
        "tiers": report.tokens_by_tier,
        "miss_reason": report.miss_reason,
        "queue_s": round(report.queue_s, 6),
        "match_s": round(report.match_s, 6),
        "load_s": round(report.load_s, 6),
        "prefill_s": round(report.prefill_s, 6),
        "ttft_s": round(report.ttft_s, 6),
    }
    if report.first_logits is not None:
        result["first_logits"] = _base64_floats(report)
    if shows_tokens:
        result["output_tokens"] = [token.token for token in choice.tokens]
    return result


def _base64_floats(report: RequestReport) -> str:
    assert report.first_logits is not None
    logits = report.first_logits.astype(np.dtype("<f4"), copy=False)
    return base64.b64encode(logits.tobytes()).decode("ascii")
