"""A client in a process of its own, to be killed, frozen and forked.

``python -m kvstore.drill.client_process`` runs it.

It gets one JSON line (role, socket, namespace, keys) on stdin, says ``{"event": "ready"}`` once it holds what
its role holds, waits for another line, and says what came of it.
"""

import json
import os
import random
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from kvstore.client import KVStore
from kvstore.client_state import Timeouts
from kvstore.drill.blocks import BLOCK_TOKENS, count_wrong_bytes, drill_namespace, payload_of, payloads_of
from kvstore.drill.raw_client import RawClient
from kvstore.errors import ServerUnavailable
from kvstore.keys import BlockKey, Namespace, PrefixChain
from kvstore.link import unix_dial
from kvstore.messages import ChainRef, Commit, Count, WrittenSlot
from kvstore.transfer import read_slots, write_slots

_TIMEOUT_S = 5.0


class _Role:
    """What one client does with the chain it was given."""

    def __init__(self, order: dict[str, object]) -> None:
        self.path = Path(str(order["socket"]))
        self.namespace: Namespace = drill_namespace(
            str(order["namespace"]), block_bytes=int(str(order["block_bytes"]))
        )
        keys = order["keys"]
        assert isinstance(keys, list), "keys are a list of hexadecimal texts"
        self.chain = PrefixChain(
            self.namespace.digest, tuple(BlockKey(bytes.fromhex(key)) for key in keys), BLOCK_TOKENS
        )
        self.length_bytes = self.namespace.layout.block_bytes

    def run(self, role: str) -> None:
        """Play a role."""
        {"lease": self.lease, "write": self.write, "scribble": self.scribble, "fork": self.fork}[role]()

    def lease(self) -> None:
        """Hold a lease; copy the blocks when told to, which may be after the lease has ended."""
        with RawClient(unix_dial(self.path), self.namespace) as raw:
            ready = raw.lease(self.chain)
            _say(event="ready", blocks=len(ready.slots))
            _wait()
            rows = np.empty((len(ready.slots), self.length_bytes), np.uint8)
            good, end = read_slots(raw.reading, ready.slots, list(rows), lambda: False)
            wrong = sum(map(count_wrong_bytes, self.chain.keys[:good], rows))
            _say(event="done", good=good, end=end.value, wrong_bytes=wrong)

    def write(self) -> None:
        """Hold slots that are written by half; write and commit them when told to, as a client must."""
        with RawClient(unix_dial(self.path), self.namespace) as raw:
            lent = raw.reserve(self.chain)
            self._write_halves(raw, [slot.offset for slot in lent.slots])
            _say(event="ready", blocks=len(lent.slots))
            _wait()
            payloads = [payload_of(self.chain.keys[slot.position], self.length_bytes) for slot in lent.slots]
            written = write_slots(raw.writing, lent.slots, payloads, lambda: False)
            _say(event="done", written=len(written), stored=self._commit(raw, written))

    def scribble(self) -> None:
        """Hold slots; when told to, write and commit them whatever has become of them meanwhile."""
        with RawClient(unix_dial(self.path), self.namespace) as raw:
            lent = raw.reserve(self.chain)
            _say(event="ready", blocks=len(lent.slots))
            _wait()
            self._write_halves(raw, [slot.offset for slot in lent.slots])
            written = [WrittenSlot(slot.position, slot.offset, slot.generation, 0) for slot in lent.slots]
            _say(event="done", stored=self._commit(raw, written))

    def _commit(self, raw: RawClient, written: Sequence[WrittenSlot]) -> int:
        """Commit slots whose time may be up; returns how many blocks the store took."""
        if not written:
            return 0
        try:
            stored = raw.ask(Commit(ChainRef(self.chain, None), tuple(written)))
        except ServerUnavailable:  # refused as too late
            return 0
        return stored.count if isinstance(stored, Count) else -1

    def fork(self) -> None:
        """Use one client object in a process and in its forked child at the same time."""
        timeouts = Timeouts(match_s=_TIMEOUT_S, fetch_s=_TIMEOUT_S, put_s=_TIMEOUT_S)
        with KVStore.connect(self.path, timeouts=timeouts) as client:
            client.open_namespace(self.namespace)
            client.get(self.chain)
            _say(event="ready", blocks=len(self.chain))
            _wait()
            child = os.fork()
            wrong = self._use(client, seed=child)
            if not child:
                os._exit(min(wrong, 1))
            _, status = os.waitpid(child, 0)
            _say(event="done", wrong_bytes=wrong, child_status=os.waitstatus_to_exitcode(status))

    def _use(self, client: KVStore, *, seed: int) -> int:
        rng, wrong = random.Random(bool(seed)), 0  # noqa: S311 (a schedule)
        for _ in range(20):
            part = self.chain[: rng.randint(1, len(self.chain))]
            if rng.random() < 0.3:
                client.put(part, payloads_of(part, self.length_bytes))
            wrong += sum(map(count_wrong_bytes, part.keys, client.get(part)))
        return wrong

    def _write_halves(self, raw: RawClient, offsets: list[int]) -> None:
        half = self.length_bytes // 2
        for key, offset in zip(self.chain.keys, offsets, strict=False):
            target = np.frombuffer(raw.writing.slot(offset, half), np.uint8)
            np.copyto(target, payload_of(key, half))


def _say(**event: object) -> None:
    sys.stdout.write(json.dumps(event) + "\n")
    sys.stdout.flush()


def _wait() -> None:
    sys.stdin.readline()


if __name__ == "__main__":
    line = json.loads(sys.stdin.readline())
    _Role(line).run(line["role"])
