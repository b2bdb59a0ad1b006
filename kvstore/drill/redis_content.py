"""What a Redis-protocol server holds, looked into and damaged from outside."""

import random
import socket
from typing import Self, Union

from kvstore.drill.blocks import payload_of
from kvstore.keys import BlockKey

_TIMEOUT_S = 5.0
_PROBE_BYTES = 32

Reply = Union[int, bytes, None, "list[Reply]"]


class RedisContent:
    """The keys and values of one server. Values are found by the bytes of the block they hold."""

    def __init__(self, port: int) -> None:
        self._stream = socket.create_connection(("127.0.0.1", port), timeout=_TIMEOUT_S)
        self._replies = self._stream.makefile("rb")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._replies.close()
        self._stream.close()

    def find(self, keys: list[BlockKey], length_bytes: int) -> dict[BlockKey, bytes]:
        """Return the names of the values that hold these blocks, as far as there are any."""
        probes = {payload_of(key, length_bytes)[:_PROBE_BYTES].tobytes(): key for key in keys}
        found: dict[BlockKey, bytes] = {}
        names = self._ask(b"KEYS", b"*")
        assert isinstance(names, list), "the reply to KEYS is a list"
        for name in names:
            assert isinstance(name, bytes), "the reply to KEYS holds names"
            value = self.get(name)
            for probe, key in probes.items():
                if probe in value:
                    found[key] = name
        return found

    def get(self, name: bytes) -> bytes:
        """Return a value; empty if there is none, or not a string."""
        value = self._ask(b"GET", name)
        return value if isinstance(value, bytes) else b""

    def put(self, name: bytes, value: bytes) -> None:
        """Store a value."""
        self._ask(b"SET", name, value)

    def flip_bit(self, name: bytes, rng: random.Random) -> None:
        """Flip one random bit of a value, of its header or its payload."""
        value = bytearray(self.get(name))
        # Headers are short: without a choice of their own they would hardly ever be hit.
        place = rng.randrange(256 if rng.random() < 0.3 else len(value))
        value[place] ^= 1 << rng.randrange(8)
        self._ask(b"SET", name, bytes(value))

    def copy(self, source: bytes, target: bytes) -> None:
        """Store one key's value under another."""
        self._ask(b"SET", target, self.get(source))

    def cut(self, name: bytes, rng: random.Random) -> None:
        """Cut a value, lengthen it, empty it, or put a list in its place."""
        value, dice = self.get(name), rng.random()
        if dice < 0.6:
            self._ask(b"SET", name, value[: rng.randrange(len(value))])
        elif dice < 0.8:
            self._ask(b"SET", name, value + rng.randbytes(rng.randint(1, 4096)))
        elif dice < 0.9:
            self._ask(b"SET", name, b"")
        else:
            self._ask(b"DEL", name)
            self._ask(b"RPUSH", name, b"a", b"b")

    def limit_memory(self, spare_bytes: int) -> None:
        """Refuse writes that need more than this beyond what is in use; 0: no limit."""
        limit = self._memory_bytes() + spare_bytes if spare_bytes else 0
        self._ask(b"CONFIG", b"SET", b"maxmemory-policy", b"noeviction")
        self._ask(b"CONFIG", b"SET", b"maxmemory", b"%d" % limit)

    def _memory_bytes(self) -> int:
        told = self._ask(b"INFO", b"memory")
        assert isinstance(told, bytes), "the reply to INFO is a text"
        lines = dict(line.split(b":", 1) for line in told.splitlines() if b":" in line)
        return int(lines[b"used_memory"])

    def _ask(self, *words: bytes) -> Reply:
        parts = [b"*%d\r\n" % len(words), *(b"$%d\r\n%s\r\n" % (len(word), word) for word in words)]
        self._stream.sendall(b"".join(parts))
        return self._reply()

    def _reply(self) -> Reply:
        """Read one reply; an error is None."""
        line = self._replies.readline()
        if not line.endswith(b"\r\n"):
            raise ConnectionError("redis: the connection ended")
        kind, rest = line[:1], line[1:-2]
        if kind == b"*":
            return [self._reply() for _ in range(int(rest))]
        if kind == b"$" and int(rest) >= 0:
            return self._replies.read(int(rest) + 2)[:-2]
        if kind == b":":
            return int(rest)
        return rest if kind == b"+" else None
