"""What the chart renders, run on this machine: paths of containers lie in a folder, programs are real."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvstore.drill.redis_server import find_binary, free_port
from kvstore.drill.store_process import guarded
from tests.helm.chart import named, pod_specs, render, store_container, toml_text

PATIENCE_S = 60.0
_PATHS = re.compile(r"(?<![\w/])/(?:etc/|run/kvstore|var/lib/kvstore|tmp/|data\b)")
PASSWORD = "a password's first line"


class Installed:
    """One release's store and bundled Redis, as processes. ``folder`` stands for every container's root."""

    def __init__(self, folder: Path, values: dict[str, Any], *, redis_port: int = 0) -> None:
        self.folder = folder
        self.found = render(values)
        self.pod = pod_specs(self.found)["Pod/demo-kvstore-test"]
        self.redis_port = redis_port or free_port()
        self._put("etc/kvstore/config/config.toml", toml_text(self.found))
        self._put("etc/kvstore/redis/password", f"{PASSWORD}\n")
        self._put("etc/redis-auth/password", f"{PASSWORD}\n")
        for name, text in named(self.found, "ConfigMap", "demo-kvstore-redis")["data"].items():
            self._put(f"etc/redis/{name}", text)
        for name in ("run/kvstore", "var/lib/kvstore", "tmp", "data", "bin"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / "bin/valkey-server").symlink_to(find_binary())
        (folder / "bin/kvstore").symlink_to(Path(sys.executable).parent / "kvstore")

    def here(self, text: str) -> str:
        """Return the text with paths and addresses of containers replaced by those of this machine."""
        text = _PATHS.sub(lambda found: f"{self.folder}{found[0]}", text)
        text = text.replace("demo-kvstore-redis:6379", f"127.0.0.1:{self.redis_port}")
        return text.replace("bind * -::*", "bind 127.0.0.1").replace("port 6379", f"port {self.redis_port}")

    def _put(self, name: str, text: str) -> None:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(self.here(text))

    @property
    def socket_path(self) -> str:
        """The store's socket."""
        return f"{self.folder}/run/kvstore/kvstore.sock"

    @property
    def environment(self) -> dict[str, str]:
        """The environment of the rendered containers."""
        container = store_container(self.pod)
        given = {at["name"]: self.here(at["value"]) for at in container["env"]}
        return {"PATH": f"{self.folder}/bin:{os.environ['PATH']}", **given}

    def run(self, command: list[str]) -> "subprocess.CompletedProcess[str]":
        """Run a command as the kubelet would in a container."""
        words = [self.here(word) for word in command]
        return subprocess.run(
            words, env=self.environment, capture_output=True, text=True, timeout=100, check=False
        )

    @contextmanager
    def redis(self):
        """Run the bundled server as its container would; yields its process."""
        pod = pod_specs(self.found)["StatefulSet/demo-kvstore-redis"]
        with self._process(pod["containers"][0]["command"], "redis.log") as process:
            self._until(self._answers, process, "redis.log")
            yield process

    def _answers(self) -> bool:
        try:
            socket.create_connection(("127.0.0.1", self.redis_port), timeout=1).close()
        except OSError:
            return False
        return True

    @contextmanager
    def store(self):
        """Run the store as its container would; yields its process."""
        with self._process(["kvstore", *store_container(self.pod)["args"]], "store.log") as process:
            self._until(self._is_ready, process, "store.log")
            yield process

    def _is_ready(self) -> bool:
        return "kvstore: ready" in (self.folder / "store.log").read_text()

    @contextmanager
    def _process(self, command: list[str], log: str):
        words = guarded([self.here(word) for word in command])
        with (self.folder / log).open("w") as out:
            process = subprocess.Popen(words, env=self.environment, stdout=out, stderr=out)
        try:
            yield process
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(PATIENCE_S)

    def _until(self, holds, process, log: str) -> None:
        give_up_s = time.monotonic() + PATIENCE_S
        while not holds():
            has_failed = process.poll() is not None or time.monotonic() >= give_up_s
            assert not has_failed, (self.folder / log).read_text()
            time.sleep(0.05)
