"""Refused: a request that is answered with an error, and the codes that clients tell errors by."""

import enum
from collections.abc import Mapping

from kvstore.errors import (
    Forbidden,
    InvalidLayout,
    InvalidRequest,
    InvalidTokens,
    KVStoreError,
    NamespaceNotOpen,
    ServerUnavailable,
    TierFull,
    TierUnavailable,
    TimedOut,
    TooManyFailures,
    Unauthorized,
)


class ErrorCode(enum.Enum):
    """What went wrong, for programs. A closed set: codes are never renamed."""

    BAD_REQUEST = "bad_request"
    CHECKSUM_MISMATCH = "checksum_mismatch"
    UNAUTHORIZED = "unauthorized"
    FORBIDDEN = "forbidden"
    NOT_FOUND = "not_found"
    UNKNOWN_NAMESPACE = "unknown_namespace"
    UNKNOWN_LEASE = "unknown_lease"
    MISS = "miss"
    NO_RECORD = "no_record"
    METHOD_NOT_ALLOWED = "method_not_allowed"
    REQUEST_TIMEOUT = "request_timeout"
    CONFLICT = "conflict"
    TOO_LARGE = "too_large"
    UNSUPPORTED_MEDIA_TYPE = "unsupported_media_type"
    EXPECTATION_FAILED = "expectation_failed"
    TOO_MANY_REQUESTS = "too_many_requests"
    INTERNAL = "internal"
    UNAVAILABLE = "unavailable"
    QUOTA = "quota"
    NO_ROOM = "no_room"
    TIMED_OUT = "timed_out"

    @property
    def status(self) -> int:
        """The status that an answer with this code has."""
        return _STATUS[self]


_STATUS = {
    ErrorCode.BAD_REQUEST: 400,
    ErrorCode.CHECKSUM_MISMATCH: 400,
    ErrorCode.UNAUTHORIZED: 401,
    ErrorCode.FORBIDDEN: 403,
    ErrorCode.NOT_FOUND: 404,
    ErrorCode.UNKNOWN_NAMESPACE: 404,
    ErrorCode.UNKNOWN_LEASE: 404,
    ErrorCode.MISS: 404,
    ErrorCode.NO_RECORD: 404,
    ErrorCode.METHOD_NOT_ALLOWED: 405,
    ErrorCode.REQUEST_TIMEOUT: 408,
    ErrorCode.CONFLICT: 412,
    ErrorCode.TOO_LARGE: 413,
    ErrorCode.UNSUPPORTED_MEDIA_TYPE: 415,
    ErrorCode.EXPECTATION_FAILED: 417,
    ErrorCode.TOO_MANY_REQUESTS: 429,
    ErrorCode.INTERNAL: 500,
    ErrorCode.UNAVAILABLE: 503,
    ErrorCode.QUOTA: 507,
    ErrorCode.NO_ROOM: 507,
    ErrorCode.TIMED_OUT: 504,
}

_NOT_OPEN = "namespace: not open for this caller: POST its fields to /v1/namespaces first"
_CODES: tuple[tuple[type[KVStoreError], ErrorCode], ...] = (
    (NamespaceNotOpen, ErrorCode.UNKNOWN_NAMESPACE),
    (InvalidRequest, ErrorCode.BAD_REQUEST),
    (InvalidLayout, ErrorCode.BAD_REQUEST),
    (InvalidTokens, ErrorCode.BAD_REQUEST),
    (TooManyFailures, ErrorCode.TOO_MANY_REQUESTS),
    (Unauthorized, ErrorCode.UNAUTHORIZED),
    (Forbidden, ErrorCode.FORBIDDEN),
    (TierFull, ErrorCode.UNAVAILABLE),
    (TierUnavailable, ErrorCode.UNAVAILABLE),
    (TimedOut, ErrorCode.TIMED_OUT),
    (ServerUnavailable, ErrorCode.UNAVAILABLE),
)


class Refused(KVStoreError):
    """A request that is answered with an error. ``details`` are further members of the answer."""

    def __init__(
        self,
        code: ErrorCode,
        message: str,
        *,
        headers: Mapping[str, str] | None = None,
        details: Mapping[str, object] | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.headers = dict(headers or {})
        self.details = dict(details or {})

    def as_dict(self) -> dict[str, object]:
        """Return the body of the answer."""
        return {"error": {"code": self.code.value, "message": str(self)}, **self.details}


def unknown_namespace() -> Refused:
    """Return the one answer to a namespace that is unknown, forgotten, or not the caller's."""
    return Refused(ErrorCode.UNKNOWN_NAMESPACE, _NOT_OPEN)


def refusal_of(error: KVStoreError) -> Refused:
    """Return the answer to an error of the store."""
    if isinstance(error, Refused):
        return error
    code = next((code for kind, code in _CODES if isinstance(error, kind)), ErrorCode.INTERNAL)
    if code is ErrorCode.UNKNOWN_NAMESPACE:
        return unknown_namespace()
    message = "the server failed: its log says why" if code is ErrorCode.INTERNAL else str(error)
    headers = {}
    if isinstance(error, TooManyFailures):
        headers["Retry-After"] = str(error.wait_s)
    elif isinstance(error, Unauthorized):
        headers["WWW-Authenticate"] = "Bearer"
    return Refused(code, message, headers=headers)
