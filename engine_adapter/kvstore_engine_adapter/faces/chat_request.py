"""ChatRequest: a ``/v1/chat/completions`` body, checked."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from kvstore_engine_adapter.faces.api_error import ApiError
from kvstore_engine_adapter.faces.fields import Fields, json_object, require_unicode
from kvstore_engine_adapter.faces.parameters import CHAT, CHAT_EXTRA, STREAM_OPTIONS
from kvstore_engine_adapter.faces.sampling_fields import (
    AnswerPlan,
    read_hints,
    read_max_tokens,
    read_plan,
    read_top_logprobs,
)
from kvstore_engine_adapter.tokenizer import ChatMessage

MAX_MESSAGES = 4096
SESSION_HEADER = "KVStore-Session"
ROLES = ("system", "developer", "user", "assistant", "tool")


@dataclass(frozen=True, slots=True)
class SessionChoice:
    """The session that a chat continues. ``version`` None: whatever it has."""

    name: str
    creates: bool = False
    version: int | None = None


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A checked request."""

    model: str
    messages: tuple[ChatMessage, ...]
    plan: AnswerPlan
    is_streaming: bool
    includes_usage: bool
    session: SessionChoice | None


def parse_chat_request(body: bytes) -> ChatRequest:
    """Return the request in a body.

    Raises:
        ApiError: 400: no JSON object, an unknown or unsupported parameter, or one of the wrong type or range.
    """
    fields = Fields(json_object(body))
    fields.require_known(CHAT)
    extra = fields.nested("kvstore", CHAT_EXTRA)
    wants_first_logits = extra.boolean("first_logits")
    plan = read_plan(
        fields,
        max_tokens=read_max_tokens(fields, "max_completion_tokens", "max_tokens"),
        logprobs=_logprobs(fields),
    )
    return ChatRequest(
        model=fields.text("model"),
        messages=read_messages(fields),
        plan=dataclasses.replace(
            plan,
            wants_first_logits=wants_first_logits,
            wants_tokens=wants_first_logits or extra.boolean("output_tokens"),
            hints=read_hints(extra),
        ),
        is_streaming=fields.boolean("stream"),
        includes_usage=fields.nested("stream_options", STREAM_OPTIONS).boolean("include_usage"),
        session=_session(extra),
    )


def with_session_header(chat: ChatRequest, values: Sequence[str]) -> ChatRequest:
    """Return the request with the session that a header names, where the body names none.

    Raises:
        ApiError: 400: several headers, one that is not what the body says, or a session with several choices.
    """
    if values:
        named = chat.session or SessionChoice(values[0])
        if set(values) != {named.name}:
            raise ApiError(
                400,
                f"{SESSION_HEADER} must be one header, and the same as kvstore.session",
                param="kvstore.session",
            )
        chat = dataclasses.replace(chat, session=named)
    if chat.session is not None and chat.plan.num_choices > 1:
        raise ApiError(400, "n must be 1 in a session: it goes on with one answer", param="n")
    return chat


def read_messages(fields: Fields) -> tuple[ChatMessage, ...]:
    """Return the messages of a chat, at least one.

    Raises:
        ApiError: 400: they are no list of messages.
    """
    value = fields.values.get("messages")
    if not isinstance(value, list) or not 1 <= len(value) <= MAX_MESSAGES:
        fields.refuse("messages", f"must be a list of 1 to {MAX_MESSAGES} messages")
    return tuple(_message(entry, f"messages[{index}]") for index, entry in enumerate(value))


def message_text(content: object, path: str, kinds: tuple[str, ...] = ("text",)) -> str:
    """Return a message's content, which is text or a list of parts of the given types, as one text.

    Raises:
        ApiError: 400: it is something else.
    """
    if isinstance(content, list):
        content = "".join(_part_text(part, f"{path}.content[{i}]", kinds) for i, part in enumerate(content))
    if not isinstance(content, str):
        raise ApiError(400, f"{path}.content must be text or a list of text parts", param=f"{path}.content")
    return require_unicode(content, f"{path}.content")


def _message(value: object, path: str) -> ChatMessage:
    if not isinstance(value, dict):
        raise ApiError(400, f"{path} is no object", param=path)
    role = value.get("role")
    if role not in ROLES:
        raise ApiError(400, f"{path}.role must be one of {', '.join(ROLES)}", param=f"{path}.role")
    if value.get("tool_calls"):
        raise ApiError(
            400,
            f"{path}.tool_calls are not supported",
            param=f"{path}.tool_calls",
            code="unsupported_parameter",
        )
    return ChatMessage(str(role), message_text(value.get("content"), path))


def _part_text(value: object, path: str, kinds: tuple[str, ...]) -> str:
    text = value.get("text") if isinstance(value, dict) and value.get("type") in kinds else None
    if not isinstance(text, str):
        raise ApiError(
            400, f"{path} must be a part of type {' or '.join(kinds)}: nothing else is supported", param=path
        )
    return text


def _logprobs(fields: Fields) -> int | None:
    wants = fields.boolean("logprobs")
    top = read_top_logprobs(fields, "top_logprobs", default=0)
    if top and not wants:
        fields.refuse("top_logprobs", "needs logprobs to be true")
    return top if wants else None


def _session(extra: Fields) -> SessionChoice | None:
    name = extra.optional_text("session")
    creates, version = extra.boolean("create"), extra.integer("version")
    if name is None:
        if creates or version is not None:
            extra.refuse("create" if creates else "version", "needs a session")
        return None
    return SessionChoice(name, creates, version)
