"""Stock: slots that a server lent to a client's connection before they were needed.

A put of few blocks writes into them and is over in one exchange. They are lent slots like any others: past
their deadline nothing can be published of them, but they stay lent until they are given back or the
connection ends. A client asks for some only while its puts follow each other, and gives back at its next call
what lay unused; one that calls no more keeps them as long as it is connected.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from kvstore.messages import Stored
from kvstore.tier import slot_bytes
from kvstore.wire import AHEAD_BYTES

_AGAIN_S = 1.0
"""Puts that follow each other at that distance will go on, it is assumed."""

_IDLE_S = 5.0
_USED_PART = 0.5
"""The part of the time slots are lent for in which writing into them may begin."""


@dataclass(slots=True)
class _Lot:
    """Slots for blocks of one length. They are of use until ``until_s``, that of those lent first."""

    slots: list[tuple[int, int]]
    until_s: float


class Stock:
    """What one connection has lent ahead. One thread at a time uses it, as it does the connection.

    ``idle_from_s``: the instant from which some of it lies unused.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self._lots: dict[int, _Lot] = {}
        self._last_put_s = -math.inf
        self._is_repeated = False
        self._meets_present = False
        self.idle_from_s = math.inf

    def has_slots(self, length_bytes: int, count: int) -> bool:
        """Whether ``begin_put`` may find slots for a put of ``count`` blocks."""
        lot = self._lots.get(length_bytes)
        return lot is not None and len(lot.slots) >= count and not self._meets_present

    def begin_put(self, length_bytes: int, count: int) -> list[tuple[int, int]]:
        """Return slots for a put of ``count`` blocks, which are in the stock no more; none if they do not do.

        Whose blocks may be stored already had better ask first, rather than copy them for nothing: after a
        put of which some were, none are given.
        """
        now_s = self.clock()
        self._is_repeated = now_s - self._last_put_s <= _AGAIN_S
        self._last_put_s = now_s
        lot = self._lots.get(length_bytes)
        if self._meets_present or lot is None or len(lot.slots) < count or now_s >= lot.until_s:
            return []
        taken = lot.slots[:count]
        del lot.slots[:count]
        if not lot.slots:
            self._take_lot(length_bytes)
        return taken

    def wanted(self, length_bytes: int, count: int) -> int:
        """Return how many slots to ask for, so that a put like this one finds as many as it has blocks."""
        is_small = count == 1 or count * slot_bytes(length_bytes) <= AHEAD_BYTES
        if not self._is_repeated or self._meets_present or not is_small:
            return 0
        lot = self._lots.get(length_bytes)
        return max(0, count - (len(lot.slots) if lot else 0))

    def make_room(self, length_bytes: int, count: int) -> list[tuple[int, int]]:
        """Return slots to be given back, for other lengths: with them there would be too many."""
        others = [length for length in self._lots if length != length_bytes]
        held = sum(slot_bytes(length) * len(self._lots[length].slots) for length in others)
        if held + count * slot_bytes(length_bytes) <= AHEAD_BYTES:
            return []
        return [slot for length in others for slot in self._take_lot(length)]

    def note_present(self, num_present: int) -> None:
        """Note how many blocks of a put were stored already."""
        self._meets_present = num_present > 0

    def add(self, length_bytes: int, answer: Stored, asked_s: float) -> None:
        """Take in what an answer brings, to a request made at ``asked_s``."""
        if not answer.slots:
            return
        until_s = asked_s + min(_IDLE_S, _USED_PART * answer.lent_us / 1e6)
        lot = self._lots.setdefault(length_bytes, _Lot([], until_s))
        lot.slots += answer.slots
        lot.until_s = min(lot.until_s, until_s)
        self.idle_from_s = min(self.idle_from_s, until_s)

    def take_idle(self) -> list[tuple[int, int]]:
        """Return what lay unused for too long, to be given back; it is in the stock no more."""
        now_s = self.clock()
        idle = [length for length, lot in self._lots.items() if now_s >= lot.until_s]
        return [slot for length in idle for slot in self._take_lot(length)]

    def _take_lot(self, length_bytes: int) -> list[tuple[int, int]]:
        slots = self._lots.pop(length_bytes).slots
        self.idle_from_s = min((lot.until_s for lot in self._lots.values()), default=math.inf)
        return slots
