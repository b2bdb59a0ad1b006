"""Traces end to end: real processes, and a collector that decodes what they send."""

import itertools
import json
import os
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from kvstore.drill.store_process import MIB, StoreProcess, StoreSettings
from kvstore.tracing import Attribute
from tests.redis_server import RedisServer, free_port
from tests.tracing.collector import Collector

CLIENT = Path(__file__).parent / "traced_client.py"
ROOT = Path(__file__).parents[2]
TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = "b7ad6b7169203331"
SERVER, CLIENT_KIND = 2, 3
FIRST_TOKENS = itertools.count(1000, 1000)


def settings(folder, **changes):
    return StoreSettings(ssd_bytes=16 * MIB, ssd_folder=folder / "ssd", http_port=free_port(), **changes)


def run_client(address, what, environ):
    done = subprocess.run(
        [sys.executable, CLIENT, address, what, str(next(FIRST_TOKENS))],
        env={**os.environ, "PYTHONPATH": str(ROOT), **environ},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def get(url, **headers):
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=60) as answer:
        return answer.read()


@pytest.fixture(scope="module")
def traced(tmp_path_factory):
    """A store that is traced, and the collector."""
    folder = tmp_path_factory.mktemp("store")
    with Collector() as collector:
        store = StoreProcess(folder, settings(folder))
        store.start(environ=collector.environ)
        try:
            yield store, collector
        finally:
            store.kill()


def addresses(store):
    return {"unix": f"unix:{store.socket_path}", "http": f"http://127.0.0.1:{store.settings.http_port}"}


@pytest.mark.parametrize("what", ["sync", "async"])
@pytest.mark.parametrize("way", ["unix", "http"])
def test_one_trace_goes_from_the_client_through_the_store_to_the_ssd(traced, way, what):
    store, collector = traced
    trace_id = run_client(addresses(store)[way], what, collector.environ)
    collector.wait_for("the whole")
    spans = {}

    def whole():
        spans.update({span.id: span for span in collector.spans() if span.trace == trace_id})
        return {"ssd read", "ssd write"} <= {span.name for span in spans.values()}

    wait_until(whole)
    read = next(span for span in spans.values() if span.name == "ssd read")
    served = spans[read.parent]
    asked = spans[served.parent]
    assert (read.service, served.service, asked.service) == ("kvstore", "kvstore", "client")
    assert (served.kind, asked.kind) == (SERVER, CLIENT_KIND)
    assert spans[asked.parent].name == "the whole"
    assert read.attributes["kvstore.tier"] == "ssd"
    assert read.attributes["kvstore.blocks.done"] == read.attributes["kvstore.blocks"]


def test_spans_hold_nothing_but_the_attributes_there_are(traced):
    store, collector = traced
    for what, way in (("sync", "unix"), ("sync", "http")):
        run_client(addresses(store)[way], what, collector.environ)
    spans = [span for span in collector.wait_for("ssd read") if span.service == "kvstore"]
    known = {attribute.value for attribute in Attribute}
    assert {name for span in spans for name in span.attributes} <= known
    assert b"s3cret-salt" not in collector.bodies()
    assert b"s3cret-salt".hex().encode() not in collector.bodies()


def test_a_request_over_http_goes_on_in_the_trace_that_it_brings(traced):
    store, collector = traced
    url = addresses(store)["http"]
    get(f"{url}/v1/stats", traceparent=f"00-{TRACE}-{PARENT}-01")
    span = next(span for span in collector.wait_for("GET /v1/stats") if span.trace == TRACE)
    assert (span.parent, span.kind) == (PARENT, SERVER)
    assert span.attributes == {
        "http.request.method": "GET",
        "http.route": "/v1/stats",
        "http.response.status_code": 200,
    }


def test_a_request_that_is_not_sampled_makes_no_span(traced):
    store, collector = traced
    url = addresses(store)["http"]
    other = "1" * 32
    get(f"{url}/v1/stats", traceparent=f"00-{other}-{PARENT}-00")
    get(f"{url}/v1/stats", traceparent=f"00-{'2' * 32}-{PARENT}-01")
    wait_until(lambda: any(span.trace == "2" * 32 for span in collector.spans()))
    assert not any(span.trace == other for span in collector.spans())


def wait_until(is_true, patience_s=60.0):
    until_s = time.monotonic() + patience_s
    while not is_true():
        assert time.monotonic() < until_s, "it did not come"
        time.sleep(0.05)


@pytest.fixture
def redis(tmp_path):
    folder = tmp_path / "redis"
    folder.mkdir()
    server = RedisServer(folder)
    server.start()
    yield server
    server.stop()


def test_the_remote_tier_shows_as_redis(tmp_path, redis):
    with Collector() as collector:
        store = StoreProcess(tmp_path, settings(tmp_path, redis_url=redis.url))
        store.start(environ=collector.environ)
        try:
            run_client(f"unix:{store.socket_path}", "sync", collector.environ)
            spans = collector.wait_for("remote write")
        finally:
            store.kill()
    write = next(span for span in spans if span.name == "remote write")
    assert write.kind == CLIENT_KIND
    assert write.attributes["db.system.name"] == "redis"


@pytest.mark.parametrize("trouble", ["refused", "hanging", "failing", "no address"])
def test_a_collector_in_trouble_harms_no_request_and_no_end(tmp_path, trouble):
    with Collector(is_hanging=trouble == "hanging", status=400 if trouble == "failing" else 200) as collector:
        environ = dict(collector.environ)
        if trouble in ("refused", "no address"):
            where = f"http://127.0.0.1:{free_port()}" if trouble == "refused" else "not an address"
            environ["OTEL_EXPORTER_OTLP_ENDPOINT"] = where
        environ |= {"OTEL_BSP_MAX_QUEUE_SIZE": "512"}
        store = StoreProcess(tmp_path, settings(tmp_path))
        store.start(environ=environ)
        try:
            url = addresses(store)["http"]
            trace_header = f"00-{TRACE}-{PARENT}-01"
            for _ in range(1200 if trouble == "hanging" else 20):
                get(f"{url}/v1/stats", traceparent=trace_header)
            wait_until(lambda: lost(url, trouble))
            store.terminate()
        finally:
            store.kill()


def lost(url, trouble):
    counts = json.loads(get(f"{url}/v1/stats"))["server"]["traces"]
    return counts["dropped"] > 0 if trouble == "hanging" else counts["failed"] > 0


def test_a_store_that_is_not_told_of_a_collector_loads_nothing_of_it():
    code = (
        "import sys, kvstore, kvstore.running, kvstore.cli.serve_command, kvstore.http;"
        "sys.exit(any(name.startswith('opentelemetry') for name in sys.modules))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=110)


def test_a_store_without_the_sdk_warns_and_serves(tmp_path):
    store = StoreProcess(tmp_path, settings(tmp_path))
    blocked = tmp_path / "blocked" / "opentelemetry"
    blocked.mkdir(parents=True)
    (blocked / "__init__.py").write_text("raise ModuleNotFoundError('none', name='opentelemetry')")
    # The command isolates its path from the folder it runs in, not from this variable.
    environ = {"PYTHONPATH": str(blocked.parent), "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9"}
    store.start(environ=environ)
    try:
        get(f"{addresses(store)['http']}/readyz")
    finally:
        store.kill()
    assert "tiered-kvstore[tracing]" in (tmp_path / "store.log").read_text()
