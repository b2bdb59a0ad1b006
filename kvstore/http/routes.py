"""The one table of routes: what is answered, what each request may hold, and who may send it."""

import inspect
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

from aiohttp import web

from kvstore.auth import Scope
from kvstore.http import admin, batches, blocks, events, lookups, page_files, records, schemas, sizes
from kvstore.http.refusal import ErrorCode, Refused
from kvstore.http.schema import Schema
from kvstore.http.service import Call, HttpService

Operation = Callable[[Call], Awaitable[web.StreamResponse]]
"""Answers an admitted request."""

StateAnswer = Callable[[HttpService], web.Response]
"""Answers anyone, whatever the server's state."""


@dataclass(frozen=True, slots=True)
class Route:
    """One operation: its method and path, what answers it, and the scope it needs.

    ``scope`` None: any caller that is known may send it. ``parameters`` are schemas of what the path and the
    query hold; ``body`` that of a JSON body; ``takes_payload``: the operation reads the body itself.
    ``result`` is the schema of a JSON answer (None: no JSON), ``content`` the type of an answer in text,
    ``statuses`` are those of good answers.
    """

    method: str
    path: str
    operation: Operation | StateAnswer
    scope: Scope | None = None
    parameters: Mapping[str, Schema] = field(default_factory=dict)
    body: Schema | None = None
    takes_payload: bool = False
    result: Schema | None = None
    content: str = ""
    statuses: tuple[int, ...] = (200,)
    is_public: bool = False

    @property
    def name(self) -> str:
        """The name it has in counters and in the OpenAPI document."""
        return self.operation.__name__

    @property
    def summary(self) -> str:
        """What it does, in one sentence."""
        return (inspect.getdoc(self.operation) or "").split("\n\n", 1)[0]

    @property
    def path_names(self) -> tuple[str, ...]:
        """Names of the parameters in its path."""
        return tuple(re.findall(r"\{(\w+)\}", self.path))


_BLOCK = "/v1/blocks/{namespace}/{key}"
_BLOCK_PARAMETERS: Mapping[str, Schema] = {
    "namespace": schemas.NAMESPACE,
    "key": schemas.BLOCK_KEY,
    "start": schemas.START,
    "parent": schemas.PARENT,
    "part": schemas.PART_TEXT,
    "timeout_s": schemas.TIMEOUT,
}
_RECORD = "/v1/records/{collection}/{name}"
_RECORD_PARAMETERS: Mapping[str, Schema] = {
    "collection": schemas.COLLECTION,
    "name": schemas.RECORD_NAME,
    "timeout_s": schemas.TIMEOUT,
}
_READ, _WRITE, _ADMIN = Scope.READ, Scope.WRITE, Scope.ADMIN

ROUTES: tuple[Route, ...] = (
    Route("GET", "/healthz", admin.health, result=schemas.STATUS_ANSWER, is_public=True),
    Route(
        "GET", "/readyz", admin.readiness, result=schemas.STATUS_ANSWER, statuses=(200, 503), is_public=True
    ),
    Route("GET", "/ui", page_files.page, content="text/html", is_public=True),
    Route("GET", "/ui/page.css", page_files.page_style, content="text/css", is_public=True),
    Route("GET", "/ui/page.js", page_files.page_script, content="text/javascript", is_public=True),
    Route("GET", "/openapi.json", admin.openapi, result=schemas.ANY_OBJECT),
    Route("GET", "/v1/identity", lookups.identity, result=schemas.IDENTITY_ANSWER),
    Route(
        "POST",
        "/v1/namespaces",
        lookups.open_namespace,
        body=schemas.OPEN_NAMESPACE,
        result=schemas.NAMESPACE_ANSWER,
    ),
    Route("GET", _BLOCK, blocks.get_block, _READ, _BLOCK_PARAMETERS),
    Route("HEAD", _BLOCK, blocks.head_block, _READ, _BLOCK_PARAMETERS),
    Route(
        "PUT",
        _BLOCK,
        blocks.put_block,
        _WRITE,
        _BLOCK_PARAMETERS,
        takes_payload=True,
        result=schemas.PUT_ANSWER,
        statuses=(200, 201),
    ),
    Route("DELETE", _BLOCK, blocks.delete_block, _WRITE, _BLOCK_PARAMETERS, result=schemas.DROP_ANSWER),
    Route("POST", "/v1/drop", blocks.drop_blocks, _WRITE, body=schemas.LOOKUP, result=schemas.DROP_ANSWER),
    Route("POST", "/v1/match", lookups.match, _READ, body=schemas.MATCH, result=schemas.MATCH_ANSWER),
    Route("POST", "/v1/exists", lookups.exists, _READ, body=schemas.EXISTS, result=schemas.EXISTS_ANSWER),
    Route("POST", "/v1/fetch", batches.fetch, _READ, body=schemas.FETCH),
    Route("POST", "/v1/store", batches.store, _WRITE, takes_payload=True, result=schemas.PUT_ANSWER),
    Route(
        "POST", "/v1/prefetch", lookups.prefetch, _READ, body=schemas.LOOKUP, result=schemas.PREFETCH_ANSWER
    ),
    Route(
        "POST",
        "/v1/hints",
        lookups.note_hints,
        _WRITE,
        body=schemas.NOTE_HINTS,
        result=schemas.HINTS_ANSWER,
    ),
    Route("POST", "/v1/why", lookups.why, _READ, body=schemas.WHY, result=schemas.WHY_ANSWER),
    Route("POST", "/v1/leases", lookups.lease, _READ, body=schemas.LEASE, result=schemas.MATCH_ANSWER),
    Route(
        "PUT",
        "/v1/leases/{lease}",
        lookups.renew,
        _READ,
        {"lease": schemas.LEASE_NAME},
        result=schemas.RENEW_ANSWER,
    ),
    Route(
        "DELETE",
        "/v1/leases/{lease}",
        lookups.release,
        _READ,
        {"lease": schemas.LEASE_NAME},
        result=schemas.RELEASE_ANSWER,
    ),
    Route(
        "GET",
        "/v1/records/{collection}",
        records.list_records,
        _READ,
        {
            "collection": schemas.COLLECTION,
            "prefix": schemas.RECORD_PREFIX,
            "after": schemas.RECORD_AFTER,
            "limit": schemas.RECORD_LIMIT,
            "timeout_s": schemas.TIMEOUT,
        },
        result=schemas.RECORDS_ANSWER,
    ),
    Route("GET", _RECORD, records.get_record, _READ, _RECORD_PARAMETERS),
    Route(
        "PUT",
        _RECORD,
        records.put_record,
        _WRITE,
        {**_RECORD_PARAMETERS, "ttl_s": schemas.RECORD_TTL},
        takes_payload=True,
        result=schemas.RECORD_WRITE_ANSWER,
    ),
    Route(
        "DELETE",
        _RECORD,
        records.delete_record,
        _WRITE,
        _RECORD_PARAMETERS,
        result=schemas.RECORD_DROP_ANSWER,
    ),
    Route(
        "GET",
        "/v1/events",
        events.events,
        _READ,
        {"namespace": schemas.NAMESPACE, "timeout_s": schemas.TIMEOUT},
    ),
    Route(
        "GET",
        "/v1/size",
        sizes.size,
        _READ,
        {"namespace": schemas.NAMESPACE},
        result=schemas.ANY_OBJECT,
    ),
    Route(
        "GET",
        "/v1/branches",
        sizes.branches,
        _READ,
        {"namespace": schemas.NAMESPACE, "limit": schemas.BRANCH_LIMIT},
        result=schemas.BRANCHES_ANSWER,
    ),
    Route("GET", "/v1/stats", admin.stats, _ADMIN, result=schemas.ANY_OBJECT),
    Route("GET", "/metrics", admin.metrics, _ADMIN, content="text/plain"),
    Route("GET", "/v1/admin/namespaces", admin.namespaces, _ADMIN, result=schemas.NAMESPACES_ANSWER),
    Route("POST", "/v1/admin/flush", admin.flush, _ADMIN, body=schemas.FLUSH, result=schemas.FLUSH_ANSWER),
    Route("POST", "/v1/admin/check", admin.check, _ADMIN, body=schemas.CHECK, result=schemas.CHECK_ANSWER),
    Route(
        "POST", "/v1/admin/policy", admin.policy, _ADMIN, body=schemas.POLICY, result=schemas.POLICY_ANSWER
    ),
    Route("POST", "/v1/admin/epoch", admin.epoch, _ADMIN, body=schemas.EPOCH, result=schemas.EPOCH_ANSWER),
    Route("POST", "/v1/admin/erase", admin.erase, _ADMIN, body=schemas.ERASE, result=schemas.ERASE_ANSWER),
    Route("POST", "/v1/admin/drop", admin.drop, _ADMIN, body=schemas.LOOKUP, result=schemas.DROP_ANSWER),
    Route(
        "POST", "/v1/admin/demote", admin.demote, _ADMIN, body=schemas.LOOKUP, result=schemas.DEMOTE_ANSWER
    ),
)


class Router:
    """Finds the route of a request."""

    def __init__(self, routes: Sequence[Route] = ROUTES) -> None:
        self._exact: dict[str, dict[str, Route]] = {}
        self._patterns: list[tuple[re.Pattern[str], dict[str, Route]]] = []
        by_path: dict[str, dict[str, Route]] = {}
        for route in routes:
            by_path.setdefault(route.path, {})[route.method] = route
        for path, methods in by_path.items():
            if "{" in path:
                self._patterns.append((re.compile(re.sub(r"\{(\w+)\}", r"(?P<\1>[^/]+)", path)), methods))
            else:
                self._exact[path] = methods

    def find(self, method: str, path: str) -> tuple[Route, dict[str, str]]:
        """Return the route and what its path's parameters are. HEAD is answered where GET is.

        Raises:
            Refused: there is no such path, or not with that method.
        """
        methods, values = self._methods(path)
        if methods is None:
            raise Refused(ErrorCode.NOT_FOUND, "path: there is nothing: see /openapi.json")
        route = methods.get(method) or (methods.get("GET") if method == "HEAD" else None)
        if route is None:
            allowed = ", ".join(sorted({*methods, *(("HEAD",) if "GET" in methods else ())}))
            raise Refused(
                ErrorCode.METHOD_NOT_ALLOWED, f"method: expected {allowed}", headers={"Allow": allowed}
            )
        return route, values

    def _methods(self, path: str) -> tuple[dict[str, Route] | None, dict[str, str]]:
        exact = self._exact.get(path)
        if exact is not None:
            return exact, {}
        for pattern, methods in self._patterns:
            found = pattern.fullmatch(path)
            if found is not None:
                return methods, found.groupdict()
        return None, {}
