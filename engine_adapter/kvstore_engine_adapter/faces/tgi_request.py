"""TgiRequest: a body of TGI's ``/generate`` and its kin, checked."""

import dataclasses
from dataclasses import dataclass

from kvstore_engine_adapter.faces.fields import Fields, json_object
from kvstore_engine_adapter.faces.parameters import HINTS, TGI, TGI_PARAMETERS
from kvstore_engine_adapter.faces.sampling_fields import (
    MAX_STOPS,
    AnswerPlan,
    checked_sampling,
    read_hints,
    read_max_tokens,
)
from kvstore_engine_adapter.sampling import SamplingParams

_DEFAULT_MAX_TOKENS = 100
_MAX_TOP_TOKENS = 5


@dataclass(frozen=True, slots=True)
class TgiRequest:
    """A checked request. ``truncate_tokens`` keeps so many of the prompt's last tokens, None all of them."""

    inputs: str
    plan: AnswerPlan
    is_streaming: bool
    truncate_tokens: int | None
    returns_full_text: bool
    wants_details: bool


def parse_tgi_request(body: bytes) -> TgiRequest:
    """Return the request in a body.

    Raises:
        ApiError: 400: no JSON object, an unknown or unsupported parameter, or one of the wrong type or range.
    """
    fields = Fields(json_object(body))
    fields.require_known(TGI)
    inputs = fields.text("inputs")
    if not inputs:
        fields.refuse("inputs", "cannot be empty")
    parameters = fields.nested("parameters", TGI_PARAMETERS)
    sampling = _sampling(parameters)
    top = parameters.whole("top_n_tokens", low=0, high=_MAX_TOP_TOKENS, default=0)
    return TgiRequest(
        inputs=inputs,
        plan=AnswerPlan(
            sampling=sampling,
            max_tokens=read_max_tokens(parameters, "max_new_tokens", default=_DEFAULT_MAX_TOKENS),
            stops=parameters.texts("stop", most=MAX_STOPS),
            logprobs=top,
            hints=read_hints(fields.nested("kvstore", HINTS)),
        ),
        is_streaming=fields.boolean("stream"),
        truncate_tokens=read_max_tokens(parameters, "truncate"),
        returns_full_text=parameters.boolean("return_full_text"),
        wants_details=parameters.boolean("details"),
    )


def _sampling(fields: Fields) -> SamplingParams:
    """Return TGI's sampling: greedy unless asked to draw, or given something that only matters for that."""
    temperature, top_p, top_k = fields.number("temperature"), fields.number("top_p"), fields.integer("top_k")
    if temperature is not None and temperature <= 0:
        fields.refuse("temperature", "must be strictly positive")
    if top_p is not None and not 0 < top_p < 1:
        fields.refuse("top_p", "must be above 0 and below 1")
    if top_k is not None and top_k < 1:
        fields.refuse("top_k", "must be strictly positive")
    is_drawing = fields.boolean("do_sample") or temperature not in (None, 1.0) or bool(top_p or top_k)
    frequency, repetition = fields.number("frequency_penalty"), fields.number("repetition_penalty")
    sampling = checked_sampling(
        temperature=1.0 if temperature is None else temperature,
        top_p=1.0 if top_p is None else top_p,
        top_k=top_k or 0,
        seed=fields.integer("seed"),
        frequency_penalty=frequency or 0.0,
        repetition_penalty=1.0 if repetition is None else repetition,
    )
    return sampling if is_drawing else dataclasses.replace(sampling, temperature=0.0)
