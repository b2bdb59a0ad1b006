"""CompletionRequest: a ``/v1/completions`` body, checked."""

import dataclasses
from dataclasses import dataclass
from typing import TypeGuard

from kvstore_engine_adapter.faces.fields import Fields, is_token, json_object, require_unicode
from kvstore_engine_adapter.faces.parameters import COMPLETIONS, COMPLETIONS_EXTRA, STREAM_OPTIONS
from kvstore_engine_adapter.faces.sampling_fields import (
    AnswerPlan,
    read_hints,
    read_max_tokens,
    read_plan,
    read_top_logprobs,
)

MAX_PROMPTS = 128
MAX_ANSWERS = 128
_DEFAULT_MAX_TOKENS = 16


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """A checked request. A prompt is a text or the tokens of one."""

    model: str
    prompts: tuple[str | tuple[int, ...], ...]
    plan: AnswerPlan
    echoes: bool
    is_streaming: bool
    includes_usage: bool


def parse_completion_request(body: bytes) -> CompletionRequest:
    """Return the request in a body.

    Raises:
        ApiError: 400: no JSON object, an unknown or unsupported parameter, or one of the wrong type or range.
    """
    fields = Fields(json_object(body))
    fields.require_known(COMPLETIONS)
    extra = fields.nested("kvstore", COMPLETIONS_EXTRA)
    wants_first_logits = extra.boolean("first_logits")
    logprobs = read_top_logprobs(fields, "logprobs", default=0) if fields.has("logprobs") else None
    plan = read_plan(
        fields,
        max_tokens=read_max_tokens(fields, "max_tokens", default=_DEFAULT_MAX_TOKENS),
        logprobs=logprobs,
    )
    prompts, echoes = _prompts(fields), fields.boolean("echo")
    if echoes and logprobs is not None:
        fields.refuse(
            "echo",
            "together with logprobs is not supported: prompts have no log-probabilities here",
            code="unsupported_parameter",
        )
    if len(prompts) * plan.num_choices > MAX_ANSWERS:
        fields.refuse(
            "n", f"is {plan.num_choices} for {len(prompts)} prompts: at most {MAX_ANSWERS} answers in all"
        )
    return CompletionRequest(
        model=fields.text("model"),
        prompts=prompts,
        plan=dataclasses.replace(
            plan,
            wants_first_logits=wants_first_logits,
            wants_tokens=wants_first_logits or extra.boolean("output_tokens"),
            hints=read_hints(extra),
        ),
        echoes=echoes,
        is_streaming=fields.boolean("stream"),
        includes_usage=fields.nested("stream_options", STREAM_OPTIONS).boolean("include_usage"),
    )


def _prompts(fields: Fields) -> tuple[str | tuple[int, ...], ...]:
    value = fields.values.get("prompt")
    if isinstance(value, str) or _is_tokens(value):
        value = [value]
    if not isinstance(value, list) or not 1 <= len(value) <= MAX_PROMPTS:
        fields.refuse(
            "prompt", f"must be a text, a list of tokens, or a list of 1 to {MAX_PROMPTS} of one of them"
        )
    return tuple(_prompt(fields, entry, number) for number, entry in enumerate(value))


def _prompt(fields: Fields, value: object, number: int) -> str | tuple[int, ...]:
    if isinstance(value, str) and value:
        return require_unicode(value, "prompt")
    if not _is_tokens(value):
        fields.refuse("prompt", f"[{number}] is neither a text nor a list of tokens, or it is empty")
    return tuple(value)


def _is_tokens(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and bool(value) and all(map(is_token, value))
