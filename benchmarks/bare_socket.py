"""A bare round trip: what two Python processes need to pass a request and an answer over a Unix socket."""

import os
import socket
import struct

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
