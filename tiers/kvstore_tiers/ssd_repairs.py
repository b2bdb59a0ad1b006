"""Repairs: records that may be in an index and must not be, since the commit that was about them failed."""

from collections.abc import Callable, Sequence

from kvstore.tier import StorageKey, WriteStatus
from kvstore_tiers.ssd_copies import Copy
from kvstore_tiers.ssd_record import Change, IndexRecord
from kvstore_tiers.ssd_store import CommitOutcome


class Repairs:
    """Records to be undone by the commits that follow. One event loop's thread, one commit at a time.

    A store that failed may have happened all the same: its slot stays out of use until its record is known to
    be gone, and the record that it may have replaced is restored. A delete that failed may have left its
    record, which the next start would take for a copy; its slot is free at once, since the record loses to a
    newer one over the same bytes. ``visible`` finds the copy of a block; ``free`` gives a slot back.
    """

    def __init__(
        self, *, visible: Callable[[StorageKey], Copy | None], free: Callable[[IndexRecord], None]
    ) -> None:
        self._visible = visible
        self._free = free
        self._waiting: list[tuple[IndexRecord, bool]] = []
        self._under_way: list[tuple[IndexRecord, bool]] = []

    def note_stored(self, record: IndexRecord) -> None:
        """A record whose store failed; its slot is kept for it."""
        self._waiting.append((record, True))

    def note_undeleted(self, record: IndexRecord) -> None:
        """A record whose delete failed."""
        self._waiting.append((record, False))

    def take(self, limit: int) -> list[Change]:
        """Return the changes that undo up to so many records; ``end`` must follow."""
        assert not self._under_way, "repairs are under way already"
        self._under_way, self._waiting = self._waiting[:limit], self._waiting[limit:]
        return [self._change(record, is_store=is_store) for record, is_store in self._under_way]

    def changes(self) -> list[Change]:
        """Return the changes that undo all records, for the last commit of all; undone twice is undone."""
        left = [*self._under_way, *self._waiting]
        return [self._change(record, is_store=is_store) for record, is_store in left]

    def end(self, outcomes: Sequence[CommitOutcome]) -> None:
        """Say how the commit of what was taken ended; what failed waits for another one."""
        under_way, self._under_way = self._under_way, []
        for (record, is_store), outcome in zip(under_way, outcomes, strict=True):
            if outcome.status is not WriteStatus.OK:
                self._waiting.append((record, is_store))
            elif is_store:
                self._free(record)

    def clear(self) -> None:
        """Forget everything: another index is open."""
        self._waiting, self._under_way = [], []

    def _change(self, record: IndexRecord, *, is_store: bool) -> Change:
        copy = self._visible(record.header.block.storage_key) if is_store else None
        return Change.delete(record) if copy is None else Change.restore(copy.record, instead_of=record)
