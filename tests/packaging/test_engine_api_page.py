"""docs/engine_api.md: its examples run, its tables and numbers say what the code says."""

import ast
import re
from pathlib import Path

import pytest

from kvstore_engine_adapter import faces
from kvstore_engine_adapter.faces.answering import MAX_UNREAD_TOKENS
from kvstore_engine_adapter.faces.http_face import MAX_BODY_BYTES, HttpFace
from kvstore_engine_adapter.faces.memory_records import MAX_BYTES
from kvstore_engine_adapter.faces.record_access import COLLECTIONS, SessionLimits
from kvstore_engine_adapter.faces.sampling_fields import MAX_CHOICES
from tests.engine.engine_process import engine
from tests.engine.tiny_model import TinyModel

PAGE = Path(__file__).parents[2] / "docs" / "engine_api.md"

pytestmark = pytest.mark.skipif(not PAGE.exists(), reason="the documentation is not beside the tests")


def text():
    return PAGE.read_text(encoding="utf-8")


def section(heading):
    return text().split(f"\n## {heading}\n")[1].split("\n## ")[0]


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    model = TinyModel(is_tied=False).write_gguf(tmp_path_factory.mktemp("model") / "model.gguf")
    with engine(model, "--served-model-name", "smollm2") as process:
        yield process


@pytest.mark.parametrize(
    "example", re.findall(r"^```python\n(.*?)^```", text(), re.M | re.S) if PAGE.exists() else []
)
def test_its_examples_run(served, example, capsys):
    exec(compile(example.replace("http://127.0.0.1:8000", served.url), str(PAGE), "exec"), {})
    assert capsys.readouterr().out


def test_it_names_every_route_and_no_other():
    documented = set(re.findall(r"^\| `([A-Z]+ /\S*)` \|", section("Routes"), re.M))
    app = HttpFace(None, None, model_name="x").application()
    routes = {
        f"{route.method} {re.sub(r':[^}]*', '', route.resource.canonical)}"
        for route in app.router.routes()
        if route.method != "HEAD"
    }
    assert documented == routes


def codes_in_the_code():
    for path in Path(faces.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.keyword) and node.arg == "code" and isinstance(node.value, ast.Constant):
                yield node.value.value


def test_it_names_every_error_code_and_no_other():
    documented = set(re.findall(r"^\| [\d, ]+ \| `(\w+)` \|", section("Errors"), re.M))
    assert documented == set(codes_in_the_code())


def test_its_numbers_are_those_of_the_code():
    limits = SessionLimits()
    sessions, slow = section("Sessions"), section("Clients that are slow or go away")
    assert f"engine's memory ({MAX_BYTES >> 20} MiB" in sessions
    assert f"`--session-quota-bytes` ({limits.quota_bytes >> 20} MiB)" in sessions
    assert limits.ttl_s == 86_400
    assert all(f"`{name}`" in sessions for name in COLLECTIONS)
    assert f"more than {MAX_UNREAD_TOKENS} tokens" in slow
    assert f"at most {MAX_BODY_BYTES >> 20} MiB" in slow
    assert f"choices, 1 to {MAX_CHOICES}" in text()
