"""Requests that share a read and a write of a disk, traced in memory; prints the spans as JSON."""

import asyncio
import json
import sys

from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from tests.core.gated_tier import GatedTier
from tests.core.manager_harness import SPACE, running


async def main(exporter):
    tracer = trace.get_tracer("test")
    ssd = GatedTier("ssd")
    async with running(ssd) as store:
        ssd.gate.clear()
        for number, chain in enumerate(
            (SPACE.chain(range(4)), SPACE.chain(range(50, 54)), SPACE.chain(range(60, 64)))
        ):
            with tracer.start_as_current_span(f"put {number}"):
                await store.put(chain)
            if not number:
                await asyncio.sleep(0)  # the first is under way before the others are queued
        ssd.gate.set()
        assert await store.manager.flush(timeout_s=60)
        chain = SPACE.chain(range(4))
        assert await store.manager.demote(chain) == 1
        ssd.gate.clear()
        fetches = [asyncio.create_task(fetch(tracer, store, chain, number)) for number in range(2)]
        while not ssd.read_batches:  # noqa: ASYNC110
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        ssd.gate.set()
        await asyncio.gather(*fetches)
    spans = exporter.get_finished_spans()
    names = {span.context.span_id: span.name for span in spans}
    told = [
        {
            "name": span.name,
            "parent": names.get(span.parent.span_id) if span.parent else None,
            "links": [names[link.context.span_id] for link in span.links],
            "blocks": (span.attributes or {}).get("kvstore.blocks"),
        }
        for span in spans
    ]
    sys.stdout.write(json.dumps(told))


async def fetch(tracer, store, chain, number):
    with tracer.start_as_current_span(f"fetch {number}"):
        await store.fetch(chain, timeout_s=60)


if __name__ == "__main__":
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    asyncio.run(main(exporter))
