"""Operations on records: ``/v1/records/{collection}`` and ``/v1/records/{collection}/{name}``."""

import os

from aiohttp import web

from kvstore.checksum import checksum
from kvstore.http.blocks import PAYLOAD_TYPE, REASON_HEADER
from kvstore.http.refusal import ErrorCode, Refused
from kvstore.http.schema import check
from kvstore.http.schemas import RECORD_TOKEN, TENANT_SALT
from kvstore.http.service import CHECKSUM_HEADER, COMMON_HEADERS, Call, json_answer
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
    MAX_LISTED_RECORDS,
    MAX_RECORD_BYTES,
    MAX_TTL_S,
    TOKEN_BYTES,
    RecordKey,
    RecordOutcome,
    RecordPut,
    RecordWrite,
)

_DEFAULT_TIMEOUT_S = 5.0
_CODES = {
    RecordOutcome.CONFLICT: ErrorCode.CONFLICT,
    RecordOutcome.QUOTA: ErrorCode.QUOTA,
    RecordOutcome.FULL: ErrorCode.NO_ROOM,
    RecordOutcome.UNAVAILABLE: ErrorCode.UNAVAILABLE,
}


async def list_records(call: Call) -> web.StreamResponse:
    """Name the records of a collection."""
    values = call.values
    found = await call.service.records.names(
        _salt(call),
        values.need_text("collection"),
        prefix=values.text("prefix") or "",
        after=values.text("after") or "",
        limit=values.integer("limit") or MAX_LISTED_RECORDS,
        timeout_s=_timeout_s(call),
    )
    return json_answer({"records": [info.as_dict() for info in found]})


async def get_record(call: Call) -> web.StreamResponse:
    """Send the value of a record."""
    found = await call.service.records.get(_key(call), timeout_s=_timeout_s(call))
    record = found.record
    if record is None:
        assert found.reason is not None, "a record that is absent has a reason"
        word = found.reason.value
        raise Refused(
            ErrorCode.NO_RECORD,
            f"record: there is none: {word}",
            headers={REASON_HEADER: word},
            details={"reason": word},
        )
    headers = {
        **COMMON_HEADERS,
        "Content-Type": PAYLOAD_TYPE,
        "ETag": etag_of(record.version),
        CHECKSUM_HEADER: f"{checksum(record.value):016x}",
        PLACE_HEADER: record.place.value,
        CURRENT_HEADER: "true" if record.is_current else "false",
        LEFT_HEADER: f"{record.expires_in_s:.3f}",
    }
    return web.Response(body=record.value, headers=headers)


async def put_record(call: Call) -> web.StreamResponse:
    """Store a value under a name, if the condition holds."""
    key, if_version = _key(call), _condition(call)
    call.body.require_plain(PAYLOAD_TYPE)
    value = await call.body.whole(MAX_RECORD_BYTES)
    expected = call.checksum_header()
    if expected is not None and expected != checksum(value):
        raise Refused(ErrorCode.CHECKSUM_MISMATCH, "body: its checksum is not the one that the request says")
    ttl_s = call.values.number("ttl_s")
    put = RecordPut(key, value, MAX_TTL_S if ttl_s is None else ttl_s, if_version, _token(call))
    write = await call.service.records.put(put, timeout_s=_timeout_s(call))
    if not write.is_stored:
        raise _refusal(write)
    return json_answer(_told(write), headers={"ETag": etag_of(write.version)})


async def delete_record(call: Call) -> web.StreamResponse:
    """Forget a record."""
    if any(name in call.request.headers for name in ("If-Match", "If-None-Match")):
        raise Refused(ErrorCode.BAD_REQUEST, "If-Match: a record is forgotten whatever its version")
    return json_answer({"dropped": await call.service.records.drop(_key(call), timeout_s=_timeout_s(call))})


def _told(write: RecordWrite) -> dict[str, object]:
    return {
        "outcome": write.outcome.value,
        "version": write.version,
        "place": None if write.place is None else write.place.value,
        "is_doubtful": write.is_doubtful,
        "problem": write.problem,
    }


def _refusal(write: RecordWrite) -> Refused:
    text = write.problem or f"it has version {write.version}"
    headers = {"Retry-After": "1"} if write.outcome is RecordOutcome.UNAVAILABLE else {}
    if write.outcome is RecordOutcome.CONFLICT and write.version:
        headers["ETag"] = etag_of(write.version)
    return Refused(
        _CODES[write.outcome],
        f"record: not stored: {write.outcome.value}: {text}",
        headers=headers,
        details=_told(write),
    )


def _timeout_s(call: Call) -> float:
    return _DEFAULT_TIMEOUT_S if call.timeout_s is None else call.timeout_s


def _key(call: Call) -> RecordKey:
    return RecordKey(call.values.need_text("collection"), call.values.need_text("name"), _salt(call))


def _salt(call: Call) -> bytes:
    """Return the salt of the tenant whose records are meant. Raises Forbidden if it is not the caller's."""
    text = call.request.headers.get(SALT_HEADER, "")
    check(TENANT_SALT, text, SALT_HEADER)
    return call.service.tenancy.claim_salt(call.identity, bytes.fromhex(text))


def _token(call: Call) -> bytes:
    """Return the name of the put; one that names none is another one each time."""
    text = call.request.headers.get(TOKEN_HEADER)
    if text is None:
        return os.urandom(TOKEN_BYTES)
    check(RECORD_TOKEN, text, TOKEN_HEADER)
    return bytes.fromhex(text)


def _condition(call: Call) -> int | None:
    """Return the version that the record must have: 0 none at all, None any."""
    headers = call.request.headers
    matches, others = headers.getall("If-Match", []), headers.getall("If-None-Match", [])
    if not matches and not others:
        return None
    if not matches and others == ["*"]:
        return 0
    version = version_of_etag(matches[0]) if len(matches) == 1 and not others else None
    if version is None:
        raise Refused(
            ErrorCode.BAD_REQUEST, 'If-Match: expected one version as ETag gives it, or If-None-Match: "*"'
        )
    return version
