"""GoneRecords: why blocks are gone, so that a miss can be explained afterwards."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from kvstore.keys import NamespaceDigest
from kvstore.miss import MissReason
from kvstore.tier import StorageKey

GONE_RECORDS = 65_536
"""How many blocks that are gone are remembered with the reason; the oldest are forgotten first."""


@dataclass(frozen=True, slots=True)
class Gone:
    """Why and when the last copy of a block went.

    ``tier`` is where it was, ``at_s`` an instant of the manager's clock, ``by`` the namespace whose blocks
    needed the room (None: nobody's in particular).
    """

    reason: MissReason
    tier: str
    at_s: float
    by: NamespaceDigest | None = None


class GoneRecords:
    """The records of one directory."""

    def __init__(self) -> None:
        self._records: OrderedDict[StorageKey, Gone] = OrderedDict()

    def get(self, name: StorageKey) -> Gone | None:
        """Return the record of a block that is gone."""
        return self._records.get(name)

    def why(self, name: StorageKey) -> MissReason:
        """Return why a block that is not stored is missing: NEVER_SEEN unless a record says more."""
        gone = self._records.get(name)
        return MissReason.NEVER_SEEN if gone is None else gone.reason

    def remember(self, name: StorageKey, gone: Gone) -> None:
        """Remember why a block is not stored any more."""
        self._records[name] = gone
        self._records.move_to_end(name)
        if len(self._records) > GONE_RECORDS:
            self._records.popitem(last=False)

    def forget(self, names: Sequence[StorageKey]) -> None:
        """Drop the records of blocks that are stored again."""
        if not self._records.keys().isdisjoint(names):
            for name in names:
                self._records.pop(name, None)
