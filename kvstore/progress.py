"""A progress bar of one line on a terminal; nothing elsewhere."""

import time
from collections.abc import Callable
from typing import TextIO

_WIDTH = 28
_PERIOD_S = 0.1


class ProgressBar:
    """Shows how far some work of known size is. Not thread-safe."""

    def __init__(self, stream: TextIO, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._clock = clock
        self._is_shown = stream.isatty()
        self._label = ""
        self._total = 1.0
        self._started_s = 0.0
        self._drawn_s = 0.0

    def start(self, label: str, total: float) -> None:
        """Begin another piece of work."""
        self._label, self._total = label, max(total, 1.0)
        self._started_s = self._clock()
        self._drawn_s = 0.0
        self.show(0.0)

    def show(self, done: float) -> None:
        """Draw the line, unless it was drawn a moment ago."""
        now_s = self._clock()
        if not self._is_shown or now_s - self._drawn_s < _PERIOD_S:
            return
        self._drawn_s = now_s
        ratio = min(max(done / self._total, 0.0), 1.0)
        filled = round(ratio * _WIDTH)
        line = f"{self._label:<24.24} [{'#' * filled}{'.' * (_WIDTH - filled)}] {ratio:4.0%}"
        left_s = (now_s - self._started_s) * (1 - ratio) / ratio if ratio > 0.02 else 0.0
        if left_s >= 1:
            line += f", {left_s:.0f} s left"
        self._stream.write(f"\r{line}\x1b[K")
        self._stream.flush()

    def clear(self) -> None:
        """Take the line away."""
        if self._is_shown:
            self._stream.write("\r\x1b[K")
            self._stream.flush()
