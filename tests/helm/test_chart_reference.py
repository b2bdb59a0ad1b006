"""The generated parts of the chart are those that its values and the store's configuration give."""

import importlib.util

import pytest
import yaml

from tests.helm.chart import CHART, chart

SCRIPT = CHART.parents[1] / "scripts" / "chart_reference.py"
if not SCRIPT.exists():
    pytest.skip("the scripts are not beside the tests", allow_module_level=True)


@pytest.fixture(scope="module")
def reference():
    spec = importlib.util.spec_from_file_location("chart_reference", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["README.md", "values.schema.json"])
def test_the_generated_parts_are_current(reference, name):
    written = (CHART / name).read_text()

    assert reference.PAGES[name]() == written, "run scripts/chart_reference.py"


def leaves(values, path=""):
    for name, value in values.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, f"{path}{name}.")
        else:
            yield f"{path}{name}"


def test_every_value_is_documented(reference):
    text = (CHART / "values.yaml").read_text()
    documented = {at.path for at in reference.documented_values(text)}

    missing = [
        leaf
        for leaf in leaves(yaml.safe_load(text))
        if not any(leaf == path or leaf.startswith(f"{path}.") for path in documented)
    ]
    assert missing == []


def test_every_value_has_a_rule_in_the_schema():
    def undescribed(values, schema, path=""):
        for name, value in values.items():
            rule = schema.get("properties", {}).get(name)
            if rule is None:
                if schema.get("additionalProperties") is False:
                    yield f"{path}{name}"
            elif isinstance(value, dict):
                yield from undescribed(value, rule, f"{path}{name}.")

    assert list(undescribed(chart().values, chart().schema)) == []
