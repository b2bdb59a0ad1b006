"""ComingBack: when one client is heard again after an answer with which it goes and copies."""

import math
import time
from collections import deque
from collections.abc import Callable

_COPY_BYTES_PER_S = 10e9
_FIRST_GUESS_S = 60e-6
_MARGIN_S = 40e-6
_LONGEST_S = 800e-6
"""After a longer copy the time that waking takes does not count."""

_KEPT = 4
"""So many of the last times count: one that was long, perhaps since waking took its part, says little."""


class ComingBack:
    """Has the loop stay awake for a client whose last copy was followed at once by its next message.

    A copy is taken to run at 10 GB/s. Besides, the client takes the least that it took of the last times.
    """

    def __init__(
        self, stay_awake: Callable[[float], None], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._stay_awake = stay_awake
        self._clock = clock
        self._told_s = -math.inf
        self._copy_s = 0.0
        self._besides_s: deque[float] = deque(maxlen=_KEPT)
        self._is_waited_for = False

    def told(self, copy_bytes: int, *, is_certain: bool) -> None:
        """Note an answer with which so much may be copied, and whether a message is sure to follow."""
        self._told_s, self._copy_s, self._is_waited_for = self._clock(), copy_bytes / _COPY_BYTES_PER_S, True
        besides_s = min(self._besides_s, default=_FIRST_GUESS_S if is_certain else math.inf)
        likely_s = self._copy_s + besides_s + _MARGIN_S
        if likely_s <= _LONGEST_S:
            self._stay_awake(likely_s)

    def heard(self) -> None:
        """Take note of the client's next message."""
        if self._is_waited_for:
            self._is_waited_for = False
            self._besides_s.append(max(0.0, self._clock() - self._told_s - self._copy_s))
