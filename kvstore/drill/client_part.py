"""ClientPart: the drill's end of a client in a process of its own."""

import json
import os
import select
import signal
import subprocess
import sys
from typing import Self

from kvstore.drill.stage import Stage
from kvstore.drill.store_process import PartFailed, guarded
from kvstore.keys import PrefixChain

_PATIENCE_S = 20.0


class ClientPart:
    """One client process; see ``client_process`` for the roles. A context that ends it."""

    def __init__(self, stage: Stage, role: str, chain: PrefixChain) -> None:
        self._order = {
            "role": role,
            "socket": str(stage.store.socket_path),
            "namespace": stage.namespace.model,
            "block_bytes": stage.block_bytes,
            "keys": [key.hex() for key in chain.keys],
        }
        words = [sys.executable, "-P", "-m", "kvstore.drill.client_process"]
        with (stage.folder / "clients.log").open("ab") as log:
            self._process = subprocess.Popen(
                guarded(words), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, bufsize=0
            )

    def __enter__(self) -> Self:
        self._tell(json.dumps(self._order))
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def wait_ready(self) -> int:
        """Wait until it holds what its role holds; returns of how many blocks."""
        return int(str(self._hear("ready")["blocks"]))

    def go_on(self) -> dict[str, object]:
        """Let it go on; returns what came of it."""
        self._tell("go")
        return self._hear("done")

    def pause(self) -> None:
        """Freeze it (SIGSTOP)."""
        os.kill(self._process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Let it run."""
        os.kill(self._process.pid, signal.SIGCONT)

    def kill(self) -> None:
        """Kill it as kill -9 does. Idempotent."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None, "it was started with a pipe"
        self._process.stdin.write(line.encode() + b"\n")

    def _hear(self, event: str) -> dict[str, object]:
        stdout = self._process.stdout
        assert stdout is not None, "it was started with a pipe"
        readable, _, _ = select.select([stdout], [], [], _PATIENCE_S)
        line = stdout.readline() if readable else b""
        if not line:
            raise PartFailed(f"client in role {self._order['role']}: no answer: see clients.log (--keep)")
        said: dict[str, object] = json.loads(line)
        if said.get("event") != event:
            raise PartFailed(f"client in role {self._order['role']}: said {said}, expected {event}")
        return said
