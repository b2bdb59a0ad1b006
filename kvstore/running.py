"""Running a store: assembled from its configuration, opened, served, and closed again in order."""

import asyncio
import contextlib
import os
import resource
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Self

from kvstore.access_log import AccessLog
from kvstore.assembly import Store, assemble
from kvstore.awake_selector import AwakeSelector
from kvstore.config import Config
from kvstore.config_sections import HttpConfig
from kvstore.errors import InvalidConfig, ServerUnavailable
from kvstore.event_feed import EventFeed
from kvstore.idle_work import IdleWork
from kvstore.log_limit import limit_loop_errors
from kvstore.server import StoreServer
from kvstore.zmq_settings import ZmqSettings

if TYPE_CHECKING:
    from kvstore.http import HttpFace
    from kvstore.zmq_events import ZmqPublisher

_JOIN_PATIENCE_S = 30.0


@contextlib.asynccontextmanager
async def serving(
    config: Config,
    *,
    socket_path: str | os.PathLike[str] | None = None,
    stay_awake: Callable[[float], None] | None = None,
    idle_work: IdleWork | None = None,
    prefill_tokens_per_s: float = 0.0,
    events: ZmqSettings | None = None,
    access_log: AccessLog | None = None,
) -> AsyncIterator[StoreServer]:
    """Open the store a configuration describes and serve it, at ``socket_path`` if one is given.

    ``stay_awake`` is told for how many seconds the loop should not go to sleep, ``idle_work`` is done when it
    has nothing else to do (None: what would wait for that is done at once). ``prefill_tokens_per_s`` is
    the speed of the engines beside it, from which metrics and policies estimate what hits save (0: unknown).
    ``events`` says where it is published which blocks come and go. ``access_log`` is started and closed with
    the server.

    Raises:
        InvalidConfig: the socket, the access log or the configuration cannot be used.
        TierUnavailable: a tier cannot be opened.
    """
    store = assemble(config, prefill_tokens_per_s=prefill_tokens_per_s)
    if idle_work is not None:
        store.manager.leave_for_idle(idle_work)
    server = StoreServer(
        store.manager,
        records=store.records,
        socket_path=socket_path,
        max_connections=config.server.max_connections,
        stay_awake=stay_awake,
        access_log=access_log,
    )
    server.counters.prefill_tokens_per_s = prefill_tokens_per_s
    feed = EventFeed(store.manager, server.counters.events)
    publisher = None if events is None else _publisher(events, server)
    face = None
    if config.http is not None:
        face = _http_face(config, config.http, store, server, feed, access_log)
    async with contextlib.AsyncExitStack() as stack:
        # First the addresses: where another server has them, no folder of a tier is made or touched.
        stack.push_async_callback(server.stop)
        await server.listen()
        if face is not None:
            stack.push_async_callback(face.stop)
            await face.listen()
            server.http_url = face.url
            server.num_ended_over_http = face.num_ended_connections
        if publisher is not None:
            stack.callback(publisher.close)
            publisher.open()
        if access_log is not None:
            access_log.start()
            stack.push_async_callback(asyncio.to_thread, access_log.close)
            server.counters.access_log = access_log.as_dict
        stack.push_async_callback(store.manager.close)
        if idle_work is not None:
            stack.callback(idle_work.leave_undone)
        await store.manager.open()
        stack.push_async_callback(store.records.close)
        await store.records.open()
        if publisher is not None:
            await stack.enter_async_context(publisher.publishing(feed))
        stack.push_async_callback(server.stop)
        server.start(store.dram.arena.fd, listing=store.dram.listing)
        if face is not None:
            stack.push_async_callback(face.stop)
            face.start()
        yield server


def _publisher(events: ZmqSettings, server: StoreServer) -> "ZmqPublisher":
    try:
        # Only a store that publishes needs ZeroMQ.
        from kvstore.zmq_events import ZmqPublisher
    except ModuleNotFoundError as error:
        raise InvalidConfig(
            "--events needs the package pyzmq: pip install 'tiered-kvstore[events]'"
        ) from error

    return ZmqPublisher(events, server.counters.events)


def _http_face(
    config: Config,
    http: HttpConfig,
    store: Store,
    server: StoreServer,
    feed: EventFeed,
    access_log: AccessLog | None,
) -> "HttpFace":
    # Only a store with such a section needs aiohttp.
    from kvstore.doors import Doors
    from kvstore.http import HttpFace, Limits
    from kvstore.http.limits import connection_cap

    max_fds, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    limits = Limits(
        max_connections=connection_cap(
            http.max_connections,
            max_fds=None if max_fds == resource.RLIM_INFINITY else max_fds,
            others=config.server.max_connections,
        ),
        requests_per_s=http.requests_per_s,
    )
    return HttpFace(
        store.manager,
        store.dram,
        http.host_port,
        limits=limits,
        doors=Doors.make(http),
        lease_s=config.store.lease_s,
        server_stats=server.counters.as_dict,
        records=store.records,
        feed=feed,
        access_log=access_log,
    )


OpenServer = Callable[[], AbstractAsyncContextManager[StoreServer]]


class LocalServer:
    """Runs a store and its server on a thread; clients of this process reach it over socket pairs."""

    def __init__(self, open_server: OpenServer, selector: AwakeSelector) -> None:
        self._open_server = open_server
        self._selector = selector
        self._loop: asyncio.AbstractEventLoop | None = None
        self._server: StoreServer | None = None
        self._stop: asyncio.Event | None = None
        self._started = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="kvstore-local", daemon=True)

    @classmethod
    def start(cls, config: Config) -> Self:
        """Open the store on its thread and return when it serves. Raises what opening raises."""
        selector = AwakeSelector(0.0)
        local = cls(lambda: serving(config, idle_work=selector.idle_work), selector)
        local._thread.start()
        local._started.wait()
        if local._failure is not None:
            local._thread.join()
            raise local._failure
        return local

    def dial(self, deadline_s: float) -> socket.socket:
        """Return a socket connected to the server; a forked child has none (ServerUnavailable)."""
        loop, server = self._loop, self._server
        if loop is None or server is None or not self._thread.is_alive() or deadline_s <= time.monotonic():
            raise ServerUnavailable("server: the local store is closed, or belongs to another process")
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            loop.call_soon_threadsafe(server.serve_socket, theirs)
        except RuntimeError as error:
            ours.close()
            theirs.close()
            raise ServerUnavailable("server: the local store is closed") from error
        return ours

    def stop(self) -> None:
        """Close server and store and wait for the thread. Idempotent."""
        loop, stop = self._loop, self._stop
        if loop is None or stop is None or not self._thread.is_alive():
            return
        loop.call_soon_threadsafe(stop.set)
        self._thread.join(_JOIN_PATIENCE_S)

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(self._selector)) as runner:
                runner.run(self._main())
        except BaseException as error:  # handed to the thread that waits in start()
            if self._started.is_set():
                raise
            self._failure = error
            self._started.set()

    async def _main(self) -> None:
        async with self._open_server() as server:
            self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
            limit_loop_errors(self._loop)
            self._server = server
            self._started.set()
            await self._stop.wait()
            self._server = None
