"""RedisSentinels: a real master with a replica, watched by real sentinels, on free loopback ports."""

import re
from collections.abc import Callable
from pathlib import Path

from kvstore.drill.redis_server import RedisServer
from kvstore.drill.store_process import PartFailed, wait_until

MASTER = "kvmaster"

_PATIENCE_S = 30.0


class Sentinel(RedisServer):
    """A server that runs from a configuration file of its own, as sentinels must."""

    def __init__(self, folder: Path, master: RedisServer, *lines: str) -> None:
        super().__init__(folder)
        self._lines = [
            *(f"port {self.port}", "bind 127.0.0.1", f"dir {folder}", f"logfile {folder / 'log'}"),
            f"sentinel monitor {MASTER} 127.0.0.1 {master.port} 2",
            f"sentinel down-after-milliseconds {MASTER} 500",
            f"sentinel failover-timeout {MASTER} 3000",
            *lines,
        ]

    def words(self) -> list[str]:
        """Arguments of the process; writes its configuration file."""
        path = self.folder / "sentinel.conf"
        path.write_text("\n".join(self._lines) + "\n", encoding="utf-8")
        return [str(path), "--sentinel"]


class RedisSentinels:
    """``start`` returns when the sentinels know each other and the replica.

    ``lines`` are added to the sentinels' configuration. ``master`` and ``replica`` change their roles in
    ``follow_failover``.
    """

    def __init__(self, folder: Path, *lines: str) -> None:
        options = ("--repl-diskless-sync-delay", "0", "--repl-ping-replica-period", "1")
        self.master = RedisServer(folder / "master", *options)
        own = (*options, "--replicaof", f"127.0.0.1 {self.master.port}")
        self.replica = RedisServer(folder / "replica", *own)
        self.sentinels = [Sentinel(folder / f"sentinel-{n}", self.master, *lines) for n in range(3)]

    @property
    def url(self) -> str:
        """Its address: all sentinels."""
        return "redis+sentinel://" + ",".join(f"127.0.0.1:{one.port}" for one in self.sentinels)

    def start(self) -> "RedisSentinels":
        """Start all of them.

        Raises:
            PartFailed: one does not answer, or they do not find each other in time.
        """
        self.master.start()
        self.replica.start()
        for sentinel in self.sentinels:
            sentinel.start()
        self._until(lambda: all(map(self._is_settled, self.sentinels)), "do not find each other")
        return self

    def stop(self) -> None:
        """End all of them."""
        for server in (*self.sentinels, self.replica, self.master):
            server.stop()

    def is_replicated(self) -> bool:
        """Return whether the replica has all that the master had when it was asked."""
        written, got = (_offset(server) for server in (self.master, self.replica))
        return 0 <= written <= got

    @property
    def has_failed_over(self) -> bool:
        """Whether most sentinels say that the replica is the master."""
        port = b"\r\n%d\r\n" % self.replica.port
        told = [one.ask(b"SENTINEL", b"GET-MASTER-ADDR-BY-NAME", MASTER.encode()) for one in self.sentinels]
        return sum(reply.endswith(port) for reply in told) > len(told) // 2

    def follow_failover(self) -> None:
        """Make the former master, which must not run, a replica of the new one.

        Raises:
            PartFailed: it does not become one in time.
        """
        self.master, self.replica = self.replica, self.master
        self.replica.start("--replicaof", f"127.0.0.1 {self.master.port}")
        self._until(lambda: b"master_link_status:up" in _replication(self.replica), "has no replica")
        self._until(lambda: all(map(self._is_settled, self.sentinels)), "do not know the replica")

    def _is_settled(self, sentinel: Sentinel) -> bool:
        told = sentinel.ask(b"SENTINEL", b"MASTER", MASTER.encode())
        is_up = b"down" not in _flags(told)
        return is_up and b"num-slaves\r\n$1\r\n1" in told and b"num-other-sentinels\r\n$1\r\n2" in told

    def _until(self, is_so: Callable[[], bool], what: str) -> None:
        if not wait_until(is_so, _PATIENCE_S, pause_s=0.02):
            raise PartFailed(f"redis: the sentinels or their servers {what}")


def _replication(server: RedisServer) -> bytes:
    try:
        return server.ask(b"INFO", b"replication")
    except OSError:
        return b""


def _offset(server: RedisServer) -> int:
    found = re.search(rb"master_repl_offset:(\d+)", _replication(server))
    return int(found[1]) if found else -1


def _flags(told: bytes) -> bytes:
    _, _, rest = told.partition(b"flags\r\n")
    return rest.split(b"\r\n", 2)[1] if rest else b"down"
