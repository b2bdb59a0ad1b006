"""BlockLoads and BlockSaves: moves between an engine's pages and the store, in threads of their own.

A load is complete, or says which pages did not get their bytes. A save first takes a snapshot of the pages,
in the engine's own thread and step: so nothing that the engine does with them later (preemption, another
request) can change what is stored, and no request has to wait or hold its blocks for a save. Snapshots are
bounded in bytes; what does not fit is dropped and counted.
"""

import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol, TypeAlias, runtime_checkable

import numpy as np
import numpy.typing as npt

from kvstore import tracing
from kvstore.client import KVStore
from kvstore.errors import KVStoreError
from kvstore.hints import Hints
from kvstore.keys import BlockKey, PrefixChain
from kvstore.layout import Part
from kvstore.miss import MissReason
from kvstore.results import PutResult
from kvstore.tracing import TraceContext
from kvstore_engine_adapter.counts import Counts
from kvstore_engine_adapter.prefix_lookups import LATE

logger = logging.getLogger(__name__)

Payloads = npt.NDArray[np.uint8]
"""``[blocks, block_bytes]`` uint8, C order, CPU: the bytes of blocks of one group."""

Rows: TypeAlias = Payloads | Sequence[npt.NDArray[np.uint8]]
"""The same, or a row ``[block_bytes]`` for each block, anywhere in memory."""

_WINDOW_BYTES = 16 << 20
_THREADS = 2
_AWAY_S = 1.0


class Snapshot(Protocol):
    """Bytes that were read from pages, or are on their way."""

    def payloads(self) -> Rows:
        """Wait until they are here, and return them. In any thread."""


class EnginePages(Protocol):
    """An engine's pages: each group of layers has pages of ``block_bytes(group)``."""

    def block_bytes(self, group: int) -> int:
        """Bytes of one block of that group, as this rank holds it."""

    def read(self, group: int, pages: Sequence[int]) -> Snapshot:
        """Take a snapshot, ordered before everything that the engine does next. In the engine's thread."""

    def write(self, group: int, pages: Sequence[int], payloads: Payloads) -> None:
        """Write blocks into pages that nobody else uses; return when they are there. In any thread."""


@runtime_checkable
class HostPages(EnginePages, Protocol):
    """Pages that are host memory: blocks are loaded into them without a copy in between."""

    def in_place(self, group: int, pages: Sequence[int]) -> Sequence[npt.NDArray[np.uint8]]:
        """Return the pages in place, each ``[block_bytes]``, writable."""


@dataclass(frozen=True, slots=True)
class GroupMove:
    """Blocks of one group and the pages they are in, or go to, in the same order."""

    group: int
    chain: PrefixChain
    pages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Move:
    """All blocks that are loaded, or saved, for one request at one time.

    ``hints``: what it knows of them. ``trace``: the span that it belongs to.
    """

    request_id: str
    groups: tuple[GroupMove, ...]
    hints: Hints | None = None
    trace: TraceContext | None = None


@dataclass(frozen=True, slots=True)
class LoadDone:
    """A load has ended after ``seconds``; ``failed`` are the (group, page) that hold nothing of value.

    ``missing``: of each group the first block that the store did not give, and the reason that it said. Of a
    load that came too late it says none, and of the blocks behind the first one nothing is known.
    """

    request_id: str
    failed: tuple[tuple[int, int], ...] = ()
    missing: tuple[tuple[BlockKey, MissReason], ...] = ()
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class SaveDone:
    """A save has ended after ``seconds``; ``stored`` are the keys that it has put into the store.

    ``num_present`` others were there already, ``num_dropped`` are not there.
    """

    request_id: str
    stored: tuple[BlockKey, ...] = ()
    num_present: int = 0
    num_dropped: int = 0
    seconds: float = 0.0


class BlockLoads:
    """Loads under way, each of at most ``deadline_s`` and ``byte_s`` per byte from when it was asked for."""

    def __init__(
        self,
        client: KVStore,
        pages: EnginePages,
        part: Part | None,
        *,
        deadline_s: float = 0.5,
        byte_s: float = 5e-9,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._pages = pages
        self._part = part
        self._deadline_s = deadline_s
        self._byte_s = byte_s
        self._clock = clock
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="kvstore-load")
        self._done: queue.SimpleQueue[LoadDone] = queue.SimpleQueue()
        self._ended = threading.Event()
        self._num_running = 0
        self.counts = Counts()

    @property
    def is_idle(self) -> bool:
        """Whether no load is under way, or waits to be taken."""
        return self._num_running == 0

    def begin(self, move: Move) -> None:
        """Begin a load; its end comes out of ``take_done``. In the engine's thread."""
        size_bytes = sum(self._pages.block_bytes(one.group) * len(one.pages) for one in move.groups)
        until_s = self._clock() + self._deadline_s + size_bytes * self._byte_s
        self._num_running += 1
        self._threads.submit(self._run, move, until_s)

    def take_done(self, *, patience_s: float = 0.0) -> list[LoadDone]:
        """Return the loads that have ended since; wait up to ``patience_s`` for one if some are under way."""
        if self._num_running and patience_s > 0 and self._done.empty():
            self._ended.wait(patience_s)
        self._ended.clear()
        done: list[LoadDone] = []
        while True:
            try:
                done.append(self._done.get_nowait())
            except queue.Empty:
                break
        self._num_running -= len(done)
        return done

    def close(self) -> None:
        """End the threads, after the loads under way."""
        self._threads.shutdown(wait=True, cancel_futures=True)

    def _run(self, move: Move, until_s: float) -> None:
        failed: list[tuple[int, int]] = []
        missing: list[tuple[BlockKey, MissReason]] = []
        began_s = self._clock()
        try:
            with tracing.within(move.trace):
                for one in move.groups:
                    loaded, reason = self._load(one, until_s, move.hints)
                    failed += [(one.group, page) for page in one.pages[loaded:]]
                    if reason is not None:
                        missing.append((one.chain.keys[loaded], reason))
                    self.counts.add("loaded_blocks", loaded)
        except Exception:
            # Whatever it was, the request goes on without these blocks.
            logger.exception("load: failed; the request computes these blocks")
            failed = [(one.group, page) for one in move.groups for page in one.pages]
        self.counts.add("loads")
        self.counts.add("failed_blocks", len(failed))
        seconds = self._clock() - began_s
        self._done.put(LoadDone(move.request_id, tuple(failed), tuple(missing), seconds))
        self._ended.set()

    def _load(self, move: GroupMove, until_s: float, hints: Hints | None) -> tuple[int, MissReason | None]:
        """Load blocks window by window; returns how many leading ones are in their pages, and why no more."""
        size_bytes = self._pages.block_bytes(move.group)
        step = max(1, min(len(move.pages), _WINDOW_BYTES // size_bytes))
        pages = self._pages
        host = pages if isinstance(pages, HostPages) else None
        buffer: Payloads = np.empty((0 if host is not None else step, size_bytes), np.uint8)
        for start in range(0, len(move.pages), step):
            chain = move.chain[start : start + step]
            left_s = until_s - self._clock()
            if left_s <= 0:
                self.counts.add(f"load_{LATE}")
                return start, None
            there = move.pages[start : start + step]
            rows = list(buffer[: len(chain)]) if host is None else list(host.in_place(move.group, there))
            result = self._client.fetch_into(chain, rows, part=self._part, timeout_s=left_s, hints=hints)
            if result.blocks:
                if host is None:
                    pages.write(move.group, there[: result.blocks], buffer[: result.blocks])
                self.counts.add("loaded_bytes", result.blocks * size_bytes)
            if result.blocks < len(chain):
                reason = "unknown" if result.reason is None else result.reason.value
                self.counts.add(f"load_{reason}")
                return start + result.blocks, result.reason
        return len(move.pages), None


class BlockSaves:
    """Saves under way, at most ``queue_bytes`` of snapshots at a time. Best effort.

    For a second after a store did not answer, what waits or comes is dropped. If ``reports``, the end of each
    save comes out of ``take_done``, which has to be called then.
    """

    def __init__(
        self,
        client: KVStore,
        pages: EnginePages,
        part: Part | None,
        *,
        queue_bytes: int = 256 << 20,
        timeout_s: float = 1.0,
        reports: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._pages = pages
        self._part = part
        self._queue_bytes = queue_bytes
        self._timeout_s = timeout_s
        self._reports = reports
        self._clock = clock
        self._away_until_s = -math.inf
        self._held_bytes = 0
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="kvstore-save")
        self._done: queue.SimpleQueue[SaveDone] = queue.SimpleQueue()
        self._num_running = 0
        self.counts = Counts()

    @property
    def is_idle(self) -> bool:
        """Whether no save is under way, or waits to be taken. Only with ``reports``."""
        return self._num_running == 0

    def begin(self, move: Move) -> None:
        """Take a snapshot and store it later; dropped if too much waits already. In the engine's thread."""
        taken: list[tuple[GroupMove, Snapshot]] = []
        held_bytes = num_dropped = 0
        is_away = self._clock() < self._away_until_s
        for one in move.groups:
            size_bytes = self._pages.block_bytes(one.group) * len(one.pages)
            with self._lock:
                has_room = not is_away and self._held_bytes + size_bytes <= self._queue_bytes
                self._held_bytes += size_bytes if has_room else 0
            if not has_room:
                num_dropped += len(one.pages)
                continue
            held_bytes += size_bytes
            taken.append((one, self._pages.read(one.group, one.pages)))
        self.counts.add("dropped_blocks", num_dropped)
        self._num_running += self._reports
        if taken:
            self._threads.submit(self._run, move, taken, held_bytes, num_dropped)
        elif self._reports:
            self._done.put(SaveDone(move.request_id, num_dropped=num_dropped))

    def take_done(self) -> list[SaveDone]:
        """Return the saves that have ended since."""
        done: list[SaveDone] = []
        while True:
            try:
                done.append(self._done.get_nowait())
            except queue.Empty:
                break
        self._num_running -= len(done)
        return done

    def close(self, *, patience_s: float = 5.0) -> None:
        """Store what waits, for at most ``patience_s``; then drop the rest, and wait for what is running."""
        until_s = time.monotonic() + patience_s
        while self._held_bytes and time.monotonic() < until_s:
            time.sleep(0.005)
        self._threads.shutdown(wait=True, cancel_futures=True)

    def _run(
        self, move: Move, taken: Sequence[tuple[GroupMove, Snapshot]], held_bytes: int, num_dropped: int
    ) -> None:
        began_s = self._clock()
        stored: list[BlockKey] = []
        num_present = 0
        try:
            for one, snapshot in taken:
                with tracing.within(move.trace):
                    result = self._save(one, snapshot, move.hints)
                num_dropped += len(one.pages) if result is None else result.dropped
                if result is not None:
                    num_present += result.present
                    doubtful = set(result.doubtful)
                    if result.stored:
                        stored += [key for at, key in enumerate(one.chain.keys) if at not in doubtful]
        finally:
            with self._lock:
                self._held_bytes -= held_bytes
            if self._reports:
                seconds = self._clock() - began_s
                self._done.put(SaveDone(move.request_id, tuple(stored), num_present, num_dropped, seconds))

    def _save(self, move: GroupMove, snapshot: Snapshot, hints: Hints | None) -> PutResult | None:
        """Store blocks of one group; None: it could not be tried."""
        try:
            if self._clock() < self._away_until_s:
                self.counts.add("dropped_blocks", len(move.pages))
                return None
            payloads = snapshot.payloads()
            result = self._client.put(
                move.chain, list(payloads), part=self._part, timeout_s=self._timeout_s, hints=hints
            )
        except KVStoreError as error:
            self.counts.add("dropped_blocks", len(move.pages))
            logger.debug("save: %s", error)
            return None
        except Exception:
            self.counts.add("dropped_blocks", len(move.pages))
            logger.exception("save: failed; these blocks are not shared")
            return None
        self.counts.add("saved_blocks", result.stored)
        self.counts.add("present_blocks", result.present)
        self.counts.add("dropped_blocks", result.dropped)
        self.counts.add("saved_bytes", result.stored * self._pages.block_bytes(move.group))
        if result.reason in (MissReason.TIMED_OUT, MissReason.UNAVAILABLE):
            # What waits behind it would wait as long, one after another.
            self._away_until_s = self._clock() + _AWAY_S
        return result
