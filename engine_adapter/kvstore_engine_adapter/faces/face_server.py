"""FaceServer: an HttpFace on an address, with limits on connections, slow clients and what is no HTTP."""

import logging
import resource
import ssl
from collections.abc import Callable

from aiohttp import web
from aiohttp.typedefs import Handler

from kvstore.http.limits import Limits, connection_cap
from kvstore.http.listener import Listener, full_answer
from kvstore.http.protocol import Protocol
from kvstore_engine_adapter.faces.api_error import ApiError
from kvstore_engine_adapter.faces.event_stream import ClientGone, SlowClient
from kvstore_engine_adapter.faces.http_face import MAX_BODY_BYTES, HttpFace

logger = logging.getLogger(__name__)

_MAX_CONNECTIONS = 1024
_FULL = full_answer(
    b'{"error": {"message": "the server has too many connections", "type": "overloaded_error", '
    b'"param": null, "code": "overloaded"}}'
)


class FaceServer:
    """Serves a face until it is stopped.

    ``tls`` returns the context of the next connection, None for plain ones. ``shutdown_s`` is half the time
    that ``stop`` may take.
    """

    def __init__(
        self,
        face: HttpFace,
        *,
        tls: Callable[[], ssl.SSLContext] | None = None,
        limits: Limits | None = None,
        max_body_bytes: int = MAX_BODY_BYTES,
        shutdown_s: float = 1.0,
    ) -> None:
        self.counters = face.counters
        app = face.application(
            max_body_bytes=max_body_bytes, outer=[self._guarded], on_admitted=self._note_admitted
        )
        # Cancellation on: a client that hangs up ends its request.
        self._runner = web.AppRunner(
            app, handler_cancellation=True, access_log=None, shutdown_timeout=shutdown_s
        )
        self._listener = Listener(
            self._protocol,
            limits=limits or _limits(),
            counters=self.counters,
            tls=tls,
            full=_FULL,
            what="engine",
            remedy="ulimit -n, or run more replicas",
        )

    @property
    def url(self) -> str:
        """Where it is reached; only while it listens."""
        return self._listener.url

    async def start(self, host: str, port: int) -> None:
        """Take the address, an IP address and a port or 0, and serve.

        Raises:
            InvalidConfig: the address cannot be used.
        """
        await self._runner.setup()
        self._listener.listen(host, port)

    async def stop_listening(self) -> None:
        """Let no more connections in. Idempotent."""
        await self._listener.stop()

    async def stop(self) -> None:
        """End everything. Idempotent."""
        await self._listener.stop()
        await self._runner.cleanup()
        self._listener.abort_all()

    @web.middleware
    async def _guarded(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        guard = self._listener.guard_of(request.protocol)
        guard.begin_request(request.content_length)
        try:
            return await handler(request)
        except ClientGone as error:
            self.counters.slow_clients += isinstance(error, SlowClient)
            # What was sent of the answer is not whole: its end must not look like one.
            guard.abort()
            return web.Response()
        finally:
            guard.end_request()

    def _note_admitted(self, request: web.Request) -> None:
        self._listener.guard_of(request.protocol).note_admitted()

    def _protocol(self) -> "_Protocol":
        server = self._runner.server
        assert server is not None, "the runner is set up"
        return _Protocol(server, self.counters)


class _Protocol(Protocol):
    """One connection's protocol, answering in OpenAI's shape what is not HTTP."""

    def malformed(self) -> web.Response:
        """Return the answer to what is not HTTP."""
        return _answer(ApiError(400, "the request is not HTTP, or its head is above the limits"))

    def failed(self) -> web.Response:
        """Return the answer after a fault of the server itself."""
        return _answer(ApiError(500, "the server failed; its log says why", kind="server_error"))


def _answer(error: ApiError) -> web.Response:
    return web.json_response(error.body, status=error.status)


def _limits() -> Limits:
    max_fds, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    is_limited = max_fds != resource.RLIM_INFINITY
    cap = connection_cap(_MAX_CONNECTIONS, max_fds=max_fds if is_limited else None, others=0)
    return Limits(max_connections=cap)
