"""ModelTokenizer: text to tokens and back, chat templates, and text that grows token by token."""

import datetime
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import jinja2
import jinja2.sandbox
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from kvstore.errors import InvalidRequest, PromptTooLong, UnsupportedModel
from kvstore_engine_adapter.gguf_file import MetadataValue

# Split patterns by GGUF's `tokenizer.ggml.pre` (llama.cpp, src/llama-vocab.cpp, after each model's
# tokenizer.json).
_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CONTROL, _USER_DEFINED = 3, 4
# Composing to NFC makes a text's UTF-8 at most 3.5 times shorter (all of Unicode 14): U+1FBE U+0308 U+0301,
# 7 bytes, become U+0390, 2 bytes.
_NFC_SHRINKING = 4
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE_MARK = "\u2581"
_END_NAMES = ("<|im_end|>", "<|eot_id|>", "<|end_of_text|>", "<|endoftext|>", "</s>")


def _byte_characters() -> dict[str, bytes]:
    """Return the byte that each character of a byte-level vocabulary stands for.

    Printable bytes stand as themselves, the others in order from U+0100 on (GPT-2, encoder.py).
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    characters = {chr(byte): bytes([byte]) for byte in printable}
    return characters | {chr(0x100 + place): bytes([byte]) for place, byte in enumerate(others)}


_BYTE_OF = _byte_characters()


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One message of a conversation."""

    role: str
    content: str


class ModelTokenizer:
    """A tokenizer, the tokens that end an answer, and the model's chat template. Safe in threads."""

    def __init__(
        self,
        inner: tokenizers.Tokenizer,
        *,
        end_tokens: frozenset[int],
        bos: str = "",
        eos: str = "",
        adds_bos: bool = False,
        chat_template: str | None = None,
    ) -> None:
        self._inner = inner
        self._bos = bos
        self._eos = eos
        self._bos_token = inner.token_to_id(bos) if adds_bos and bos else None
        self.end_tokens = end_tokens
        self._token_max_bytes = _token_max_bytes(inner)
        added = inner.get_added_tokens_decoder()
        self._added = frozenset(added)
        self._special = frozenset(token for token, entry in added.items() if entry.special)
        self._is_byte_level = isinstance(inner.decoder, decoders.ByteLevel)
        self._template = None if chat_template is None else _compiled(chat_template)

    @property
    def special_tokens(self) -> frozenset[int]:
        """Tokens that stand for no text, such as ends and roles."""
        return self._special

    @property
    def vocab_size(self) -> int:
        """Tokens it knows, added ones included."""
        return self._inner.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text; special tokens written in it are recognised."""
        # Measured with tokenizers 0.23 and 4 MB of text: encode holds the GIL for all of its 5 to 18 seconds,
        # a batch of one for 0.02 to 0.2 seconds.
        (encoding,) = self._inner.encode_batch_fast([text], add_special_tokens=False)
        tokens = list(encoding.ids)
        if self._bos_token is not None and tokens[:1] != [self._bos_token]:
            tokens.insert(0, self._bos_token)
        return tokens

    def encode_prompt(self, text: str, *, context_tokens: int | None = None) -> list[int]:
        """Return the tokens of a prompt, as ``encode``.

        One that cannot have fewer than ``context_tokens`` tokens is refused before it costs the seconds that
        megabytes take to tokenize; one that passes may still turn out too long.

        Raises:
            PromptTooLong: its length in bytes says that it has ``context_tokens`` tokens or more.
        """
        least_tokens = self.least_tokens(text)
        if context_tokens is not None and least_tokens >= context_tokens:
            raise PromptTooLong(
                f"prompt: {len(text)} characters, which are {least_tokens} tokens or more, the context is "
                f"{context_tokens} including at least one token of answer: shorten the prompt or raise the "
                "model length"
            )
        return self.encode(text)

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes that a token stands for; a special token stands for its name."""
        text = self._inner.id_to_token(token) or ""
        if token in self._added:
            return text.encode("utf-8")
        if self._is_byte_level:
            return b"".join(_BYTE_OF.get(character) or character.encode("utf-8") for character in text)
        byte = _BYTE_TOKEN.fullmatch(text)
        return bytes([int(byte[1], 16)]) if byte else text.replace(_SPACE_MARK, " ").encode("utf-8")

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, without special ones; bytes that are no UTF-8 become U+FFFD."""
        return self._inner.decode(list(tokens), skip_special_tokens=True)

    def least_tokens(self, text: str) -> int:
        """Return a number of tokens that a text has at least, from its length alone; 0 if none is known."""
        length_bytes = len(text.encode("utf-8"))
        return -(-length_bytes // self._token_max_bytes) if self._token_max_bytes else 0

    def encode_chat(self, messages: Sequence[ChatMessage], *, context_tokens: int | None = None) -> list[int]:
        """Return the tokens of a conversation, up to where the model's answer begins.

        ``context_tokens`` is as in ``encode_prompt``.

        Raises:
            InvalidRequest: the model has no chat template, or the template refuses the messages.
            PromptTooLong: as ``encode_prompt``.
        """
        if self._template is None:
            raise InvalidRequest("chat: this model carries no chat template")
        try:
            text = self._template.render(
                messages=[{"role": message.role, "content": message.content} for message in messages],
                add_generation_prompt=True,
                bos_token=self._bos,
                eos_token=self._eos,
                tools=None,
            )
        except jinja2.TemplateError as error:
            raise InvalidRequest(f"chat: the model's template refuses these messages: {error}") from error
        return self.encode_prompt(text, context_tokens=context_tokens)


class TextStream:
    """Turns tokens into text pieces as they come, never splitting a character.

    Decoding restarts a few tokens back, because a token's text may depend on the one before it; a tail that
    ends in an unfinished character is held until the rest arrives or ``finish`` is called.
    """

    def __init__(self, tokenizer: ModelTokenizer) -> None:
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self._start = 0
        self._sent = 0

    def push(self, token: int) -> str:
        """Return the text that a new token completes, perhaps none."""
        self._tokens.append(token)
        before, text = self._window()
        if text.endswith("\N{REPLACEMENT CHARACTER}"):
            return ""
        return self._advance(before, text)

    def finish(self) -> str:
        """Return what is still held."""
        before, text = self._window()
        return self._advance(before, text)

    def _window(self) -> tuple[str, str]:
        decode = self._tokenizer.decode
        return decode(self._tokens[self._start : self._sent]), decode(self._tokens[self._start :])

    def _advance(self, before: str, text: str) -> str:
        self._start, self._sent = self._sent, len(self._tokens)
        return text[len(before) :]


def tokenizer_from_gguf(metadata: Mapping[str, MetadataValue], *, where: str) -> ModelTokenizer:
    """Build the tokenizer that a GGUF file's metadata describes.

    Raises:
        UnsupportedModel: no tokenizer, an inconsistent one, or a kind that is not byte-level BPE.
    """
    kind = metadata.get("tokenizer.ggml.model")
    if kind != "gpt2":
        raise UnsupportedModel(
            f"{where}: tokenizer {kind!r} is not supported in GGUF (only gpt2, byte-level BPE): "
            "use the model's Hugging Face folder"
        )
    tokens, merges = _texts(metadata, "tokens", where), _texts(metadata, "merges", where)
    types = metadata.get("tokenizer.ggml.token_type")
    if not isinstance(types, list) or len(types) != len(tokens):
        raise UnsupportedModel(f"{where}: tokenizer.ggml.token_type does not fit {len(tokens)} tokens")
    try:
        pairs = [(left, right) for left, right in (merge.split(" ", 1) for merge in merges)]
        vocabulary = {text: index for index, text in enumerate(tokens)}
        inner = tokenizers.Tokenizer(
            models.BPE(vocab=vocabulary, merges=pairs, ignore_merges=_ignores_merges(metadata))
        )
    except Exception as error:  # tokenizers raises plain Exception for merges outside the vocabulary
        raise UnsupportedModel(f"{where}: damaged tokenizer: {error}") from error
    inner.pre_tokenizer = _pre_tokenizer(str(metadata.get("tokenizer.ggml.pre", "default")), where)
    inner.decoder = decoders.ByteLevel()
    special = [AddedToken(text, special=True) for text, t in zip(tokens, types, strict=True) if t == _CONTROL]
    named = [
        AddedToken(text, special=False) for text, t in zip(tokens, types, strict=True) if t == _USER_DEFINED
    ]
    inner.add_special_tokens(special)
    inner.add_tokens(named)
    template = metadata.get("tokenizer.chat_template")
    return ModelTokenizer(
        inner,
        end_tokens=_end_tokens(
            inner, [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot")]
        ),
        bos=_token_text(tokens, metadata.get("tokenizer.ggml.bos_token_id")),
        eos=_token_text(tokens, metadata.get("tokenizer.ggml.eos_token_id")),
        adds_bos=metadata.get("tokenizer.ggml.add_bos_token") is True,
        chat_template=template if isinstance(template, str) else None,
    )


def tokenizer_from_folder(folder: Path, *, end_ids: Sequence[int] = ()) -> ModelTokenizer:
    """Load ``tokenizer.json``, ``tokenizer_config.json`` and the chat template of a Hugging Face folder.

    ``end_ids`` are the end tokens that config.json and generation_config.json name.

    Raises:
        UnsupportedModel: a file is missing or damaged.
    """
    path = folder / "tokenizer.json"
    try:
        inner = tokenizers.Tokenizer.from_str(path.read_text("utf-8"))
    except OSError as error:
        raise UnsupportedModel(
            f"{path}: {error.strerror}: a model folder needs its tokenizer.json"
        ) from error
    except Exception as error:  # tokenizers raises plain Exception for a damaged file
        raise UnsupportedModel(f"{path}: damaged tokenizer: {error}") from error
    settings = read_json(folder / "tokenizer_config.json", default={})
    bos, eos = (_special_text(settings.get(name)) for name in ("bos_token", "eos_token"))
    template = settings.get("chat_template")
    if isinstance(template, list):
        named = [entry for entry in template if isinstance(entry, dict) and entry.get("name") == "default"]
        template = named[0].get("template") if named else None
    template_file = folder / "chat_template.jinja"
    if template_file.is_file():
        template = template_file.read_text("utf-8")
    return ModelTokenizer(
        inner,
        end_tokens=_end_tokens(inner, [*end_ids, inner.token_to_id(eos) if eos else None]),
        bos=bos,
        eos=eos,
        adds_bos=settings.get("add_bos_token") is True,
        chat_template=template if isinstance(template, str) else None,
    )


def read_json(path: Path, *, default: dict[str, object] | None = None) -> dict[str, object]:
    """Return the object in a JSON file.

    Raises:
        UnsupportedModel: it is missing (and there is no default), or holds no JSON object.
    """
    try:
        value = json.loads(path.read_text("utf-8"))
    except FileNotFoundError as error:
        if default is not None:
            return default
        raise UnsupportedModel(f"{path}: missing: a model folder needs it") from error
    except (OSError, ValueError) as error:
        raise UnsupportedModel(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise UnsupportedModel(f"{path}: holds no JSON object")
    return value


def _texts(metadata: Mapping[str, MetadataValue], name: str, where: str) -> list[str]:
    value = metadata.get(f"tokenizer.ggml.{name}")
    if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
        raise UnsupportedModel(f"{where}: tokenizer.ggml.{name} is missing")
    return [str(text) for text in value]


def _ignores_merges(metadata: Mapping[str, MetadataValue]) -> bool:
    return metadata.get("tokenizer.ggml.pre") in ("llama-bpe", "llama3")


def _pre_tokenizer(name: str, where: str) -> pre_tokenizers.PreTokenizer:
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if name in ("default", "gpt-2"):
        return byte_level
    if name == "smollm":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    patterns = {"llama-bpe": _LLAMA3_SPLIT, "llama3": _LLAMA3_SPLIT, "qwen2": _QWEN2_SPLIT}
    if name not in patterns:
        raise UnsupportedModel(
            f"{where}: pre-tokenizer {name!r} is not supported: use the model's Hugging Face folder"
        )
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(patterns[name]), "isolated"), plain])


def _token_text(tokens: Sequence[str], index: object) -> str:
    return tokens[index] if isinstance(index, int) and 0 <= index < len(tokens) else ""


def _special_text(value: object) -> str:
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else ""


def _end_tokens(inner: tokenizers.Tokenizer, named: Sequence[object]) -> frozenset[int]:
    known = [inner.token_to_id(name) for name in _END_NAMES]
    return frozenset(token for token in (*named, *known) if isinstance(token, int) and token >= 0)


def _token_max_bytes(inner: tokenizers.Tokenizer) -> int | None:
    """Return the most bytes of text that one token stands for; None if that is not bounded for certain."""
    shrinking = 1
    if inner.normalizer is not None:
        if not isinstance(inner.normalizer, normalizers.NFC):
            return None
        shrinking = _NFC_SHRINKING
    added = inner.get_added_tokens_decoder().values()
    # Such a token takes in any amount of white space beside it.
    is_greedy = any(token.lstrip or token.rstrip for token in added)
    if is_greedy or not isinstance(inner.decoder, decoders.ByteLevel):
        return None
    # Bytes stand as one character each in a byte-level vocabulary; added tokens stand as they are.
    lengths = [len(text) for text in inner.get_vocab(with_added_tokens=False)]
    lengths += [len(token.content.encode("utf-8")) for token in added]
    return shrinking * max(lengths, default=1)


def _compiled(source: str) -> jinja2.Template:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    functions: dict[str, Callable[[str], str]] = {"raise_exception": _refuse, "strftime_now": _strftime_now}
    environment.globals.update(functions)
    try:
        return environment.from_string(source)
    except jinja2.TemplateError as error:
        raise UnsupportedModel(f"chat template: {error}") from error


def _refuse(message: str) -> str:
    raise jinja2.TemplateError(message)


def _strftime_now(text: str) -> str:
    return datetime.datetime.now(tz=datetime.UTC).strftime(text)
