"""A real store in a process of its own, for tests that kill, stop and restart it."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Self

MIB = 1 << 20


def config_text(socket_path: Path, *, dram_bytes: int = 16 * MIB, lease_s: float = 30.0) -> str:
    """Return a configuration with a small dram tier and nothing below it."""
    return (
        f'[server]\nsocket = "{socket_path}"\n[store]\nlease_s = {lease_s}\n'
        f"[tiers.dram]\ncapacity_bytes = {dram_bytes}\nstaging_bytes = {MIB}\n"
    )


class StoreProcess:
    """``kvstore serve`` on a socket in ``folder``."""

    def __init__(self, folder: Path, **config: float) -> None:
        self.socket_path = folder / "kv.sock"
        self._config = folder / "store.toml"
        self._config.write_text(config_text(self.socket_path, **config))
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    @property
    def process(self) -> "subprocess.Popen[bytes]":
        assert self._process is not None
        return self._process

    @property
    def is_running(self) -> bool:
        """Whether it was started and has not ended."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start and wait until it says that it is ready."""
        command = [sys.executable, "-m", "kvstore.cli", "serve", "--config", str(self._config), "--json"]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"the store did not start: exit status {self._process.wait()}"
        assert json.loads(line)["event"] == "ready"

    def kill(self) -> None:
        """Kill it as kill -9 does, also while it is stopped."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
        self._reap()

    def terminate(self) -> int:
        """End it by SIGTERM; returns its exit status."""
        self.process.terminate()
        return self._reap()

    def pause(self) -> None:
        """Stop it without ending it."""
        os.kill(self.process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Let it go on."""
        os.kill(self.process.pid, signal.SIGCONT)

    def _reap(self) -> int:
        process, self._process = self._process, None
        if process is None:
            return 0
        status = process.wait(timeout=30)
        if process.stdout is not None:
            process.stdout.close()
        return status
