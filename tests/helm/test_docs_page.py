"""What docs/kubernetes.md names is there."""

import itertools
import re
import shlex
import subprocess
import sys

import pytest
import yaml

from kvstore.cli import COMMANDS, command_parser
from tests.helm.chart import CHART, chart, helm, named, pod_specs, render, store_container

PAGE = CHART.parents[1] / "docs" / "kubernetes.md"
if not PAGE.exists():
    pytest.skip("the documentation is not beside the tests", allow_module_level=True)
TEXT = PAGE.read_text()


def command_lines():
    found = re.findall(r"^```(\w*)\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
    blocks = [block for language, block in found if not language]
    return [shlex.split(line) for block in blocks for line in block.replace("\\\n", " ").splitlines()]


@pytest.mark.parametrize("words", [words for words in command_lines() if words[0] == "helm"], ids=" ".join)
def test_the_helm_commands_give_values_that_the_chart_takes(words):
    given = [value for option, value in itertools.pairwise(words) if option == "--set"]

    assert given or words[1] == "install"
    assert render(helm.parse_set_string(",".join(given)))


def examples():
    return {
        next(iter(values)): values
        for text in re.findall(r"^```yaml\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
        for values in [yaml.safe_load(text)]
    }


def test_the_example_of_events_lets_in_the_routers_that_it_names():
    given = examples()["events"] | {"mode": "daemonset"}

    found = render(given)
    args = store_container(pod_specs(found)["DaemonSet/demo-kvstore"])["args"]
    (rule,) = named(found, "NetworkPolicy", "demo-kvstore-node")["spec"]["ingress"]

    assert command_parser("serve").parse_args(args[1:]).events_topic == "kv@$(KVSTORE_POD_IP)@llama"
    assert [port["port"] for port in rule["ports"]] == [5557, 5558]
    assert rule["from"] == [{"podSelector": {"matchLabels": {"app": "router"}}}]


def test_the_example_of_an_engine_runs_on_a_gpu_with_the_options_that_the_engine_has():
    containers = pod_specs(render(examples()["replica"]))["Deployment/demo-kvstore-replica"]["containers"]
    (engine,) = [at for at in containers if at["image"].endswith("-cuda")]
    command, *options = [word for word in engine["command"] + engine["args"] if word != "kvstore"]
    known = subprocess.run(
        [sys.executable, "-m", "kvstore.cli", command, "--help"], capture_output=True, text=True, check=True
    ).stdout

    assert engine["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert engine["securityContext"]["runAsNonRoot"]
    assert [word for word in options if word.startswith("--") and word not in known] == []


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
