"""What an import loads, seen in a fresh interpreter."""

import importlib.resources
import importlib.util
import subprocess
import sys

import pytest

HEAVY = {
    "torch",
    "cupy",
    "lmdb",
    "redis",
    "aiohttp",
    "cryptography",
    "gguf",
    "tokenizers",
    "safetensors",
    "jinja2",
    "rich",
}
LIGHT = [
    "kvstore",
    "kvstore.async_client",
    "kvstore.cli",
    "kvstore.client",
    "kvstore.config_reference",
    "kvstore.results",
]


@pytest.mark.parametrize("module", LIGHT)
def test_the_clients_side_loads_no_heavy_package(module: str) -> None:
    assert importlib.util.find_spec(module)
    code = f"import {module}, sys; print(*{{name.split('.')[0] for name in sys.modules}})"
    output = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True
    ).stdout
    assert set(output.split()) & HEAVY == set()


ASSEMBLE = """
import sys
sys.modules["{package}"] = None
from kvstore.assembly import assemble
from kvstore.config import Config
from kvstore.errors import InvalidConfig
assemble(Config())
try:
    assemble(Config.from_dict({{"tiers": {tiers}}}))
except InvalidConfig as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("package", "tiers"),
    [
        ("redis", {"remote": {"url": "redis://h"}}),
        ("lmdb", {"ssd": {"path": "/x", "capacity_bytes": "1MiB"}}),
    ],
)
def test_a_tier_whose_package_is_absent_is_refused_by_name_and_no_other_store_needs_it(
    package: str, tiers: dict[str, object]
) -> None:
    code = ASSEMBLE.format(package=package, tiers=tiers)
    output = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    [section] = tiers
    told = f"[tiers.{section}] needs the package {package}: pip install 'tiered-kvstore[server]'"
    assert output.stdout.strip() == told


@pytest.mark.parametrize("module", ["kvstore", "kvstore_tiers", "kvstore_kernels", "kvstore_engine_adapter"])
def test_every_package_says_that_it_is_typed(module: str) -> None:
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.submodule_search_locations
    assert importlib.resources.files(module).joinpath("py.typed").is_file()
