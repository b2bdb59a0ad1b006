"""Many clients at once, to be killed together.

``python -m kvstore.drill.crowd_process`` runs it, as the leader of a process group of its own.

It gets one JSON line (socket, namespace, block_bytes, and per client a role and the keys of its chain) on
stdin, forks a process for each client, and says ``{"event": "ready"}`` once each of them holds what its role
holds, or is at work. Roles: ``lease`` holds a lease, ``write`` half-written slots, ``work`` puts and fetches
without end.
"""

import json
import os
import random
import sys
from pathlib import Path

import numpy as np

from kvstore.client import KVStore
from kvstore.client_state import Timeouts
from kvstore.drill.blocks import BLOCK_TOKENS, count_wrong_bytes, drill_namespace, payload_of, payloads_of
from kvstore.drill.raw_client import RawClient
from kvstore.keys import BlockKey, Namespace, PrefixChain
from kvstore.link import unix_dial

_TIMEOUT_S = 5.0
_FAILED_STATUS, _WRONG_STATUS = 1, 3


class _Member:
    """One client, in a process of its own."""

    def __init__(self, order: dict[str, object], keys: list[str]) -> None:
        self._leader = os.getppid()
        self._path = Path(str(order["socket"]))
        self._length_bytes = int(str(order["block_bytes"]))
        self._namespace: Namespace = drill_namespace(str(order["namespace"]), block_bytes=self._length_bytes)
        named = tuple(BlockKey(bytes.fromhex(key)) for key in keys)
        self._chain = PrefixChain(self._namespace.digest, named, BLOCK_TOKENS)

    def run(self, role: str, ready: int) -> None:
        """Play a role for good; writes a byte to ``ready`` once it has begun."""
        {"lease": self._lease, "write": self._write, "work": self._work}[role](ready)

    def _lease(self, ready: int) -> None:
        with RawClient(unix_dial(self._path), self._namespace) as raw:
            raw.lease(self._chain)
            _stay(ready)

    def _write(self, ready: int) -> None:
        """Hold slots that are written by half."""
        with RawClient(unix_dial(self._path), self._namespace) as raw:
            half = self._length_bytes // 2
            for slot in raw.reserve(self._chain).slots:
                target = np.frombuffer(raw.writing.slot(slot.offset, half), np.uint8)
                np.copyto(target, payload_of(self._chain.keys[slot.position], half))
            _stay(ready)

    def _work(self, ready: int) -> None:
        """Put, fetch and drop without end; tells of a wrong byte by its exit status."""
        rng = random.Random(os.getpid())  # noqa: S311 (a schedule)
        timeouts = Timeouts(match_s=_TIMEOUT_S, fetch_s=_TIMEOUT_S, put_s=_TIMEOUT_S)
        with KVStore.connect(self._path, timeouts=timeouts) as client:
            client.open_namespace(self._namespace)
            client.put(self._chain, payloads_of(self._chain, self._length_bytes))
            os.write(ready, b"!")
            # Whoever is to kill it may die first.
            while os.getppid() == self._leader:
                part = self._chain[: rng.randint(1, len(self._chain))]
                if any(map(count_wrong_bytes, part.keys, client.get(part))):
                    os._exit(_WRONG_STATUS)
                if rng.random() < 0.2:
                    client.drop(part)
                client.put(part, payloads_of(part, self._length_bytes))


def _stay(ready: int) -> None:
    os.write(ready, b"!")
    sys.stdin.read()


def _say(**event: object) -> None:
    sys.stdout.write(json.dumps(event) + "\n")
    sys.stdout.flush()


def main() -> None:
    """Fork the clients, and tell if one ends, which none should."""
    order = json.loads(sys.stdin.readline())
    hears, tells = os.pipe()
    children: list[int] = []
    for role, keys in order["members"]:
        child = os.fork()
        if not child:
            try:
                _Member(order, keys).run(role, tells)
            finally:
                os._exit(_FAILED_STATUS)
        children.append(child)
    for _ in children:
        os.read(hears, 1)
    _say(event="ready", clients=len(children))
    _, status = os.wait()
    code = os.waitstatus_to_exitcode(status)
    _say(event="ended", status=code, was_served_wrong_bytes=code == _WRONG_STATUS)


if __name__ == "__main__":
    main()
