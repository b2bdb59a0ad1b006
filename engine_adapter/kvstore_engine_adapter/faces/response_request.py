"""ResponseRequest: a ``/v1/responses`` body, checked."""

import dataclasses
from dataclasses import dataclass

from kvstore_engine_adapter.faces.api_error import ApiError
from kvstore_engine_adapter.faces.chat_request import MAX_MESSAGES, message_text
from kvstore_engine_adapter.faces.fields import Fields, json_object, require_unicode
from kvstore_engine_adapter.faces.parameters import HINTS, RESPONSES
from kvstore_engine_adapter.faces.sampling_fields import (
    AnswerPlan,
    read_hints,
    read_max_tokens,
    read_plan,
    read_top_logprobs,
)
from kvstore_engine_adapter.tokenizer import ChatMessage

ROLES = ("system", "developer", "user", "assistant")
_PARTS = ("input_text", "output_text")
_LOGPROBS = "message.output_text.logprobs"
_MAX_METADATA, _MAX_METADATA_NAME, _MAX_METADATA_VALUE = 16, 64, 512


@dataclass(frozen=True, slots=True)
class ResponseRequest:
    """A checked request. ``messages`` are the input's; instructions stand before all history."""

    model: str
    messages: tuple[ChatMessage, ...]
    instructions: str | None
    previous_response_id: str | None
    is_stored: bool
    metadata: dict[str, str]
    plan: AnswerPlan
    is_streaming: bool


def parse_response_request(body: bytes) -> ResponseRequest:
    """Return the request in a body.

    Raises:
        ApiError: 400: no JSON object, an unknown or unsupported parameter, or one of the wrong type or range.
    """
    fields = Fields(json_object(body))
    fields.require_known(RESPONSES)
    top = read_top_logprobs(fields, "top_logprobs", default=0)
    wants_logprobs = _LOGPROBS in _includes(fields)
    if top and not wants_logprobs:
        fields.refuse("top_logprobs", f'needs "{_LOGPROBS}" in include')
    plan = read_plan(
        fields,
        max_tokens=read_max_tokens(fields, "max_output_tokens"),
        logprobs=top if wants_logprobs else None,
    )
    return ResponseRequest(
        model=fields.text("model"),
        messages=_messages(fields),
        instructions=fields.optional_text("instructions"),
        previous_response_id=fields.optional_text("previous_response_id"),
        is_stored=fields.boolean("store", default=True),
        metadata=_metadata(fields),
        plan=dataclasses.replace(plan, hints=read_hints(fields.nested("kvstore", HINTS))),
        is_streaming=fields.boolean("stream"),
    )


def _messages(fields: Fields) -> tuple[ChatMessage, ...]:
    value = fields.values.get("input")
    if isinstance(value, str) and value:
        return (ChatMessage("user", require_unicode(value, "input")),)
    if not isinstance(value, list) or not 1 <= len(value) <= MAX_MESSAGES:
        fields.refuse("input", f"must be a text that is not empty, or a list of 1 to {MAX_MESSAGES} items")
    return tuple(_message(item, f"input[{number}]") for number, item in enumerate(value))


def _message(value: object, path: str) -> ChatMessage:
    if not isinstance(value, dict):
        raise ApiError(400, f"{path} is no object", param=path)
    kind = value.get("type", "message")
    if kind != "message":
        raise ApiError(
            400,
            f"{path} must be an item of type message: nothing else is supported",
            param=f"{path}.type",
            code="unsupported_parameter",
        )
    if value.get("role") not in ROLES:
        raise ApiError(400, f"{path}.role must be one of {', '.join(ROLES)}", param=f"{path}.role")
    return ChatMessage(str(value["role"]), message_text(value.get("content"), path, _PARTS))


def _includes(fields: Fields) -> tuple[str, ...]:
    names = fields.texts("include", most=16)
    for name in names:
        # What else there is to include belongs to tools and reasoning, of which there is none to include.
        if not name.replace(".", "").replace("_", "").isalnum():
            fields.refuse("include", "names what cannot be included")
    return names


def _metadata(fields: Fields) -> dict[str, str]:
    value = fields.values.get("metadata")
    if value is None:
        return {}
    is_right = isinstance(value, dict) and len(value) <= _MAX_METADATA
    if not isinstance(value, dict) or not is_right or not all(map(_is_short, value.items())):
        fields.refuse(
            "metadata",
            f"must be an object of up to {_MAX_METADATA} texts: names of at most {_MAX_METADATA_NAME},"
            f" values of at most {_MAX_METADATA_VALUE} characters",
        )
    return {
        require_unicode(name, "metadata"): require_unicode(text, "metadata") for name, text in value.items()
    }


def _is_short(entry: tuple[object, object]) -> bool:
    name, text = entry
    is_text = isinstance(name, str) and isinstance(text, str)
    return is_text and len(str(name)) <= _MAX_METADATA_NAME and len(str(text)) <= _MAX_METADATA_VALUE
