"""HttpFace: listens, lets connections in up to its cap, and serves the API on them."""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping

from aiohttp import web

from kvstore.access_log import AccessLog
from kvstore.doors import Doors
from kvstore.event_feed import EventFeed
from kvstore.http.counters import HttpCounters
from kvstore.http.dispatch import Dispatcher
from kvstore.http.limits import Limits
from kvstore.http.listener import Listener, full_answer
from kvstore.http.openapi import openapi_document
from kvstore.http.page_files import page_files
from kvstore.http.protocol import Protocol
from kvstore.http.service import HttpService, name_answer
from kvstore.manager import BlockManager
from kvstore.record_store import RecordStore
from kvstore.tier import SlotTier

logger = logging.getLogger(__name__)

_END_S = 1.0
_LATE_S = 2.0
_FULL = full_answer(b'{"error": {"code": "unavailable", "message": "server: too many connections"}}')


class HttpFace:
    """Serves one manager over HTTP on one event loop.

    ``listen`` takes the address before anything of the store is touched. Until ``start``, and again once
    ``stop`` was called, ``/healthz`` and ``/readyz`` are answered and everything else is refused with 503.
    The manager is opened between the two and closed after ``stop`` by whoever owns it.
    """

    def __init__(
        self,
        manager: BlockManager,
        top: SlotTier,
        host_port: tuple[str, int],
        *,
        limits: Limits | None = None,
        doors: Doors | None = None,
        lease_s: float = 30.0,
        server_stats: Callable[[], Mapping[str, object]] = dict,
        records: RecordStore | None = None,
        feed: EventFeed | None = None,
        access_log: AccessLog | None = None,
    ) -> None:
        self._doors = doors or Doors()
        self._limits = limits or Limits()
        self._service = HttpService(
            manager=manager,
            top=top,
            tenancy=self._doors.tenancy,
            limits=self._limits,
            lease_s=lease_s,
            server_stats=server_stats,
            gate_stats=self._doors.gate.counters.as_dict,
            document=openapi_document(),
            page=page_files(),
            records=records or RecordStore(None),
            feed=feed or EventFeed(manager),
            access_log=access_log,
        )
        self._dispatcher = Dispatcher(self._service, self._doors.gate)
        self._host_port = host_port
        self._server: web.Server | None = None
        self._listener = Listener(
            self._protocol,
            limits=self._limits,
            counters=self.counters,
            tls=self._doors.tls,
            full=_FULL,
            what="[http] listen",
            remedy="max_connections of [http], and ulimit -n",
            clock=self._service.clock,
        )
        self._num_requests = 0
        self._is_idle = asyncio.Event()
        self._is_idle.set()

    @property
    def counters(self) -> HttpCounters:
        """What it has seen."""
        return self._service.counters

    def num_ended_connections(self) -> int:
        """Connections that have ended since the start."""
        return self.counters.connections - self.counters.open_connections

    @property
    def pending_body_bytes(self) -> int:
        """What bodies taken in whole take now, of requests under way."""
        return self._service.body_room.used_bytes

    @property
    def url(self) -> str:
        """Where it is reached; only while it listens."""
        return self._listener.url

    async def listen(self) -> None:
        """Take the address and let connections in.

        Raises:
            InvalidConfig: the address cannot be used.
        """
        self._server = web.Server(self._answer, handler_cancellation=True)
        self._listener.listen(*self._host_port)
        self._doors.start()

    def start(self) -> None:
        """Answer requests, the manager being open."""
        self._service.is_open = True

    async def stop(self, *, drain_s: float = 5.0) -> None:
        """Refuse new requests, answer those under way for up to ``drain_s`` seconds, and end. Idempotent."""
        service = self._service
        service.is_draining = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(drain_s):
                await self._is_idle.wait()
        await self._listener.stop()
        self._doors.stop()
        await self._end_connections()
        service.callers.end()
        await service.late_work.close(patience_s=_LATE_S)
        service.pool.shutdown(wait=False, cancel_futures=True)

    async def _end_connections(self) -> None:
        if self._server is not None:
            self._server.pre_shutdown()
            await self._server.shutdown(_END_S)
        self._listener.abort_all()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_END_S):
                await self._is_idle.wait()
        await asyncio.sleep(0)

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        guard = self._listener.guard_of(request.protocol)
        guard.begin_request(request.content_length)
        self._num_requests += 1
        self._is_idle.clear()
        try:
            response = await self._dispatcher.answer(request, guard)
            if not response.prepared:
                name_answer(request, response)
            return response
        except ConnectionError:
            # What was sent of the answer is not whole: its end must not look like one.
            guard.abort()
            return web.Response()
        except asyncio.CancelledError:
            # What waits to be sent may be bytes of a slot whose lease is over.
            guard.abort()
            raise
        finally:
            guard.end_request()
            self._num_requests -= 1
            if not self._num_requests:
                self._is_idle.set()

    def _protocol(self) -> Protocol:
        assert self._server is not None, "http: not listening"
        return Protocol(self._server, self.counters)
