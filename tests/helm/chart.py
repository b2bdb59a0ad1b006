"""The chart as Helm sees it: loaded once, rendered offline into objects."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

helm = pytest.importorskip("helm_python", reason="there is no Helm here: helm-python-sdk")

CHART = Path(__file__).parents[2] / "helm" / "kvstore"
if not CHART.is_dir():
    pytest.skip("the chart is not beside the tests", allow_module_level=True)

Manifest = dict[str, Any]


@cache
def chart() -> Any:
    """Return the loaded chart."""
    return helm.Chart.load(CHART)


def render_text(values: Manifest | None = None, *, namespace: str = "prod") -> dict[str, str]:
    """Return each template's output by its name without the chart's."""
    rendered = chart().render(values or {}, name="demo", namespace=namespace)
    return {name.removeprefix("kvstore/templates/"): text for name, text in rendered.items()}


def objects(texts: dict[str, str]) -> list[Manifest]:
    """Return the objects of rendered templates."""
    return [
        document
        for name, text in texts.items()
        if name.endswith(".yaml")
        for document in yaml.safe_load_all(text)
        if document
    ]


def render(values: Manifest | None = None) -> list[Manifest]:
    """Return the objects that an installation with these values makes, its test's included."""
    return objects(render_text(values))


def named(found: list[Manifest], kind: str, name: str) -> Manifest:
    """Return one object."""
    (one,) = [at for at in found if at["kind"] == kind and at["metadata"]["name"] == name]
    return one


def pod_specs(found: list[Manifest]) -> dict[str, Manifest]:
    """Return the pods of all objects by ``Kind/name``; that of the sidecar's patch too."""
    specs = {}
    for at in found:
        title = f"{at['kind']}/{at['metadata']['name']}"
        if at["kind"] == "Pod":
            specs[title] = at["spec"]
        elif "template" in at.get("spec", {}):
            specs[title] = at["spec"]["template"]["spec"]
        elif "patch.yaml" in at.get("data", {}):
            specs[title] = yaml.safe_load(at["data"]["patch.yaml"])["spec"]["template"]["spec"]
    return specs


def store_container(spec: Manifest) -> Manifest:
    """Return the store's container of a pod."""
    containers = [*spec.get("initContainers", []), *spec["containers"]]
    (one,) = [at for at in containers if at["name"] == "kvstore"]
    return one


def toml_text(found: list[Manifest]) -> str:
    """Return the store's configuration."""
    return named(found, "ConfigMap", "demo-kvstore")["data"]["config.toml"]
