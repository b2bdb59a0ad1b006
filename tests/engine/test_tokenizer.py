"""Tokenizers, chat templates and text that grows token by token."""

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import InvalidRequest, UnsupportedModel
from kvstore_engine_adapter.chat_answer import AnswerText
from kvstore_engine_adapter.tokenizer import ChatMessage, ModelTokenizer, TextStream, tokenizer_from_gguf
from tests.engine.tiny_model import make_tokenizer

TOKENIZER = ModelTokenizer(make_tokenizer(), end_tokens=frozenset({2}))


@given(st.text(max_size=60))
def test_streamed_text_equals_the_text_decoded_at_once(text):
    tokens = TOKENIZER.encode(text)
    stream = TextStream(TOKENIZER)
    pieces = [stream.push(token) for token in tokens]
    assert "".join([*pieces, stream.finish()]) == TOKENIZER.decode(tokens)


def test_no_piece_ends_in_half_a_character():
    stream = TextStream(TOKENIZER)
    pieces = [stream.push(token) for token in TOKENIZER.encode("Grüße 🚢⚓ 你好")]
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)
    assert "".join(pieces) == "Grüße 🚢⚓ 你好"


def test_an_answer_that_ends_inside_a_character_is_finished_visibly():
    stream = TextStream(TOKENIZER)
    tokens = TOKENIZER.encode("🚢")
    assert (
        "".join([*(stream.push(token) for token in tokens[:-1]), stream.finish()])
        == "\N{REPLACEMENT CHARACTER}"
    )


@pytest.mark.parametrize("stops", [(), ("stone",), ("the", "pier"), ("zzz",), ("e n",)])
def test_text_is_cut_before_the_first_stop(stops):
    text = "the old pier burned down, and the new one was built of stone."
    answer = AnswerText(TOKENIZER, stops)
    found = "".join([*(answer.push(token) for token in TOKENIZER.encode(text)), answer.finish()])
    ends = [text.find(stop) for stop in stops if stop in text]
    assert found == text[: min(ends, default=len(text))]
    assert answer.is_stopped == bool(ends)


def test_a_text_that_only_begins_like_a_stop_is_sent_in_the_end():
    answer = AnswerText(TOKENIZER, ("stone age",))
    pieces = [answer.push(token) for token in TOKENIZER.encode("built of stone")]
    assert "".join(pieces) == "built of "
    assert answer.finish() == "stone"


def test_special_tokens_of_the_template_become_single_tokens(tiny_bf16):
    tokens = tiny_bf16.tokenizer.encode_chat([ChatMessage("user", "hello")])
    assert tokens.count(1) == 2
    assert tokens.count(2) == 1


def with_template(template):
    return ModelTokenizer(make_tokenizer(), end_tokens=frozenset(), chat_template=template)


def test_a_model_without_a_template_refuses_chats():
    with pytest.raises(InvalidRequest, match="no chat template"):
        TOKENIZER.encode_chat([ChatMessage("user", "hello")])


def test_a_template_may_refuse_messages():
    tokenizer = with_template("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(InvalidRequest, match="roles must alternate"):
        tokenizer.encode_chat([ChatMessage("user", "hello")])


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__ }}{{ cycler.__init__.__globals__ }}",
    ],
)
def test_a_template_cannot_leave_its_sandbox(template):
    with pytest.raises(InvalidRequest):
        with_template(template).encode_chat([ChatMessage("user", "hello")])


def test_a_template_that_does_not_parse_is_refused_at_load():
    with pytest.raises(UnsupportedModel, match="chat template"):
        with_template("{% if %}")


def metadata(**changes):
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": ["a", "b", "ab"],
        "tokenizer.ggml.token_type": [1, 1, 1],
        "tokenizer.ggml.merges": ["a b"],
    } | {f"tokenizer.ggml.{name}": value for name, value in changes.items()}


@pytest.mark.parametrize("pre", ["default", "gpt-2", "smollm", "llama-bpe", "qwen2"])
def test_known_pre_tokenizers_are_built(pre):
    tokenizer = tokenizer_from_gguf(metadata(pre=pre), where="m")
    assert isinstance(tokenizer.encode("ab"), list)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "llama"}, "not supported in GGUF"),
        ({"pre": "deepseek"}, "'deepseek' is not supported"),
        ({"tokens": None}, "tokens is missing"),
        ({"token_type": [1]}, "does not fit 3 tokens"),
        ({"merges": ["a c"]}, "damaged tokenizer"),
        ({"merges": ["ab"]}, "damaged tokenizer"),
    ],
)
def test_a_tokenizer_that_cannot_be_built_is_refused(changes, message):
    with pytest.raises(UnsupportedModel, match=message):
        tokenizer_from_gguf(metadata(**changes), where="m")


def test_llama3_digits_are_split_in_threes():
    tokenizer = tokenizer_from_gguf(metadata(pre="llama-bpe"), where="m")
    inner: tokenizers.Tokenizer = tokenizer._inner
    words = [word for word, _ in inner.pre_tokenizer.pre_tokenize_str("abc 12345")]
    assert words == ["abc", "\u0120", "123", "45"]
