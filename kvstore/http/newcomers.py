"""Newcomers: connections that have not shown yet that their client may send requests, oldest first.

When as many connections are open as may be, one of these makes way for a new one, so that whoever connects
and says nothing keeps nobody out. First goes the oldest that has not sent a byte: who means it sends its
request, or the first message of its TLS handshake, with the connection. One that has sent something has a
second.
"""

import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")

_GRACE_S = 1.0
_RECEIVED = struct.Struct("=Q")
_RECEIVED_OFFSET = 128
"""Where struct tcp_info has tcpi_bytes_received: linux/tcp.h."""

_INFO_BYTES = _RECEIVED_OFFSET + _RECEIVED.size


@dataclass(slots=True)
class _Arrival:
    """When one came, and its socket."""

    at_s: float
    sock: socket.socket


class Newcomers(Generic[T]):
    """Connections of one listener, each known by any object. ``clock`` is monotonic."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._silent: dict[T, _Arrival] = {}
        self._heard: dict[T, _Arrival] = {}

    def add(self, connection: T, sock: socket.socket) -> None:
        """Note a connection that was just accepted; its socket is only looked at, while it is open."""
        self._silent[connection] = _Arrival(self._clock(), sock)

    def discard(self, connection: T) -> None:
        """Forget one that has ended, or has shown who it is. Idempotent."""
        self._silent.pop(connection, None)
        self._heard.pop(connection, None)

    def take(self) -> tuple[T, socket.socket] | None:
        """Return the one that makes way and its socket, and forget it; None if none has to."""
        while self._silent:
            connection, arrival = next(iter(self._silent.items()))
            del self._silent[connection]
            if not _has_sent(arrival.sock):
                return connection, arrival.sock
            self._heard[connection] = arrival
        for connection, arrival in self._heard.items():
            if self._clock() - arrival.at_s < _GRACE_S:
                break
            del self._heard[connection]
            return connection, arrival.sock
        return None


def _has_sent(sock: socket.socket) -> bool:
    """Whether anything was ever received from the other side."""
    if sock.fileno() < 0:
        return False
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _RECEIVED_OFFSET + _RECEIVED.size)
    return len(info) < _RECEIVED_OFFSET + _RECEIVED.size or _RECEIVED.unpack_from(info, _RECEIVED_OFFSET) != (
        0,
    )
