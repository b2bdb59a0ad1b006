"""What a stopped Redis does to a store: latency of dram hits and of remote misses, in turns.

A real ``kvstore serve`` with a dram and a remote tier, and a real server that is stopped with SIGSTOP. One
thread fetches blocks that are in dram, two look chains up that only the remote tier could have, and one puts
new blocks, which are written through to it. ``late`` counts look-ups that ended more than 10 ms after their
deadline. Phases alternate; p99 is over all phases of a kind.
"""

import argparse
import json
import statistics
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np

from kvstore import KVLayout, KVStore, Namespace
from kvstore.drill.redis_server import RedisServer
from kvstore.drill.store_process import StoreProcess, StoreSettings

BLOCK_TOKENS = 16
LATE_S = 0.01
DEADLINE_S = 0.05


class Load:
    """Callers of a store, whose latencies are filed by phase."""

    def __init__(self, address: str, block_bytes: int) -> None:
        self.phase = "warm-up"
        self.seconds: dict[tuple[str, str], list[float]] = {}
        self.reasons: dict[str, Counter[str]] = {}
        self._layout = KVLayout.opaque(block_bytes=block_bytes, block_tokens=BLOCK_TOKENS)
        self._namespace = Namespace(model="outage", weights="none", layout=self._layout)
        self._address = address
        self._stop = threading.Event()
        self._next_token = 1 << 20
        self._lock = threading.Lock()
        self._payload = np.zeros(4 * block_bytes, np.uint8)
        self._hot = self._namespace.chain(list(range(4 * BLOCK_TOKENS)))

    def run(self, phases: list[tuple[str, Callable[[], None], float]]) -> None:
        """Put load on while each phase's action and time pass."""
        with self._client() as store:
            assert store.put(self._hot, self._payload).dropped == 0
        threads = [threading.Thread(target=self._loop, args=(call,)) for call in self._calls()]
        for thread in threads:
            thread.start()
        for name, act, length_s in phases:
            act()
            self.phase = name
            time.sleep(length_s)
            self.phase = "between"
        self._stop.set()
        for thread in threads:
            thread.join()

    def _calls(self) -> list[Callable[[KVStore], str]]:
        return [self._hit, self._miss, self._miss, self._put]

    def _loop(self, call: Callable[[KVStore], str]) -> None:
        with self._client() as store:
            while not self._stop.is_set():
                phase = self.phase
                began_s = time.perf_counter()
                reason = call(store)
                took_s = time.perf_counter() - began_s
                if phase == self.phase:
                    kind = call.__name__.strip("_")
                    with self._lock:
                        self.seconds.setdefault((phase, kind), []).append(took_s)
                        if kind == "miss":
                            self.reasons.setdefault(phase, Counter())[reason] += 1
                self._stop.wait(0.02 if call == self._put else 0.001)

    def _client(self) -> KVStore:
        store = KVStore.connect(self._address)
        store.open_namespace(self._namespace)
        return store

    def _hit(self, store: KVStore) -> str:
        assert store.fetch_into(self._hot, self._payload).blocks == 4
        return ""

    def _miss(self, store: KVStore) -> str:
        found = store.match(self._new_chain(), timeout_s=DEADLINE_S)
        return found.reason.value if found.reason else "found"

    def _put(self, store: KVStore) -> str:
        store.put(self._new_chain(), np.copy(self._payload))
        return ""

    def _new_chain(self):  # type: ignore[no-untyped-def]  # a PrefixChain
        with self._lock:
            self._next_token += 4 * BLOCK_TOKENS
            first = self._next_token
        return self._namespace.chain(list(range(first, first + 4 * BLOCK_TOKENS)))


def row(load: Load, phase: str, kind: str) -> dict[str, object]:
    """Return the figures of one kind of call in one phase."""
    taken = load.seconds[phase, kind]
    cuts = statistics.quantiles(taken, n=100)
    return {
        "phase": phase,
        "call": kind,
        "count": len(taken),
        "p50_ms": round(1000 * statistics.median(taken), 3),
        "p99_ms": round(1000 * cuts[98], 3),
        "max_ms": round(1000 * max(taken), 3),
        "late": sum(seconds > DEADLINE_S + LATE_S for seconds in taken) if kind == "miss" else 0,
    }


def main() -> None:
    """Print a table, or with ``--json`` one object on the last line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--block-bytes", type=int, default=64 << 10)
    parser.add_argument("--phase-seconds", type=float, default=3.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        redis = RedisServer(
            Path(folder) / "redis", "--maxmemory", "512mb", "--maxmemory-policy", "allkeys-lru"
        )
        redis.start()
        store = StoreProcess(Path(folder), StoreSettings(dram_bytes=256 << 20, redis_url=redis.url))
        store.start()
        try:
            load = Load(f"unix:{store.socket_path}", args.block_bytes)
            seconds = args.phase_seconds
            turn = [("between", redis.resume, 6.0), ("healthy", lambda: None, seconds)]
            turn.append(("stopped", redis.pause, seconds))
            load.run([("between", lambda: None, 2.0), *turn * args.rounds])
        finally:
            redis.stop()
            store.terminate()
    kinds = ["hit", "miss", "put"]
    rows = [row(load, phase, kind) for kind in kinds for phase in ("healthy", "stopped")]
    for each in rows:
        print(" ".join(f"{name} {value}" for name, value in each.items()))
    print({phase: dict(reasons) for phase, reasons in load.reasons.items()})
    if args.json:
        print(json.dumps({"results": rows}))


if __name__ == "__main__":
    main()
