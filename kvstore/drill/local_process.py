"""A process that has a store of its own inside (``KVStore.local``), and forks.

``python -m kvstore.drill.local_process`` runs it.

It gets one JSON line (role, config, seed) on stdin, and says what came of it on stdout: ``wrong_bytes``, and
one line in ``problems`` for each broken promise. In the role ``fork`` it leaves a child behind that lives
until its stdin ends; ``look`` only opens the store again and looks for all that was stored.
"""

import json
import os
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path

from kvstore.client import KVStore
from kvstore.client_state import Timeouts
from kvstore.config import Config, load_config
from kvstore.drill.blocks import count_wrong_bytes, drill_namespace, new_chain, payloads_of
from kvstore.errors import KVStoreError, ServerUnavailable
from kvstore.keys import PrefixChain

_CALL_S = 5.0
_WRONG_STATUS, _PROBLEM_STATUS = 1, 2
_CHILDREN = 3


class _Host:
    """One process with a store, whose children use the same client object."""

    def __init__(self, config: Config, rng: random.Random) -> None:
        self._config = config
        self._rng = rng
        self._namespace = drill_namespace()
        self._chains = [new_chain(self._namespace, rng.randint(1, 6), rng) for _ in range(4)]
        self._clients: list[KVStore] = []
        self.wrong_bytes = 0
        self.problems: list[str] = []

    def fork(self) -> None:
        """Put blocks, fork under use, and look at everything again, also after closing and reopening."""
        with self._open() as client:
            for chain in self._chains:
                client.put(chain, payloads_of(chain, self._namespace.layout.block_bytes))
            if not client.flush():
                self.problems.append("a store without a fault did not make blocks durable")
            children = [self._fork(client) for _ in range(_CHILDREN)]
            for _ in range(20):
                self._use(client, self._rng.choice(self._chains), may_miss=False)
            for child in children:
                self._judge(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
            self._look(client)
            _leave_child()
        self.look()

    def look(self) -> None:
        """Open the store, while a child of an earlier one lives, and look for all that was stored."""
        try:
            client = self._open()
        except KVStoreError as error:
            self.problems.append(f"open again while a forked child lives: {error}")
            return
        self._look(client)
        self._clients.append(client)

    def _open(self) -> KVStore:
        timeouts = Timeouts(match_s=_CALL_S, fetch_s=_CALL_S, put_s=_CALL_S)
        client = KVStore.local(self._config, timeouts=timeouts)
        client.open_namespace(self._namespace)
        return client

    def _use(self, client: KVStore, chain: PrefixChain, *, may_miss: bool) -> int:
        """Fetch a chain; returns how many wrong bytes were served."""
        served = client.get(chain)
        wrong_bytes = sum(map(count_wrong_bytes, chain.keys, served))
        self.wrong_bytes += wrong_bytes
        if len(served) < len(chain) and not may_miss:
            self.problems.append(
                f"{len(served)} of {len(chain)} blocks are served in the process that forked"
            )
        return wrong_bytes

    def _look(self, client: KVStore) -> None:
        for chain in self._chains:
            self._use(client, chain, may_miss=False)
        self.problems += client.check()
        until_s = time.monotonic() + 1
        while client.stats()["live_leases"] and time.monotonic() < until_s:
            time.sleep(0.01)
        if leases := client.stats()["live_leases"]:
            self.problems.append(f"{leases} leases are left, nobody holds any")

    def _fork(self, client: KVStore) -> int:
        """Fork a child that uses and closes the client, and ends in one of two ways."""
        ends_abruptly = self._rng.random() < 0.5
        child = os.fork()
        if child:
            return child
        status = _PROBLEM_STATUS
        try:
            status = self._child(client)
        finally:
            if ends_abruptly:
                os._exit(status)
        sys.exit(status)

    def _child(self, client: KVStore) -> int:
        """Use the client where its store is not: everything is a miss, and nothing is touched."""
        wrong_bytes = sum(self._use(client, chain, may_miss=True) for chain in self._chains)
        new = new_chain(self._namespace, 2, self._rng)
        stored = client.put(new, payloads_of(new, self._namespace.layout.block_bytes)).stored
        is_refused = _is_refused(client.check)
        client.close()
        if wrong_bytes:
            return _WRONG_STATUS
        return 0 if is_refused and not stored else _PROBLEM_STATUS

    def _judge(self, status: int) -> None:
        if status == _WRONG_STATUS:
            self.wrong_bytes += 1
        elif status:
            self.problems.append(f"a forked child ended with status {status}")


def _leave_child() -> None:
    """Fork a child that lives until stdin ends, and wait until it runs."""
    hears, tells = os.pipe()
    if not os.fork():
        os.write(tells, b"!")
        os.read(sys.stdin.fileno(), 1)
        os._exit(0)
    os.read(hears, 1)
    os.close(hears)
    os.close(tells)


def _is_refused(call: Callable[[], object]) -> bool:
    try:
        call()
    except ServerUnavailable:
        return True
    return False


def main() -> None:
    """Play the part, say what came of it, and wait to be killed."""
    order = json.loads(sys.stdin.readline())
    host = _Host(load_config(Path(order["config"])), random.Random(order["seed"]))  # noqa: S311 (a schedule)
    {"fork": host.fork, "look": host.look}[order["role"]]()
    said = {"event": "done", "wrong_bytes": host.wrong_bytes, "problems": host.problems}
    sys.stdout.write(json.dumps(said) + "\n")
    sys.stdout.flush()
    os.read(sys.stdin.fileno(), 1)


if __name__ == "__main__":
    main()
