"""The Redis-protocol server of the drill, for tests."""

import re

from kvstore.drill.redis_server import RedisServer, find_binary, free_port
from kvstore.drill.store_process import wait_until

__all__ = ["RedisServer", "find_binary", "free_port", "wait_replicated"]


def wait_replicated(master: RedisServer) -> None:
    """Wait until a replica has all that was written. (WAIT tells only of writes of its own connection.)"""

    def is_level() -> bool:
        told = master.ask(b"INFO", b"replication")
        written = re.search(rb"master_repl_offset:(\d+)", told)
        replicas = re.findall(rb"state=online,offset=(\d+)", told)
        return written is not None and any(int(at) >= int(written[1]) for at in replicas)

    assert wait_until(is_level, 60, pause_s=0.02)
