"""RedisSentinels: a real master with a replica, watched by real sentinels, on free loopback ports."""

import time
from collections.abc import Callable
from pathlib import Path

from tests.redis_server import RedisServer

MASTER = "kvmaster"


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
        path = self.folder / "sentinel.conf"
        path.write_text("\n".join(self._lines) + "\n")
        return [str(path), "--sentinel"]


class RedisSentinels:
    """``start`` returns when the sentinels know each other and the replica."""

    def __init__(self, folder: Path, *lines: str) -> None:
        options = ("--repl-diskless-sync-delay", "0", "--repl-ping-replica-period", "1")
        self.master = RedisServer(folder / "master", *options)
        own = (*options, "--replicaof", f"127.0.0.1 {self.master.port}")
        self.replica = RedisServer(folder / "replica", *own)
        self.sentinels = [Sentinel(folder / f"sentinel-{n}", self.master, *lines) for n in range(3)]

    @property
    def url(self) -> str:
        return "redis+sentinel://" + ",".join(f"127.0.0.1:{one.port}" for one in self.sentinels)

    def start(self) -> "RedisSentinels":
        self.master.start()
        self.replica.start()
        for sentinel in self.sentinels:
            sentinel.start()
        self._until(lambda: all(self._is_settled(sentinel) for sentinel in self.sentinels))
        return self

    def stop(self) -> None:
        for server in (*self.sentinels, self.replica, self.master):
            server.stop()

    def _is_settled(self, sentinel: Sentinel) -> bool:
        told = sentinel.ask(b"SENTINEL", b"MASTER", MASTER.encode())
        return b"num-slaves\r\n$1\r\n1" in told and b"num-other-sentinels\r\n$1\r\n2" in told

    def _until(self, is_so: Callable[[], bool]) -> None:
        give_up_s = time.monotonic() + 30
        while not is_so():
            assert time.monotonic() < give_up_s, "the sentinels do not find each other"
            time.sleep(0.02)
