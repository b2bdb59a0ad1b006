"""A real ``kvstore serve`` in a process of its own, for benchmarks."""

import json
import subprocess
import sys
from pathlib import Path


class ServedStore:
    """A store with so much room in memory and, if wanted, on disk below it. It serves once it is made."""

    def __init__(self, folder: Path, dram_bytes: int, *, ssd_bytes: int = 0) -> None:
        self.socket_path = folder / "kv.sock"
        config = folder / "store.toml"
        text = f'[server]\nlog_level = "warning"\nsocket = "{self.socket_path}"\n'
        text += f"[tiers.dram]\ncapacity_bytes = {dram_bytes}\n"
        if ssd_bytes:
            text += f'[tiers.ssd]\npath = "{folder / "ssd"}"\ncapacity_bytes = {ssd_bytes}\n'
        config.write_text(text)
        words = [sys.executable, "-P", "-m", "kvstore.cli", "serve", "--config", str(config), "--json"]
        self._process = subprocess.Popen(words, stdout=subprocess.PIPE)
        assert self._process.stdout is not None
        assert json.loads(self._process.stdout.readline())["event"] == "ready"

    @property
    def pid(self) -> int:
        """Its process."""
        return self._process.pid

    def close(self) -> None:
        """Stop it."""
        self._process.terminate()
        self._process.wait(30)
        if self._process.stdout is not None:
            self._process.stdout.close()
