"""ChildPart: a process of the drill's own that takes an order on stdin and answers in lines of JSON."""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Self

from kvstore.drill.store_process import PartFailed, guarded

_PATIENCE_S = 60.0


class ChildPart:
    """``python -m kvstore.drill.<module>``, leader of a group of processes. A context that ends them all."""

    def __init__(self, module: str, order: Mapping[str, object], *, log: Path) -> None:
        self._module = module
        self._order = dict(order)
        self._log = log
        words = [sys.executable, "-P", "-m", f"kvstore.drill.{module}"]
        with log.open("ab") as file:
            self._process = subprocess.Popen(
                guarded(words),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                bufsize=0,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """Number of the leader, and of its group."""
        return self._process.pid

    def __enter__(self) -> Self:
        self.tell(json.dumps(self._order))
        return self

    def __exit__(self, *_: object) -> None:
        self.kill_all()

    def tell(self, line: str) -> None:
        """Send a line."""
        assert self._process.stdin is not None, "it was started with a pipe"
        self._process.stdin.write(line.encode() + b"\n")

    def hear(self, event: str) -> dict[str, object]:
        """Wait for its next line, which must be about this event.

        Raises:
            PartFailed: it ended, says nothing, or something else.
        """
        said = self.hear_within(_PATIENCE_S)
        if said is None or said.get("event") != event:
            raise PartFailed(f"{self._module}: said {said}, expected {event}: see {self._log.name} (--keep)")
        return said

    def hear_within(self, timeout_s: float) -> dict[str, object] | None:
        """Return its next line; None if it says nothing in time, or has ended."""
        stdout = self._process.stdout
        assert stdout is not None, "it was started with a pipe"
        readable, _, _ = select.select([stdout], [], [], timeout_s)
        line = stdout.readline() if readable else b""
        said: dict[str, object] | None = json.loads(line) if line else None
        return said

    def pause(self) -> None:
        """Freeze it (SIGSTOP)."""
        os.kill(self._process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Let it run."""
        os.kill(self._process.pid, signal.SIGCONT)

    def kill(self) -> None:
        """Kill the leader as kill -9 does; what it forked lives on. Idempotent."""
        if self._process.returncode is None:
            os.kill(self._process.pid, signal.SIGKILL)
            # It stays a zombie, so that its number, which is the group's, goes to nobody else.
            os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)

    def kill_all(self) -> None:
        """Kill every process of the group at once. Idempotent."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
