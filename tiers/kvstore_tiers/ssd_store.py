"""SsdStore: the opened files of the ssd tier, and what was found in them. Blocking; used from threads."""

import logging
import os
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import lmdb

from kvstore.errors import TierUnavailable
from kvstore.tier import WriteStatus
from kvstore_tiers.child_check import run_check
from kvstore_tiers.disk_io import DiskIO
from kvstore_tiers.slab import Slab
from kvstore_tiers.ssd_check import EXIT_UNUSABLE
from kvstore_tiers.ssd_folder import SsdFolder, unavailable
from kvstore_tiers.ssd_index import INDEX_DAMAGE, IndexIsForeign, SsdIndex
from kvstore_tiers.ssd_record import Change
from kvstore_tiers.ssd_record_table import RecordTable

_log = logging.getLogger(__name__)

_CHANGES_PER_TRANSACTION = 512
_DAMAGE_STATUSES = (EXIT_UNUSABLE, -signal.SIGBUS, -signal.SIGSEGV, -signal.SIGABRT, -signal.SIGFPE)
"""How the examination of a damaged index ends. Any other end says nothing about the index."""


@dataclass(frozen=True, slots=True)
class _Found:
    """An index that was opened: its sound records, the keys of damaged ones, how many of another format."""

    index: SsdIndex
    records: RecordTable
    damaged: list[bytes]
    num_foreign: int = 0


@dataclass(frozen=True, slots=True)
class CommitOutcome:
    """How a commit ended. ``fault`` is a clause for people, given when the medium is at fault."""

    status: WriteStatus
    fault: str = ""


class SsdStore:
    """Slab and index of one folder, open and locked.

    ``num_foreign`` records were there in another format, and were let go of.
    """

    def __init__(
        self,
        folder: SsdFolder,
        slab: Slab,
        index: SsdIndex,
        *,
        capacity_bytes: int,
        num_foreign: int = 0,
    ) -> None:
        self._folder = folder
        self.slab = slab
        self._index = index
        self._capacity_bytes = capacity_bytes
        self.num_foreign = num_foreign
        self._is_index_broken = False
        self._is_index_damaged = False
        self.gone = ""

    @classmethod
    def open(
        cls,
        path: Path,
        *,
        capacity_bytes: int,
        name: str,
        check_timeout_s: float,
        is_sealed: bool = False,
        io: DiskIO | None = None,
    ) -> tuple["SsdStore", RecordTable]:
        """Open the folder; returns the store and the records whose slots do not overlap.

        Raises:
            TierUnavailable: the folder, the disk or its space cannot be used.
        """
        folder = SsdFolder(path, name=name, io=io)
        folder.acquire()
        opened: list[Slab | SsdIndex] = []
        try:
            folder.remove_leftovers()
            folder.settle_seal(is_sealed=is_sealed)
            _preflight(folder, capacity_bytes, check_timeout_s, name=name)
            folder.mark_dirty()
            slab, found = _open_parts(folder, capacity_bytes, opened)
            folder.sync()
        except TierUnavailable:
            _close_parts(folder, opened)
            raise
        except (OSError, lmdb.Error) as error:
            _close_parts(folder, opened)
            if isinstance(error, OSError):
                doing = f"cannot hold {capacity_bytes} bytes of blocks and their index"
                raise unavailable(name, path, doing, error) from error
            raise TierUnavailable(
                f"{name}: folder {path}: the index cannot be opened: {error}: check the disk, or remove "
                f"{folder.index_path}"
            ) from error
        store = cls(folder, slab, found.index, capacity_bytes=capacity_bytes, num_foreign=found.num_foreign)
        return store, found.records

    def commit(self, changes: Sequence[Change]) -> list[CommitOutcome]:
        """Make slab writes and index changes durable, in that order; one outcome per change.

        Before, and also when there are no changes, the files must be those that are open: what was deleted or
        replaced is named in ``gone`` from then on. Transactions are bounded, so that copy on write never
        needs more of the index than is kept for it.
        """
        has_stores = any(change.is_unconditional for change in changes)
        try:
            self._note_what_is_gone()
            if not self.gone and has_stores:
                self.slab.sync()
        except OSError as error:
            return [CommitOutcome(WriteStatus.UNAVAILABLE, f"writing failed: {error}")] * len(changes)
        if self.gone:
            return [CommitOutcome(WriteStatus.UNAVAILABLE, self.gone)] * len(changes)
        outcomes: list[CommitOutcome] = []
        for start in range(0, len(changes), _CHANGES_PER_TRANSACTION):
            outcomes += self._commit(changes[start : start + _CHANGES_PER_TRANSACTION])
        return outcomes

    def _commit(self, changes: Sequence[Change]) -> list[CommitOutcome]:
        try:
            if self._is_index_broken:
                self._reopen_index()
            try:
                self._index.commit(changes)
            except lmdb.MapFullError:
                return self._commit_apart(changes)
        except (OSError, lmdb.Error) as error:
            self._is_index_broken |= isinstance(error, lmdb.Error)
            self._is_index_damaged |= isinstance(error, INDEX_DAMAGE)
            return [CommitOutcome(WriteStatus.UNAVAILABLE, f"writing failed: {error}")] * len(changes)
        return [CommitOutcome(WriteStatus.OK)] * len(changes)

    def _note_what_is_gone(self) -> None:
        """Compare the names in the folder with the open files. Raises OSError if the disk does not say."""
        if self.gone:
            return
        if not self._folder.is_present():
            self.gone = "the folder was deleted or replaced"
        elif not self.slab.is_at(self._folder.slab_path):
            self.gone = "its slab was deleted or replaced"
        elif not self._index.is_at(self._folder.index_path):
            self.gone = "its index was deleted or replaced"
        if self.gone:
            _log.error("folder %s: %s: its blocks are lost", self._folder.path, self.gone)

    def _reopen_index(self) -> None:
        """Open the index anew: an environment that failed to write its root refuses every later change.

        One with damage is written anew, from the records that can be read.

        Raises:
            OSError, lmdb.Error: not yet.
        """
        try:
            self._index.close()
        except lmdb.Error as error:
            _log.warning("folder %s: the failed index did not close: %s", self._folder.path, error)
        self._index = SsdIndex.open(self._folder.index_path, capacity_bytes=self._capacity_bytes)
        if self._is_index_damaged:
            records, _ = self._index.load()
            path, capacity_bytes = self._folder.index_path, self._capacity_bytes
            self._index = self._index.rebuild(path, records, capacity_bytes=capacity_bytes)
            self._folder.sync()
            _log.warning(
                "folder %s: the index was damaged: written anew with %d records",
                *(self._folder.path, len(records)),
            )
        self._is_index_broken = self._is_index_damaged = False
        _log.info("folder %s: the index was opened anew after a fault", self._folder.path)

    def budget_left_bytes(self) -> int | None:
        """Return what an earlier run had left of its write budget; None if it had none, 0 if unreadable."""
        try:
            return self._index.budget_left_bytes()
        except lmdb.Error as error:
            _log.warning("folder %s: the write budget cannot be read: %s", self._folder.path, error)
            return 0

    def close(self, last_changes: Sequence[Change]) -> None:
        """Commit what is left, note a clean end if that worked, and let go of everything."""
        outcomes = self.commit(last_changes)
        is_clean = all(outcome.status is WriteStatus.OK for outcome in outcomes) and not self.gone
        try:
            self._index.close()
            if is_clean:
                self._folder.mark_clean()
        except (OSError, lmdb.Error) as error:
            _log.warning("folder %s: closing was not clean: %s", self._folder.path, error)
        finally:
            _close_parts(self._folder, [self.slab])

    def _commit_apart(self, changes: Sequence[Change]) -> list[CommitOutcome]:
        """Full index: first what frees pages, then a commit that makes them usable, then the rest again."""
        stores = [change for change in changes if change.is_unconditional]
        others = [change for change in changes if not change.is_unconditional]
        try:
            self._index.commit(others)
            self._index.commit_nothing()
            self._index.commit(stores)
        except lmdb.MapFullError:
            return [
                CommitOutcome(WriteStatus.FULL if change.is_unconditional else WriteStatus.OK)
                for change in changes
            ]
        return [CommitOutcome(WriteStatus.OK)] * len(changes)


def _preflight(folder: SsdFolder, capacity_bytes: int, timeout_s: float, *, name: str) -> None:
    """After an unclean end, let a child process be the first to open the index."""
    if not folder.is_dirty() or not os.path.lexists(folder.index_path):
        return
    words = [str(folder.index_path), str(capacity_bytes)]
    try:
        child = run_check("kvstore_tiers.ssd_check", words, timeout_s=timeout_s)
    except subprocess.TimeoutExpired:
        folder.discard_index(f"reading it took longer than {timeout_s:.0f} s")
        return
    if child.returncode:
        said = " ".join(child.stderr.decode("utf-8", "replace").strip().splitlines()[-1:])
        how = f"reading it ended with status {child.returncode} {said}".rstrip()
        if child.returncode not in _DAMAGE_STATUSES:
            raise TierUnavailable(
                f"{name}: folder {folder.path}: the index could not be examined after an unclean end: {how}: "
                "nothing was changed; try again when there is memory, space and permission"
            )
        folder.discard_index(how)


def _open_parts(folder: SsdFolder, capacity_bytes: int, opened: list[Slab | SsdIndex]) -> tuple[Slab, _Found]:
    """Open slab and index, noted in ``opened`` for whoever cleans up, and cut both to the capacity."""
    slab, had_bytes = Slab.open(folder.slab_path, capacity_bytes, io=folder.io)
    opened.append(slab)
    try:
        found = _open_index(folder, capacity_bytes)
    except (OSError, lmdb.Error):
        if had_bytes < capacity_bytes:
            slab.shrink(had_bytes)
        raise
    index = found.index
    opened.append(index)
    kept, unusable = found.records.without_overlaps(min(had_bytes, capacity_bytes))
    if found.damaged or unusable:
        _log.warning(
            "folder %s: %d damaged records and %d without their bytes are forgotten",
            *(folder.path, len(found.damaged), len(unusable)),
        )
    # Of a file with damage nothing is kept but its sound records: what else is damaged shows only later.
    is_to_be_rebuilt = bool(found.damaged) or not _try_to_delete(index, unusable)
    if had_bytes > capacity_bytes:
        slab.shrink(capacity_bytes)
    if is_to_be_rebuilt or index.is_larger_than(folder.index_path, capacity_bytes):
        opened.remove(index)
        index = index.rebuild(folder.index_path, kept, capacity_bytes=capacity_bytes)
        opened.append(index)
    return slab, replace(found, index=index, records=kept)


def _try_to_delete(index: SsdIndex, keys: Sequence[bytes]) -> bool:
    """Delete records; False if that shows damage in the file."""
    if not keys:
        return True
    try:
        index.delete_keys(keys)
    except INDEX_DAMAGE as error:
        _log.warning("the index is damaged: %s", error)
        return False
    return True


def _close_parts(folder: SsdFolder, parts: Sequence[Slab | SsdIndex]) -> None:
    """Let go of everything, whatever the disk says to that."""
    for part in parts:
        try:
            part.close()
        except (OSError, lmdb.Error) as error:
            _log.warning("folder %s: closing was not clean: %s", folder.path, error)
    folder.release()


def _open_index(folder: SsdFolder, capacity_bytes: int) -> _Found:
    index: SsdIndex | None = None
    num_foreign = 0
    try:
        index = SsdIndex.open(folder.index_path, capacity_bytes=capacity_bytes)
        return _Found(index, *index.load())
    except (IndexIsForeign, *INDEX_DAMAGE) as error:
        if index is not None:
            index.close()
        num_foreign = error.num_records if isinstance(error, IndexIsForeign) else 0
        folder.discard_index(str(error))
    except BaseException:
        if index is not None:
            index.close()
        raise
    index = SsdIndex.open(folder.index_path, capacity_bytes=capacity_bytes)
    return _Found(index, *index.load(), num_foreign)
