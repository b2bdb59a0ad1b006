"""Spoilt frames by the thousand: no crash, no leak, and a healthy client does not notice.

``KVSTORE_FUZZ_FRAMES`` makes them more than the few thousand of a test run.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from kvstore import KVStore, Timeouts
from kvstore.drill.store_process import Footprint
from tests.client.conftest import BLOCK_BYTES, NAMESPACE
from tests.store_process import MIB, StoreProcess

NUM_FRAMES = int(os.environ.get("KVSTORE_FUZZ_FRAMES", "3000"))
PATIENT = Timeouts(match_s=60, fetch_s=60, put_s=60, control_s=60)
_FLOOR_S = 0.25
"""What a busy machine adds at times, whatever is sent."""


class Healthy:
    """A client that goes about its work and notes how long each call takes."""

    def __init__(self, store: KVStore) -> None:
        self._store = store
        self._chain = NAMESPACE.chain(range(32))
        self.wrong = 0

    def put(self) -> None:
        for at in range(8):
            assert self._store.put_block(self._chain[at : at + 1], np.full(BLOCK_BYTES, at, np.uint8))

    def work(self) -> float:
        """Match and get, and return the seconds that the match took; after a pause, as engines make them."""
        time.sleep(0.001)
        began_s = time.perf_counter()
        self._store.match(self._chain)
        took_s = time.perf_counter() - began_s
        self.wrong += sum((block != at).any() for at, block in enumerate(self._store.get(self._chain)))
        return took_s


def _p99(seconds: list[float]) -> float:
    return float(np.percentile(seconds, 99))


def _fuzz(
    store: StoreProcess, num_frames: int, healthy: Healthy, *options: str
) -> tuple[dict[str, int], float]:
    command = [sys.executable, "-m", "tests.server.fuzzer", str(store.socket_path), str(num_frames), *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as fuzzer:
        took_s = [healthy.work()]
        while fuzzer.poll() is None:
            took_s.append(healthy.work())
        assert fuzzer.stdout is not None
        said: dict[str, int] = json.loads(fuzzer.stdout.readline())
        assert fuzzer.returncode == 0
    return said, _p99(took_s)


@pytest.mark.alone
@pytest.mark.timeout(300 + NUM_FRAMES / 100)
def test_spoilt_frames_neither_crash_nor_swell_nor_slow_a_server(tmp_path: Path) -> None:
    with (
        StoreProcess(tmp_path) as store,
        KVStore.connect(store.socket_path, timeouts=PATIENT) as client,
    ):
        client.open_namespace(NAMESPACE)
        healthy = Healthy(client)
        healthy.put()
        alone_s = _p99([healthy.work() for _ in range(1000)])
        _, among_whole_s = _fuzz(store, NUM_FRAMES // 3, healthy, "1", "whole")
        _fuzz(store, NUM_FRAMES // 3, healthy, "1")
        before = Footprint.of(store.process.pid)
        said, among_s = _fuzz(store, NUM_FRAMES, healthy, "2")
        give_up_s = time.monotonic() + 60
        while client.stats()["owners"] > 1:
            assert time.monotonic() < give_up_s
        after, stats = Footprint.of(store.process.pid), client.stats()
        sys.stdout.write(
            f"{said}\n{before}\n{after}\np99 of a healthy match: {alone_s:.6f} s alone, "
            f"{among_whole_s:.6f} s among whole frames, {among_s:.6f} s among spoilt ones\n"
        )

        assert said["frames"] >= NUM_FRAMES
        assert stats["server"]["protocol_errors"] > NUM_FRAMES / 100
        assert stats["live_leases"] == stats["overdue_slots"] == 0
        assert healthy.wrong == 0
        assert client.check(1000) == []
        assert after.rss_bytes - before.rss_bytes < 16 * MIB
        assert after.descriptors == before.descriptors
        assert among_s <= max(2 * among_whole_s, _FLOOR_S)
        assert client.client_stats().connects == 1
        assert "Traceback" not in (tmp_path / "store.log").read_text()
