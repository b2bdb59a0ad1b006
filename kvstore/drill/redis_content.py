"""What a Redis-protocol server holds, looked into and damaged from outside."""

import random
from typing import Any

import redis

from kvstore.drill.blocks import payload_of
from kvstore.keys import BlockKey

_TIMEOUT_S = 5.0
_PROBE_BYTES = 32


class RedisContent:
    """The keys and values of one server. Values are found by the bytes of the block they hold."""

    def __init__(self, port: int) -> None:
        self._redis: Any = redis.Redis(port=port, socket_timeout=_TIMEOUT_S)  # Any: its types are unions

    def close(self) -> None:
        """Close the connections."""
        self._redis.close()

    def find(self, keys: list[BlockKey], length_bytes: int) -> dict[BlockKey, bytes]:
        """Return the names of the values that hold these blocks, as far as there are any."""
        probes = {payload_of(key, length_bytes)[:_PROBE_BYTES].tobytes(): key for key in keys}
        found: dict[BlockKey, bytes] = {}
        for name in self._redis.scan_iter(count=1000):
            value = self._redis.get(name)
            for probe, key in probes.items():
                if value is not None and probe in value:
                    found[key] = name
        return found

    def flip_bit(self, name: bytes, rng: random.Random) -> None:
        """Flip one random bit of a value, of its header or its payload."""
        value = bytearray(self._redis.get(name))
        # Headers are short: without a choice of their own they would hardly ever be hit.
        place = rng.randrange(256 if rng.random() < 0.3 else len(value))
        value[place] ^= 1 << rng.randrange(8)
        self._redis.set(name, bytes(value))

    def copy(self, source: bytes, target: bytes) -> None:
        """Store one key's value under another."""
        self._redis.set(target, self._redis.get(source))

    def cut(self, name: bytes, rng: random.Random) -> None:
        """Cut a value, lengthen it, empty it, or put a list in its place."""
        value: bytes = self._redis.get(name)
        dice = rng.random()
        if dice < 0.6:
            self._redis.set(name, value[: rng.randrange(len(value))])
        elif dice < 0.8:
            self._redis.set(name, value + rng.randbytes(rng.randint(1, 4096)))
        elif dice < 0.9:
            self._redis.set(name, b"")
        else:
            self._redis.delete(name)
            self._redis.rpush(name, b"a", b"b")

    def limit_memory(self, spare_bytes: int) -> None:
        """Refuse writes that need more than this beyond what is in use; 0: no limit."""
        limit = self._redis.info("memory")["used_memory"] + spare_bytes if spare_bytes else 0
        self._redis.config_set("maxmemory-policy", "noeviction")
        self._redis.config_set("maxmemory", limit)
