"""Keep a repeating warning from flooding the log."""

import logging
import time
from collections.abc import Callable


class LimitedWarning:
    """Logs a warning at most once per interval, with the number of those it kept back."""

    def __init__(
        self, logger: logging.Logger, *, interval_s: float = 10.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._logger = logger
        self._interval_s = interval_s
        self._clock = clock
        self._next_s = 0.0
        self._num_kept_back = 0

    def warn(self, message: str, *values: object) -> None:
        """Log the warning, or count it."""
        now_s = self._clock()
        if now_s < self._next_s:
            self._num_kept_back += 1
            return
        if self._num_kept_back:
            self._logger.warning("%d more like the following were not logged", self._num_kept_back)
        self._next_s, self._num_kept_back = now_s + self._interval_s, 0
        self._logger.warning(message, *values)
