"""WriteBudget: how many bytes a day an ssd may be written with, and which blocks get them. Pure.

A token bucket: it holds one day's bytes at most, fills evenly, and starts full. So an idle day may be
followed by up to two days' bytes within 24 hours; over time the budget holds. While the bucket is less than
half full the budget is tight: only a block that asks for the second time within the ghost window is admitted,
since most blocks are never wanted again (second-hit admission as in LARC, Huang et al., MSST 2013). An empty
bucket admits nothing.

The clock is monotonic, and time in which the tier is not open fills nothing: what a restart finds is what the
last commit stored.
"""

from collections import OrderedDict
from collections.abc import Callable

_DAY_S = 86_400.0
_TIGHT_RATIO = 0.5
GHOST_KEYS = 65_536
"""How many blocks that were not admitted are remembered."""


class WriteBudget:
    """Tokens and ghosts of one disk. One event loop's thread."""

    def __init__(
        self, bytes_per_day: int, *, clock: Callable[[], float], ghost_keys: int = GHOST_KEYS
    ) -> None:
        self._bytes_per_day = bytes_per_day
        self._clock = clock
        self._ghost_keys = ghost_keys
        self._ghosts: OrderedDict[bytes, None] = OrderedDict()
        self._left_bytes = float(bytes_per_day)
        self._counted_s = clock()

    @property
    def is_limited(self) -> bool:
        """Whether there is a budget at all."""
        return self._bytes_per_day > 0

    @property
    def left_bytes(self) -> int:
        """Bytes that may be written now."""
        self._fill()
        return int(self._left_bytes)

    @property
    def is_tight(self) -> bool:
        """Whether only blocks that were seen before are admitted."""
        return self.is_limited and self.left_bytes < _TIGHT_RATIO * self._bytes_per_day

    def restore(self, left_bytes: int) -> None:
        """Go on from what an earlier run had left."""
        self._left_bytes = float(min(max(0, left_bytes), self._bytes_per_day))
        self._counted_s = self._clock()

    def admit(self, key: bytes, size_bytes: int) -> bool:
        """Charge a write and return True, or remember the block as seen and return False."""
        if not self.is_limited:
            return True
        is_enough = self.left_bytes >= size_bytes
        if is_enough and (not self.is_tight or key in self._ghosts):
            self._ghosts.pop(key, None)
            self._left_bytes -= size_bytes
            return True
        self._ghosts[key] = None
        self._ghosts.move_to_end(key)
        if len(self._ghosts) > self._ghost_keys:
            self._ghosts.popitem(last=False)
        return False

    def give_back(self, size_bytes: int) -> None:
        """Take back the charge of a write that did not reach the disk."""
        if self.is_limited:
            self._left_bytes = min(self._left_bytes + size_bytes, float(self._bytes_per_day))

    def _fill(self) -> None:
        now_s = self._clock()
        gained = (now_s - self._counted_s) / _DAY_S * self._bytes_per_day
        self._left_bytes = min(self._left_bytes + gained, float(self._bytes_per_day))
        self._counted_s = now_s
