"""Valkey through a raw Unix socket: payloads straight from and into the caller's memory, nothing checked.

The least that a client of the Redis protocol costs in Python: no parser, a reply's length is known.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path

from peers import Bytes
from peers.valkey_server import ValkeyServer

_MAX_PARTS = 1000
"""Below IOV_MAX, the most buffers of one sendmsg."""

_AHEAD = 2
"""GETs of large blocks in flight; more only fill the server's output buffers."""

_AHEAD_BYTES = 1 << 20


class RawRedis:
    """One server and one connection."""

    def __init__(self, folder: Path, block_bytes: int) -> None:
        self._server = ValkeyServer(folder)
        self.server_pids = [self._server.pid]
        self._stream = self._server.connect()
        self._ahead = max(_AHEAD, _AHEAD_BYTES // block_bytes)
        self._set_size = b"$%d\r\n" % block_bytes
        self._head, self._tail = bytearray(len(self._set_size)), bytearray(2)

    def names(self, keys: Sequence[bytes]) -> list[bytes]:
        """Each key as an argument on the wire."""
        return [b"$%d\r\n%s\r\n" % (len(key), key) for key in keys]

    def put(self, names: Sequence[bytes], payloads: Sequence[Bytes]) -> None:
        """SET all, then take the replies."""
        parts: list[bytes | memoryview] = []
        for name, payload in zip(names, payloads, strict=True):
            parts += [b"*3\r\n$3\r\nSET\r\n" + name + self._set_size, payload.data, b"\r\n"]
        self._send(parts)
        expected = b"+OK\r\n" * len(names)
        assert self._take(len(expected)) == expected

    def fetch(self, names: Sequence[bytes], targets: Sequence[Bytes]) -> None:
        """GET all, some ahead of the replies, received where they belong."""
        asks = [b"*2\r\n$3\r\nGET\r\n" + name for name in names]
        self._stream.sendall(b"".join(asks[: self._ahead]))
        for number, target in enumerate(targets):
            self._take_block(target)
            if number + self._ahead < len(asks):
                self._stream.sendall(asks[number + self._ahead])

    def exists(self, names: Sequence[bytes]) -> None:
        """Count those that are stored; not which."""
        assert self._count(b"EXISTS", names) == len(names)

    def match(self, names: Sequence[bytes]) -> None:
        """There is nothing for leading blocks: count, as ``exists``."""
        self.exists(names)

    def remove(self, names: Sequence[bytes]) -> None:
        """Delete them."""
        self._count(b"DEL", names)

    def close(self) -> None:
        """Stop client and server."""
        self._stream.close()
        self._server.close()

    def _send(self, parts: Sequence[bytes | memoryview]) -> None:
        left = [memoryview(part).cast("B") for part in parts]
        at = 0
        while at < len(left):
            sent = self._stream.sendmsg(left[at : at + _MAX_PARTS])
            while at < len(left) and sent >= len(left[at]):
                sent -= len(left[at])
                at += 1
            if sent:
                left[at] = left[at][sent:]

    def _take_block(self, target: Bytes) -> None:
        parts = [memoryview(self._head), target.data, memoryview(self._tail)]
        got = self._stream.recvmsg_into(parts)[0]
        if not got or self._head.startswith((b"$-", b"-")):
            raise LookupError("raw_redis: the server has no such block, or closed the connection")
        for number, part in enumerate(parts):
            skip = min(got, len(part))
            parts[number] = part[skip:]
            got -= skip
        self._fill(parts)
        assert self._head == self._set_size, bytes(self._head)

    def _fill(self, parts: Iterable[memoryview]) -> None:
        for part in parts:
            at = 0
            while at < len(part):
                got = self._stream.recv_into(part[at:])
                if not got:
                    raise ConnectionError("raw_redis: the server closed the connection")
                at += got

    def _take(self, count: int) -> bytearray:
        data = bytearray(count)
        self._fill([memoryview(data)])
        return data

    def _count(self, verb: bytes, names: Sequence[bytes]) -> int:
        words = b"*%d\r\n$%d\r\n%s\r\n" % (len(names) + 1, len(verb), verb)
        self._stream.sendall(words + b"".join(names))
        reply = b""
        while not reply.endswith(b"\r\n"):
            got = self._stream.recv(64)
            if not got:
                raise ConnectionError("raw_redis: the server closed the connection")
            reply += got
        return int(reply[1:])


def open_peer(folder: Path, block_bytes: int, num_blocks: int) -> RawRedis:
    """Start it; the server takes the memory it needs."""
    return RawRedis(folder, block_bytes)
