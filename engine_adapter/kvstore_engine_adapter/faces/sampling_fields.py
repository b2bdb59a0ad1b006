"""The parameters that the OpenAI routes share: sampling, ends, priority, streaming, as an AnswerPlan."""

from dataclasses import dataclass

from kvstore.errors import InvalidRequest
from kvstore.hints import MAX_NEXT_USE_S, Hints
from kvstore.hints import MAX_PRIORITY as MAX_BLOCK_PRIORITY
from kvstore_engine_adapter.faces.api_error import ApiError
from kvstore_engine_adapter.faces.fields import Fields
from kvstore_engine_adapter.generation import MAX_LOGPROBS
from kvstore_engine_adapter.sampling import SamplingParams

MAX_STOPS = 4
MAX_STOP_TOKENS = 64
MAX_CHOICES = 16
_MAX_PRIORITY = (1 << 31) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerPlan:
    """How a prompt is to be answered, whatever face asks.

    ``max_tokens`` None: up to the context's end. ``stops`` are texts that end an answer, ``stop_tokens``
    tokens beside the model's own, which do not count if ``ignores_end``. ``logprobs`` asks for so many of the
    likeliest tokens at each place, None for no log-probabilities at all. ``wants_tokens``: the whole answer
    names its tokens. ``hints``: what the request says of its blocks' future.
    """

    sampling: SamplingParams
    max_tokens: int | None = None
    stops: tuple[str, ...] = ()
    stop_tokens: frozenset[int] = frozenset()
    ignores_end: bool = False
    num_choices: int = 1
    logprobs: int | None = None
    priority: int = 0
    wants_first_logits: bool = False
    wants_tokens: bool = False
    hints: Hints | None = None


def read_sampling(fields: Fields) -> SamplingParams:
    """Return what the parameters say of sampling.

    Raises:
        ApiError: 400: a value of the wrong type or range.
    """
    values = {
        name: fields.number(name)
        for name in (
            "temperature",
            "top_p",
            "min_p",
            "presence_penalty",
            "frequency_penalty",
            "repetition_penalty",
        )
    }
    top_k = fields.integer("top_k")
    given = {name: value for name, value in values.items() if value is not None}
    return checked_sampling(
        **{"temperature": 1.0} | given,
        top_k=0 if top_k in (None, -1) else top_k or 0,
        seed=fields.integer("seed"),
    )


def checked_sampling(*, top_k: int, seed: int | None, **numbers: float) -> SamplingParams:
    """Return sampling parameters; a value outside its range is the client's mistake, with its name.

    Raises:
        ApiError: 400.
    """
    try:
        return SamplingParams(top_k=top_k, seed=seed, **numbers)
    except InvalidRequest as error:
        raise ApiError(400, str(error), param=str(error).split(":", 1)[0]) from error


def read_plan(fields: Fields, *, max_tokens: int | None, logprobs: int | None = None) -> AnswerPlan:
    """Return the plan in the fields that all OpenAI routes share.

    Raises:
        ApiError: 400: a value of the wrong type or range.
    """
    return AnswerPlan(
        sampling=read_sampling(fields),
        max_tokens=max_tokens,
        stops=fields.texts("stop", most=MAX_STOPS),
        stop_tokens=frozenset(fields.tokens("stop_token_ids", most=MAX_STOP_TOKENS)),
        ignores_end=fields.boolean("ignore_eos"),
        num_choices=fields.whole("n", low=1, high=MAX_CHOICES, default=1),
        logprobs=logprobs,
        priority=fields.whole("priority", low=-_MAX_PRIORITY, high=_MAX_PRIORITY, default=0),
    )


def read_max_tokens(fields: Fields, *names: str, default: int | None = None) -> int | None:
    """Return the first of the limits that is given.

    Raises:
        ApiError: 400: it is no integer of at least 1.
    """
    found = [(name, fields.integer(name)) for name in names]
    for name, value in found:
        if value is not None:
            if value < 1:
                fields.refuse(name, f"is {value}, expected at least 1")
            return value
    return default


def read_top_logprobs(fields: Fields, name: str, *, default: int) -> int:
    """Return how many of the likeliest tokens are wanted at each place.

    Raises:
        ApiError: 400: outside 0..20.
    """
    return fields.whole(name, low=0, high=MAX_LOGPROBS, default=default)


def read_hints(extra: Fields) -> Hints | None:
    """Return what ``kvstore`` of a request says of its blocks' future.

    Raises:
        ApiError: 400: a value of the wrong type or range.
    """
    next_use_s = extra.number("next_use_s")
    if next_use_s is not None and not 0 <= next_use_s <= MAX_NEXT_USE_S:
        extra.refuse("next_use_s", f"must be 0 to {MAX_NEXT_USE_S:.0f}")
    hints = Hints(
        ends_session=extra.boolean("ends_session"),
        is_one_off=extra.boolean("is_one_off"),
        next_use_s=next_use_s,
        priority=extra.whole("block_priority", low=-MAX_BLOCK_PRIORITY, high=MAX_BLOCK_PRIORITY, default=0),
    )
    return None if hints == Hints() else hints
