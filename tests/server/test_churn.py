"""Many clients connecting, working and dying at random: nothing of them is left.

``KVSTORE_CHURN_S`` makes it longer than the few seconds of a test run, ``KVSTORE_CHURN_CLIENTS`` larger.
"""

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvstore import KVStore, Timeouts
from kvstore.drill.store_process import Footprint
from tests.server.churn_worker import BLOCK_BYTES, CHURN_SPACE, payload
from tests.store_process import MIB, StoreProcess

CHURN_S = float(os.environ.get("KVSTORE_CHURN_S", "4"))
NUM_CLIENTS = int(os.environ.get("KVSTORE_CHURN_CLIENTS", "200"))
NUM_WORKERS = 4
NOTHING = {"owners": 1, "live_leases": 0, "overdue_slots": 0, "lent_ahead_bytes": 0, "loads": 0}
PATIENT = Timeouts(match_s=60, fetch_s=60, put_s=60, control_s=60)


class Workers:
    """Processes of clients, some of which are killed and started again."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seed = 0
        self._running = [self._start() for _ in range(NUM_WORKERS)]
        self.num_killed = 0

    def kill_one(self, choose: random.Random) -> None:
        at = choose.randrange(NUM_WORKERS)
        self._reap(self._running[at], is_killed=True)
        self.num_killed += 1
        self._running[at] = self._start()

    def end(self) -> list[dict[str, int]]:
        """Tell all to end, with whatever their clients hold, and return what they say."""
        for worker in self._running:
            assert worker.stdin is not None
            worker.stdin.close()
        said = []
        for worker in self._running:
            assert worker.stdout is not None
            said.append(json.loads(worker.stdout.readline()))
            self._reap(worker, is_killed=False)
        return said

    def _start(self) -> "subprocess.Popen[bytes]":
        self._seed += 1
        words = ["-m", "tests.server.churn_worker", str(self._path), str(NUM_CLIENTS // NUM_WORKERS)]
        command = [sys.executable, *words, str(self._seed)]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def _reap(self, worker: "subprocess.Popen[bytes]", *, is_killed: bool) -> None:
        if is_killed:
            worker.kill()
        worker.wait(60)
        for stream in (worker.stdin, worker.stdout):
            assert stream is not None
            stream.close()


def _leftovers(monitor: KVStore) -> dict[str, int]:
    stats = monitor.stats()
    return {name: stats[name] for name in NOTHING}


def _fill(monitor: KVStore) -> None:
    """Put so much that the arena is full, as it is when the churn has gone on for long."""
    chain = CHURN_SPACE.chain(range(10**6, 10**6 + 4 * 8 * MIB // BLOCK_BYTES))
    monitor.put(chain, [payload(key) for key in chain.keys])


@pytest.mark.alone
@pytest.mark.timeout(CHURN_S + 240)
@pytest.mark.parametrize("is_full", [True, False])
def test_clients_that_come_and_go_leave_nothing_behind(tmp_path: Path, is_full: bool) -> None:
    choose = random.Random(11)
    shared_memory = sorted(path.name for path in Path("/dev/shm").iterdir())
    with (
        StoreProcess(
            tmp_path, dram_bytes=(8 if is_full else 64) * MIB, max_connections=4 * NUM_CLIENTS
        ) as store,
        KVStore.connect(store.socket_path, timeouts=PATIENT) as monitor,
    ):
        monitor.open_namespace(CHURN_SPACE)
        if is_full:
            _fill(monitor)
        workers = Workers(store.socket_path)
        pause_s = max(0.5, CHURN_S / 40)
        pauses = [pause_s] * round(CHURN_S / 2 / pause_s)
        while not is_full and "store" not in monitor.stats()["server"]["requests"]:
            time.sleep(pause_s)  # a busy machine takes its time to start the first clients
        before = _churn(workers, pauses, choose, store)
        after = _churn(workers, pauses, choose, store)
        said = workers.end()
        give_up_s = time.monotonic() + 60
        while _leftovers(monitor) != NOTHING:
            assert time.monotonic() < give_up_s, _leftovers(monitor)
        at_rest = Footprint.of(store.process.pid)
        server = monitor.stats()["server"]
        sys.stdout.write(f"{workers.num_killed} processes killed, {server}\n{before}\n{after}\n{at_rest}\n")

        assert sum(one["wrong"] for one in said) == 0
        assert is_full or server["requests"]["store"] > 0
        assert monitor.check(10_000) == []
        assert at_rest.descriptors <= 40
        assert at_rest.rss_bytes - before.rss_bytes < 16 * MIB
        assert monitor.drop(CHURN_SPACE.chain(range(4))) in (0, 1)
    assert sorted(path.name for path in Path("/dev/shm").iterdir()) == shared_memory


def _churn(workers: Workers, pauses: list[float], choose: random.Random, store: StoreProcess) -> Footprint:
    for pause_s in pauses:
        time.sleep(pause_s)
        workers.kill_one(choose)
    return Footprint.of(store.process.pid)
