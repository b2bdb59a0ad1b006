"""What is asked of a disk that keeps records, and how it ends; without the packages that disks need."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kvstore_tiers.record_format import RecordHead, StoredRecord


class DiskFull(Exception):
    """There is no room for what a commit would store; nothing was changed."""


class DiskFault(Exception):
    """The disk failed, or its files are gone; what a commit changed is in doubt."""


@dataclass(frozen=True, slots=True)
class Change:
    """A record to store under a key, or (None) to forget; ``entry`` given: only if that is there."""

    key: bytes
    record: StoredRecord | None
    entry: bytes | None = None


@dataclass(frozen=True, slots=True)
class Found:
    """What was there when a disk was opened: key, head and name part. ``num_damaged`` more were forgotten."""

    entries: list[tuple[bytes, RecordHead, bytes]]
    num_damaged: int = 0


class KeptOnDisk(Protocol):
    """Records on disk. Blocking; one thread writes at a time, any may read."""

    def read(self, key: bytes) -> bytes | None:
        """Return a record in its stored form, None if there is none. Raises DiskFault."""

    def commit(self, changes: Sequence[Change]) -> None:
        """Make changes, all or none; on disk when this returns. Raises DiskFull, DiskFault."""

    @property
    def may_hold_clear(self) -> bool:
        """Whether bytes of records in the clear may lie in the files, also in parts that are free."""

    def scrub(self) -> None:
        """Write the files anew with what they hold, and overwrite the old ones.

        To be called by the thread that commits. Raises DiskFull (nothing was changed), DiskFault.
        """

    def close(self, *, is_clean: bool) -> None:
        """Close, and unlock the folder. Idempotent."""
