"""Body: a request's body, read piece by piece, in bounded time and size, straight to where it belongs."""

import asyncio
import time
from collections.abc import Callable

from aiohttp import web

from kvstore.http.counters import HttpCounters
from kvstore.http.limits import Limits
from kvstore.http.refusal import ErrorCode, Refused

_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


class BodyRoom:
    """The memory for bodies that are taken in whole, of all requests together. One event loop's thread."""

    def __init__(self, max_bytes: int, counters: HttpCounters) -> None:
        self._max_bytes = max_bytes
        self._counters = counters
        self.used_bytes = 0

    def take(self, num_bytes: int) -> None:
        """Take some of it.

        Raises:
            Refused: others have it all.
        """
        if self.used_bytes + num_bytes > self._max_bytes:
            self._counters.refused_bodies += 1
            raise Refused(
                ErrorCode.UNAVAILABLE,
                f"body: those of other requests take {self.used_bytes} bytes, {self._max_bytes} are for all",
                headers={"Retry-After": "1", "Connection": "close"},
            )
        self.used_bytes += num_bytes

    def give_back(self, num_bytes: int) -> None:
        """Let others have some of it."""
        self.used_bytes -= num_bytes


class Body:
    """The body of one request. Whoever sends it too slowly gets 408 and is dropped.

    A client that waits for 100 Continue gets it with the first read, so after all that could refuse its
    request has been looked at. ``end`` must follow: what was taken in whole counts until then.
    """

    def __init__(
        self,
        request: web.BaseRequest,
        limits: Limits,
        counters: HttpCounters,
        room: BodyRoom,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._request = request
        self._room = room
        self._held_bytes = 0
        self._limits = limits
        self._counters = counters
        self._clock = clock
        self._rest = memoryview(b"")
        self._is_begun = False
        self._waited_s = 0.0
        self._num_read_bytes = 0

    @property
    def declared_bytes(self) -> int | None:
        """Its length as the request's head says; None if that is not said."""
        return self._request.content_length

    def require_plain(self, media_type: str) -> None:
        """Refuse a body that is compressed or of another type.

        Raises:
            Refused: it is.
        """
        headers = self._request.headers
        if headers.get("Content-Encoding", "identity").strip().lower() != "identity":
            raise Refused(
                ErrorCode.UNSUPPORTED_MEDIA_TYPE, "body: no Content-Encoding is taken: send it plain"
            )
        if "Content-Type" in headers and self._request.content_type != media_type:
            raise Refused(ErrorCode.UNSUPPORTED_MEDIA_TYPE, f"body: expected Content-Type: {media_type}")

    def require_length(self, length_bytes: int) -> None:
        """Refuse a body whose head says another length.

        Raises:
            Refused: it does.
        """
        if self.declared_bytes not in (None, length_bytes):
            raise Refused(
                ErrorCode.BAD_REQUEST, f"body: {self.declared_bytes} bytes, expected {length_bytes}"
            )

    async def whole(self, max_bytes: int) -> bytes:
        """Return all of a small body.

        Raises:
            Refused: it is longer, too slow, or breaks HTTP.
        """
        if (self.declared_bytes or 0) > max_bytes:
            raise _too_large(max_bytes)
        pieces: list[bytes] = []
        num_bytes = 0
        while piece := await self.piece(max_bytes):
            num_bytes += len(piece)
            if num_bytes > max_bytes:
                raise _too_large(max_bytes)
            self._hold(piece)
            pieces.append(bytes(piece))
        return b"".join(pieces)

    def end(self) -> None:
        """Give back the memory that it counts for: the request is over. Idempotent."""
        self._room.give_back(self._held_bytes)
        self._held_bytes = 0

    def _hold(self, piece: memoryview) -> None:
        self._room.take(len(piece))
        self._held_bytes += len(piece)

    async def exactly(self, length_bytes: int) -> bytes:
        """Return the next bytes.

        Raises:
            Refused: the body ends before, is too slow, or breaks HTTP.
        """
        pieces: list[bytes] = []
        while length_bytes:
            piece = await self.need_piece(length_bytes)
            self._hold(piece)
            pieces.append(bytes(piece))
            length_bytes -= len(piece)
        return b"".join(pieces)

    async def need_piece(self, max_bytes: int) -> memoryview:
        """Return the next one to ``max_bytes`` bytes; valid until the next call.

        Raises:
            Refused: the body ends here, is too slow, or breaks HTTP.
        """
        piece = await self.piece(max_bytes)
        if not piece:
            raise Refused(
                ErrorCode.BAD_REQUEST, f"body: ends after {self._num_read_bytes} bytes, {max_bytes} too early"
            )
        return piece

    async def piece(self, max_bytes: int) -> memoryview:
        """Return up to ``max_bytes`` of what comes next, nothing at the end; valid until the next call.

        Raises:
            Refused: it is too slow, or breaks HTTP.
        """
        if not self._rest:
            self._rest = memoryview(await self._receive())
        piece, self._rest = self._rest[:max_bytes], self._rest[max_bytes:]
        self._num_read_bytes += len(piece)
        return piece

    async def begin(self) -> None:
        """Wait until something of it has come, so that nothing is done for a client that sends nothing.

        Raises:
            Refused: it is too slow, or breaks HTTP.
        """
        if not self._rest:
            self._rest = memoryview(await self._receive())

    async def require_end(self) -> None:
        """Check that nothing follows.

        Raises:
            Refused: more does.
        """
        if await self.piece(1):
            raise Refused(ErrorCode.BAD_REQUEST, f"body: goes on after {self._num_read_bytes - 1} bytes")

    async def _receive(self) -> bytes:
        if not self._is_begun:
            self._is_begun = True
            await self._invite()
        # Its sender answers for the time that is waited here, and not for what the store takes in between.
        slowest_s = self._limits.stall_s + self._num_read_bytes / self._limits.body_bytes_per_s
        began_s = self._clock()
        try:
            async with asyncio.timeout(min(self._limits.stall_s, slowest_s - self._waited_s)):
                data = await self._request.content.readany()
        except TimeoutError:
            self._counters.slow_clients += 1
            waited_s = self._waited_s + self._clock() - began_s
            raise Refused(
                ErrorCode.REQUEST_TIMEOUT,
                f"body: too slow: {self._num_read_bytes} bytes in {waited_s:.1f} s",
                headers={"Connection": "close"},
            ) from None
        except web.RequestPayloadError:
            raise Refused(ErrorCode.BAD_REQUEST, "body: cut short, or its chunks are damaged") from None
        self._waited_s += self._clock() - began_s
        self._counters.received_bytes += len(data)
        return data

    async def _invite(self) -> None:
        """Send 100 Continue to a client that waits for it."""
        if self._request.headers.get("Expect", "").lower() == "100-continue":
            await self._request.writer.write(_CONTINUE)
            self._request.writer.output_size = 0  # what came before the status line does not count as sent


def _too_large(max_bytes: int) -> Refused:
    return Refused(ErrorCode.TOO_LARGE, f"body: more than {max_bytes} bytes")
