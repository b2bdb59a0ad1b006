"""An engine with its HTTP face on a free port, and official clients of it."""

import asyncio
import contextlib
from dataclasses import dataclass

import openai

from kvstore.http.counters import HttpCounters
from kvstore_engine_adapter.faces.face_server import FaceServer
from kvstore_engine_adapter.faces.http_face import HttpFace
from kvstore_engine_adapter.paged_engine import EngineSettings, PagedEngine

LONG_TEXT = "The old pier burned down in 1847. " * 12


@dataclass
class Served:
    """A running face."""

    url: str
    engine: PagedEngine
    face: HttpFace
    counters: HttpCounters

    async def has_requests(self, expected):
        """Wait until the engine has requests, or has none."""
        while bool(self.engine.manager.stats()["owners"]) != expected:  # noqa: ASYNC110  # nothing tells
            await asyncio.sleep(0.01)

    def openai(self, **options):
        """Return the official client."""
        return openai.OpenAI(base_url=f"{self.url}/v1", **{"api_key": "none", "max_retries": 0} | options)

    def async_openai(self, **options):
        """Return the official asynchronous client."""
        return openai.AsyncOpenAI(
            base_url=f"{self.url}/v1", **{"api_key": "none", "max_retries": 0} | options
        )


@contextlib.asynccontextmanager
async def face_server(model, *, server_options=None, doors=None, **settings):
    """Serve a model inside the block."""
    engine = PagedEngine(model, EngineSettings(**{"max_model_tokens": 1024} | settings))
    await engine.open()
    face = HttpFace(engine, model.tokenizer, model_name="tiny", doors=doors)
    server = FaceServer(face, **{"max_body_bytes": 65536} | (server_options or {}))
    try:
        await server.start("127.0.0.1", 0)
        yield Served(server.url, engine, face, server.counters)
    finally:
        await server.stop()
        await engine.close()
