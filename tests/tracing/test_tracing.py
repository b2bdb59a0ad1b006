"""What a trace's context is, what asks for traces, what is linked; without a collector."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvstore.config import TraceSettings, trace_settings
from kvstore.trace_export import TraceCounters
from kvstore.tracing import Attribute, TraceContext

ROOT = Path(__file__).parents[2]
DOCS = (ROOT / "docs" / "tracing.md").read_text()
TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
ENDPOINT = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4318"}


@pytest.mark.parametrize(("flags", "is_sampled"), [("01", True), ("00", False), ("03", True), ("fe", False)])
def test_a_header_names_a_span_and_whether_it_is_sampled(flags, is_sampled):
    context = TraceContext.of_header(f"00-{TRACE}-{SPAN}-{flags}")

    assert context == TraceContext(bytes.fromhex(TRACE), bytes.fromhex(SPAN), is_sampled)
    assert TraceContext.of_header(context.header()) == context
    assert TraceContext.unpack(context.pack()) == context


@pytest.mark.parametrize(
    "text",
    [
        None,
        "",
        f"00-{TRACE}-{SPAN}",
        f"00-{TRACE}-{SPAN}-01-more",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE[1:]}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-01\n",
        f"01-{TRACE}-{SPAN}-01-" + "x" * 600,
    ],
)
def test_a_malformed_header_names_none(text):
    assert TraceContext.of_header(text) is None


def test_a_header_of_a_later_version_is_understood():
    assert TraceContext.of_header(f"01-{TRACE}-{SPAN}-01-more") is not None


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {**ENDPOINT, "OTEL_SDK_DISABLED": "TRUE"},
        {**ENDPOINT, "OTEL_TRACES_EXPORTER": "none"},
        {**ENDPOINT, "OTEL_TRACES_EXPORTER": "console"},
        {"OTEL_SERVICE_NAME": "kvstore"},
    ],
)
def test_nothing_is_traced_unless_it_is_asked_for(environ):
    assert trace_settings(environ) is None


@pytest.mark.parametrize(
    ("environ", "wanted"),
    [
        (ENDPOINT, TraceSettings()),
        ({"OTEL_TRACES_EXPORTER": "otlp"}, TraceSettings()),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://c"}, TraceSettings()),
        ({**ENDPOINT, "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, TraceSettings("grpc")),
        ({**ENDPOINT, "OTEL_BSP_MAX_QUEUE_SIZE": "4096"}, TraceSettings(queue_spans=4096)),
        ({**ENDPOINT, "OTEL_BSP_MAX_QUEUE_SIZE": "many"}, TraceSettings()),
        ({**ENDPOINT, "OTEL_BSP_MAX_QUEUE_SIZE": "1"}, TraceSettings()),
        ({**ENDPOINT, "OTEL_BSP_MAX_QUEUE_SIZE": "0000010240000"}, TraceSettings()),
        ({**ENDPOINT, "OTEL_BSP_MAX_QUEUE_SIZE": "000001024" + 5000 * "0"}, TraceSettings()),
    ],
)
def test_an_endpoint_or_the_exporters_name_asks_for_traces(environ, wanted):
    assert trace_settings(environ) == wanted


def test_spans_beyond_the_limit_are_dropped_and_counted():
    counters = TraceCounters(2)

    assert [counters.admit() for _ in range(3)] == [True, True, False]
    counters.settle(1, is_exported=True)
    counters.settle(1, is_exported=False)

    assert counters.as_dict() == {"exported": 1, "failed": 1, "dropped": 1, "waiting": 0}


def test_every_attribute_is_documented_and_no_other():
    cells = [
        line.split("|")[1] for line in DOCS.splitlines() if line.startswith("| `") and line.count("|") == 3
    ]
    told = {word for cell in cells for word in cell.replace("`", "").replace(",", " ").split()}

    assert told == {attribute.value for attribute in Attribute}


def test_work_for_several_requests_lies_below_the_first_and_is_linked_to_the_others():
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("shared_work.py")],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr
    spans = json.loads(done.stdout)

    (read,) = [span for span in spans if span["name"] == "ssd read"]
    assert (read["parent"], read["links"]) == ("fetch 0", ["fetch 1"])
    writes = [span for span in spans if span["name"] == "ssd write"]
    assert [(span["parent"], span["links"]) for span in writes] == [
        ("put 0", []),
        ("put 1", ["put 2"]),
    ]
