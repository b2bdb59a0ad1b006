"""Clients that read without asking beside writers, drops, evictions and ended epochs: never a wrong byte."""

import random
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from kvstore import KVLayout, KVStore, Namespace, PrefixChain, Timeouts
from tests.store_process import MIB, StoreProcess

PATIENT = Timeouts(match_s=60, fetch_s=60, put_s=60, control_s=60)
BLOCK_BYTES = 16 << 10
NUM_BLOCKS = 96
LAYOUT = KVLayout.opaque(block_bytes=BLOCK_BYTES, block_tokens=4)
SPACE = Namespace("history", LAYOUT)


class History:
    """What happened to blocks that are put again and again, each time with the bytes of another version.

    ``floors`` has the lowest version of each block that may be served: it rises when a drop is acknowledged.
    ``ended`` is the epoch before which nothing may be served. Both are read before a read begins.
    """

    def __init__(self) -> None:
        self.floors = [0] * NUM_BLOCKS
        self.tops = [0] * NUM_BLOCKS
        self.epoch = self.ended = 0
        self.is_over = threading.Event()
        self.wrong: list[str] = []
        self.num_drops = self.num_served = self.num_direct = 0

    def chain(self, block: int, epoch: int) -> PrefixChain:
        return SPACE.at_epoch(epoch).chain(range(4 * block, 4 * block + 4))

    def write(self, client: KVStore, source: random.Random, blocks: range) -> None:
        """Put and drop blocks that nobody else writes."""
        opened = -1
        while not self.is_over.is_set():
            epoch = self.epoch
            if epoch != opened:
                client.open_namespace(SPACE.at_epoch(epoch))
                opened = epoch
            block = source.choice(blocks)
            chain = self.chain(block, epoch)
            if source.random() < 0.25:
                if client.drop(chain) == 1:
                    self.floors[block] = self.tops[block] + 1
                    self.num_drops += 1
            else:
                self.tops[block] += 1
                client.put(chain, np.full(BLOCK_BYTES // 8, self.tops[block] * NUM_BLOCKS + block, np.uint64))

    def read(self, client: KVStore, source: random.Random) -> None:
        """Read blocks, mostly of the running epoch, and look at what comes."""
        opened: set[int] = set()
        while not self.is_over.is_set():
            epoch = max(0, self.epoch - (source.random() < 0.1))
            if epoch not in opened:
                client.open_namespace(SPACE.at_epoch(epoch))
                opened.add(epoch)
            block = source.randrange(NUM_BLOCKS)
            floor, ended = self.floors[block], self.ended
            found = client.get(self.chain(block, epoch))
            if not found:
                continue
            self.num_served += 1
            versions = np.unique(found[0].view(np.uint64))
            version, whose = divmod(int(versions[0]), NUM_BLOCKS)
            if len(versions) > 1 or whose != block:
                self.wrong.append(f"block {block}: foreign bytes")
            if version < floor:
                self.wrong.append(f"block {block}: version {version} was dropped, {floor} is the first left")
            if epoch < ended:
                self.wrong.append(f"block {block}: of epoch {epoch}, which ended before {ended}")
        self.num_direct += client.client_stats().direct_blocks

    def end_epochs(self, client: KVStore, _: random.Random) -> None:
        """End an epoch now and then, but not before it has filled the store, however slow the machine."""
        num_before = 0
        while not self.is_over.wait(0.1):
            if sum(self.tops) < num_before + 3 * NUM_BLOCKS:
                continue
            num_before = sum(self.tops)
            self.ended = client.advance_epoch(SPACE.model)
            self.epoch = self.ended


def _run(path: Path, work: Callable[..., None], *more: object) -> threading.Thread:
    def run() -> None:
        with KVStore.connect(path, timeouts=PATIENT) as client:
            work(client, *more)

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def test_what_is_read_without_asking_is_right_and_not_dropped_before(tmp_path: Path) -> None:
    history = History()
    with StoreProcess(tmp_path, dram_bytes=MIB, policy="lru") as store:
        threads = [
            _run(store.socket_path, history.write, random.Random(1), range(0, NUM_BLOCKS, 2)),
            _run(store.socket_path, history.write, random.Random(2), range(1, NUM_BLOCKS, 2)),
            _run(store.socket_path, history.read, random.Random(3)),
            _run(store.socket_path, history.read, random.Random(4)),
            _run(store.socket_path, history.end_epochs, random.Random(5)),
        ]
        deadline_s = time.monotonic() + 60
        while (history.num_drops < 300 or history.num_served < 3000) and time.monotonic() < deadline_s:
            history.is_over.wait(0.05)
        history.is_over.set()
        for thread in threads:
            thread.join()
        with KVStore.connect(store.socket_path, timeouts=PATIENT) as client:
            problems, stats = client.check(), client.stats()

    assert history.wrong == []
    assert problems == []
    assert history.num_direct > 0
    assert stats["evictions_blocks"].get("dram/space", 0) > 0, stats["evictions_blocks"]
    assert stats["direct_blocks"] <= history.num_direct
