"""A server that works for long takes no more memory than one that has warmed up.

It runs with the collector as a serving process has it. ``KVSTORE_SOAK_S`` makes the test longer than the few
seconds of a test run.
"""

import os
import statistics
import time
from pathlib import Path

import numpy as np
import pytest

from kvstore import KVLayout, KVStore, Namespace, Timeouts
from tests.store_process import MIB, StoreProcess

SOAK_S = float(os.environ.get("KVSTORE_SOAK_S", "6"))
WARM_UP_ROUNDS = 120
NUM_CHAINS = 48
CHAIN_BLOCKS = 128
BLOCK_BYTES = 4096
PATIENT = Timeouts(match_s=60, fetch_s=60, put_s=60, control_s=60)
SPACES = [
    Namespace(f"model {number}", KVLayout.opaque(block_bytes=BLOCK_BYTES, block_tokens=4))
    for number in range(4)
]
PAYLOADS = np.zeros(CHAIN_BLOCKS * BLOCK_BYTES, np.uint8)


def _private_bytes(pid: int) -> int:
    """Return what the process has in memory of its own: the arena is shared and does not count."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    (size,) = [line.split()[1] for line in lines if line.startswith("RssAnon:")]
    return int(size) << 10


def _round(store: StoreProcess, number: int) -> None:
    """Have a client put, find, lease, keep and drop blocks, and leave without letting go of all of it."""
    space = SPACES[number % len(SPACES)]
    first = number % NUM_CHAINS * CHAIN_BLOCKS * 4
    chain = space.chain(range(first, first + CHAIN_BLOCKS * 4))
    client = KVStore.connect(store.socket_path, timeouts=PATIENT)
    client.open_namespace(space)
    client.put(chain, PAYLOADS)
    client.match(chain)
    client.exists(chain)
    client.get(chain[:4])
    client.lease(chain[:16])
    lease = client.lease(chain[16:32])
    client.drop(chain[64:])
    client.why(chain[60:68])
    lease.release()
    client.put_record("soak", f"n{number % NUM_CHAINS}", b"x" * 100, ttl_s=60)
    client.close()


@pytest.mark.timeout(SOAK_S + 240)
def test_blocks_leases_and_connections_that_come_and_go_leave_no_memory_behind(tmp_path: Path) -> None:
    with StoreProcess(tmp_path) as store:
        for number in range(WARM_UP_ROUNDS):
            _round(store, number)
        sizes: list[int] = []
        number, until_s = WARM_UP_ROUNDS, time.monotonic() + SOAK_S
        while time.monotonic() < until_s or number < 3 * WARM_UP_ROUNDS:
            _round(store, number)
            sizes.append(_private_bytes(store.process.pid))
            number += 1
        with KVStore.connect(store.socket_path, timeouts=PATIENT) as monitor:
            stats = monitor.stats()

    half = len(sizes) // 2
    grown_bytes = statistics.median(sizes[-half // 2 :]) - statistics.median(sizes[: half // 2])
    rounds = len(sizes) // 2
    # An object of 100 bytes that stays per block, or 6 KiB per connection, would be more.
    assert grown_bytes < 2 * MIB + rounds * CHAIN_BLOCKS * 32, (grown_bytes, rounds, sizes[:: rounds // 4])
    assert stats["owners"] == 1
    assert stats["live_leases"] == 0
