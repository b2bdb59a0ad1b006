"""The OpenAPI 3.1 document of the API, made from the table of routes."""

from importlib import metadata
from typing import Any

from kvstore.http import schemas
from kvstore.http.blocks import ORIGIN_HEADER, PAYLOAD_TYPE, REASON_HEADER
from kvstore.http.refusal import ErrorCode
from kvstore.http.routes import ROUTES, Route
from kvstore.http.schema import Schema
from kvstore.http.service import CHECKSUM_HEADER
from kvstore.record_headers import CURRENT_HEADER, LEFT_HEADER, PLACE_HEADER, SALT_HEADER, TOKEN_HEADER

_PUT_STATUSES = {
    code.status for code in (ErrorCode.CONFLICT, ErrorCode.UNAVAILABLE, ErrorCode.QUOTA, ErrorCode.NO_ROOM)
}
"""Statuses of puts of records that say how the put ended."""

Json = dict[str, Any]
"""A JSON object. Any: JSON."""

_JSON_TYPE = "application/json"
_DESCRIPTION = """Blocks of a KV cache, stored and fetched by key. A block's key is the SHA-256 of its
parent's key and its own tokens; the first block's parent is the digest of its namespace. A miss is an answer
with a reason, never a failure."""
_BINARY: Schema = {"type": "string", "format": "binary"}
_FRAMED = "The length of a JSON head as u32, little-endian; the head; the payloads back to back."
_FETCH_HEAD = "Head: blocks, length_bytes, checksums, origins, reason."
_MISS_STATUS = ErrorCode.MISS.status
_MISSING = ("get_block", "head_block")
_ABOUT_RECORDS = "/v1/records/"
_STORE_HEAD = "Head: namespace, keys, start, parent, part, length_bytes, checksums, timeout_s, hints."


def openapi_document() -> Json:
    """Return the document."""
    paths: dict[str, Json] = {}
    for route in ROUTES:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "tiered-kvstore",
            "version": metadata.version("tiered-kvstore"),
            "description": " ".join(_DESCRIPTION.split()),
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "security": [{}, {"key": []}],
        "paths": paths,
        "components": {
            "securitySchemes": {
                "key": {"type": "http", "scheme": "bearer", "description": "A key of the server's keyring."}
            },
            "schemas": _named_schemas(),
            "responses": _named_responses(),
        },
    }


def _operation(route: Route) -> Json:
    operation: Json = {
        "operationId": route.name,
        "summary": route.summary,
        "responses": _responses(route),
    }
    if route.is_public:
        operation["security"] = [{}]
    if route.scope is not None:
        operation["description"] = f"Scope: {route.scope.value}."
    parameters = [_parameter(route, name, schema) for name, schema in route.parameters.items()]
    if route.name == "put_block":
        parameters.append(
            _header(CHECKSUM_HEADER, schemas.CHECKSUM) | {"name": CHECKSUM_HEADER, "in": "header"}
        )
    if route.path.startswith(_ABOUT_RECORDS):
        parameters += _record_headers(route)
    if parameters:
        operation["parameters"] = parameters
    if route.body is not None:
        operation["requestBody"] = {"required": True, "content": _json_content(route.body)}
    if route.takes_payload:
        content: Json = {PAYLOAD_TYPE: {"schema": _BINARY}}
        text = f"{_FRAMED} {_STORE_HEAD}" if route.name == "store" else "The payload."
        operation["requestBody"] = {"required": True, "description": text, "content": content}
    return operation


def _parameter(route: Route, name: str, schema: Schema) -> Json:
    is_in_path = name in route.path_names
    parameter: Json = {"name": name, "in": "path" if is_in_path else "query", "schema": schema}
    if is_in_path:
        parameter["required"] = True
    return parameter


def _header(text: str, schema: Schema) -> Json:
    return {"schema": schema, "description": str(schema.get("description", text))}


def _responses(route: Route) -> Json:
    responses: Json = {str(status): _good(route) for status in route.statuses}
    if route.is_public:
        return responses
    for status in sorted({code.status for code in ErrorCode if _may_answer(route, code)}):
        kind = _kind(route, status)
        if route.method == "HEAD":
            kind += "-without-body"
        responses[str(status)] = {"$ref": f"#/components/responses/{kind}-{status}"}
    return responses


def _kind(route: Route, status: int) -> str:
    """Return the name of the answers that a route gives with the status of an error."""
    if status == _MISS_STATUS and route.name in _MISSING:
        return "miss"
    if route.name == "get_record" and status == ErrorCode.NO_RECORD.status:
        return "absent"
    if route.name == "put_record" and status in _PUT_STATUSES:
        return "unstored"
    return "error"


def _record_headers(route: Route) -> list[Json]:
    """Return the headers that an operation on records looks at."""
    schemas_of = {SALT_HEADER: schemas.TENANT_SALT}
    if route.name == "put_record":
        schemas_of |= {
            "If-Match": schemas.RECORD_CONDITION,
            "If-None-Match": schemas.RECORD_ABSENCE,
            TOKEN_HEADER: schemas.RECORD_TOKEN,
            CHECKSUM_HEADER: schemas.CHECKSUM,
        }
    return [_header(name, schema) | {"name": name, "in": "header"} for name, schema in schemas_of.items()]


def _named_responses() -> Json:
    """Return the answers that are no good ones: one for each status, with its codes."""
    responses: Json = {}
    for status in sorted({code.status for code in ErrorCode}):
        words = [code.value for code in ErrorCode if code.status == status]
        without_body: Json = {"description": f"Codes: {', '.join(words)}."}
        responses[f"error-without-body-{status}"] = without_body
        responses[f"error-{status}"] = {**without_body, "content": _json_content(schemas.ERROR)}
        if status in _PUT_STATUSES:
            responses[f"unstored-{status}"] = {
                **without_body,
                "content": _json_content(schemas.RECORD_REFUSED),
            }
        if status == ErrorCode.NO_RECORD.status:
            responses[f"absent-{status}"] = {**without_body, "content": _json_content(schemas.RECORD_ABSENT)}
    miss: Json = {
        "description": "A miss, with its reason, or a namespace that is not open.",
        "headers": {REASON_HEADER: {"schema": schemas.MISS["properties"]["reason"]}},
    }
    responses[f"miss-without-body-{_MISS_STATUS}"] = miss
    responses[f"miss-{_MISS_STATUS}"] = {**miss, "content": _json_content(schemas.MISS)}
    return responses


def _named_schemas() -> Json:
    """Return the schemas of bodies by their names."""
    return {
        _title(name): value
        for name, value in vars(schemas).items()
        if name.isupper() and not name.startswith("_") and isinstance(value, dict) and "properties" in value
    }


def _title(name: str) -> str:
    return "".join(word.capitalize() for word in name.split("_"))


def _reference(schema: Schema) -> Json:
    name = next((name for name, known in _named_schemas().items() if known is schema), None)
    return dict(schema) if name is None else {"$ref": f"#/components/schemas/{name}"}


def _json_content(schema: Schema) -> Json:
    return {_JSON_TYPE: {"schema": _reference(schema)}}


def _good(route: Route) -> Json:
    if route.result is not None:
        return {"description": "Done.", "content": _json_content(route.result)}
    if route.name == "events":
        events = {"text/event-stream": {"schema": {"type": "string"}}}
        return {"description": "Server-sent events, until timeout_s has passed.", "content": events}
    if route.content:
        text = "Prometheus text." if route.name == "metrics" else "The file."
        return {"description": text, "content": {route.content: {"schema": {"type": "string"}}}}
    response: Json = {"description": "The payload."}
    if route.name == "fetch":
        response["description"] = f"{_FRAMED} {_FETCH_HEAD}"
    elif route.name == "get_record":
        response["headers"] = {
            name: {"schema": {"type": "string"}, "description": text}
            for name, text in {
                "ETag": "Its version.",
                PLACE_HEADER: "Where it was read.",
                CURRENT_HEADER: "true if that is where versions are decided, else false.",
                LEFT_HEADER: "Seconds until its time is over.",
            }.items()
        }
        response["headers"][CHECKSUM_HEADER] = {"schema": schemas.CHECKSUM}
    else:
        response["headers"] = {
            ORIGIN_HEADER: {"schema": {"type": "string"}, "description": "Tier it came from."}
        }
    if route.name == "get_block":
        response["headers"][CHECKSUM_HEADER] = {"schema": schemas.CHECKSUM}
    if route.method != "HEAD":
        response["content"] = {PAYLOAD_TYPE: {"schema": _BINARY}}
    return response


def _may_answer(route: Route, code: ErrorCode) -> bool:
    """Whether a route may be answered with a code."""
    has_body = route.body is not None or route.takes_payload
    names_blocks = route.scope is not None and ("namespace" in route.parameters or _is_about_blocks(route))
    needed = {
        ErrorCode.NOT_FOUND: False,
        ErrorCode.METHOD_NOT_ALLOWED: False,
        ErrorCode.CHECKSUM_MISMATCH: route.takes_payload,
        ErrorCode.UNKNOWN_NAMESPACE: names_blocks,
        ErrorCode.UNKNOWN_LEASE: route.name in ("release", "renew"),
        ErrorCode.MISS: route.name in _MISSING,
        ErrorCode.NO_RECORD: route.name == "get_record",
        ErrorCode.CONFLICT: route.name == "put_record",
        ErrorCode.QUOTA: route.name == "put_record",
        ErrorCode.NO_ROOM: route.name == "put_record",
        ErrorCode.REQUEST_TIMEOUT: has_body,
        ErrorCode.TOO_LARGE: has_body,
        ErrorCode.UNSUPPORTED_MEDIA_TYPE: has_body,
    }
    return needed.get(code, True)


def _is_about_blocks(route: Route) -> bool:
    return route.name == "store" or (route.body is not None and "namespace" in route.body["properties"])
