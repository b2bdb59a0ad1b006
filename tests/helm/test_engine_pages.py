"""The manifests in the engines' pages: values that the chart takes, and pods that Kubernetes takes."""

import json
import re

import pytest
import yaml

from kvstore_engine_adapter.sglang.options import BackendOptions
from tests.helm.chart import CHART, pod_specs, render

validation = pytest.importorskip("kubernetes_validate.utils", reason="there is no kubernetes-validate")

DOCS = CHART.parents[1] / "docs"
if not DOCS.is_dir():
    pytest.skip("the documentation is not beside the tests", allow_module_level=True)


def manifests(page):
    blocks = re.findall(r"^```yaml\n(.*?)^```", (DOCS / page).read_text(), re.MULTILINE | re.DOTALL)
    return [yaml.safe_load(block) for block in blocks]


VALUES = {page: one for page in ("sglang.md", "vllm.md") for one in manifests(page) if "replica" in one}
PODS = {page: one for page in ("sglang.md", "vllm.md") for one in manifests(page) if one.get("kind") == "Pod"}


@pytest.mark.parametrize("page", VALUES)
def test_the_values_run_the_engine_with_its_arguments_beside_the_store(page):
    values = VALUES[page]
    container = values["replica"]["container"]

    (spec,) = [
        spec
        for title, spec in pod_specs(render(values)).items()
        if title.startswith("Deployment/")
        and any(one["name"] == container["name"] for one in spec["containers"])
    ]

    (engine,) = [one for one in spec["containers"] if one["name"] == container["name"]]
    assert engine["args"] == container["args"]
    assert engine.get("command") == container.get("command")


@pytest.mark.parametrize("page", PODS)
def test_the_pods_are_valid(page):
    validation.validate(PODS[page], "1.33", strict=True)


def test_sglang_is_given_options_that_the_backend_takes():
    (container,) = [VALUES["sglang.md"]["replica"]["container"]]
    (given,) = [
        json.loads(argument.partition("=")[2])
        for argument in container["args"]
        if argument.startswith("--hicache-storage-backend-extra-config=")
    ]

    assert BackendOptions.parse(given).store == "unix:/run/kvstore/kvstore.sock"
