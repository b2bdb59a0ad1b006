"""Counting tokens of the demo's prompts with the model's own tokenizer."""

from itertools import takewhile
from pathlib import Path

from kvstore.errors import UnsupportedModel
from kvstore_engine_adapter import gguf_model, hf_model
from kvstore_engine_adapter.gguf_file import GgufFile
from kvstore_engine_adapter.paged_engine import DEFAULT_CONTEXT_TOKENS
from kvstore_engine_adapter.tokenizer import (
    ChatMessage,
    ModelTokenizer,
    tokenizer_from_folder,
    tokenizer_from_gguf,
)


class PromptTokens:
    """The tokenizer of a model, without its weights. Opening it blocks."""

    def __init__(self, model: Path) -> None:
        self._tokenizer, model_tokens = _tokenizer_and_context(model)
        self.context_tokens = min(model_tokens, DEFAULT_CONTEXT_TOKENS)
        """Most tokens of prompt and answer that a replica of this model takes."""

    def count_text(self, text: str) -> int:
        """Return the number of tokens of a plain text."""
        return len(self._tokenizer.encode(text))

    def count_chat(self, prompt: str) -> int:
        """Return the number of tokens of a chat with one prompt.

        Raises:
            InvalidRequest: the model has no chat template, or the template refuses the prompt.
            PromptTooLong: the prompt's length alone says that it does not fit the context.
        """
        message = ChatMessage("user", prompt)
        return len(self._tokenizer.encode_chat([message], context_tokens=self.context_tokens))

    def count_shared(self, prompt: str, other: str) -> int:
        """Return how many leading tokens two chat prompts have in common."""
        first, second = (self._tokenizer.encode_chat([ChatMessage("user", text)]) for text in (prompt, other))
        return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))


def _tokenizer_and_context(model: Path) -> tuple[ModelTokenizer, int]:
    if model.is_dir():
        return tokenizer_from_folder(model), hf_model.read_config(model).context_tokens
    if not model.exists():
        raise UnsupportedModel(f"{model}: no such file or folder: give a GGUF file or a Hugging Face folder")
    where = str(model)
    with GgufFile(model) as file:
        config = gguf_model.read_config(file, where=where)
        return tokenizer_from_gguf(file.metadata, where=where), config.context_tokens
