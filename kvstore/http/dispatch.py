"""Dispatcher: takes a request through every check to its operation, and every error to its answer.

The order: path and method, the server's state, where the request comes from, who sends it and whether it
may, how much it has under way, what it says. Only then is its body read, and only by what it is meant for.
"""

import logging
import re
from collections.abc import Mapping
from functools import partial
from typing import cast

from aiohttp import web

from kvstore.errors import KVStoreError
from kvstore.gate import Gate, Shown
from kvstore.http.body import Body
from kvstore.http.payloads import Spoilt
from kvstore.http.refusal import ErrorCode, Refused, refusal_of
from kvstore.http.routes import Operation, Route, Router, StateAnswer
from kvstore.http.schema import Schema, check, parse_json
from kvstore.http.service import Call, HttpService, Peer, json_answer
from kvstore.http.spans import served_request
from kvstore.http.values import Values
from kvstore.log_limit import LimitedWarning

logger = logging.getLogger(__name__)

_JSON_TYPE = "application/json"
_INTEGER = re.compile("-?[0-9]{1,19}")
_NUMBER = re.compile(r"-?[0-9]{1,20}(\.[0-9]{1,20})?([eE][-+]?[0-9]{1,3})?")


class Dispatcher:
    """Answers every request of one HTTP face; ``gate`` decides who may send it."""

    def __init__(self, service: HttpService, gate: Gate) -> None:
        self._service = service
        self._gate = gate
        self._router = Router()
        self._failures = LimitedWarning(logger)

    async def answer(self, request: web.BaseRequest, peer: Peer) -> web.StreamResponse:
        """Return the answer of a request; whatever goes wrong, it is one.

        Raises:
            ConnectionError: the client is gone, or its answer cannot be completed.
        """
        try:
            return await self._answer(request, peer)
        except KVStoreError as error:
            refused = refusal_of(error)
            if refused.code is ErrorCode.INTERNAL:
                self._failures.warn("http: %s %s failed: %s", request.method, request.path[:80], error)
        except (ConnectionError, web.RequestPayloadError) as error:
            raise ConnectionError("http: the client is gone") from error
        except Exception:
            logger.exception("http: %s %s failed", request.method, request.path[:80])
            refused = Refused(ErrorCode.INTERNAL, "the server failed: its log says why")
        self._service.counters.errors[refused.code.value] += 1
        if request.writer.output_size:
            raise Spoilt("http: an answer failed half-way")
        return json_answer(refused.as_dict(), status=refused.code.status, headers=refused.headers)

    async def _answer(self, request: web.BaseRequest, peer: Peer) -> web.StreamResponse:
        service = self._service
        route, path_values = self._router.find(request.method, request.rel_url.raw_path)
        service.counters.requests[route.name] += 1
        if route.is_public:
            return cast("StateAnswer", route.operation)(service)  # what the table has for public routes
        if service.is_draining or not service.is_open:
            raise Refused(
                ErrorCode.UNAVAILABLE,
                "server: stopping" if service.is_draining else "server: starting: its tiers are being opened",
                headers={"Retry-After": "1", "Connection": "close"},
            )
        shown = _shown(request)
        caller = service.callers.get(self._gate.admit(shown, route.scope))
        peer.note_admitted()
        with caller.request(), served_request(request, route.path) as served:
            body = Body(request, service.limits, service.counters, service.body_room, service.clock)
            try:
                values = _parameters(route, path_values, request)
                if route.body is not None:
                    values |= await _json_body(body, route.body, service.limits.max_json_bytes)
                is_admitted = partial(self._gate.still_admits, shown, caller.identity)
                call = Call(service, request, caller, Values(values), body, peer, is_admitted)
                del values
                answer = await cast("Operation", route.operation)(call)  # what the table has for the others
                served.note_status(answer.status)
                return answer
            except KVStoreError as error:
                code = refusal_of(error).code
                served.note_status(code.status, code.value)
                raise
            finally:
                body.end()


def _shown(request: web.BaseRequest) -> Shown:
    headers = request.headers
    return Shown(
        authorization=headers.getall("Authorization", ()),
        host=headers.getall("Host", ()),
        origin=headers.getall("Origin", ()),
        peer=request.remote or "",
    )


async def _json_body(body: Body, schema: Schema, max_bytes: int) -> dict[str, object]:
    body.require_plain(_JSON_TYPE)
    value = parse_json(await body.whole(max_bytes))
    check(schema, value, "body")
    assert isinstance(value, dict), "the schema allows only an object"
    return value


def _parameters(route: Route, path_values: Mapping[str, str], request: web.BaseRequest) -> dict[str, object]:
    """Return the checked parameters of path and query."""
    expectation = request.headers.get("Expect", "100-continue")
    if expectation.lower() != "100-continue":
        raise Refused(ErrorCode.EXPECTATION_FAILED, "Expect: only 100-continue is understood")
    query = request.rel_url.query
    texts = {**path_values}
    for name, text in query.items():
        if name in texts:
            raise Refused(
                ErrorCode.BAD_REQUEST, f"query: {ascii(name)[:80]} is given twice, or in the path too"
            )
        if name not in route.parameters:
            known = [known for known in route.parameters if known not in path_values]
            raise Refused(
                ErrorCode.BAD_REQUEST,
                f"query: {ascii(name)[:80]} is unknown: there are {', '.join(known) or 'none'}",
            )
        texts[name] = text
    values: dict[str, object] = {}
    for name, text in texts.items():
        schema = route.parameters[name]
        values[name] = _typed(schema, text)
        check(schema, values[name], name)
    return values


def _typed(schema: Schema, text: str) -> object:
    """Return a parameter's text as what its schema wants, if it is that."""
    if schema["type"] == "integer" and _INTEGER.fullmatch(text):
        return int(text)
    if schema["type"] == "number" and _NUMBER.fullmatch(text):
        return float(text)
    return text
