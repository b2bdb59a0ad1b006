"""A trace from a request to an engine through the store to the disk, sent by the real processes."""

import json
import os
import urllib.request

from kvstore.drill.store_process import MIB, StoreProcess, StoreSettings
from tests.engine.engine_process import TEXT, engine
from tests.tracing.collector import Collector

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


def ask(url, model="tiny", **headers):
    body = {
        "model": model,
        "messages": [{"role": "user", "content": TEXT}],
        "max_tokens": 4,
        "temperature": 0,
    }
    request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=100) as answer:
        return json.load(answer)


def store_in(folder):
    settings = StoreSettings(dram_bytes=32 * MIB, ssd_bytes=32 * MIB, ssd_folder=folder / "ssd")
    return StoreProcess(folder, settings)


def test_one_trace_goes_from_an_engines_request_to_the_read_of_a_disk(tiny_gguf, tmp_path):
    """The store is started anew in between, so that what the first engine left lies on the disk alone."""
    address = tmp_path / "kv.sock"
    with store_in(tmp_path) as store, engine(tiny_gguf, "--store", address) as first:
        ask(first.url)
        first.stop()
        store.terminate()
    with Collector() as collector:
        store = store_in(tmp_path)
        store.start(environ=collector.environ)
        environ = {**os.environ, **collector.environ}
        try:
            with engine(
                tiny_gguf, "--store", address, "--served-model-name", "small", environ=environ
            ) as second:
                usage = ask(second.url, "small", traceparent=f"00-{TRACE}-{PARENT}-01")["usage"]
                spans = collector.wait_for("ssd read", "POST /v1/chat/completions")
                assert second.stop()[0] == 0
        finally:
            store.kill()
    by_id = {span.id: span for span in spans if span.trace == TRACE}
    way = [next(span for span in by_id.values() if span.name == "ssd read")]
    while way[-1].parent in by_id:
        way.append(by_id[way[-1].parent])
    assert way[-1].name == "POST /v1/chat/completions"
    assert way[-1].parent == PARENT
    assert [span.service for span in way] == ["kvstore"] * 2 + ["kvstore-engine"] * (len(way) - 2)
    answered = next(span for span in way if span.name.startswith("text_completion"))
    assert answered.name == "text_completion small", "by the name that clients give"
    assert answered.attributes["gen_ai.request.model"] == "small"
    # None on a machine so busy that the load came late.
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    assert answered.attributes["gen_ai.usage.cache_read.input_tokens"] == cached
    assert answered.attributes["gen_ai.usage.output_tokens"] == 4
