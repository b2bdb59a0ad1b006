"""ZmqSettings: where a store publishes its events over ZeroMQ, and who may read them."""

import ipaddress
import re
from dataclasses import dataclass
from pathlib import Path

from kvstore.errors import InvalidConfig
from kvstore.kv_events import EventForm, HashForm

_TCP = re.compile(r"tcp://(?P<host>\[[0-9a-fA-F:]+\]|[^:/\s]+):(?P<port>[0-9]{1,5})")
_IPC = re.compile(r"ipc:///\S+")


@dataclass(frozen=True, slots=True)
class ZmqSettings:
    """Where and how events are published.

    ``keys`` is a folder with ``server.key_secret`` and ``clients/*.key``, CURVE certificates as ``zmq.auth``
    makes them; with it only those clients are let in, and everything is encrypted. ``replay`` empty: none.
    """

    endpoint: str
    replay: str = ""
    topic: str = ""
    hashes: HashForm = HashForm.INT
    form: EventForm = EventForm.MAP
    keys: Path | None = None

    def check(self) -> None:
        """Refuse endpoints that cannot be served, or that anybody could reach.

        Raises:
            InvalidConfig: message with the endpoint, the reason and the remedy.
        """
        for endpoint in filter(None, (self.endpoint, self.replay)):
            tcp = _TCP.fullmatch(endpoint)
            if tcp is None and not _IPC.fullmatch(endpoint):
                raise InvalidConfig(f"events: {endpoint}: expected tcp://HOST:PORT or ipc:///PATH")
            if tcp is not None and self.keys is None and not _is_loopback(tcp["host"].strip("[]")):
                raise InvalidConfig(
                    f"events: {endpoint} can be reached from other machines, without authentication: give"
                    " --events-keys, or an address of this machine alone"
                )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
