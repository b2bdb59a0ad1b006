"""docs/replay.md: its example runs, and its options are those of the command."""

import json
import re

import pytest

from kvstore.cli import command_parser, main
from tests.replay.traces import CHECKOUT, write_mooncake

PAGE = CHECKOUT / "docs" / "replay.md"

pytestmark = pytest.mark.skipif(not PAGE.is_file(), reason="the documentation is not beside the tests")


def test_the_policy_of_ones_own_can_be_replayed(tmp_path, capsys):
    (code,) = re.findall(r"```python\n(.+?)```", PAGE.read_text(), re.DOTALL)
    own = tmp_path / "patient.py"
    own.write_text(code)
    trace = write_mooncake(tmp_path / "trace.jsonl")

    status = main(["replay", str(trace), "--policies", "lru,bound", "--policy", f"{own}:Patient", "--json"])

    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert status == 0
    assert {row["policy"] for row in told["results"]} == {"lru", "bound", "Patient"}


def test_each_option_on_the_page_is_one_of_the_command():
    used = set(re.findall(r"`(--[\w-]+)", PAGE.read_text())) - {"--access-log", "--access-log-bytes"}
    known = {name for action in command_parser("replay")._actions for name in action.option_strings}

    assert used <= known
