"""Child processes of the demo: started with a log each, waited for until ready, and all ended at the end."""

import asyncio
import contextlib
import json
import os
import shutil
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from kvstore.errors import KVStoreError

_GRACE_S = 5.0
_LINE_MAX_BYTES = 1 << 20


class DemoFailed(KVStoreError):
    """The demo could not go on: a part did not start, died, or gave no usable answer."""


_CLI = "import sys; from kvstore.cli import main; sys.exit(main())"


def kvstore_command(*words: str) -> list[str]:
    """Return a ``kvstore`` command line in this interpreter, whatever the folder it is run from."""
    return [sys.executable, "-P", "-c", _CLI, *words]


@dataclass(slots=True)
class Child:
    """One process of the demo. Its standard error, and what it prints after it is ready, go to ``log``."""

    name: str
    process: asyncio.subprocess.Process
    log: Path
    drain: "asyncio.Task[None] | None" = field(default=None, repr=False)

    @property
    def is_running(self) -> bool:
        """Whether the process has not ended."""
        return self.process.returncode is None

    def last_words(self) -> str:
        """Return the last line of its log, for messages."""
        with contextlib.suppress(OSError):
            lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
            return next((line.strip() for line in reversed(lines) if line.strip()), "it said nothing")
        return "it left no log"

    def pause(self) -> None:
        """Stop it where it is (SIGSTOP); its connections stay open and answer nothing."""
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let it go on (SIGCONT)."""
        self.process.send_signal(signal.SIGCONT)


class Processes:
    """Owner of the demo's processes: a context that ends every one of them, however it is left.

    Each child leads its own session, so that Ctrl-C reaches only the demo, which then ends them in order.
    Where ``setpriv`` is there, the kernel ends them too if the demo itself is killed.
    """

    def __init__(self, log_folder: Path) -> None:
        self._log_folder = log_folder
        self._children: list[Child] = []

    async def __aenter__(self) -> "Processes":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await asyncio.gather(*(self.stop(child) for child in self._children))

    async def start(self, name: str, command: Sequence[str]) -> Child:
        """Start a process.

        Raises:
            DemoFailed: the program is not there.
        """
        log = self._log_folder / f"{name}.log"
        guard = ("setpriv", "--pdeathsig", "KILL", "--") if shutil.which("setpriv") else ()
        with log.open("ab") as sink:
            try:
                process = await asyncio.create_subprocess_exec(
                    *guard,
                    *command,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=sink,
                    start_new_session=True,
                    limit=_LINE_MAX_BYTES,
                )
            except OSError as error:
                raise DemoFailed(f"{name}: cannot start {command[0]}: {error.strerror}") from error
        child = Child(name, process, log)
        self._children.append(child)
        return child

    async def ready_event(self, child: Child, *, timeout_s: float) -> dict[str, object]:
        """Return the JSON object ``{"event": "ready", ...}`` that a child prints; the rest goes to its log.

        Raises:
            DemoFailed: the child ended first, or ``timeout_s`` passed.
        """
        assert child.process.stdout is not None
        try:
            async with asyncio.timeout(timeout_s):
                while line := await child.process.stdout.readline():
                    event = _parsed(line)
                    if event.get("event") == "ready":
                        child.drain = asyncio.create_task(_drain(child.process.stdout, child.log))
                        return event
                status = await child.process.wait()
        except TimeoutError:
            raise DemoFailed(
                f"{child.name}: not ready after {timeout_s:.0f} s: {child.last_words()}"
            ) from None
        raise DemoFailed(f"{child.name}: ended with status {status}: {child.last_words()}")

    async def stop(self, child: Child) -> None:
        """End a child: SIGTERM, and SIGKILL after five seconds. Idempotent."""
        if child.is_running:
            child.resume()
            child.process.terminate()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_GRACE_S):
                    await child.process.wait()
        await self.kill(child)

    async def kill(self, child: Child) -> None:
        """End a child and what it started at once (SIGKILL). Idempotent."""
        if child.is_running:
            # Not once it has been reaped: its number may then be another group's.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.process.pid, signal.SIGKILL)
        await child.process.wait()
        if child.drain is not None:
            await child.drain
            child.drain = None


def _parsed(line: bytes) -> dict[str, object]:
    try:
        value = json.loads(line)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


async def _drain(stream: asyncio.StreamReader, log: Path) -> None:
    with log.open("ab") as sink:
        while chunk := await stream.read(1 << 16):
            sink.write(chunk)
