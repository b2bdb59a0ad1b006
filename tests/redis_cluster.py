"""RedisCluster: a real cluster of masters, and replicas where asked for, on free loopback ports."""

import time
from collections.abc import Callable
from pathlib import Path

from tests.redis_server import RedisServer, free_port

NUM_SLOTS = 16_384


class RedisCluster:
    """``start`` returns when every node says that the cluster is well."""

    def __init__(
        self,
        folder: Path,
        *,
        num_masters: int = 3,
        num_replicas: int = 0,
        tls_options: Callable[[int], tuple[str, ...]] = lambda tls_port: (),
    ) -> None:
        options = ("--cluster-enabled", "yes", "--cluster-node-timeout", "1000")
        options += ("--cluster-require-full-coverage", "no", "--cluster-replica-validity-factor", "0")
        options += ("--repl-diskless-sync-delay", "0", "--repl-ping-replica-period", "1")
        self.nodes: list[RedisServer] = []
        self.tls_ports: list[int] = []
        for number in range(num_masters + num_replicas):
            # The default, port + 10000, may be no port.
            self.tls_ports.append(free_port())
            own = (*options, "--cluster-port", str(free_port()), *tls_options(self.tls_ports[-1]))
            self.nodes.append(RedisServer(folder / f"node-{number}", *own))
        self.masters = self.nodes[:num_masters]
        self.replicas = self.nodes[num_masters:]

    @property
    def tls_url(self) -> str:
        return f"rediss+cluster://127.0.0.1:{self.tls_ports[0]}"

    @property
    def url(self) -> str:
        return "redis+cluster://" + ",".join(f"127.0.0.1:{node.port}" for node in self.masters)

    def start(self) -> "RedisCluster":
        for node in self.nodes:
            node.start()
        step = -(-NUM_SLOTS // len(self.masters))
        for number, node in enumerate(self.masters):
            start, stop = number * step, min((number + 1) * step, NUM_SLOTS) - 1
            assert node.ask(b"CLUSTER", b"ADDSLOTSRANGE", b"%d" % start, b"%d" % stop) == b"+OK\r\n"
        for number, node in enumerate(self.nodes):
            node.ask(b"CLUSTER", b"SET-CONFIG-EPOCH", b"%d" % (number + 1))
        for node in self.nodes[1:]:
            self.nodes[0].ask(b"CLUSTER", b"MEET", b"127.0.0.1", b"%d" % node.port, node.bus_port)
        self._until(self._all_know_all)
        for replica, master in zip(self.replicas, self.masters, strict=False):
            assert replica.ask(b"CLUSTER", b"REPLICATE", self.node_id(master)) == b"+OK\r\n"
        self._until(self._is_well)
        return self

    def stop(self) -> None:
        for node in self.nodes:
            node.stop()

    def node_id(self, node: RedisServer) -> bytes:
        return node.ask(b"CLUSTER", b"MYID")

    def owner(self, slot: int) -> RedisServer:
        step = -(-NUM_SLOTS // len(self.masters))
        return self.masters[slot // step]

    def _all_know_all(self) -> bool:
        asked = f"cluster_known_nodes:{len(self.nodes)}".encode()
        return all(asked in node.ask(b"CLUSTER", b"INFO") for node in self.nodes) and self._agree()

    def _is_well(self) -> bool:
        infos = [node.ask(b"CLUSTER", b"INFO") for node in self.nodes]
        return all(b"cluster_state:ok" in info for info in infos) and all(
            b"master_link_status:up" in node.ask(b"INFO", b"replication") for node in self.replicas
        )

    def _agree(self) -> bool:
        asked = f"cluster_slots_assigned:{NUM_SLOTS}".encode()
        return all(asked in node.ask(b"CLUSTER", b"INFO") for node in self.nodes)

    def _until(self, is_so: Callable[[], bool]) -> None:
        give_up_s = time.monotonic() + 30
        while not is_so():
            assert time.monotonic() < give_up_s, "the cluster does not form"
            time.sleep(0.02)
