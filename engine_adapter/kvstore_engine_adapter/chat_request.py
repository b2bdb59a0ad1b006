"""ChatRequest: a ``/v1/chat/completions`` body, checked; ApiError: what a client is told instead."""

import json
import math
from dataclasses import dataclass
from typing import NoReturn

from kvstore.errors import InvalidRequest
from kvstore_engine_adapter.sampling import SamplingParams
from kvstore_engine_adapter.tokenizer import ChatMessage

MAX_MESSAGES = 4096
MAX_STOPS = 4
_ROLES = ("system", "developer", "user", "assistant", "tool")
# Accepted and without effect: they change nothing about the answer of a single local model.
_WITHOUT_EFFECT = frozenset(
    {
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "parallel_tool_calls",
    }
)
# Accepted only with the value that means 'off'.
_OFF_VALUES: dict[str, tuple[object, ...]] = {
    "n": (1,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "logit_bias": ({},),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
}


class ApiError(Exception):
    """An error for the client: an HTTP status and OpenAI's error object."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.body: dict[str, object] = {
            "error": {"message": message, "type": kind, "param": param, "code": code}
        }


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A checked request. ``stops`` are texts that end the answer."""

    model: str
    messages: tuple[ChatMessage, ...]
    sampling: SamplingParams
    max_tokens: int | None
    stops: tuple[str, ...]
    is_streaming: bool
    includes_usage: bool
    wants_first_logits: bool
    wants_tokens: bool


def parse_chat_request(body: bytes) -> ChatRequest:
    """Return the request in a body.

    Raises:
        ApiError: 400: no JSON object, an unknown or unsupported parameter, or one of the wrong type or range.
    """
    fields = _Fields(_json_object(body), "")
    _refuse_unsupported(fields)
    options = fields.nested("stream_options", ("include_usage",))
    extra = fields.nested("kvstore", ("first_logits", "output_tokens"))
    wants_first_logits = extra.boolean("first_logits")
    max_tokens = fields.integer("max_completion_tokens")
    if max_tokens is None:
        max_tokens = fields.integer("max_tokens")
    if max_tokens is not None and max_tokens < 1:
        fields.refuse("max_tokens", f"is {max_tokens}, expected at least 1")
    return ChatRequest(
        model=fields.text("model"),
        messages=_messages(fields),
        sampling=_sampling(fields),
        max_tokens=max_tokens,
        stops=_stops(fields),
        is_streaming=fields.boolean("stream"),
        includes_usage=options.boolean("include_usage"),
        wants_first_logits=wants_first_logits,
        wants_tokens=wants_first_logits or extra.boolean("output_tokens"),
    )


_KNOWN = (
    frozenset({"model", "messages", "stream", "stream_options", "max_tokens", "max_completion_tokens"})
    | {"temperature", "top_p", "top_k", "seed", "stop", "kvstore"}
    | _WITHOUT_EFFECT
    | _OFF_VALUES.keys()
)


def _json_object(body: bytes) -> dict[str, object]:
    try:
        value = json.loads(body, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is no valid JSON: {error}", code="invalid_json") from error
    if not isinstance(value, dict):
        raise ApiError(400, "the body is no JSON object", code="invalid_json")
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def _refuse_unsupported(fields: "_Fields") -> None:
    for name, value in fields.values.items():
        if name not in _KNOWN:
            fields.refuse(name, "is an unrecognized parameter", code="unknown_parameter")
        off = _OFF_VALUES.get(name)
        if off is not None and value is not None and value not in off:
            fields.refuse(name, "is not supported by this server", code="unsupported_parameter")


def _messages(fields: "_Fields") -> tuple[ChatMessage, ...]:
    value = fields.values.get("messages")
    if not isinstance(value, list) or not 1 <= len(value) <= MAX_MESSAGES:
        fields.refuse("messages", f"must be a list of 1 to {MAX_MESSAGES} messages")
    return tuple(_message(entry, f"messages[{index}]") for index, entry in enumerate(value))


def _message(value: object, path: str) -> ChatMessage:
    if not isinstance(value, dict):
        raise ApiError(400, f"{path} is no object", param=path)
    role, content = value.get("role"), value.get("content")
    if role not in _ROLES:
        raise ApiError(400, f"{path}.role must be one of {', '.join(_ROLES)}", param=f"{path}.role")
    if value.get("tool_calls"):
        raise ApiError(400, f"{path}.tool_calls are not supported", param=f"{path}.tool_calls")
    if isinstance(content, list):
        content = "".join(_content_part(part, f"{path}.content[{i}]") for i, part in enumerate(content))
    if not isinstance(content, str):
        raise ApiError(400, f"{path}.content must be text or a list of text parts", param=f"{path}.content")
    return ChatMessage(str(role), _unicode(content, f"{path}.content"))


def _content_part(value: object, path: str) -> str:
    if not isinstance(value, dict) or value.get("type") != "text" or not isinstance(value.get("text"), str):
        raise ApiError(400, f"{path} must be a part of type text: nothing else is supported", param=path)
    return str(value["text"])


def _unicode(text: str, path: str) -> str:
    # JSON's \ud800 escapes can smuggle in lone surrogates, which no tokenizer takes.
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ApiError(400, f"{path} holds a lone surrogate, which is no text", param=path) from error
    return text


def _sampling(fields: "_Fields") -> SamplingParams:
    temperature, top_p, top_k = fields.number("temperature"), fields.number("top_p"), fields.integer("top_k")
    try:
        return SamplingParams(
            temperature=1.0 if temperature is None else temperature,
            top_p=1.0 if top_p is None else top_p,
            top_k=0 if top_k is None else max(top_k, 0) if top_k == -1 else top_k,
            seed=fields.integer("seed"),
        )
    except InvalidRequest as error:
        raise ApiError(400, str(error), param=str(error).split(":", 1)[0]) from error


def _stops(fields: "_Fields") -> tuple[str, ...]:
    value = fields.values.get("stop")
    stops = [value] if isinstance(value, str) else value
    if stops is None:
        return ()
    is_texts = isinstance(stops, list) and all(isinstance(stop, str) and stop for stop in stops)
    if not isinstance(stops, list) or not is_texts or len(stops) > MAX_STOPS:
        fields.refuse("stop", f"must be a text, or a list of at most {MAX_STOPS}, none of them empty")
    return tuple(str(stop) for stop in stops)


class _Fields:
    """Typed reads of a JSON object; null counts as absent."""

    def __init__(self, values: dict[str, object], path: str) -> None:
        self.values = values
        self._path = path

    def refuse(self, name: str, what: str, *, code: str | None = None) -> NoReturn:
        raise ApiError(400, f"{self._path}{name} {what}", param=f"{self._path}{name}", code=code)

    def nested(self, name: str, known: tuple[str, ...]) -> "_Fields":
        value = self.values.get(name)
        if value is None:
            return _Fields({}, f"{name}.")
        if not isinstance(value, dict):
            self.refuse(name, "must be an object")
        fields = _Fields(value, f"{name}.")
        for key in value:
            if key not in known:
                fields.refuse(key, "is an unrecognized parameter", code="unknown_parameter")
        return fields

    def text(self, name: str) -> str:
        value = self.values.get(name)
        if not isinstance(value, str):
            self.refuse(name, "must be a text")
        return value

    def boolean(self, name: str) -> bool:
        value = self.values.get(name)
        if value is not None and not isinstance(value, bool):
            self.refuse(name, "must be true or false")
        return bool(value)

    def integer(self, name: str) -> int | None:
        value = self.values.get(name)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
            self.refuse(name, "must be an integer")
        return value

    def number(self, name: str) -> float | None:
        value = self.values.get(name)
        if value is None:
            return None
        if not isinstance(value, int | float) or isinstance(value, bool):
            self.refuse(name, "must be a number")
        try:
            number = float(value)
        except OverflowError:
            self.refuse(name, "is too large")
        if not math.isfinite(number):
            self.refuse(name, "must be finite")
        return number
