"""What the demo's replicas read: a long document, questions about it, and another text for the last step."""

from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from kvstore_engine_adapter.demo.processes import DemoFailed

NUM_QUESTIONS = 5
MIN_TOKENS = 800
"""Fewest tokens of a document: below, a prefill is too short to show what reuse saves."""

_FILE_MAX_BYTES = 1 << 20

_QUESTIONS = (
    "Who was the architect of the lighthouse?",
    "What is the colour of the light?",
    "How high is the tower?",
    "What is the reef called?",
    "In which year did the light become automatic?",
)
_QUESTIONS_ABOUT_ANYTHING = (
    "What is this text about?",
    "What is the first thing that the text says?",
    "Which names does the text mention?",
    "What is the last thing that the text says?",
    "Give this text a title.",
)
_OTHER_QUESTION = "When was the cooperative founded?"


@dataclass(frozen=True, slots=True)
class DemoTexts:
    """One document with a question per step, and another text with a question."""

    document: str
    questions: tuple[str, ...]
    other_document: str
    other_question: str

    def prompt(self, index: int) -> str:
        """Return the prompt of one question about the document."""
        return _prompt(self.document, self.questions[index])

    def other_prompt(self) -> str:
        """Return the prompt about the other text."""
        return _prompt(self.other_document, self.other_question)


def load_texts(document: Path | None = None, questions: Path | None = None) -> DemoTexts:
    """Return the bundled texts, or a document and questions (one per line) from files. Blocks.

    Raises:
        DemoFailed: a file cannot be read, is no text, is empty, or holds too few questions.
    """
    asked: tuple[str, ...] = _QUESTIONS if document is None else _QUESTIONS_ABOUT_ANYTHING
    if questions is not None:
        asked = tuple(line.strip() for line in _read(questions).splitlines() if line.strip())
        if len(set(asked)) < NUM_QUESTIONS or len(set(asked)) < len(asked):
            raise DemoFailed(
                f"questions: {questions}: {len(set(asked))} different ones in {len(asked)} lines,"
                f" expected {NUM_QUESTIONS} or more, each once"
            )
    return DemoTexts(
        document=_bundled("harbour.txt") if document is None else _read(document),
        questions=asked,
        other_document=_bundled("orchard.txt"),
        other_question=_OTHER_QUESTION,
    )


def _prompt(document: str, question: str) -> str:
    return f"Read this text.\n\n{document}\n\nAnswer in one short sentence. {question}"


def _bundled(name: str) -> str:
    path = resources.files("kvstore_engine_adapter.demo") / "data" / name
    return path.read_text(encoding="utf-8").strip()


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(_FILE_MAX_BYTES + 1)
        text = data.decode().strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise DemoFailed(f"{path}: cannot be read: {reason}: name a text file") from error
    if not text or len(data) > _FILE_MAX_BYTES:
        raise DemoFailed(f"{path}: is {len(data)} bytes of text, expected 1 to {_FILE_MAX_BYTES}")
    return text
