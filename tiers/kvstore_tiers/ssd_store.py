"""SsdStore: the opened files of the ssd tier, and what was found in them. Blocking; used from threads."""

import contextlib
import gc
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path

import lmdb

from kvstore.errors import TierUnavailable
from kvstore.tier import WriteStatus
from kvstore_tiers.slab import Slab
from kvstore_tiers.ssd_check import EXIT_UNUSABLE
from kvstore_tiers.ssd_folder import SsdFolder, unavailable
from kvstore_tiers.ssd_index import Change, IndexIsForeign, IndexRecord, SsdIndex

_log = logging.getLogger(__name__)

_CHANGES_PER_TRANSACTION = 512
_DAMAGE_STATUSES = (EXIT_UNUSABLE, -signal.SIGBUS, -signal.SIGSEGV, -signal.SIGABRT, -signal.SIGFPE)
"""How the examination of a damaged index ends. Any other end says nothing about the index."""


@dataclass(frozen=True, slots=True)
class CommitOutcome:
    """How a commit ended. ``fault`` is a clause for people, given when the medium is at fault."""

    status: WriteStatus
    fault: str = ""


class SsdStore:
    """Slab and index of one folder, open and locked."""

    def __init__(self, folder: SsdFolder, slab: Slab, index: SsdIndex) -> None:
        self._folder = folder
        self.slab = slab
        self._index = index

    @classmethod
    def open(
        cls, path: Path, *, capacity_bytes: int, name: str, check_timeout_s: float
    ) -> tuple["SsdStore", list[IndexRecord]]:
        """Open the folder; returns the store and the records whose slots do not overlap, oldest use first.

        Raises:
            TierUnavailable: the folder, the disk or its space cannot be used.
        """
        folder = SsdFolder(path, name=name)
        folder.acquire()
        opened: list[Slab | SsdIndex] = []
        slab: Slab | None = None
        had_bytes = capacity_bytes
        try:
            _preflight(folder, capacity_bytes, check_timeout_s, name=name)
            folder.mark_dirty()
            slab, had_bytes = Slab.open(folder.slab_path, capacity_bytes)
            opened.append(slab)
            index, records, damaged = _open_index(folder, capacity_bytes)
            opened.append(index)
            kept, unusable = _without_overlaps(records, min(had_bytes, capacity_bytes))
            if damaged or unusable:
                _log.warning(
                    "%s: folder %s: %d damaged records and %d without their bytes are forgotten",
                    *(name, path, len(damaged), len(unusable)),
                )
                index.delete_keys([*damaged, *(record.key for record in unusable)])
            if had_bytes > capacity_bytes:
                slab.shrink(capacity_bytes)
            folder.sync()
        except (OSError, lmdb.Error, TierUnavailable) as error:
            if slab is not None and had_bytes < capacity_bytes:
                slab.shrink(had_bytes)
            for part in opened:
                part.close()
            folder.release()
            if isinstance(error, TierUnavailable):
                raise
            if isinstance(error, OSError):
                doing = f"cannot hold {capacity_bytes} bytes of blocks and their index"
                raise unavailable(name, path, doing, error) from error
            raise TierUnavailable(
                f"{name}: folder {path}: the index cannot be opened: {error}: check the disk, or remove "
                f"{folder.index_path}"
            ) from error
        return cls(folder, slab, index), sorted(kept, key=attrgetter("recency"))

    def commit(self, changes: Sequence[Change]) -> list[CommitOutcome]:
        """Make slab writes and index changes durable, in that order; one outcome per change.

        Transactions are bounded, so that copy on write never needs more of the index than is kept for it.
        """
        outcomes: list[CommitOutcome] = []
        for start in range(0, len(changes), _CHANGES_PER_TRANSACTION):
            outcomes += self._commit(changes[start : start + _CHANGES_PER_TRANSACTION])
        return outcomes

    def _commit(self, changes: Sequence[Change]) -> list[CommitOutcome]:
        stores = [change for change in changes if change.kind == "store"]
        others = [change for change in changes if change.kind != "store"]
        try:
            if not self._folder.is_present():
                return [CommitOutcome(WriteStatus.UNAVAILABLE, "the folder was deleted")] * len(changes)
            if stores:
                self.slab.sync()
            try:
                self._index.commit(changes)
            except lmdb.MapFullError:
                return self._commit_apart(changes, stores, others)
        except (OSError, lmdb.Error) as error:
            return [CommitOutcome(WriteStatus.UNAVAILABLE, f"writing failed: {error}")] * len(changes)
        return [CommitOutcome(WriteStatus.OK)] * len(changes)

    def is_present(self) -> bool:
        """Return whether the folder still exists."""
        return self._folder.is_present()

    def close(self, last_changes: Sequence[Change]) -> None:
        """Commit what is left, note a clean end if that worked, and let go of everything."""
        outcomes = self.commit(last_changes)
        is_clean = all(outcome.status is WriteStatus.OK for outcome in outcomes) and self._folder.is_present()
        try:
            self._index.close()
            if is_clean:
                self._folder.mark_clean()
        except (OSError, lmdb.Error) as error:
            _log.warning("folder %s: closing was not clean: %s", self._folder.path, error)
        finally:
            self.slab.close()
            self._folder.release()

    def _commit_apart(
        self, changes: Sequence[Change], stores: Sequence[Change], others: Sequence[Change]
    ) -> list[CommitOutcome]:
        """Full index: first what frees pages, then a commit that makes them usable, then the rest again."""
        try:
            self._index.commit(others)
            self._index.commit_nothing()
            self._index.commit(stores)
        except lmdb.MapFullError:
            return [
                CommitOutcome(WriteStatus.FULL if change.kind == "store" else WriteStatus.OK)
                for change in changes
            ]
        return [CommitOutcome(WriteStatus.OK)] * len(changes)


@contextlib.contextmanager
def garbage_collection_paused() -> Iterator[None]:
    """Loading makes objects by the hundred thousand and no garbage; looking for it doubles the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _preflight(folder: SsdFolder, capacity_bytes: int, timeout_s: float, *, name: str) -> None:
    """After an unclean end, let a child process be the first to open the index."""
    if not folder.is_dirty() or not os.path.lexists(folder.index_path):
        return
    command = [sys.executable, "-P", "-m", "kvstore_tiers.ssd_check", str(folder.index_path)]
    try:
        child = subprocess.run(
            [*command, str(capacity_bytes)], capture_output=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired:
        folder.set_index_aside(f"reading it took longer than {timeout_s:.0f} s")
        return
    if child.returncode:
        said = " ".join(child.stderr.decode("utf-8", "replace").strip().splitlines()[-1:])
        how = f"reading it ended with status {child.returncode} {said}".rstrip()
        if child.returncode not in _DAMAGE_STATUSES:
            raise TierUnavailable(
                f"{name}: folder {folder.path}: the index could not be examined after an unclean end: {how}: "
                "nothing was changed; try again when there is memory, space and permission"
            )
        folder.set_index_aside(how)


def _open_index(folder: SsdFolder, capacity_bytes: int) -> tuple[SsdIndex, list[IndexRecord], list[bytes]]:
    index: SsdIndex | None = None
    try:
        index = SsdIndex.open(folder.index_path, capacity_bytes=capacity_bytes)
        return (index, *index.load())
    except (IndexIsForeign, lmdb.InvalidError, lmdb.CorruptedError, lmdb.VersionMismatchError) as error:
        if index is not None:
            index.close()
        folder.set_index_aside(str(error))
    except BaseException:
        if index is not None:
            index.close()
        raise
    index = SsdIndex.open(folder.index_path, capacity_bytes=capacity_bytes)
    return (index, *index.load())


def _without_overlaps(
    records: list[IndexRecord], limit_bytes: int
) -> tuple[list[IndexRecord], list[IndexRecord]]:
    """Split records into those that can all be true, and the rest (of two that overlap the older goes)."""
    kept: list[IndexRecord] = []
    unusable: list[IndexRecord] = []
    for record in sorted(records, key=attrgetter("offset")):
        if record.offset + record.slot_bytes > limit_bytes:
            unusable.append(record)
            continue
        while kept and kept[-1].offset + kept[-1].slot_bytes > record.offset:
            if kept[-1].generation > record.generation:
                unusable.append(record)
                break
            unusable.append(kept.pop())
        else:
            kept.append(record)
    return kept, unusable
