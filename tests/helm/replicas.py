"""Replicas as clients of a store: they put, fetch and match, and remember what they were told."""

import random
import threading
import time
from collections import Counter

import numpy as np

from kvstore import KVLayout, KVStore, KVStoreError, Namespace
from kvstore.client_state import Timeouts

BLOCK_BYTES = 4096
CHAIN_BLOCKS = 4
SPACE = Namespace("rollout", KVLayout.opaque(block_bytes=BLOCK_BYTES, block_tokens=4))
TIMEOUTS = Timeouts(match_s=1.0, fetch_s=2.0, put_s=2.0, control_s=5.0)
PATIENT = Timeouts(match_s=60, fetch_s=60, put_s=60, control_s=60)

_FLUSH_EVERY = 8


def chain_of(number):
    """The chain that belongs to a number."""
    return SPACE.chain([number, *range(CHAIN_BLOCKS * 4 - 1)])


def payload_of(number):
    """Its bytes, all blocks in a row: nobody else's."""
    return np.random.default_rng(number).integers(0, 256, CHAIN_BLOCKS * BLOCK_BYTES, np.uint8)


class Ledger:
    """What all replicas were told: which chains are stored, by node, and which were flushed since."""

    def __init__(self):
        self._lock = threading.Lock()
        self._acknowledged = {}  # number -> node
        self._durable = set()

    def note_stored(self, number, node):
        with self._lock:
            self._acknowledged[number] = node

    def note_flushed(self, numbers):
        with self._lock:
            self._durable.update(numbers)

    def of(self, node):
        """Return the chains that a node's store has acknowledged."""
        with self._lock:
            return sorted(number for number, at in self._acknowledged.items() if at == node)

    def durable(self):
        """Return the chains that were written to tiers below memory, by the store's word."""
        with self._lock:
            return sorted(self._durable)


class Replica(threading.Thread):
    """One client of a node's store. ``calls`` counts outcomes, ``failures`` are what must not happen."""

    def __init__(self, node, socket_path, number, ledger, *, most_chains=400):
        super().__init__(daemon=True)
        self.node = node
        self.calls = Counter()
        self.failures = []
        self.longest_late_s = 0.0
        self.has_begun = threading.Event()
        self.known_misses = Counter()
        self.client_stats = None
        self._socket_path = socket_path
        self._numbers = iter(range(number * 10_000, number * 10_000 + most_chains))
        self._random = random.Random(number)
        self._ledger = ledger
        self._unflushed = []
        self._is_told_to_end = threading.Event()

    def end(self):
        """Have it finish what it is at, and wait for it."""
        self._is_told_to_end.set()
        self.join()

    def run(self):
        try:
            with KVStore.connect(self._socket_path, timeouts=TIMEOUTS) as client:
                client.open_namespace(SPACE)
                while not self._is_told_to_end.is_set():
                    self._work(client)
                self.client_stats = client.client_stats()
        except BaseException as error:  # the test reads it
            self.failures.append(error)
        finally:
            self.has_begun.set()

    def _work(self, client):
        number = next(self._numbers, None)
        if number is not None:
            self._put(client, number)
        own, durable = self._ledger.of(self.node), self._ledger.durable()
        for known, numbers in ((False, own), (True, durable)):
            if numbers:
                self._fetch(client, self._random.choice(numbers), is_durable=known)
        if durable:
            self._match(client, self._random.choice(durable))
        if len(self._unflushed) >= _FLUSH_EVERY:
            self._flush(client)
        time.sleep(0.005)

    def _timed(self, what, limit_s, call):
        begun_s = time.monotonic()
        result = call()
        self.longest_late_s = max(self.longest_late_s, time.monotonic() - begun_s - limit_s)
        return result

    def _put(self, client, number):
        payload = payload_of(number)
        result = self._timed("put", TIMEOUTS.put_s, lambda: client.put(chain_of(number), payload))
        if result.dropped:
            self._count("put", result.reason)
            return
        self.calls["put"] += 1
        self._ledger.note_stored(number, self.node)
        self._unflushed.append(number)

    def _fetch(self, client, number, *, is_durable):
        buffer = np.full(CHAIN_BLOCKS * BLOCK_BYTES, 0xA5, np.uint8)
        result = self._timed("fetch", TIMEOUTS.fetch_s, lambda: client.fetch_into(chain_of(number), buffer))
        served = result.blocks * BLOCK_BYTES
        if not np.array_equal(buffer[:served], payload_of(number)[:served]):
            self.failures.append(f"wrong bytes of chain {number}")
        if result.blocks == CHAIN_BLOCKS:
            self.calls["fetch: hit"] += 1
            return
        self._count("fetch", result.reason)
        if is_durable:
            self.known_misses[result.reason] += 1

    def _match(self, client, number):
        found = self._timed("match", TIMEOUTS.match_s, lambda: client.match(chain_of(number)))
        if found.blocks == CHAIN_BLOCKS:
            self.calls["match: hit"] += 1
            return
        self._count("match", found.reason)
        self.known_misses[found.reason] += 1

    def _count(self, call, reason):
        if reason is None:
            self.failures.append(f"{call}: a miss without a reason")
        else:
            self.calls[f"{call}: {reason.value}"] += 1

    def _flush(self, client):
        try:
            is_flushed = client.flush(TIMEOUTS.control_s)
        except KVStoreError:
            return  # no call of the data path: it says that nobody is there
        if is_flushed:
            self._ledger.note_flushed(self._unflushed)
            self._unflushed = []
            self.has_begun.set()


def missing(socket_path, numbers):
    """Return those of the chains that a store does not serve whole and right, asked patiently."""
    with KVStore.connect(socket_path, timeouts=PATIENT) as client:
        client.open_namespace(SPACE)
        return [number for number in numbers if not _is_served(client, number)]


def _is_served(client, number):
    blocks = client.get(chain_of(number))
    return len(blocks) == CHAIN_BLOCKS and np.array_equal(np.concatenate(blocks), payload_of(number))
