"""RedisCluster: a real cluster of masters, and replicas where asked for, on free loopback ports."""

from collections.abc import Callable
from pathlib import Path

from kvstore.drill.redis_server import RedisServer, free_port
from kvstore.drill.store_process import PartFailed, wait_until

NUM_SLOTS = 16_384

_PATIENCE_S = 30.0
_MEETING_S = 3.0


def _nothing(number: int) -> tuple[str, ...]:
    return ()


class RedisCluster:
    """``start`` returns when every node says that the cluster is well."""

    def __init__(
        self,
        folder: Path,
        *,
        num_masters: int = 3,
        num_replicas: int = 0,
        options_of: Callable[[int], tuple[str, ...]] = _nothing,
    ) -> None:
        options: tuple[str, ...] = ("--cluster-enabled", "yes", "--cluster-node-timeout", "1000")
        options += ("--cluster-require-full-coverage", "no", "--cluster-replica-validity-factor", "0")
        options += ("--repl-diskless-sync-delay", "0", "--repl-ping-replica-period", "1")
        self.nodes: list[RedisServer] = []
        for number in range(num_masters + num_replicas):
            # The default, port + 10000, may be no port.
            own = (*options, "--cluster-port", str(free_port()), *options_of(number))
            self.nodes.append(RedisServer(folder / f"node-{number}", *own))
        self.masters = self.nodes[:num_masters]
        self.replicas = self.nodes[num_masters:]

    @property
    def url(self) -> str:
        """Its address: all masters."""
        return "redis+cluster://" + ",".join(f"127.0.0.1:{node.port}" for node in self.masters)

    def start(self) -> "RedisCluster":
        """Start the nodes and join them.

        Raises:
            PartFailed: a node does not answer, or they do not form a cluster in time.
        """
        for node in self.nodes:
            node.start()
        step = -(-NUM_SLOTS // len(self.masters))
        for number, node in enumerate(self.masters):
            start, stop = number * step, min((number + 1) * step, NUM_SLOTS) - 1
            _tell(node, b"CLUSTER", b"ADDSLOTSRANGE", b"%d" % start, b"%d" % stop)
        for number, node in enumerate(self.nodes):
            node.ask(b"CLUSTER", b"SET-CONFIG-EPOCH", b"%d" % (number + 1))
        self._meet()
        for replica, master in zip(self.replicas, self.masters, strict=False):
            _tell(replica, b"CLUSTER", b"REPLICATE", self.node_id(master))
        self.wait_well()
        return self

    def stop(self) -> None:
        """End the nodes."""
        for node in self.nodes:
            node.stop()

    def wait_well(self) -> None:
        """Wait until every node says that the cluster is well, and every replica has its master.

        Raises:
            PartFailed: that takes too long.
        """
        self._until(self._is_well)

    def node_id(self, node: RedisServer) -> bytes:
        """Return a node's name in the cluster."""
        return node.ask(b"CLUSTER", b"MYID")

    def owner(self, slot: int) -> RedisServer:
        """Return the master that was given a hash slot."""
        step = -(-NUM_SLOTS // len(self.masters))
        return self.masters[slot // step]

    def _meet(self) -> None:
        """Introduce the nodes to each other, again if need be: one that is slow to answer is forgotten."""
        for _ in range(round(_PATIENCE_S / _MEETING_S)):
            for node in self.nodes[1:]:
                self.nodes[0].ask(b"CLUSTER", b"MEET", b"127.0.0.1", b"%d" % node.port, node.bus_port)
            if wait_until(self._all_know_all, _MEETING_S, pause_s=0.02):
                return
        raise PartFailed("redis: the nodes do not find each other")

    def _all_know_all(self) -> bool:
        known = f"cluster_known_nodes:{len(self.nodes)}".encode()
        assigned = f"cluster_slots_assigned:{NUM_SLOTS}".encode()
        infos = [node.ask(b"CLUSTER", b"INFO") for node in self.nodes]
        return all(known in info and assigned in info for info in infos)

    def _is_well(self) -> bool:
        infos = [node.ask(b"CLUSTER", b"INFO") for node in self.nodes]
        return all(
            b"cluster_state:ok" in info and b"cluster_slots_pfail:0" in info for info in infos
        ) and all(b"master_link_status:up" in node.ask(b"INFO", b"replication") for node in self.replicas)

    def _until(self, is_so: Callable[[], bool]) -> None:
        if not wait_until(is_so, _PATIENCE_S, pause_s=0.02):
            raise PartFailed("redis: the nodes do not form a cluster")


def _tell(node: RedisServer, *words: bytes) -> None:
    reply = node.ask(*words)
    if reply != b"+OK\r\n":
        raise PartFailed(f"redis: refuses {words[1].decode()}: {reply.decode(errors='replace').strip()}")
