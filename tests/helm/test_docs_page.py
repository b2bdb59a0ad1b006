"""What docs/kubernetes.md names is there."""

import itertools
import re
import shlex

import pytest

from kvstore.cli import COMMANDS
from tests.helm.chart import CHART, chart, helm, render

PAGE = CHART.parents[1] / "docs" / "kubernetes.md"
if not PAGE.exists():
    pytest.skip("the documentation is not beside the tests", allow_module_level=True)
TEXT = PAGE.read_text()


def command_lines():
    blocks = re.findall(r"^```\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
    return [shlex.split(line) for block in blocks for line in block.replace("\\\n", " ").splitlines()]


@pytest.mark.parametrize("words", [words for words in command_lines() if words[0] == "helm"], ids=" ".join)
def test_the_helm_commands_give_values_that_the_chart_takes(words):
    given = [value for option, value in itertools.pairwise(words) if option == "--set"]

    assert given or words[1] == "install"
    assert render(helm.parse_set_string(",".join(given)))


def test_every_value_that_it_names_exists():
    schema = chart().schema["properties"]
    paths = set(re.findall(r"`([a-z][A-Za-z]+(?:\.[A-Za-z_]+)+)(?:: [^`]+)?`", TEXT))
    named = {path for path in paths if path.split(".")[0] in schema}

    def is_known(path):
        rule = {"properties": schema}
        for part in path.split("."):
            if part not in rule.get("properties", {}):
                return not rule.get("properties")
            rule = rule["properties"][part]
        return True

    assert len(named) > 20
    assert {path for path in named if not is_known(path)} == set()


def test_every_template_that_it_names_is_there():
    defined = {name for at in chart().templates for name in re.findall(r'define "([\w.]+)"', at["data"])}
    named = set(re.findall(r"`(kvstore\.[a-z][A-Za-z]+)`", TEXT))

    assert len(named) >= 6
    assert named <= defined


def test_every_command_that_it_names_exists():
    named = set(re.findall(r"kvstore ([a-z]+)(?= (?:--|keys|init|add)|`)", TEXT))

    assert {"flush", "stats", "version"} <= named
    assert named <= {command.name for command in COMMANDS}
