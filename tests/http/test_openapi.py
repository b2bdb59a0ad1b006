"""The OpenAPI document: true to the table of routes, and a real server true to it."""

import json
import re
import subprocess
import sys
import urllib.request

import pytest

from kvstore.http.openapi import openapi_document
from kvstore.http.routes import ROUTES
from tests.http.guarded_process import GuardedProcess
from tests.http.http_store import SPACE, layout_fields


def test_every_route_is_described_and_nothing_else():
    described = {
        (method.upper(), path) for path, item in openapi_document()["paths"].items() for method in item
    }
    assert described == {(route.method, route.path) for route in ROUTES}


def test_names_of_operations_differ_and_each_says_what_it_does():
    assert len({route.name for route in ROUTES}) == len(ROUTES)
    assert all(route.summary.endswith(".") for route in ROUTES)


def test_every_reference_leads_somewhere():
    text = json.dumps(openapi_document())
    for reference in set(re.findall(r'"\$ref": "#/([^"]+)"', text)):
        node = openapi_document()
        for word in reference.split("/"):
            node = node[word]


async def test_the_document_is_served(client):
    assert (await client.get("/openapi.json")).json == openapi_document()


def narrowed(document, digest):
    """Return the document for one open namespace, so that requests get beyond the check of its name."""
    if isinstance(document, dict):
        if document.get("description") == "Digest of an open namespace.":
            return {"type": "string", "enum": [digest]}
        return {
            name: value if name.endswith("Answer") else narrowed(value, digest)
            for name, value in document.items()
            if name != "/v1/events"  # a stream has no end of its own
        }
    return [narrowed(value, digest) for value in document] if isinstance(document, list) else document


def as_json(url, body):
    return urllib.request.Request(url, body, {"Content-Type": "application/json"})


@pytest.mark.timeout(400)
def test_a_server_answers_as_the_document_says(tmp_path):
    with GuardedProcess(tmp_path, {}) as server:
        body = json.dumps({"model": SPACE.model, "layout": layout_fields()}).encode()
        request = urllib.request.Request(
            f"{server.url}/v1/namespaces", body, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=30) as answer:
            digest = json.load(answer)["namespace"]
        path = tmp_path / "narrowed.json"
        path.write_text(json.dumps(narrowed(openapi_document(), digest)))

        # Not checked: that all which fits the schemas is accepted. A parent goes with a start above 0, and a
        # payload is as long as its block: JSON Schema cannot say so.
        words = [sys.executable, "-m", "schemathesis.cli", "run", str(path), "--url", server.url]
        words += ["--checks", "all", "--exclude-checks", "positive_data_acceptance", "--seed", "1"]
        words += ["--max-examples", "5", "--phases", "examples,coverage,fuzzing", "--no-color"]
        words += ["--warnings", "off", "--generation-database", "none"]
        ended = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=380, check=False)

        assert ended.returncode == 0, ended.stdout[-6000:] + ended.stderr[-2000:]
        with urllib.request.urlopen(f"{server.url}/v1/stats", timeout=30) as answer:
            http = json.load(answer)["http"]
        assert "internal" not in http["errors"]
        assert set(http["requests"]) == {route.name for route in ROUTES} - {"events"}
        assert "Traceback" not in server.log
