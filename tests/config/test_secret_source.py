"""SecretSource: what names a place, what is found there, and that nothing else is ever shown."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.assembly import assemble
from kvstore.config import Config
from kvstore.errors import InvalidConfig
from kvstore.secret_source import SecretSource


def read(text: str, environ: dict[str, str] | None = None) -> str:
    return SecretSource.parse(text).read(environ or {}, key="[a] b")


def test_a_secret_comes_from_an_environment_variable() -> None:
    assert read("env:KV_SECRET", {"KV_SECRET": "hunter2"}) == "hunter2"


def test_an_absent_or_empty_variable_is_refused_with_its_name() -> None:
    for environ in ({}, {"KV_SECRET": ""}):
        with pytest.raises(InvalidConfig, match=r"^\[a\] b: env:KV_SECRET: .*KV_SECRET is not set or empty"):
            read("env:KV_SECRET", environ)


@pytest.mark.parametrize("data", [b"hunter2", b"hunter2\n", b"hunter2\r\nmore\n"])
def test_a_secret_is_the_first_line_of_a_file(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "secret").write_bytes(data)
    assert read(f"file:{tmp_path}/secret") == "hunter2"


def test_several_secrets_are_the_lines_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "secrets").write_text("a\nb\n", encoding="utf-8")
    source = SecretSource.parse(f"file:{tmp_path}/secrets")
    assert source.read_text({}, key="[a] b").splitlines() == ["a", "b"]


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (None, "cannot be read: No such file"),
        (b"", "is empty"),
        (b"\nhunter2", "first line is empty"),
        (b"hunter2\xff", "not UTF-8"),
        (b"h" * (1 << 20) + b"u", "larger than 1 MiB"),
    ],
)
def test_an_unusable_file_is_refused_and_its_content_never_shown(
    tmp_path: Path, data: bytes | None, problem: str
) -> None:
    path = tmp_path / "secret"
    if data is not None:
        path.write_bytes(data)
    with pytest.raises(InvalidConfig, match=problem) as caught:
        read(f"file:{path}")
    assert str(path) in str(caught.value)
    assert "hunter2" not in str(caught.value)
    assert caught.value.__cause__ is None


@pytest.mark.parametrize(
    "text",
    [
        *("hunter2", "", "env:", "file:", "env", "env:hunter2-x", "env:2hunter2", "file:hunter2"),
        *("file:/hunter2\0", "ENV:hunter2", " env:hunter2", "env:hunter2\n", 5, None, ["env:hunter2"]),
    ],
)
def test_what_names_no_place_is_refused_and_never_shown(text: object) -> None:
    with pytest.raises(ValueError, match="value not shown") as caught:
        SecretSource.parse(text)
    assert "hunter2" not in str(caught.value)


@given(st.text(max_size=30) | st.text(max_size=30).map("env:{}".format) | st.text().map("file:{}".format))
def test_what_is_read_is_written_the_same(text: str) -> None:
    try:
        source = SecretSource.parse(text)
    except ValueError:
        return
    assert SecretSource.parse(str(source)) == source


@pytest.mark.parametrize(
    ("mode", "is_exposed"), [(0o600, False), (0o640, False), (0o644, True), (0o604, True)]
)
def test_a_file_that_others_may_read_is_told(tmp_path: Path, mode: int, is_exposed: bool) -> None:
    file = tmp_path / "secret"
    file.write_text("s")
    file.chmod(mode)
    assert SecretSource(file=file).is_readable_by_others is is_exposed
    assert not SecretSource(file=tmp_path / "none").is_readable_by_others
    assert not SecretSource(variable="NAME").is_readable_by_others


def test_a_start_warns_of_master_keys_and_passwords_that_others_may_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("keys", "password"):
        (tmp_path / name).write_text("ab" * 32)
        (tmp_path / name).chmod(0o644)
    tiers = {
        "dram": {"capacity_bytes": "1MiB"},
        "remote": {"url": "redis://127.0.0.1:1", "password": f"file:{tmp_path}/password"},
    }
    assemble(Config.from_dict({"tiers": tiers, "encryption": {"keys": f"file:{tmp_path}/keys"}}))
    warned = [record.getMessage() for record in caplog.records if "chmod 600" in record.getMessage()]
    assert [message.partition(":")[0] for message in warned] == [
        "[encryption] keys",
        "[tiers.remote] password",
    ]
    assert "abab" not in caplog.text
