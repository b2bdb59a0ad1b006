"""ApiError: what a client is told instead of an answer, in OpenAI's shape or in TGI's."""

from kvstore.errors import (
    Forbidden,
    InvalidRequest,
    KVStoreError,
    PromptTooLong,
    TierFull,
    TooManyFailures,
    Unauthorized,
)
from kvstore_engine_adapter.generation import EngineBusy, EngineClosed

_RETRY_AFTER_S = 1
_TGI_KINDS = {503: "overloaded", 429: "overloaded", 424: "generation"}


class ApiError(Exception):
    """An error for the client: an HTTP status and what OpenAI's error object says.

    ``retry_after_s`` is when to come back, for an error that passes.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s

    @property
    def body(self) -> dict[str, object]:
        """OpenAI's error object."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    @property
    def tgi_status(self) -> int:
        """The status that TGI answers with: 422 for what it calls a failed validation, 424 for a failure."""
        return {400: 422, 500: 424}.get(self.status, self.status)

    @property
    def tgi_body(self) -> dict[str, object]:
        """TGI's error object."""
        kind = _TGI_KINDS.get(self.tgi_status, "validation")
        return {"error": self.message, "error_type": kind}

    @property
    def headers(self) -> dict[str, str]:
        """Headers of the answer beside its type."""
        headers = {} if self.retry_after_s is None else {"Retry-After": str(self.retry_after_s)}
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return headers


def api_error(error: Exception, *, prompt_param: str | None = None) -> ApiError:
    """Return what a client is told of a failure; what is not meant for it stays in the log.

    ``prompt_param`` is the parameter that holds the route's prompt.
    """
    match error:
        case ApiError():
            return error
        case Unauthorized() | Forbidden():
            return _of_doors(error)
        case PromptTooLong():
            return ApiError(400, str(error), param=prompt_param, code="context_length_exceeded")
        case InvalidRequest():
            return ApiError(400, str(error))
        case EngineBusy() | EngineClosed() | TierFull():
            return ApiError(
                503, str(error), kind="overloaded_error", code="overloaded", retry_after_s=_RETRY_AFTER_S
            )
        case KVStoreError() | ArithmeticError():
            return ApiError(500, str(error), kind="server_error")
        case _:
            return ApiError(500, "the server failed; its log says why", kind="server_error")


def _of_doors(error: Unauthorized | Forbidden) -> ApiError:
    match error:
        case TooManyFailures(wait_s=wait_s):
            return ApiError(
                429, str(error), kind="rate_limit_error", code="rate_limit_exceeded", retry_after_s=wait_s
            )
        case Unauthorized():
            return ApiError(401, str(error), kind="authentication_error", code="invalid_api_key")
        case _:
            return ApiError(403, str(error), kind="permission_error", code="forbidden")
