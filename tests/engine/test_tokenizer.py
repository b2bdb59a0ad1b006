"""Tokenizers, chat templates and text that grows token by token."""

import itertools
import threading
import time

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import InvalidRequest, PromptTooLong, UnsupportedModel
from kvstore_engine_adapter.faces.choice import StopCut
from kvstore_engine_adapter.tokenizer import ChatMessage, ModelTokenizer, TextStream, tokenizer_from_gguf
from tests.engine.tiny_model import TEXT, make_tokenizer

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
    stream, cut = TextStream(TOKENIZER), StopCut(stops)
    found = "".join([*(cut.push(stream.push(token)) for token in TOKENIZER.encode(text)), cut.finish()])
    ends = [text.find(stop) for stop in stops if stop in text]
    assert found == text[: min(ends, default=len(text))]
    assert cut.end_chars == (min(ends) if ends else None)


def test_a_text_that_only_begins_like_a_stop_is_sent_in_the_end():
    stream, cut = TextStream(TOKENIZER), StopCut(("stone age",))
    pieces = [cut.push(stream.push(token)) for token in TOKENIZER.encode("built of stone")]
    assert "".join(pieces) == "built of "
    assert cut.finish() == "stone"


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


@given(st.text(max_size=200) | st.text("\u1fbe\u0308\u0301\u212a\u2126 e", max_size=200))
@pytest.mark.parametrize("normalizer", [None, tokenizers.normalizers.NFC()])
def test_no_text_has_fewer_tokens_than_its_length_says(normalizer, text):
    inner = make_tokenizer()
    if normalizer is not None:
        inner.normalizer = normalizer
    tokenizer = ModelTokenizer(inner, end_tokens=frozenset())
    assert len(tokenizer.encode(text)) >= tokenizer.least_tokens(text)


def changed(**changes):
    inner = make_tokenizer()
    for name, value in changes.items():
        setattr(inner, name, value)
    return inner


def with_greedy_token():
    inner = make_tokenizer()
    inner.add_tokens([tokenizers.AddedToken("<mask>", lstrip=True)])
    return inner


@pytest.mark.parametrize(
    "inner",
    [
        changed(normalizer=tokenizers.normalizers.Strip()),
        changed(decoder=tokenizers.decoders.Metaspace()),
        with_greedy_token(),
    ],
)
def test_where_a_token_may_stand_for_any_length_nothing_is_said_of_a_texts_tokens(inner):
    assert ModelTokenizer(inner, end_tokens=frozenset()).least_tokens(" " * 10000) == 0


def test_a_conversation_too_long_by_its_bytes_is_refused_before_it_is_tokenized(tiny_bf16, monkeypatch):
    tokenizer = tiny_bf16.tokenizer
    monkeypatch.setattr(ModelTokenizer, "encode", None)
    with pytest.raises(PromptTooLong, match=r"4000\d\d\d characters, which are \d+ tokens or more.*is 1024"):
        tokenizer.encode_chat([ChatMessage("user", "x" * 4_000_000)], context_tokens=1024)


@pytest.mark.alone
def test_other_threads_run_while_a_long_text_is_tokenized():
    text = TEXT * 4000
    TOKENIZER.encode(TEXT)
    started_s = time.monotonic()
    thread = threading.Thread(target=TOKENIZER.encode, args=(text,))
    thread.start()
    moments_s = [started_s]
    while thread.is_alive():
        thread.join(0.001)
        moments_s.append(time.monotonic())
    longest_gap_s = max(after - before for before, after in itertools.pairwise(moments_s))
    assert longest_gap_s < max(0.5 * (moments_s[-1] - started_s), 0.1)


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
