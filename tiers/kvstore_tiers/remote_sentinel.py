"""SentinelServers: the master that sentinels name, followed through failovers.

Every sentinel is asked, and the answer of the newest configuration epoch counts, so that one that was cut off
does not send anybody to a former master. Asked every few seconds, several times a second while the master
fails or refuses writes as a replica. No subscription: a cache can be a second late.
"""

import asyncio
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from kvstore_tiers.remote_control import Refused, Reply
from kvstore_tiers.remote_node import NodeSettings, RemoteNode
from kvstore_tiers.remote_session import PORT_MAX, Redirect, read_decimal
from kvstore_tiers.remote_topology import Scout, said_once
from kvstore_tiers.resp_address import RespAddress
from kvstore_tiers.resp_stream import RespFault

_INTERVAL_S = 5.0
_TROUBLED_INTERVAL_S = 0.25


@dataclass(frozen=True, slots=True, order=True)
class Master:
    """What one sentinel says of the master; a newer epoch compares greater."""

    epoch: int
    host: str
    port: int


class SentinelServers:
    """The master behind some sentinels."""

    def __init__(self, sentinels: Sequence[RespAddress], master: str, settings: NodeSettings) -> None:
        self._sentinels = [dataclasses.replace(sentinel, db=0) for sentinel in sentinels]
        self._login = sentinels[0]
        self._master = master
        self._settings = settings
        self._node: RemoteNode | None = None
        self._trouble = "no sentinel was asked yet"
        self._epoch = 0
        self._closing: set[asyncio.Task[None]] = set()
        self._scout = Scout(
            self._look, self._use, name=settings.name, interval_s=self._interval, clock=settings.clock
        )

    @property
    def trouble(self) -> str:
        """Why no master is known."""
        return "" if self._node is not None else self._trouble

    @property
    def nodes(self) -> list[RemoteNode]:
        """The master, if it is known."""
        return [] if self._node is None else [self._node]

    async def open(self) -> None:
        """Ask the sentinels."""
        await self._scout.start(2 * self._settings.control_timeout_s)

    async def close(self) -> None:
        """Stop asking, and close the master's connections."""
        await self._scout.close()
        node, self._node = self._node, None
        if node is not None:
            await node.close()
        while self._closing:
            await asyncio.wait(self._closing)

    def node_of(self, key: bytes) -> RemoteNode | None:
        """Return the master."""
        return self._node

    def follow(self, asked: RemoteNode, redirect: Redirect) -> RemoteNode | None:
        """Return None: a master behind sentinels points nowhere."""
        return None

    def look_again(self) -> None:
        """Ask the sentinels soon."""
        self._scout.wake()

    def _interval(self) -> float:
        is_well = self._node is not None and self._node.health().is_up
        return _INTERVAL_S if is_well else _TROUBLED_INTERVAL_S

    def _look(self, deadline_s: float) -> Master:
        """Ask every sentinel; in a thread."""
        answers: list[Master] = []
        faults: list[tuple[str, str]] = []
        for sentinel in self._sentinels:
            try:
                answers.append(self._ask(sentinel, deadline_s))
            except RespFault as fault:
                faults.append((f"{sentinel.host}:{sentinel.port}", str(fault)))
        if not answers:
            raise RespFault(f"no sentinel names the master {self._master}: {said_once(faults)}")
        return max(answers)

    def _ask(self, sentinel: RespAddress, deadline_s: float) -> Master:
        """Ask without a login first: sentinels often have none, and then refuse one."""
        words = ("SENTINEL", "MASTER", self._master)
        anonymous = dataclasses.replace(sentinel, user="", password="")
        try:
            return read_master(self._settings.ask(anonymous, words, deadline_s))
        except Refused as refused:
            if refused.code not in {"NOAUTH", "NOPERM"} or not sentinel.password:
                raise
        return read_master(self._settings.ask(sentinel, words, deadline_s))

    def _use(self, found: Master | RespFault) -> None:
        if isinstance(found, RespFault):
            self._trouble = str(found)
            return
        node = self._node
        if node is not None:
            is_same = (node.address.host, node.address.port) == (found.host, found.port)
            if is_same or found.epoch < self._epoch:
                self._epoch = max(self._epoch, found.epoch)
                return
            closing = asyncio.create_task(node.close())
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)
        self._epoch = found.epoch
        self._node = RemoteNode(self._login.at(found.host, found.port), self._settings)
        self._node.start()


def read_master(reply: Reply) -> Master:
    """Return what a sentinel answered to SENTINEL MASTER.

    Raises:
        RespFault: it is not the description of a master.
    """
    words = reply if isinstance(reply, list) else []
    told = {str(name): str(value) for name, value in zip(words[::2], words[1::2], strict=False)}
    host = told.get("ip", "")
    port = read_decimal(told.get("port", ""), limit=PORT_MAX)
    epoch = read_decimal(told.get("config-epoch", "0"), limit=2**64)
    if not host or not port or epoch is None:
        raise RespFault("the sentinel does not describe a master")
    return Master(epoch, host, port)
