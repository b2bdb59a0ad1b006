"""Stage: the real parts that one kind of fault works on, and the promises that are checked after each try."""

import os
import random
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from kvstore.calls import FetchResult
from kvstore.client import KVStore
from kvstore.client_state import Timeouts
from kvstore.drill.blocks import count_wrong_bytes, drill_namespace, new_chain, payloads_of
from kvstore.drill.disk_control import DiskControl
from kvstore.drill.journal import Journal
from kvstore.drill.ledger import Ledger
from kvstore.drill.redis_server import RedisServer
from kvstore.drill.store_process import MIB, Footprint, StoreProcess, StoreSettings, wait_until
from kvstore.errors import ServerUnavailable
from kvstore.keys import BlockKey, PrefixChain
from kvstore.results import PutResult

CALL_S = 0.2
"""Time of a call of the data path while faults are injected."""

HEALTH_S = 1.0
"""A store must answer within this time after a fault has ended."""

HEAL_S = 6.0
"""What is stored must be served again within this time after a fault has ended: breakers pause and retry."""

_PATIENT_S = 5.0
_DURABLE_MAX_BLOCKS = 48
_ALL_BLOCKS = 4096
_RSS_ROOM_BYTES = 32 * MIB
_DESCRIPTORS_ROOM = 8
_THREADS_ROOM = 8

_TIMEOUTS = Timeouts(match_s=CALL_S, fetch_s=CALL_S, put_s=CALL_S, control_s=_PATIENT_S)


class Stage:
    """One store process, a client of it, a Redis-protocol server where one is needed, and the journal.

    Calls made through ``put``, ``get`` and ``match`` are timed, and what they serve is verified.
    """

    def __init__(
        self,
        folder: Path,
        settings: StoreSettings,
        ledger: Ledger,
        *,
        rng: random.Random,
        redis: RedisServer | None = None,
        heal_s: float = HEAL_S,
    ) -> None:
        self.folder = folder
        self.ledger = ledger
        self.rng = rng
        self.redis = redis
        self.journal = Journal()
        self.namespace = drill_namespace()
        self.store = StoreProcess(folder, settings)
        self.client = self.new_client()
        self._base: Footprint | None = None
        self._evictions_seen = (0, 0)
        self._heal_s = heal_s

    @property
    def block_bytes(self) -> int:
        """Bytes of each block."""
        return self.namespace.layout.block_bytes

    @property
    def ssd_folder(self) -> Path:
        """Folder of the ssd tier."""
        folder = self.store.settings.ssd_folder
        assert folder is not None, "this stage has no ssd tier"
        return folder

    @property
    def disk(self) -> DiskControl:
        """What orders trouble for the disk of a store that is troubled."""
        return DiskControl(self.store.trouble_path)

    def new_client(self, *, control_s: float = _PATIENT_S) -> KVStore:
        """Return another client of the store; the caller closes it."""
        client = KVStore.connect(self.store.socket_path, timeouts=replace(_TIMEOUTS, control_s=control_s))
        client.open_namespace(self.namespace)
        return client

    def close(self) -> None:
        """End the client, the store and Redis."""
        self.client.close()
        self.store.kill()
        if self.redis is not None:
            self.redis.stop()

    def ensure_running(self) -> None:
        """Start the store unless it runs."""
        if not self.store.is_running:
            self.store.start()

    def new_chain(self, num_blocks: int) -> PrefixChain:
        """Name blocks that nobody has put."""
        return self.new_chain_from(self.rng, num_blocks)

    def new_chain_from(self, rng: random.Random, num_blocks: int) -> PrefixChain:
        """Name blocks that nobody has put, with another thread's source of chance."""
        return new_chain(self.namespace, num_blocks, rng)

    # Calls

    def put(
        self, chain: PrefixChain, *, client: KVStore | None = None, timeout_s: float = CALL_S
    ) -> PutResult:
        """Put a chain's blocks."""
        payloads = payloads_of(chain, self.block_bytes)
        with self.ledger.timing(f"put of {len(chain)} blocks", timeout_s):
            return (client or self.client).put(chain, payloads, timeout_s=timeout_s)

    def get(
        self, chain: PrefixChain, *, client: KVStore | None = None, timeout_s: float = CALL_S
    ) -> FetchResult:
        """Fetch a chain's blocks, and verify each byte that is served."""
        rows = np.empty((len(chain), self.block_bytes), np.uint8)
        with self.ledger.timing(f"get of {len(chain)} blocks", timeout_s):
            result = (client or self.client).fetch_into(chain, rows, timeout_s=timeout_s)
        self.verify_rows(chain.keys[: result.blocks], rows, "get")
        if (result.reason is None) != (result.blocks == len(chain)):
            self.ledger.note_violation(f"{result.blocks} of {len(chain)} blocks: reason {result.reason}")
        return result

    def match(self, chain: PrefixChain, *, client: KVStore | None = None, timeout_s: float = CALL_S) -> int:
        """Return how many leading blocks are stored."""
        with self.ledger.timing(f"match of {len(chain)} blocks", timeout_s):
            found = (client or self.client).match(chain, timeout_s=timeout_s)
        if (found.reason is None) != (found.blocks == len(chain)):
            self.ledger.note_violation(
                f"match of {found.blocks} of {len(chain)} blocks: reason {found.reason}"
            )
        return found.blocks

    def verify_rows(
        self, keys: Sequence[BlockKey], rows: "np.ndarray[Any, np.dtype[np.uint8]]", what: str
    ) -> None:
        """Compare served blocks with what was put under their keys."""
        for key, row in zip(keys, rows, strict=False):
            wrong_bytes = count_wrong_bytes(key, row)
            if wrong_bytes:
                self.ledger.note_wrong(f"{what} of block {key.hex()[:12]}", wrong_bytes)
        self.ledger.note_served(len(keys))

    def put_durable(self, chain: PrefixChain, *, client: KVStore | None = None) -> bool:
        """Put new blocks and have them acknowledged as durable; False if the store did not promise it.

        Raises:
            ServerUnavailable: the store went away.
        """
        caller = client or self.client
        drops = self._write_drops(caller)
        result = self.put(chain, client=caller, timeout_s=_PATIENT_S)
        if result.stored < len(chain) or not caller.flush() or self._write_drops(caller) != drops:
            return False
        self.journal.note_durable(chain)
        return True

    def fill_durable(self, num_blocks: int = 16) -> list[PrefixChain]:
        """Have some new chains of random lengths acknowledged as durable; the oldest others make room."""
        for chain in self.journal.durable_chains():
            if self.journal.num_blocks + num_blocks <= _DURABLE_MAX_BLOCKS:
                break
            self.journal.forget(chain)
            self.client.drop(chain)
        chains: list[PrefixChain] = []
        while sum(map(len, chains)) < num_blocks:
            chain = self.new_chain(self.rng.randint(1, 8))
            if not self.put_durable(chain):
                self.ledger.note_violation("a store without a fault did not make blocks durable")
                break
            chains.append(chain)
        return chains

    def empty_dram(self) -> None:
        """Push everything out of dram by blocks that nobody wants, so that reads come from below."""
        filler = self.new_chain(3 * self.store.settings.dram_bytes // (2 * self.block_bytes))
        for start in range(0, len(filler), 8):
            self.put(filler[start : start + 8], timeout_s=_PATIENT_S)
        self.client.flush()
        self.client.drop(filler)

    def stats(self) -> dict[str, Any]:  # Any: JSON
        """Return the store's counters and occupancy."""
        return self.client.stats()

    def count_corrupt(self) -> int:
        """Return how many damaged copies this run of the store has found."""
        corrupt: dict[str, int] = self.stats()["corrupt_blocks"]
        return sum(corrupt.values())

    def restart(self) -> None:
        """End the store as SIGTERM does, and start it again."""
        status = self.store.terminate()
        if status:
            self.ledger.note_violation(f"the store ended with status {status} on SIGTERM")
        self.store.start()

    # Promises

    def verify(self) -> None:
        """Check every promise."""
        if not self.answers():
            return
        self.verify_durable()
        self.verify_state()

    def answers(self) -> bool:
        """Check that the store answers soon."""
        started_s = time.monotonic()
        try:
            self.client.ping(timeout_s=HEAL_S)
        except ServerUnavailable as error:
            self.ledger.note_violation(f"no answer {HEAL_S:.0f} s after the fault: {error}")
            return False
        took_s = time.monotonic() - started_s
        if took_s > HEALTH_S:
            self.ledger.note_violation(f"the first answer after the fault took {took_s:.2f} s")
        return True

    def verify_durable(self) -> None:
        """Check that all that was acknowledged as durable is served, or counted as evicted."""
        missing: list[BlockKey] = []
        for chain in self.journal.durable_chains():
            missing += self._missing(chain)
        evicted = self._new_evictions()
        if evicted:
            self.ledger.note_effect("ssd_evictions_counted", evicted)
        self.journal.note_evicted(evicted)
        lost, incomplete = self.journal.settle(missing)
        for chain in incomplete:
            self.client.drop(chain)
        if lost:
            self.ledger.note_lost(f"block {lost[0].hex()[:12]}", len(lost))

    def drop_damaged(self) -> None:
        """Have the store look at all it holds, so that injected damage is dropped before the checks."""
        for line in self.client.check(sample_blocks=_ALL_BLOCKS):
            if not line.endswith("; dropped"):
                self.ledger.note_violation(f"check: {line}")

    def verify_becomes_durable(self) -> None:
        """Check that new blocks are made durable again soon: what was out of use heals by itself."""
        if not wait_until(lambda: self.put_durable(self.new_chain(2)), HEAL_S, pause_s=0.02):
            self.ledger.note_violation(f"{HEAL_S:.0f} s after the fault nothing becomes durable")

    def verify_state(self) -> None:
        """Check the store's invariants, its counters, and that nothing is leased any more."""
        for line in self.client.check():
            self.ledger.note_violation(f"check: {line}")
        if not wait_until(lambda: self.stats()["live_leases"] == 0, HEALTH_S):
            self.ledger.note_violation(f"{self.stats()['live_leases']} leases are left, nobody holds any")
        stats = self.stats()
        for name in ("match", "fetch"):
            found = stats[name]
            ended = sum(found["hits_blocks"].values()) + sum(found["misses_blocks"].values())
            if ended != found["lookups_blocks"]:
                self.ledger.note_violation(f"{name}: {ended} of {found['lookups_blocks']} lookups ended")
        for name, tier in stats["tiers"].items():
            if tier["capacity_bytes"] and not 0 <= tier["used_bytes"] <= tier["capacity_bytes"]:
                self.ledger.note_violation(
                    f"{name}: {tier['used_bytes']} of {tier['capacity_bytes']} bytes are in use"
                )

    def note_base(self) -> None:
        """Measure what the store takes, before the first fault."""
        self._base = Footprint.of(self.store.process.pid)

    def verify_footprint(self) -> None:
        """Check that memory, descriptors and threads are near their base again."""
        if self._base is None or not self.store.is_running:
            return
        base, pid = self._base, self.store.process.pid

        def is_near() -> bool:
            at = Footprint.of(pid)
            return (
                at.rss_bytes <= base.rss_bytes + _RSS_ROOM_BYTES
                and at.descriptors <= base.descriptors + _DESCRIPTORS_ROOM
                and at.threads <= base.threads + _THREADS_ROOM
            )

        if not wait_until(is_near, HEALTH_S):
            self.ledger.note_violation(f"the store takes {Footprint.of(pid)}, before the faults {base}")

    def _missing(self, chain: PrefixChain) -> list[BlockKey]:
        """Return the keys of a chain that are not served, also after some patience."""
        missing: list[BlockKey] = []
        give_up_s = time.monotonic() + self._heal_s
        while len(chain):
            result = self.get(chain, timeout_s=_PATIENT_S)
            if result.blocks == len(chain):
                break
            chain = chain[result.blocks :]
            is_final = self.journal.is_excused(chain.keys[0]) or time.monotonic() >= give_up_s
            if is_final:
                missing.append(chain.keys[0])
                chain = chain[1:]
            elif not result.blocks:
                time.sleep(0.02)
        return missing

    def _new_evictions(self) -> int:
        """Return how many evictions from ssd the store has counted since this was last asked."""
        evictions: dict[str, int] = self.stats()["evictions_blocks"]
        count = sum(n for what, n in evictions.items() if what.startswith("ssd/"))
        pid, seen = self._evictions_seen
        self._evictions_seen = (self.store.process.pid, count)
        return count - seen if pid == self.store.process.pid else count

    def _write_drops(self, client: KVStore) -> int:
        drops: dict[str, int] = client.stats()["write_drops_blocks"]
        return sum(drops.values())


def pause(duration_s: float) -> None:
    """Let things happen for a while."""
    time.sleep(duration_s)


def own_descriptors() -> int:
    """Return how many descriptors this process has open."""
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208 (names only)
