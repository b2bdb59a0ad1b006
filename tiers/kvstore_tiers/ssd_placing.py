"""Placing: which disk of several the blocks of a batch are written to; the rule is told in ssd_array."""

from collections.abc import Callable, Sequence

from kvstore.tier import BlockHeader, StorageKey
from kvstore_tiers.slots import padded
from kvstore_tiers.ssd import SsdTier

_MOST_UNEVEN_RATIO = 1 / 16
"""How much fuller than the emptiest a disk may be, in parts of its capacity, and still take on a chain."""


class Placing:
    """Places one batch on ``usable`` disks. ``holder`` names the disk that has a copy, of all disks."""

    def __init__(self, usable: Sequence[SsdTier], holder: Callable[[StorageKey], SsdTier | None]) -> None:
        self._holder = holder
        self._free_bytes = {disk: disk.capacity_bytes - disk.used_bytes for disk in usable}
        self._num_new = dict.fromkeys(usable, 0)
        self._placed: dict[StorageKey, SsdTier | None] = {}

    def place(self, header: BlockHeader) -> SsdTier | None:
        """Return the disk for a block; None if there is no disk."""
        name = header.block.storage_key
        if name not in self._placed:
            holder = self._holder(name)
            is_fixed = holder is not None and holder in self._free_bytes
            self._placed[name] = holder if is_fixed else self._choose(header)
        return self._placed[name]

    def _choose(self, header: BlockHeader) -> SsdTier | None:
        length, free = header.length_bytes, self._free_bytes
        fitting = [disk for disk in free if disk.has_room(length, self._num_new[disk] + 1)]
        emptiest = max(fitting or free, key=free.__getitem__, default=None)
        if emptiest is None:
            return None
        before = header.block._replace(key=header.parent).storage_key
        near = self._placed.get(before) or self._holder(before)
        chosen = emptiest
        if near is not None and near in fitting:
            most_uneven_bytes = _MOST_UNEVEN_RATIO * near.capacity_bytes
            chosen = near if free[emptiest] - free[near] <= most_uneven_bytes else emptiest
        free[chosen] -= padded(length)
        self._num_new[chosen] += 1
        return chosen
