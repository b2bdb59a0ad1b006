"""The cluster of the drill, for tests, which also speak TLS to it."""

from collections.abc import Callable
from pathlib import Path

from kvstore.drill import redis_cluster
from kvstore.drill.redis_server import free_port

NUM_SLOTS = redis_cluster.NUM_SLOTS


class RedisCluster(redis_cluster.RedisCluster):
    def __init__(
        self,
        folder: Path,
        *,
        num_masters: int = 3,
        num_replicas: int = 0,
        tls_options: Callable[[int], tuple[str, ...]] = lambda tls_port: (),
    ) -> None:
        ports = [free_port() for _ in range(num_masters + num_replicas)]
        super().__init__(
            folder,
            num_masters=num_masters,
            num_replicas=num_replicas,
            options_of=lambda number: tls_options(ports[number]),
        )
        self.tls_ports = ports

    @property
    def tls_url(self) -> str:
        return f"rediss+cluster://127.0.0.1:{self.tls_ports[0]}"
