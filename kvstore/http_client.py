"""HttpKVStore and AsyncHttpKVStore: the clients of a store on another machine, over HTTP.

``KVStore.connect`` and ``AsyncKVStore.connect`` return them for an ``http://`` or ``https://`` address.
"""

import asyncio
import ipaddress
import logging
import os
import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from pathlib import Path
from typing import TypeVar

from kvstore.async_client import AsyncKVStore
from kvstore.client import KVStore
from kvstore.client_calls import Call, ClientCalls
from kvstore.client_state import AWAY, ClientState, Timeouts
from kvstore.errors import Forbidden, InvalidConfig, KVStoreError, ServerUnavailable, TimedOut, Unauthorized
from kvstore.http_client_calls import HttpCall, HttpClientCalls
from kvstore.http_link import client_context
from kvstore.http_record_calls import HttpRecordCalls
from kvstore.http_session import HttpSession
from kvstore.http_transport import MAX_LINKS, HttpTransport
from kvstore.keys import Namespace
from kvstore.log_limit import LimitedWarning
from kvstore.outlasting import outlast
from kvstore.server_address import HttpAddress

logger = logging.getLogger(__name__)

T = TypeVar("T")

_KEY = re.compile("[!-~]{1,4096}")


class _HttpCaller:
    """Carries out calls over HTTP, blocking. Thread-safe."""

    def __init__(self, transport: HttpTransport, state: ClientState) -> None:
        self._transport = transport
        self._state = state
        self._refusals = LimitedWarning(logger)

    @staticmethod
    def missed(call: Call[T], error: ServerUnavailable) -> T:
        """Return what a call comes to that was not made. Raises the error if it is a control call."""
        if call.when_away is None:
            raise error
        return call.when_away(error)

    def run(self, call: Call[T], *, is_cancelled: Callable[[], bool] = lambda: False) -> T:
        """Carry a call out; what it comes to when the store does not serve it is the call's affair.

        One whose caller has given it up comes to nothing, and is not counted as one that was not served.
        """
        when_away = call.when_away
        session = HttpSession(self._transport, self._state, call.deadline_s, is_control=call.is_control)
        assert isinstance(call, HttpCall), "a call for a socket"
        work: Callable[[HttpSession], T] = call.work
        not_served: Callable[[KVStoreError], T] = call.not_served
        try:
            return work(session)
        except AWAY as error:
            if is_cancelled():
                raise
            return not_served(error)
        except (Unauthorized, Forbidden) as error:
            if when_away is None:
                raise
            # A key that was withdrawn must not end the requests of an engine.
            self._state.note_refused()
            self._refusals.warn("client: not served: %s", error)
            return when_away(ServerUnavailable(str(error)))


class HttpKVStore(KVStore):
    """A blocking client over HTTP.

    What the server does not allow (a key without the scope, or that was withdrawn) raises Unauthorized or
    Forbidden; on the data path it is a miss, with a warning in the log and a count in ``client_stats``.
    ``view``, ``reserve`` and ``register_with_cuda`` need shared memory and raise InvalidRequest. A restart
    of the server is not told from a lost connection.
    """

    def __init__(
        self,
        address: HttpAddress,
        *,
        api_key: str | None = None,
        tls_folder: Path | None = None,
        timeouts: Timeouts | None = None,
        is_read_only: bool = False,
    ) -> None:
        self._state = ClientState(timeouts or Timeouts())
        self._calls = self._http_calls = HttpClientCalls(self._state, is_read_only=is_read_only)
        self._record_calls = HttpRecordCalls(self._state, is_read_only=is_read_only)
        self._transport = _transport(address, self._state, api_key=api_key, tls_folder=tls_folder)
        self._caller = _HttpCaller(self._transport, self._state)

    def close(self) -> None:
        """Close the connections. Idempotent."""
        self._transport.close()

    def open_namespace(self, namespace: Namespace, *, is_public: bool = False) -> Namespace:
        """Open a namespace, and return it as this caller must use it: with its tenant's salt.

        One that carries a salt already is taken as it is, without asking. ``is_public`` asks for the one that
        tenants share.

        Raises:
            ServerUnavailable: no server answers in time, so the salt is not known.
            Unauthorized, Forbidden: the server does not know the API key, or the model is not shared.
            InvalidRequest: a public namespace has a tenant salt.
        """
        if not namespace.tenant_salt:
            namespace = self._caller.run(self._http_calls.opening(namespace, is_public=is_public))
        return _opened(self._state, self._calls, namespace, is_public=is_public)

    def _run(self, call: Call[T]) -> T:
        return self._caller.run(call)


class AsyncHttpKVStore(AsyncKVStore):
    """A client over HTTP for one event loop, otherwise as ``HttpKVStore``; it calls on threads of its own."""

    def __init__(
        self,
        address: HttpAddress,
        *,
        api_key: str | None = None,
        tls_folder: Path | None = None,
        timeouts: Timeouts | None = None,
        is_read_only: bool = False,
    ) -> None:
        self._state = ClientState(timeouts or Timeouts())
        self._calls = self._http_calls = HttpClientCalls(self._state, is_read_only=is_read_only)
        self._record_calls = HttpRecordCalls(self._state, is_read_only=is_read_only)
        self._transport = _transport(address, self._state, api_key=api_key, tls_folder=tls_folder)
        self._caller = _HttpCaller(self._transport, self._state)
        self._threads = _threads()
        self._free_threads = asyncio.Semaphore(MAX_LINKS)
        self._pid = os.getpid()
        self._is_closed = False

    async def close(self) -> None:
        """Close the connections. Calls under way end as misses. Idempotent."""
        self._is_closed = True
        self._transport.close()
        self._transport.abandon_all()
        self._threads.shutdown(wait=False)

    async def open_namespace(self, namespace: Namespace, *, is_public: bool = False) -> Namespace:
        """Open a namespace, and return it as this caller must use it: with its tenant's salt.

        Raises as ``HttpKVStore.open_namespace``.
        """
        if not namespace.tenant_salt:
            namespace = await self._run(self._http_calls.opening(namespace, is_public=is_public))
        return _opened(self._state, self._calls, namespace, is_public=is_public)

    async def _run(self, call: Call[T]) -> T:
        """Carry a call out on a thread; cancelled, it returns when that thread has ended."""
        thread_ids: list[int] = []
        still_ours = threading.Lock()
        is_cancelled = threading.Event()

        def work() -> T:
            thread_ids.append(threading.get_ident())
            try:
                return self._caller.run(call, is_cancelled=is_cancelled.is_set)
            finally:
                with still_ours:
                    thread_ids.clear()

        def abandon() -> None:
            is_cancelled.set()
            with still_ours:  # the thread takes on no other call meanwhile
                for thread_id in thread_ids:
                    self._transport.abandon(thread_id)

        self._transport.require_open()
        if self._pid != os.getpid():
            # Threads are not inherited by a forked child.
            self._threads, self._free_threads = _threads(), asyncio.Semaphore(MAX_LINKS)
            self._pid = os.getpid()
        free_threads = self._free_threads
        try:
            async with asyncio.timeout(max(0.0, call.deadline_s - time.monotonic())):
                await free_threads.acquire()
        except TimeoutError:
            return self._caller.missed(call, TimedOut(f"client: all {MAX_LINKS} connections are in use"))
        try:
            if self._is_closed:
                return self._caller.missed(call, ServerUnavailable("client: it was closed meanwhile"))
            running = asyncio.get_running_loop().run_in_executor(self._threads, copy_context().run, work)
            return await outlast(running, when_cancelled=abandon)
        finally:
            free_threads.release()


def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(MAX_LINKS, thread_name_prefix="kvstore-http")


def _transport(
    address: HttpAddress, state: ClientState, *, api_key: str | None, tls_folder: Path | None
) -> HttpTransport:
    if api_key is not None and not _KEY.fullmatch(api_key):
        raise InvalidConfig("api_key: not printable text without spaces: strip the end of its line")
    if not address.is_tls:
        if tls_folder is not None:
            raise InvalidConfig(f"address {address}: tls_folder is given, but it is not https")
        if api_key is not None and not _is_loopback(address.host):
            raise InvalidConfig(f"address {address}: an API key is not sent in the clear: use https")
        return HttpTransport(address, state, api_key=api_key, tls=None)
    return HttpTransport(address, state, api_key=api_key, tls=client_context(tls_folder))


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _opened(state: ClientState, calls: ClientCalls, namespace: Namespace, *, is_public: bool) -> Namespace:
    opened = calls.open_namespace(namespace, is_public=is_public)
    if is_public:
        state.note_public(opened.digest)
    return opened
