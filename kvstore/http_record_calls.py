"""HttpRecordCalls: the calls about records, made over HTTP: the same checks, promises and results."""

from collections.abc import Callable
from typing import Any, TypeVar
from urllib.parse import urlencode

from kvstore.checksum import checksum
from kvstore.errors import CorruptBlock, KVStoreError, ProtocolMismatch, ServerUnavailable
from kvstore.http_client_calls import HttpCall
from kvstore.http_link import REQUEST_HEADER, HttpAnswer, HttpRequest, json_object
from kvstore.http_session import HttpSession
from kvstore.http_transport import error_of
from kvstore.record_calls import RecordCalls, read_infos
from kvstore.record_headers import (
    CURRENT_HEADER,
    LEFT_HEADER,
    PLACE_HEADER,
    SALT_HEADER,
    TOKEN_HEADER,
    etag_of,
    version_of_etag,
)
from kvstore.records import (
    MAX_RECORD_BYTES,
    MAX_TTL_S,
    MAX_VERSION,
    Record,
    RecordAbsence,
    RecordInfo,
    RecordKey,
    RecordLookup,
    RecordOutcome,
    RecordPlace,
    RecordPut,
    RecordWrite,
    require_collection,
    require_limit,
    require_prefix,
)
from kvstore.transfer import Buffer

T = TypeVar("T")

_MAX_TIMEOUT_S = 60.0
_ANSWER_RESERVE_S = 0.002
_ERROR_MAX_BYTES = 64 << 10
_CHECKSUM_HEADER = "KVStore-Checksum"
_REFUSED = frozenset({412, 503, 507})
"""Statuses of puts that were not done, whose answers say how they ended."""

_ABSENT = frozenset({404})


class HttpRecordCalls(RecordCalls):
    """Checks the arguments of calls about records, and makes calls over HTTP of them."""

    def put(
        self,
        key: RecordKey,
        value: Buffer,
        *,
        ttl_s: float | None,
        if_version: int | None,
        timeout_s: float | None,
    ) -> HttpCall[RecordWrite]:
        """Store a value under a name."""
        put = self.named_put(key, value, ttl_s=ttl_s, if_version=if_version)
        return HttpCall(
            deadline_s=self.deadline_s(timeout_s, self._state.timeouts.put_s),
            when_away=self.unknown_end,
            work=lambda session: session.ask(_put_request(put, session), _read_write),
        )

    def get(self, key: RecordKey, *, timeout_s: float | None) -> HttpCall[RecordLookup]:
        """Read a record."""
        return self._about("GET", key, _read_lookup, timeout_s, self._state.timeouts.fetch_s, _ABSENT)

    def drop(self, key: RecordKey, *, timeout_s: float | None) -> HttpCall[bool]:
        """Forget a record."""
        self.refuse_if_read_only()
        return self._about("DELETE", key, _read_dropped, timeout_s, self._state.timeouts.control_s)

    def listing(
        self,
        collection: str,
        *,
        prefix: str,
        after: str,
        limit: int,
        tenant_salt: bytes,
        timeout_s: float | None,
    ) -> HttpCall[list[RecordInfo]]:
        """Name the records of a collection."""
        require_collection(collection)
        require_prefix(prefix)
        require_prefix(after, "after")
        require_limit(limit)

        def work(session: HttpSession) -> list[RecordInfo]:
            query = {"prefix": prefix, "after": after, "limit": limit, "timeout_s": _left_s(session)}
            path = f"/v1/records/{collection}?{urlencode(query)}"
            return session.ask(HttpRequest("GET", path, headers=_salt_headers(tenant_salt)), _read_listing)

        return HttpCall(deadline_s=self.deadline_s(timeout_s, self._state.timeouts.control_s), work=work)

    def _about(
        self,
        method: str,
        key: RecordKey,
        take: Callable[[HttpAnswer], T],
        timeout_s: float | None,
        default_s: float,
        accepted: frozenset[int] = frozenset(),
    ) -> HttpCall[T]:
        def work(session: HttpSession) -> T:
            path = f"{_path(key)}?{urlencode({'timeout_s': _left_s(session)})}"
            request = HttpRequest(
                method, path, headers=_salt_headers(key.tenant_salt), accepted_statuses=accepted
            )
            return session.ask(request, take)

        return HttpCall(deadline_s=self.deadline_s(timeout_s, default_s), work=work)


def _path(key: RecordKey) -> str:
    return f"/v1/records/{key.collection}/{key.name}"


def _salt_headers(salt: bytes) -> dict[str, str]:
    return {SALT_HEADER: salt.hex()} if salt else {}


def _left_s(session: HttpSession) -> float:
    """Return how long the store may take: a little less than is left."""
    left_s = session.remaining_s()
    return round(min(_MAX_TIMEOUT_S, max(0.0, left_s - min(_ANSWER_RESERVE_S, left_s / 4))), 6)


def _put_request(put: RecordPut, session: HttpSession) -> HttpRequest:
    query = {"ttl_s": min(put.ttl_s, MAX_TTL_S), "timeout_s": _left_s(session)}
    headers = {
        "Content-Type": "application/octet-stream",
        TOKEN_HEADER: put.token.hex(),
        _CHECKSUM_HEADER: f"{checksum(put.value):016x}",
        **_salt_headers(put.key.tenant_salt),
    }
    if put.if_version == 0:
        headers["If-None-Match"] = "*"
    elif put.if_version is not None:
        headers["If-Match"] = etag_of(put.if_version)
    return HttpRequest(
        "PUT",
        f"{_path(put.key)}?{urlencode(query)}",
        (put.value,) if put.value else (),
        headers,
        accepted_statuses=_REFUSED,
    )


def _read_write(answer: HttpAnswer) -> RecordWrite:
    if not answer.is_error:
        return _write(answer.json())
    body = _refusal_body(answer)
    told = json_object(body)
    if "outcome" not in told:
        raise error_of(answer.status, body)
    return _write(told)


def _write(told: dict[str, Any]) -> RecordWrite:  # Any: JSON
    try:
        version, place = told["version"], told["place"]
        if type(version) is not int or not 0 <= version <= MAX_VERSION:
            raise ValueError("version")
        return RecordWrite(
            RecordOutcome(told["outcome"]),
            version,
            None if place is None else RecordPlace(place),
            told["is_doubtful"] is True,
            str(told["problem"])[:500],
        )
    except (KeyError, ValueError) as error:
        raise ProtocolMismatch("http: how a put ended is malformed") from error


def _read_lookup(answer: HttpAnswer) -> RecordLookup:
    if answer.is_error:
        body = _refusal_body(answer)
        told = json_object(body)
        reason = told.get("reason")
        error = error_of(answer.status, body)
        if told.get("error", {}).get("code") != "no_record":
            raise error
        try:
            return RecordLookup(None, RecordAbsence(reason))
        except ValueError:
            raise ProtocolMismatch("http: an unknown reason of an absence") from error
    value = answer.rest(MAX_RECORD_BYTES)
    if answer.header(_CHECKSUM_HEADER) != f"{checksum(value):016x}":
        raise CorruptBlock("record: what came is not what was sent")
    version = version_of_etag(answer.header("ETag") or "")
    try:
        place, left_s = RecordPlace(answer.header(PLACE_HEADER)), float(answer.header(LEFT_HEADER) or "")
    except ValueError as error:
        raise ProtocolMismatch("http: what is said of a record is malformed") from error
    if version is None or not 0 <= left_s <= MAX_TTL_S:
        raise ProtocolMismatch("http: what is said of a record is malformed")
    return RecordLookup(Record(value, version, left_s, place, answer.header(CURRENT_HEADER) == "true"))


def _read_dropped(answer: HttpAnswer) -> bool:
    dropped = answer.json().get("dropped")
    if not isinstance(dropped, bool):
        raise ProtocolMismatch("http: dropped is no truth")
    return dropped


def _read_listing(answer: HttpAnswer) -> list[RecordInfo]:
    items = answer.json().get("records")
    if not isinstance(items, list):
        raise ProtocolMismatch("http: records are no list")
    return read_infos(items)


def _refusal_body(answer: HttpAnswer) -> bytes:
    """Return the body of an answer with an error's status, if it is the store's answer to this request.

    Raises:
        KVStoreError: it is something else's: a proxy's, say.
    """
    body = answer.rest(_ERROR_MAX_BYTES)
    error: KVStoreError = error_of(answer.status, body)
    if answer.header(REQUEST_HEADER) is None:
        raise error
    try:
        json_object(body)["error"]["code"]
    except (ProtocolMismatch, KeyError, TypeError):
        raise ServerUnavailable(str(error)) from error
    return body
