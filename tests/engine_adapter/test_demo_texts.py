"""The demo's texts: bundled, or a user's own."""

from pathlib import Path

import pytest

from kvstore_engine_adapter.demo.processes import DemoFailed
from kvstore_engine_adapter.demo.texts import NUM_QUESTIONS, load_texts


def test_the_bundled_texts_are_there_with_a_question_per_step() -> None:
    texts = load_texts()
    assert 600 < len(texts.document.split()) < 1000
    assert len(set(texts.questions)) == NUM_QUESTIONS
    assert texts.prompt(1).endswith(texts.questions[1])
    assert not texts.other_prompt().startswith(texts.prompt(0)[:60])


def test_a_users_document_is_read_with_general_questions(tmp_path: Path) -> None:
    path = tmp_path / "mine.txt"
    path.write_text("A text.\n", encoding="utf-8")
    texts = load_texts(path)
    assert "\n\nA text.\n\n" in texts.prompt(0)
    assert len(set(texts.questions)) >= NUM_QUESTIONS


def test_a_users_questions_are_read(tmp_path: Path) -> None:
    path = tmp_path / "questions.txt"
    path.write_text("a?\nb?\n\nc?\nd?\ne?\n", encoding="utf-8")
    assert load_texts(questions=path).questions == ("a?", "b?", "c?", "d?", "e?")


@pytest.mark.parametrize("data", [b"a?\nb?\n", b"a?\na?\na?\na?\na?\n", b""])
def test_too_few_questions_are_refused(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "questions.txt"
    path.write_bytes(data)
    with pytest.raises(DemoFailed, match=r"questions\.txt"):
        load_texts(questions=path)


@pytest.mark.parametrize("data", [None, b"", b"  \n", b"\xff\xfe", b"x" * ((1 << 20) + 1)])
def test_an_unusable_document_is_refused_in_one_line(tmp_path: Path, data: bytes | None) -> None:
    path = tmp_path / "mine.txt"
    if data is not None:
        path.write_bytes(data)
    with pytest.raises(DemoFailed, match=r"mine\.txt"):
        load_texts(path)
