"""Servers: which node of the remote tier has a key; and the simplest answer, one server for all keys.

Everything here runs on the event loop except what a Scout runs in its own thread.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

from kvstore_tiers.jobs import Jobs
from kvstore_tiers.remote_node import NodeSettings, RemoteNode
from kvstore_tiers.remote_session import Redirect
from kvstore_tiers.resp_address import RespAddress
from kvstore_tiers.resp_stream import RespFault

_log = logging.getLogger(__name__)

_LOOK_MAX_S = 5.0

T = TypeVar("T")


class Servers(Protocol):
    """The nodes of a remote tier, and who of them has which key."""

    @property
    def trouble(self) -> str:
        """Why keys have no node, a clause for people; empty when they have."""

    @property
    def nodes(self) -> list[RemoteNode]:
        """The nodes known now."""

    async def open(self) -> None:
        """Find the nodes, in bounded time. Servers that are absent are found later."""

    async def close(self) -> None:
        """Close every node. Idempotent."""

    def node_of(self, key: bytes) -> RemoteNode | None:
        """Return the node that has a key; None while that is unknown."""

    def follow(self, asked: RemoteNode, redirect: Redirect) -> RemoteNode | None:
        """Return the node that the asked one pointed to; None if it should not point anywhere."""

    def look_again(self) -> None:
        """Have the topology looked up soon: a node failed, or pointed to another one."""


class SingleServer:
    """One server for every key."""

    def __init__(self, address: RespAddress, settings: NodeSettings) -> None:
        self._node = RemoteNode(address, settings)

    @property
    def trouble(self) -> str:
        """Empty: the server is known."""
        return ""

    @property
    def nodes(self) -> list[RemoteNode]:
        """The server."""
        return [self._node]

    async def open(self) -> None:
        """Begin to talk to it."""
        self._node.start()

    async def close(self) -> None:
        """Close the server's connections."""
        await self._node.close()

    def node_of(self, key: bytes) -> RemoteNode | None:
        """Return the server."""
        return self._node

    def follow(self, asked: RemoteNode, redirect: Redirect) -> RemoteNode | None:
        """Return None: a server that belongs to a cluster must be configured as one."""
        return None

    def look_again(self) -> None:
        """Do nothing: there is nothing to find."""


class Scout(Generic[T]):
    """Looks a topology up in a thread of its own: at start, when told to, and now and then.

    ``look`` blocks until the instant it is given at most, and raises RespFault when nobody knew; ``use`` gets
    what it found, or the fault, on the event loop. ``interval_s`` says when to look again unasked.
    """

    def __init__(
        self,
        look: Callable[[float], T],
        use: Callable[[T | RespFault], None],
        *,
        name: str,
        interval_s: Callable[[], float],
        clock: Callable[[], float],
        pause_s: float = 0.1,
    ) -> None:
        self._look = look
        self._use = use
        self._name = name
        self._interval_s = interval_s
        self._clock = clock
        self._pause_s = pause_s
        self._jobs = Jobs(f"{name}-scout", 1)
        self._is_wanted = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def start(self, patience_s: float) -> None:
        """Begin to look; returns when the first look is over, or patience is."""
        self._jobs.start()
        has_looked = asyncio.Event()
        self._task = asyncio.create_task(self._run(has_looked), name=f"{self._name}-scout")
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(has_looked.wait(), patience_s)

    async def close(self) -> None:
        """Stop looking. Idempotent."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
        await self._jobs.close()

    def wake(self) -> None:
        """Look soon, but not more often than every pause."""
        self._is_wanted.set()

    async def _run(self, has_looked: asyncio.Event) -> None:
        while True:
            try:
                self._is_wanted.clear()
                self._use(await self._jobs.run(self._look_once))
            except Exception:
                _log.exception("%s: looking the topology up failed", self._name)
            has_looked.set()
            await asyncio.sleep(self._pause_s)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._is_wanted.wait(), max(0.0, self._interval_s() - self._pause_s))

    def _look_once(self) -> T | RespFault:
        try:
            return self._look(self._clock() + _LOOK_MAX_S)
        except RespFault as fault:
            return fault


def said_once(faults: Sequence[tuple[str, str]]) -> str:
    """Return faults of servers for people, the servers with the same one together."""
    servers: dict[str, list[str]] = {}
    for server, fault in faults:
        servers.setdefault(fault, []).append(server)
    return "; ".join(f"{', '.join(names)}: {fault}" for fault, names in servers.items())
