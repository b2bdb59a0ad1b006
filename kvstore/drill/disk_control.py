"""DiskControl: the drill's end of the trouble in a store's process."""

import json
import socket
import subprocess
import sys
from pathlib import Path

from kvstore.drill.store_process import PartFailed
from kvstore.drill.trouble import TroubleOrder, TroubleStatus

_PATIENCE_S = 20.0


class DiskControl:
    """Orders to one store, by the socket where it listens for them."""

    def __init__(self, socket_path: Path) -> None:
        self._socket_path = socket_path

    def order(self, order: TroubleOrder) -> TroubleStatus:
        """Give an order; returns what had happened under the one before.

        Raises:
            PartFailed: the store is not there.
        """
        return self._ask(order.to_json())

    def end(self) -> TroubleStatus:
        """Let there be no trouble; returns what had happened. Raises PartFailed."""
        return self.order(TroubleOrder())

    def status(self) -> TroubleStatus:
        """Return what has happened since the last order. Raises PartFailed."""
        return self._ask("")

    def _ask(self, line: str) -> TroubleStatus:
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stream:
                stream.settimeout(_PATIENCE_S)
                stream.connect(str(self._socket_path))
                stream.sendall(line.encode() + b"\n")
                stream.shutdown(socket.SHUT_WR)
                said = json.loads(b"".join(iter(lambda: stream.recv(4096), b"")))
        except (OSError, ValueError) as error:
            raise PartFailed(f"store: takes no orders about its disk: {error}") from error
        return TroubleStatus(**said)


def trouble_obstacle() -> str:
    """Return why no trouble can come to a store's disk on this machine; empty if it can."""
    words = [sys.executable, "-P", "-m", "kvstore.drill.troubled_store", "--probe"]
    tried = subprocess.run(words, capture_output=True, text=True, check=False, timeout=_PATIENCE_S)
    if not tried.returncode:
        return ""
    said = tried.stderr.strip().splitlines()[-1:] or [f"status {tried.returncode}"]
    return f"a store's disk operations cannot be watched: {said[0]}"
