"""EventStream: an answer as server-sent events, to a client that may stop reading or go away."""

import asyncio
import json
from collections.abc import Coroutine, Mapping

from aiohttp import web

_PATIENCE_S = 10.0


class ClientGone(ConnectionError):
    """A client that hung up, or that does not read its stream."""


class SlowClient(ClientGone):
    """A client that takes its stream too slowly, or not at all."""


class EventStream:
    """Server-sent events on one response.

    Every call raises ClientGone if the client went away, or takes nothing for 10 seconds.
    """

    def __init__(self) -> None:
        self._response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
        )

    @property
    def response(self) -> web.StreamResponse:
        """What the route returns."""
        return self._response

    async def start(self, request: web.Request) -> None:
        """Send status and headers: from now on an error can only be an event."""
        await self._response.prepare(request)

    async def send(self, data: Mapping[str, object], *, event: str | None = None) -> None:
        """Send one event."""
        head = b"" if event is None else b"event: " + event.encode() + b"\n"
        await self._write(head + b"data: " + json.dumps(data, ensure_ascii=False).encode() + b"\n\n")

    async def send_done(self) -> None:
        """Send OpenAI's last event."""
        await self._write(b"data: [DONE]\n\n")

    async def end(self) -> None:
        """End the stream. Nothing may follow it, so its connection is not used again."""
        self._response.force_close()
        await _in_time(self._response.write_eof())

    async def _write(self, data: bytes) -> None:
        await _in_time(self._response.write(data))


async def _in_time(sending: Coroutine[object, object, None]) -> None:
    try:
        async with asyncio.timeout(_PATIENCE_S):
            await sending
    except TimeoutError as error:
        raise SlowClient("a client stopped reading its stream") from error
    except ConnectionError as error:
        raise ClientGone("a client went away while its stream was sent") from error
