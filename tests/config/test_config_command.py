"""``kvstore config`` and the generated reference."""

import argparse
import json
import tomllib
from pathlib import Path

import pytest

from kvstore.cli import config_command
from kvstore.config import Config
from kvstore.config_reference import configuration_reference, effective_text

ROOT = Path(__file__).parents[2]
REMOTE = '[tiers.ssd]\npath = "/x\\"y"\ncapacity_bytes = "3GiB"\n[tiers.remote]\nurl = "redis://h"\n'
PASSWORD = 'password = "file:/x"\n'


def _run(*words: str) -> int:
    parser = argparse.ArgumentParser()
    config_command.register(parser.add_subparsers())
    args = parser.parse_args(["config", *words])
    status: int = args.run(args)
    return status


@pytest.mark.skipif(not (ROOT / "kvstore").exists(), reason="docs/ is only in the checkout")
def test_the_reference_in_docs_is_the_generated_one() -> None:
    assert (ROOT / "docs/configuration.md").read_text(encoding="utf-8") == configuration_reference()


def test_the_text_form_is_toml_that_reads_back_the_same() -> None:
    config = Config.from_dict(tomllib.loads(REMOTE + PASSWORD))
    assert Config.from_dict(tomllib.loads(effective_text(config))) == config


def test_a_valid_file_is_shown_with_sources(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "kvstore.toml"
    path.write_text(REMOTE + PASSWORD, encoding="utf-8")
    assert _run("--config", str(path), "--json") == 0
    sections = json.loads(capsys.readouterr().out)["sections"]
    assert sections["tiers.ssd"]["capacity_bytes"] == {"value": 3 << 30, "source": str(path)}
    assert sections["tiers.ssd"]["io_threads"] == {"value": 4, "source": "default"}
    assert sections["tiers.ssd"]["path"]["value"] == ['/x"y']
    assert sections["tiers.remote"]["password"]["value"] == "file:/x"


def test_a_bad_file_ends_with_status_2_and_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "kvstore.toml"
    path.write_text("[store]\ntimeout = 1\n", encoding="utf-8")
    assert _run("--config", str(path)) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.count("\n") == 1


def test_the_reference_is_printed_on_demand(capsys: pytest.CaptureFixture[str]) -> None:
    assert _run("--reference") == 0
    assert capsys.readouterr().out == configuration_reference()
