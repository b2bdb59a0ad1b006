"""Protocol: aiohttp's, answering what is not HTTP as everything else is answered, without a traceback."""

import asyncio
import logging

from aiohttp import web

from kvstore.http.counters import HttpCounters
from kvstore.http.refusal import ErrorCode, Refused
from kvstore.http.service import json_answer

logger = logging.getLogger(__name__)

_LINGER_S = 2.0
"""How long what a client goes on sending is thrown away, so that it sees its answer."""

MAX_LINE_BYTES = 4096
MAX_HEADER_BYTES = 8190
MAX_HEADERS = 64


class Protocol(web.RequestHandler):
    """One connection's protocol. Time is kept by the Guard before it."""

    def __init__(self, server: web.Server, counters: HttpCounters) -> None:
        super().__init__(
            server,
            loop=asyncio.get_running_loop(),
            access_log=None,  # type: ignore[arg-type]  # none is wanted, and aiohttp asks for that
            logger=logger,
            lingering_time=_LINGER_S,
            auto_decompress=False,
            max_line_size=MAX_LINE_BYTES,
            max_field_size=MAX_HEADER_BYTES,
            max_headers=MAX_HEADERS,
        )
        self._counters = counters

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answer what cannot be read as a request; the connection ends.

        Raises:
            ConnectionError: something was sent already.
        """
        if request.writer.output_size:
            raise ConnectionError("http: an answer failed half-way") from exc
        if 400 <= status < 500:
            self._counters.malformed_requests += 1
            response = self.malformed()
        else:
            logger.error("http: a request failed", exc_info=exc)
            response = self.failed()
        response.force_close()
        return response

    def malformed(self) -> web.Response:
        """Return the answer to what is not HTTP."""
        return self._refuse(ErrorCode.BAD_REQUEST, "request: not HTTP, or its head is above the limits")

    def failed(self) -> web.Response:
        """Return the answer after a fault of the server itself."""
        return self._refuse(ErrorCode.INTERNAL, "the server failed: its log says why")

    def _refuse(self, code: ErrorCode, message: str) -> web.Response:
        refused = Refused(code, message)
        self._counters.errors[code.value] += 1
        return json_answer(refused.as_dict(), status=code.status)
