"""The parameters of each route: which have an effect, which have none, and which are refused.

The routes' readers check bodies against these tables, and docs/engine_api.md shows them.
"""

import enum
from dataclasses import dataclass


class Use(enum.Enum):
    """What becomes of a parameter."""

    USED = "used"
    IGNORED = "accepted, without effect"
    """It changes nothing about the answer of a single local model."""

    REFUSED = "refused"
    """It would change the answer, and is not supported; values that mean 'off' are accepted."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of a route. ``off`` are the values of a refused one that mean 'off', beside null."""

    name: str
    use: Use
    meaning: str = ""
    off: tuple[object, ...] = ()


def _used(**meanings: str) -> tuple[Parameter, ...]:
    return tuple(Parameter(name, Use.USED, meaning) for name, meaning in meanings.items())


def _ignored(*names: str) -> tuple[Parameter, ...]:
    return tuple(Parameter(name, Use.IGNORED) for name in names)


def _refused(**off: tuple[object, ...]) -> tuple[Parameter, ...]:
    return tuple(Parameter(name, Use.REFUSED, off=values) for name, values in off.items())


SAMPLING = _used(
    temperature="0 to 2; 0 is greedy (default 1)",
    top_p="above 0, up to 1 (default 1)",
    top_k="likeliest tokens to choose among; 0 or -1: all",
    min_p="0 to 1: least probability, as a share of the likeliest token's",
    presence_penalty="-2 to 2, once for a token that the answer has",
    frequency_penalty="-2 to 2, for each time that the answer has a token",
    repetition_penalty="0.01 to 100, of every token of prompt and answer; 1: none",
    seed="makes the answer repeatable; choice i has seed + i",
)

ENDS = _used(
    stop="a text or up to 4, which end the answer and are not part of it",
    stop_token_ids="up to 64 tokens that end the answer",  # noqa: S106  # no secret
    ignore_eos="true: go on past the model's end tokens",
)

STREAMING = _used(
    stream="true: server-sent events",
    stream_options='{"include_usage": true}: a last event with the usage',
)

CHAT = (
    *_used(
        model="the served model's name",
        messages="1 to 4096 of roles system, developer, user, assistant, tool; content is text or text parts",
        max_tokens="most tokens of the answer (default: up to the context's end)",
        max_completion_tokens="the same; it wins over max_tokens",
    ),
    *SAMPLING,
    *ENDS,
    *_used(
        n="choices, 1 to 16; the prompt is computed once",
        logprobs="true: each token's log-probability",
        top_logprobs="0 to 20 likeliest tokens at each place; needs logprobs",
    ),
    *STREAMING,
    *_used(
        priority="lower is more urgent (default 0)",
        kvstore="what this server adds, see below",
    ),
    *_ignored(
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "parallel_tool_calls",
        "prediction",
    ),
    *_refused(
        logit_bias=({},),
        response_format=({"type": "text"},),
        modalities=(["text"],),
        tools=([],),
        tool_choice=("none", "auto"),
        functions=([],),
        function_call=("none", "auto"),
        audio=(),
        reasoning_effort=("none",),
        verbosity=("medium",),
        web_search_options=(),
        moderation=(),
    ),
)

HINTS = _used(
    ends_session="true: the conversation is over, its blocks may leave first",
    is_one_off="true: nobody asks for the prompt's new blocks again",
    next_use_s="seconds until the blocks are expected to be used again",
    block_priority="-4 to 4: each step up makes the blocks worth twice as much to keep (default 0)",
)
"""What a request may say of its blocks' future; the store's policy heeds it."""

_SHOWN = _used(
    first_logits="true: the logits that the first token was chosen from",
    output_tokens="true: the answer's tokens",
)

CHAT_EXTRA = (
    *_SHOWN,
    *HINTS,
    *_used(
        session="name of a session: messages are what is new",
        create="true: make the session if there is none",
        version="continue only this version of the session",
    ),
)

STREAM_OPTIONS = _used(include_usage="true: a last event with the usage") + _ignored("include_obfuscation")

COMPLETIONS = (
    *_used(
        model="the served model's name",
        prompt="a text, a list of up to 128 texts, a list of tokens, or a list of such lists",
        max_tokens="most tokens of each answer (default 16)",
    ),
    *SAMPLING,
    *ENDS,
    *_used(
        n="choices for each prompt, 1 to 16; at most 128 in all",
        logprobs="0 to 20 likeliest tokens at each place, beside the chosen one",
        echo="true: the text begins with the prompt; not together with logprobs",
    ),
    *STREAMING,
    *_used(
        priority="lower is more urgent (default 0)",
        kvstore="as in chats, but nothing of sessions",
    ),
    *_ignored("user"),
    *_refused(best_of=(1,), suffix=("",), logit_bias=({},)),
)

COMPLETIONS_EXTRA = (*_SHOWN, *HINTS)

RESPONSES = (
    *_used(
        model="the served model's name",
        input="a text, or items of type message; content is text or parts input_text and output_text",
        instructions="a system message before everything; the next response does not have it",
        previous_response_id="a stored response to go on from",
        store="false: the response cannot be gone on from (default true)",
        metadata="up to 16 short texts, kept with the response",
        max_output_tokens="most tokens of the answer (default: up to the context's end)",
    ),
    *(at for at in SAMPLING),
    *ENDS,
    *_used(
        top_logprobs='0 to 20; needs "message.output_text.logprobs" in include',
        include='["message.output_text.logprobs"]: each token\'s log-probability',
        stream="true: server-sent events",
        priority="lower is more urgent (default 0)",
        kvstore="what is known of the blocks' future, see below",
    ),
    *_ignored(
        "user",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "parallel_tool_calls",
        "max_tool_calls",
        "stream_options",
    ),
    *_refused(
        background=(False,),
        conversation=(),
        context_management=([],),
        prompt=(),
        reasoning=({},),
        text=({}, {"format": {"type": "text"}}),
        tools=([],),
        tool_choice=("none", "auto"),
        truncation=("disabled",),
        moderation=(),
    ),
)

TGI = _used(
    inputs="the prompt, a text",
    parameters="see the next table",
    stream="of `/` alone: true answers as /generate_stream does",
    kvstore="what is known of the blocks' future, as in responses",
)

TGI_PARAMETERS = (
    *_used(
        max_new_tokens="most tokens of the answer (default 100)",
        do_sample="true: draw tokens; without it only temperature, top_k, top_p and typical_p do that",
        temperature="above 0, up to 2 (default 1)",
        top_k="above 0",
        top_p="above 0, below 1",
        repetition_penalty="0.01 to 100, of every token of prompt and answer; 1: none",
        frequency_penalty="-2 to 2, for each time that the answer has a token",
        seed="makes the answer repeatable",
        stop="up to 4 texts that end the answer; as in TGI the one found is part of it",
        truncate="keep only the prompt's last so many tokens",
        return_full_text="true: the text begins with the prompt",
        details="true: tokens, log-probabilities, why it ended",
        top_n_tokens="0 to 5 likeliest tokens at each place",
    ),
    *_refused(
        best_of=(1,),
        decoder_input_details=(False,),
        typical_p=(1,),
        watermark=(False,),
        grammar=(),
        adapter_id=(),
    ),
)

SESSION = _used(
    name="of the session to make: 1 to 128 letters, digits, dots, dashes, underscores; absent: a random one",
    messages="what the history begins with, as in a chat (default: nothing)",
)

FORK = _used(
    name="of the session to make; absent: a random one",
    turns="how many leading turns to take over (default: all)",
)

TABLES = {
    "POST /v1/chat/completions": CHAT,
    "kvstore in POST /v1/chat/completions": CHAT_EXTRA,
    "POST /v1/completions": COMPLETIONS,
    "POST /v1/responses": RESPONSES,
    "kvstore in POST /v1/responses": HINTS,
    "POST /generate, /generate_stream, /": TGI,
    "parameters in POST /generate, /generate_stream, /": TGI_PARAMETERS,
    "POST /v1/sessions": SESSION,
    "POST /v1/sessions/{name}/fork": FORK,
}
"""Every table by the route that it is of."""
