"""SlotsAhead: slots lent for puts to come, so that these need not ask for some first.

They are lent slots like any others, but nobody needs them yet: so there are few of them, out of room that is
free anyhow. What a client has that is idle, nobody else gets before it comes back or goes.
"""

from collections.abc import Sequence

from kvstore.keys import PrefixChain
from kvstore.layout import Part
from kvstore.results import Owner
from kvstore.space import Space
from kvstore.state import State
from kvstore.tier import Slot, slot_bytes
from kvstore.wire import AHEAD_BYTES

_AHEAD_PART = 16
"""The part of the top tier that is lent ahead at most: one of so many."""


class SlotsAhead:
    """Lends ahead in the top tier of one manager."""

    def __init__(self, state: State, space: Space) -> None:
        self._state = state
        self._space = space

    def lend(
        self, chain: PrefixChain, part: Part | None, count: int, *, owner: Owner
    ) -> list[tuple[Slot, int]]:
        """Lend slots, in their generations, for a put to come of blocks like those of a chain.

        ``count`` of them, or none where that is more than can be spared: what is free below the high-water
        mark, up to AHEAD_BYTES or one slot for each owner, and up to a sixteenth of the tier for all of them.

        Raises:
            InvalidRequest: the namespace is not open.
        """
        state = self._state
        length_bytes = state.directory.shelf(chain.namespace, part).length_bytes
        if not count or not state.leases.is_live(owner) or not self._is_spare(owner, length_bytes, count):
            return []
        slots = state.top.allocate(length_bytes, count)
        deadline_s = state.clock() + state.settings.lease_s
        state.leases.lend(owner, slots, length_bytes=length_bytes, deadline_s=deadline_s, is_ahead=True)
        return list(zip(slots, state.top.generations(slots), strict=True))

    def _is_spare(self, owner: Owner, length_bytes: int, count: int) -> bool:
        state, leases, capacity_bytes = self._state, self._state.leases, self._state.top.capacity_bytes
        if state.settings.namespace_quota_ratio < 1.0:
            return False  # a put at its quota has to make room first
        wanted = count * slot_bytes(length_bytes)
        return (
            leases.ahead_bytes(owner) + wanted <= max(AHEAD_BYTES, slot_bytes(length_bytes))
            and leases.ahead_bytes() + wanted <= capacity_bytes // _AHEAD_PART
            and wanted <= self._space.room_below_high_water()
            and count <= leases.share_left(owner, length_bytes, capacity_bytes)
            and state.top.has_room(length_bytes, count)
        )

    def are_lent_for(
        self, chain: PrefixChain, part: Part | None, slots: Sequence[Slot], *, owner: Owner
    ) -> bool:
        """Whether an owner may publish each of some slots as a block of a chain.

        Raises:
            InvalidRequest: the namespace is not open.
        """
        length_bytes = self._state.directory.shelf(chain.namespace, part).length_bytes
        return self._state.leases.are_lent(owner, slots, length_bytes)

    def are_new(self, chain: PrefixChain, part: Part | None) -> bool:
        """Whether all blocks of a chain can be published as a run, since none of them is known.

        Raises:
            InvalidRequest: the namespace is not open.
        """
        return self._state.directory.shelf(chain.namespace, part).are_new(chain)

    def now_s(self) -> float:
        """The time by the clock that deadlines of slots are told by."""
        return self._state.clock()

    def lent_bytes(self, owner: Owner) -> int:
        """Bytes of slots that an owner has lent ahead."""
        return self._state.leases.ahead_bytes(owner)

    def are_all(self, owner: Owner) -> bool:
        """Whether all that an owner has, if anything, are slots lent ahead."""
        return self._state.leases.has_only_ahead(owner)
