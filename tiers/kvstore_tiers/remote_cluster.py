"""ClusterServers: the masters of a Redis or Valkey Cluster, and who of them has which hash slot.

The map of slots comes from CLUSTER SLOTS of the first node that knows one: those that are well before those
in trouble, then the configured seeds. It is looked up again when a node fails or says MOVED, and now and
then. What a node says in MOVED holds at once; ASK concerns that one request. A slot whose master is dead is
lost until the map names another one, or the master is back; the other slots are served.
"""

import asyncio
import binascii
import dataclasses
from collections.abc import Sequence

from kvstore_tiers.remote_control import Reply
from kvstore_tiers.remote_node import NodeSettings, RemoteNode
from kvstore_tiers.remote_session import NUM_SLOTS, PORT_MAX, Redirect
from kvstore_tiers.remote_topology import Scout, said_once
from kvstore_tiers.resp_address import RespAddress
from kvstore_tiers.resp_stream import RespFault

_INTERVAL_S = 10.0
_TROUBLED_INTERVAL_S = 0.5
_MAX_NODES = 1000

Place = tuple[str, int]
"""Host and port of a node."""


def key_slot(key: bytes) -> int:
    """Return the hash slot of a key: CRC16 (XMODEM) of it, or of what its first braces hold, if anything.

    Source: Redis Cluster specification, "Key distribution model" and "Hash tags".
    """
    start = key.find(b"{")
    if start >= 0:
        stop = key.find(b"}", start + 1)
        if stop > start + 1:
            key = key[start + 1 : stop]
    return binascii.crc_hqx(key, 0) % NUM_SLOTS


@dataclasses.dataclass(frozen=True, slots=True)
class SlotRange:
    """Slots ``start`` to ``stop``, the latter included, and the master that has them."""

    start: int
    stop: int
    master: Place


class ClusterServers:
    """The masters of a cluster."""

    def __init__(self, seeds: Sequence[RespAddress], settings: NodeSettings) -> None:
        self._seeds = list(seeds)
        self._login = seeds[0]
        self._settings = settings
        self._nodes: dict[Place, RemoteNode] = {}
        self._slots: list[RemoteNode | None] = [None] * NUM_SLOTS
        self._trouble = "no node was asked yet"
        self._candidates: list[RespAddress] = self._seeds
        self._closing: set[asyncio.Task[None]] = set()
        self._scout = Scout(
            self._look, self._use, name=settings.name, interval_s=self._interval, clock=settings.clock
        )

    @property
    def trouble(self) -> str:
        """Why no slot has a node."""
        return "" if self._nodes else self._trouble

    @property
    def nodes(self) -> list[RemoteNode]:
        """The masters known now."""
        return list(self._nodes.values())

    async def open(self) -> None:
        """Ask for the map."""
        await self._scout.start(2 * self._settings.control_timeout_s)

    async def close(self) -> None:
        """Stop asking, and close every node's connections."""
        await self._scout.close()
        for place in list(self._nodes):
            self._dismiss(place)
        while self._closing:
            await asyncio.wait(self._closing)

    def node_of(self, key: bytes) -> RemoteNode | None:
        """Return the master that has the key's slot."""
        return self._slots[key_slot(key)]

    def follow(self, asked: RemoteNode, redirect: Redirect) -> RemoteNode | None:
        """Return the node pointed to, and believe a MOVED."""
        place = (redirect.host or asked.address.host, redirect.port)
        if place not in self._nodes and len(self._nodes) >= _MAX_NODES:
            return None
        node = self._node_at(place)
        if not redirect.is_ask:
            self._slots[redirect.slot] = node
        self._scout.wake()
        return node

    def look_again(self) -> None:
        """Have the map looked up soon."""
        self._order_candidates()
        self._scout.wake()

    def _interval(self) -> float:
        self._order_candidates()
        is_well = bool(self._nodes) and all(node.health().is_up for node in self._nodes.values())
        return _INTERVAL_S if is_well else _TROUBLED_INTERVAL_S

    def _order_candidates(self) -> None:
        well = [node.address for node in self._nodes.values() if node.health().is_up]
        troubled = [node.address for node in self._nodes.values() if not node.health().is_up]
        known = {(address.host, address.port) for address in well + troubled}
        seeds = [seed for seed in self._seeds if (seed.host, seed.port) not in known]
        # Another one of the well first each time: one that was cut off is not asked twice in a row.
        self._candidates = well[1:] + well[:1] + seeds + troubled
        if len(well) > 1:
            first = self._nodes.pop((well[0].host, well[0].port))
            self._nodes[well[0].host, well[0].port] = first

    def _look(self, deadline_s: float) -> list[SlotRange]:
        """Ask one node after the other for the map; in a thread."""
        faults: list[tuple[str, str]] = []
        for address in self._candidates:
            try:
                reply = self._settings.ask(address, ("CLUSTER", "SLOTS"), deadline_s)
                return read_slots(reply, asked=(address.host, address.port))
            except RespFault as fault:
                faults.append((f"{address.host}:{address.port}", str(fault)))
        raise RespFault(f"no node has a map of the cluster: {said_once(faults)}")

    def _use(self, found: list[SlotRange] | RespFault) -> None:
        if isinstance(found, RespFault):
            self._trouble = str(found)
            return
        slots: list[RemoteNode | None] = [None] * NUM_SLOTS
        for part in found:
            slots[part.start : part.stop + 1] = [self._node_at(part.master)] * (part.stop + 1 - part.start)
        self._slots = slots
        masters = {part.master for part in found}
        for place in [place for place in self._nodes if place not in masters]:
            self._dismiss(place)

    def _node_at(self, place: Place) -> RemoteNode:
        node = self._nodes.get(place)
        if node is None:
            node = self._nodes[place] = RemoteNode(self._login.at(*place), self._settings)
            node.start()
        return node

    def _dismiss(self, place: Place) -> None:
        closing = asyncio.create_task(self._nodes.pop(place).close())
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)


def read_slots(reply: Reply, *, asked: Place) -> list[SlotRange]:
    """Return the map in an answer to CLUSTER SLOTS. A node named without a host is at the asked one's.

    Raises:
        RespFault: a map without slots, or not a map.
    """
    if not isinstance(reply, list) or not reply:
        raise RespFault("the node knows no slots")
    ranges = [_slot_range(item, asked) for item in reply]
    if len({part.master for part in ranges}) > _MAX_NODES:
        raise RespFault(f"the cluster has more than {_MAX_NODES} masters")
    return ranges


def _slot_range(item: Reply, asked: Place) -> SlotRange:
    match item:
        case [int(start), int(stop), [host, int(port), *_], *_] if (
            0 <= start <= stop < NUM_SLOTS and 0 < port <= PORT_MAX
        ):
            name = host if isinstance(host, str) and host not in ("", "?") else asked[0]
            return SlotRange(start, stop, (name, port))
    raise RespFault("the node's map of slots does not parse")
