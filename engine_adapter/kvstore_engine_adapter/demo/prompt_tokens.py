"""Counting tokens of the demo's prompts with the model's own tokenizer."""

from itertools import takewhile
from pathlib import Path

from kvstore.errors import UnsupportedModel
from kvstore_engine_adapter.gguf_file import GgufFile
from kvstore_engine_adapter.tokenizer import (
    ChatMessage,
    ModelTokenizer,
    tokenizer_from_folder,
    tokenizer_from_gguf,
)


class PromptTokens:
    """The tokenizer of a model, without its weights. Opening it blocks."""

    def __init__(self, model: Path) -> None:
        self._tokenizer = _tokenizer(model)

    def count_text(self, text: str) -> int:
        """Return the number of tokens of a plain text."""
        return len(self._tokenizer.encode(text))

    def count_shared(self, prompt: str, other: str) -> int:
        """Return how many leading tokens two chat prompts have in common."""
        first, second = (self._tokenizer.encode_chat([ChatMessage("user", text)]) for text in (prompt, other))
        return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))


def _tokenizer(model: Path) -> ModelTokenizer:
    if model.is_dir():
        return tokenizer_from_folder(model)
    if not model.exists():
        raise UnsupportedModel(f"{model}: no such file or folder: give a GGUF file or a Hugging Face folder")
    with GgufFile(model) as file:
        return tokenizer_from_gguf(file.metadata, where=str(model))
