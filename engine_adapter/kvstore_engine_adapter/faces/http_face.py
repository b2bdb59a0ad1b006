"""HttpFace: the engine's HTTP interface, in OpenAI's shapes and in TGI's."""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from kvstore.errors import KVStoreError
from kvstore.gate import Gate
from kvstore.http.counters import HttpCounters
from kvstore.http.spans import served_request
from kvstore_engine_adapter.faces.api_error import ApiError, api_error
from kvstore_engine_adapter.faces.callers import Callers
from kvstore_engine_adapter.faces.chat import ChatRoute
from kvstore_engine_adapter.faces.completions import CompletionRoute
from kvstore_engine_adapter.faces.event_stream import ClientGone
from kvstore_engine_adapter.faces.memory_records import MemoryRecords
from kvstore_engine_adapter.faces.models import ModelRoutes
from kvstore_engine_adapter.faces.record_access import RecordAccess, Records, SessionLimits
from kvstore_engine_adapter.faces.responses import ResponseRoutes
from kvstore_engine_adapter.faces.service import Service
from kvstore_engine_adapter.faces.session_routes import SessionRoutes
from kvstore_engine_adapter.faces.sessions import Sessions
from kvstore_engine_adapter.faces.stored_responses import StoredResponses
from kvstore_engine_adapter.faces.tgi import TGI_PATHS, TgiRoutes
from kvstore_engine_adapter.paged_engine import PagedEngine
from kvstore_engine_adapter.tokenizer import ModelTokenizer

logger = logging.getLogger(__name__)

MAX_BODY_BYTES = 4 << 20

_PROMPT_PARAMS = {
    "/v1/chat/completions": "messages",
    "/v1/completions": "prompt",
    "/v1/responses": "input",
}


@dataclass(frozen=True, slots=True)
class FaceDoors:
    """Who gets in, and where what callers own is kept.

    ``gate`` None lets in all that no web page can have sent; ``records`` None keeps sessions and responses in
    memory. ``has_tenants`` and ``salt`` are as in Callers.
    """

    gate: Gate | None = None
    has_tenants: bool = True
    records: Records | None = None
    limits: SessionLimits = field(default_factory=SessionLimits)
    salt: bytes = b""


class HttpFace:
    """Routes of one engine, served by a FaceServer. A client that hangs up ends its request.

    A client that does not read its stream for 10 seconds is dropped. ``close`` gives the requests under way
    their time.
    """

    def __init__(
        self,
        engine: PagedEngine,
        tokenizer: ModelTokenizer,
        *,
        model_name: str,
        doors: FaceDoors | None = None,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        doors = doors or FaceDoors()
        access = RecordAccess(doors.records or MemoryRecords(), doors.limits)
        self._callers = Callers(doors.gate or Gate(None), salt=doors.salt, has_tenants=doors.has_tenants)
        self._service = Service(engine, tokenizer, model_name=model_name, wall_clock=wall_clock)
        self._sessions = Sessions(access, wall_clock=wall_clock)
        self._stored = StoredResponses(access)

    def application(
        self,
        *,
        max_body_bytes: int = MAX_BODY_BYTES,
        outer: Sequence[Middleware] = (),
        on_admitted: Callable[[web.Request], None] | None = None,
    ) -> web.Application:
        """Return the routes.

        ``outer`` middlewares see requests first, and answers last; ``on_admitted`` is told of each request
        whose sender may send it.
        """

        @web.middleware
        async def admit(request: web.Request, handler: Handler) -> web.StreamResponse:
            self._callers.admit(request)
            if on_admitted is not None:
                on_admitted(request)
            resource = request.match_info.route.resource
            with served_request(request, "" if resource is None else resource.canonical) as served:
                answer = await handler(request)
                served.note_status(answer.status)
                return answer

        app = web.Application(
            client_max_size=max_body_bytes,
            middlewares=[*outer, self._errors_in_shape, admit],
        )
        for method, path, answer in self._routes():
            resource = app.router.add_resource(path)
            for name in ("GET", "HEAD") if method == "GET" else (method,):
                resource.add_route(name, answer, expect_handler=_answer_expectation)
        return app

    def _routes(self) -> list[tuple[str, str, Handler]]:
        service = self._service
        models, tgi = ModelRoutes(service), TgiRoutes(service)
        responses = ResponseRoutes(service, self._stored)
        sessions = SessionRoutes(service, self._sessions)
        return [
            ("POST", "/v1/chat/completions", ChatRoute(service, self._sessions).answer),
            ("POST", "/v1/completions", CompletionRoute(service).answer),
            ("POST", "/v1/responses", responses.create),
            ("GET", "/v1/responses/{id}", responses.show),
            ("DELETE", "/v1/responses/{id}", responses.delete),
            ("GET", "/v1/responses/{id}/input_items", responses.items),
            ("POST", "/v1/sessions", sessions.create),
            ("GET", "/v1/sessions", sessions.show_all),
            ("GET", "/v1/sessions/{name}", sessions.show),
            ("DELETE", "/v1/sessions/{name}", sessions.delete),
            ("POST", "/v1/sessions/{name}/fork", sessions.fork),
            ("GET", "/v1/models", models.show_all),
            ("GET", "/v1/models/{name:.+}", models.show),
            ("POST", "/generate", tgi.generate),
            ("POST", "/generate_stream", tgi.generate_stream),
            ("POST", "/", tgi.compatible),
            ("GET", "/info", tgi.info),
            ("GET", "/health", models.health),
            ("GET", "/healthz", models.health),
            ("GET", "/stats", models.stats),
        ]

    @property
    def counters(self) -> HttpCounters:
        """What HTTP has seen."""
        return self._service.counters

    @web.middleware
    async def _errors_in_shape(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Answer what fails in the shape that the path's clients expect."""
        resource = request.match_info.route.resource
        self.counters.requests["unknown" if resource is None else resource.canonical] += 1
        try:
            return await handler(request)
        except web.HTTPException as error:
            if error.status < 400:
                raise
            shown = ApiError(error.status, error.text or error.reason)
        except (ApiError, KVStoreError, ArithmeticError) as error:
            shown = api_error(error, prompt_param=_PROMPT_PARAMS.get(request.path))
        except ClientGone as error:
            logger.info("%s", error)
            raise
        except Exception as error:
            logger.exception("%s %s failed", request.method, request.path)
            shown = api_error(error)
        self.counters.errors[shown.code or str(shown.status)] += 1
        return _error_response(request, shown)

    async def close(self, *, grace_s: float) -> None:
        """Refuse new requests, give those under way ``grace_s`` seconds, then end them with an error."""
        await self._service.closing_time.close(grace_s=grace_s)


async def _answer_expectation(request: web.Request) -> web.Response | None:
    """Send 100 Continue to a client that asks for it; refuse any other expectation."""
    expectation = request.headers.get("Expect", "")
    if expectation.lower() != "100-continue":
        return _error_response(request, ApiError(417, f"Expect: {expectation[:40]!r} is not supported"))
    await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    request.writer.output_size = 0  # what came before the status line does not count as sent
    return None


def _error_response(request: web.Request, error: ApiError) -> web.Response:
    if request.path in TGI_PATHS:
        return web.json_response(error.tgi_body, status=error.tgi_status, headers=error.headers)
    return web.json_response(error.body, status=error.status, headers=error.headers)
