"""An OTLP receiver in the test's process: what real exporters send, decoded."""

import asyncio
import gzip
import threading
import time
from dataclasses import dataclass

from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

PATIENCE_S = 60.0


@dataclass(frozen=True)
class SentSpan:
    service: str
    name: str
    kind: int
    trace: str
    id: str
    parent: str
    attributes: dict
    links: tuple
    is_error: bool


class Collector:
    """Listens on a free port; ``is_hanging``: it takes requests and answers none."""

    def __init__(self, *, status=200, is_hanging=False):
        self._status, self._is_hanging = status, is_hanging
        self._bodies = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self):
        self._thread.start()
        self.port = asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(PATIENCE_S)
        return self

    def __exit__(self, *_):
        asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result(PATIENCE_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _start(self):
        app = web.Application(client_max_size=64 << 20)
        app.router.add_post("/v1/traces", self._take)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1, handler_cancellation=True)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        return site._server.sockets[0].getsockname()[1]

    async def _take(self, request):
        body = await request.read()
        if request.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        self._bodies.append(body)
        if self._is_hanging:
            await asyncio.sleep(3600)
        return web.Response(status=self._status, content_type="application/x-protobuf")

    @property
    def environ(self):
        """What has a process send its spans here, soon."""
        return {
            "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{self.port}",
            "OTEL_BSP_SCHEDULE_DELAY": "50",
        }

    @property
    def num_requests(self):
        return len(self._bodies)

    def bodies(self):
        return b"".join(self._bodies)

    def spans(self):
        found = []
        for body in list(self._bodies):
            message = ExportTraceServiceRequest()
            message.ParseFromString(body)
            for group in message.resource_spans:
                service = _attributes(group.resource.attributes)["service.name"]
                found += [_sent(service, span) for scope in group.scope_spans for span in scope.spans]
        return found

    def wait_for(self, *names):
        """Return all spans once one of each name has come."""
        until_s = time.monotonic() + PATIENCE_S
        while not set(names) <= {span.name for span in self.spans()}:
            assert time.monotonic() < until_s, (names, sorted({span.name for span in self.spans()}))
            time.sleep(0.05)
        return self.spans()


def _sent(service, span):
    return SentSpan(
        service,
        span.name,
        span.kind,
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        _attributes(span.attributes),
        tuple(link.span_id.hex() for link in span.links),
        span.status.code == 2,
    )


def _attributes(pairs):
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value):
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(item) for item in value.array_value.values]
    return getattr(value, kind)
