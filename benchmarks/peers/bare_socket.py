"""A bare round trip: what two Python processes need to pass a request and an answer over a Unix socket."""

import os
import socket
import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from peers import Bytes

REQUEST_BYTES, ANSWER_BYTES = 160, 120
"""About what the store's own messages have when one block is fetched."""

_LENGTH = struct.Struct("<II")


class BareSocket:
    """A child process that reads requests and answers with as many bytes as each asks for."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        self.pid = os.fork()
        if self.pid == 0:
            ours.close()
            _serve(theirs)
        theirs.close()
        self._socket = ours

    def round_trip(self, request_bytes: int, answer_bytes: int) -> None:
        """Send a request of so many bytes and receive the whole answer."""
        stream = self._socket
        stream.sendall(_LENGTH.pack(request_bytes, answer_bytes) + bytes(request_bytes - _LENGTH.size))
        while answer_bytes > 0:
            answer_bytes -= len(stream.recv(1 << 18))

    def close(self) -> None:
        """End the child."""
        self._socket.close()
        os.waitpid(self.pid, 0)


class BareFetch:
    """One round trip, and a plain copy: the least that fetching from another process costs."""

    def __init__(self) -> None:
        self._bare = BareSocket()
        self.server_pids = [self._bare.pid]

    def names(self, keys: Sequence[bytes]) -> None:
        """There are none."""

    def round_trip_and_copy(self, targets: Sequence[Bytes], sources: Sequence[Bytes]) -> None:
        """Ask once, copy each."""
        self._bare.round_trip(REQUEST_BYTES, ANSWER_BYTES)
        for target, source in zip(targets, sources, strict=True):
            np.copyto(target, source)

    def remove(self, names: None) -> None:
        """Nothing is kept."""

    def close(self) -> None:
        """End the child."""
        self._bare.close()


def open_peer(folder: Path, block_bytes: int, num_blocks: int) -> BareFetch:
    """Start it."""
    return BareFetch()


def _serve(stream: socket.socket) -> None:
    try:
        while data := stream.recv(1 << 18):
            request_bytes, answer_bytes = _LENGTH.unpack_from(data)
            left = request_bytes - len(data)
            while left > 0:
                left -= len(stream.recv(1 << 18))
            stream.sendall(bytes(answer_bytes))
    finally:
        os._exit(0)
